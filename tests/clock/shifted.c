/* A wall clock that a test sets: CLOCK_REALTIME of one process, moved by the seconds that stand in $SHIFT_FILE.

   A wait until a moment of that clock sees each change while it waits, as it does in the kernel. CLOCK_MONOTONIC is
   left alone, as a change of the wall clock leaves it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile long long *shift;

__attribute__((constructor)) static void open_shift(void) {
    const char *path = getenv("SHIFT_FILE");
    int fd = path ? open(path, O_RDONLY) : -1;
    void *map = fd < 0 ? MAP_FAILED : mmap(NULL, sizeof *shift, PROT_READ, MAP_SHARED, fd, 0);
    if (fd >= 0) close(fd);
    shift = map == MAP_FAILED ? NULL : map;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = (int)syscall(SYS_clock_gettime, clock, now);
    if (!failed && clock == CLOCK_REALTIME && shift) now->tv_sec += *shift;
    return failed;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec found;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &found)) return -1;
    now->tv_sec = found.tv_sec;
    now->tv_usec = found.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *result) {
    struct timespec now;
    if (clock_gettime(CLOCK_REALTIME, &now)) return -1;
    if (result) *result = now.tv_sec;
    return now.tv_sec;
}

int sem_timedwait(sem_t *semaphore, const struct timespec *until) {
    int (*wait_briefly)(sem_t *, const struct timespec *) = dlsym(RTLD_NEXT, "sem_timedwait");
    for (;;) {
        struct timespec now, slice;
        if (sem_trywait(semaphore) == 0) return 0;
        clock_gettime(CLOCK_REALTIME, &now);
        if (now.tv_sec > until->tv_sec || (now.tv_sec == until->tv_sec && now.tv_nsec >= until->tv_nsec)) {
            errno = ETIMEDOUT;
            return -1;
        }
        syscall(SYS_clock_gettime, CLOCK_REALTIME, &slice);
        slice.tv_nsec += 5000000;
        if (slice.tv_nsec >= 1000000000) { slice.tv_sec++; slice.tv_nsec -= 1000000000; }
        if (wait_briefly(semaphore, &slice) == 0) return 0;
        if (errno != ETIMEDOUT) return -1;
    }
}
