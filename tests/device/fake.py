"""A device whose memory is host memory and whose streams run late, in any order that their events allow.

Work that a stream is given runs when somebody waits for it, or earlier, as the *order* says:

    lazy            nothing runs before it is waited for
    compute first   the engine's stream is always up to date: the next forward has overwritten the live buffers, and
                    freed memory is somebody else's, before the first copy runs
    copies first    the copy stream runs as far as its events let it; the forward is not done before it is waited for
    random          at each call, a few steps of either

While the *gate* is shut no event happens: whoever waits for one, waits. Events made inside ``held`` do not happen
before its end. Device memory holds poison until the stream has
filled it, and again when it was freed.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from random import Random

import torch

from stagecache.streams import CopyPair, PinError, StreamEvent
from tests.model.real import spoil

ORDERS = ("lazy", "compute first", "copies first", "random")

COMPUTE, COPY = "compute", "copy"


class FakeEvent:
    """A mark in a stream."""

    def __init__(self, streams: FakeStreams, stream: str) -> None:
        self.stream = stream
        self.happened = False
        self.error: RuntimeError | None = None
        self.free = threading.Event()
        self._streams = streams

    def done(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.happened and self.free.is_set() and self._streams.gate.is_set()

    def wait(self) -> None:
        self._streams.waited.append(threading.current_thread().name)
        patience_s = self._streams.patience_s
        assert self.free.wait(patience_s), "the event was held"
        assert self._streams.gate.wait(patience_s), "the gate stayed shut"
        self._streams.force(self)
        if self.error is not None:
            raise self.error


@dataclass
class _Op:
    """One entry of a stream: work, or a mark, or a wait for another stream's mark. target: host memory it writes."""

    work: Callable[[], None] | None = None
    mark: FakeEvent | None = None
    needs: FakeEvent | None = None
    target: tuple[int, int] | None = None


class FakeStreams:
    """One device.

    Attributes:
        waited: names of the threads that waited for an event or for a blocking copy.
        pinned: bytes by address of what is pinned.
        wrong: what no caller may do, and did.
        refuse_pins: pinning fails.
        fail_copies: so many copies, the next ones to run, fail.
        fail_calls: so many calls of ``copy``, the next ones, raise.
        patience_s: longest wait for the gate; then the test has failed.
    """

    name = "fake"
    patience_s = 30.0

    def __init__(self, order: str = "lazy", seed: int = 0) -> None:
        self.order = order
        self.gate = threading.Event()
        self.gate.set()
        self.waited: list[str] = []
        self.pinned: dict[int, int] = {}
        self.wrong: list[str] = []
        self.refuse_pins = False
        self.fail_copies = self.fail_calls = 0
        self._random = Random(seed)
        self._lock = threading.RLock()
        self._streams: dict[str, deque[_Op]] = {COMPUTE: deque(), COPY: deque()}
        self._failed: dict[str, RuntimeError] = {}
        self._holding = False
        self._held: list[FakeEvent] = []
        self._memory: dict[int, torch.Tensor] = {}
        """All device memory ever allocated, by its address: none is used twice."""

    # ------------------------------------------------------- what a test does

    def live(self, values: torch.Tensor) -> torch.Tensor:
        """A buffer of the model's, which a forward given to the compute stream now fills with ``values``."""
        tensor = self._allocate(values)
        if values.numel():
            raw = self._raw(tensor)
            self._give(COMPUTE, _Op(lambda: raw.copy_(values)))
        return tensor

    def overwrite(self, tensor: torch.Tensor) -> None:
        """The next forward, given to the compute stream now, uses the buffer."""
        raw = self._raw(tensor)
        self._give(COMPUTE, _Op(lambda: spoil(raw)))

    @contextmanager
    def held(self) -> Iterator[None]:
        """No event made in here happens before the end: so the next forward is given to the device first."""
        self._holding = True
        try:
            yield
        finally:
            self._holding = False
            for event in self._held:
                event.free.set()
            self._held.clear()

    def force(self, event: FakeEvent) -> None:
        """Run what must run for an event to happen."""
        with self._lock:
            while not event.happened:
                if not self._step(event.stream):
                    needs = self._streams[event.stream][0].needs
                    assert needs is not None
                    self.force(needs)

    # ------------------------------------------------------------ the device

    def enter_thread(self) -> None:
        pass

    def owns(self, tensor: torch.Tensor) -> bool:
        return tensor.layout is torch.strided and tensor.untyped_storage().data_ptr() in self._memory

    def clone(self, rows: torch.Tensor) -> torch.Tensor:
        copy = self._allocate(rows)
        to, of = self._raw(copy), self._raw(rows)
        self._give(COMPUTE, _Op(lambda: to.copy_(of)))
        weakref.finalize(copy, self.overwrite, to).atexit = False
        return copy

    def cat(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        rows = sum(len(piece) for piece in pieces)
        joined = self._allocate(torch.empty((rows, *pieces[0].shape[1:]), dtype=pieces[0].dtype))
        to, sources = self._raw(joined), [self._raw(piece) for piece in pieces]
        self._give(COMPUTE, _Op(lambda: to.copy_(torch.cat(sources))))
        weakref.finalize(joined, self.overwrite, to).atexit = False
        return joined

    def mark_compute(self) -> StreamEvent:
        return self._mark(COMPUTE)

    def hold_copies(self, event: StreamEvent) -> None:
        assert isinstance(event, FakeEvent)
        self._give(COPY, _Op(needs=event))

    def copy(self, pairs: Sequence[CopyPair]) -> None:
        if self.fail_calls > 0:
            self.fail_calls -= 1
            raise RuntimeError("the copy was refused")
        blocks = False
        for host, source in pairs:
            start = host.data_ptr()
            target = start, start + host.numel() * host.element_size()
            blocks = blocks or not any(at <= target[0] and target[1] <= at + n for at, n in self.pinned.items())
            self._give(COPY, _Op(partial(self._copied, host, self._raw(source)), target=target))
        if blocks:
            self._mark(COPY).wait()

    def mark_copies(self) -> StreamEvent:
        return self._mark(COPY)

    def drain(self) -> None:
        self._mark(COPY).wait()

    def pin(self, address: int, nbytes: int) -> None:
        if self.refuse_pins:
            raise PinError("the fake device pins nothing")
        self.pinned[address] = nbytes

    def unpin(self, address: int) -> None:
        size = self.pinned.pop(address)
        with self._lock:
            for op in self._streams[COPY]:
                if op.target is not None and op.target[0] < address + size and op.target[1] > address:
                    self.wrong.append("memory was unpinned while a copy into it was on its way")

    # --------------------------------------------------------------- streams

    def _allocate(self, like: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode(False):
            memory = torch.empty(like.shape, dtype=like.dtype)
            spoil(memory)
            if memory.numel():
                self._memory[memory.data_ptr()] = memory
            return memory.view(memory.shape)

    def _raw(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor's memory, without the object that keeps it allocated."""
        memory = self._memory.get(tensor.untyped_storage().data_ptr())
        if memory is None:
            assert tensor.numel() == 0, "a tensor of the host was given to the device"
            return tensor
        with torch.inference_mode(False):
            return memory.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    def _copied(self, host: torch.Tensor, source: torch.Tensor) -> None:
        if self.fail_copies > 0:
            self.fail_copies -= 1
            spoil(host)
            raise RuntimeError("the copy broke half-way")
        host.copy_(source)

    def _mark(self, stream: str) -> FakeEvent:
        event = FakeEvent(self, stream)
        if self._holding and threading.current_thread().name != "stagecache-sender":
            self._held.append(event)
        else:
            event.free.set()
        self._give(stream, _Op(mark=event))
        return event

    def _give(self, stream: str, op: _Op) -> None:
        with self._lock:
            self._streams[stream].append(op)
            if self.order == "random":
                for _ in range(self._random.randrange(4)):
                    self._step(self._random.choice((COMPUTE, COPY)))
            elif self.order != "lazy":
                while self._step(COMPUTE if self.order == "compute first" else COPY):
                    pass

    def _step(self, stream: str) -> bool:
        """Run the next entry of a stream, if there is one and it need not wait. Caller holds the lock."""
        ops = self._streams[stream]
        if not ops or (ops[0].needs is not None and not ops[0].needs.happened):
            return False
        op = ops[0]
        if op.work is not None:
            try:
                with torch.inference_mode():
                    op.work()
            except RuntimeError as error:
                self._failed[stream] = error
        ops.popleft()
        if op.mark is not None:
            op.mark.error = self._failed.pop(stream, None)
            op.mark.happened = True
        return True
