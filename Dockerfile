# The daemon and the CLI, for CPUs: no torch, no CUDA, no root. docs/deploy.md has how to run it.
#
#   docker build -t stagecache .
#
# Every package is pinned by constraints.txt. For the same bytes each time, also pin the base image by its digest:
#   docker build --build-arg PYTHON_IMAGE=python@sha256:... --build-arg SOURCE_DATE_EPOCH=$(git log -1 --format=%ct) .

ARG PYTHON_IMAGE=python:3.12.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build

ARG SOURCE_DATE_EPOCH=1767225600
ENV SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH} PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

WORKDIR /src
COPY constraints.txt pyproject.toml LICENSE ./
COPY proto/stagecache_wire proto/stagecache_wire
COPY server/stagecached server/stagecached
COPY client/stagecache client/stagecache

# Builds of others are taken as wheels only, so no compiler is needed and none can differ. What no process ever imports
# is left out, and bytecode is made now: the daemon may not write it later. Unchecked hashes keep times out of it.
RUN pip install --constraint constraints.txt hatchling \
    && pip wheel --no-deps --no-build-isolation --wheel-dir /wheels . \
    && python -m venv --without-pip /opt/stagecache \
    && pip --python /opt/stagecache/bin/python install --no-compile --only-binary :all: \
        --constraint constraints.txt /wheels/*.whl \
    && find /opt/stagecache -depth -type d \( -name tests -o -name __pycache__ \) -exec rm -r {} + \
    && find /opt/stagecache -type f \( -name '*.pyi' -o -name '*.pyx' -o -name '*.pxd' -o -name '*.c' \
        -o -name '*.h' -o -name '*.a' \) -delete \
    && python -m compileall -q --invalidation-mode unchecked-hash -x 'pygments/(lexers|styles)/' /opt/stagecache/lib


FROM ${PYTHON_IMAGE}

LABEL org.opencontainers.image.title="stagecache" \
      org.opencontainers.image.description="Per-node cache daemon for stage outputs of vLLM and vLLM-Omni" \
      org.opencontainers.image.licenses="Apache-2.0"

# A system user, whose shared memory no login manager clears away. Its number is fixed, so that volumes and Kubernetes'
# runAsUser can name it.
RUN groupadd --system --gid 990 stagecache \
    && useradd --system --uid 990 --gid 990 --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin \
        stagecache \
    && install -d -o 990 -g 990 -m 0750 /run/stagecache

COPY --from=build /opt/stagecache /opt/stagecache

ENV PATH=/opt/stagecache/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    STAGECACHE_SOCKET=/run/stagecache/stagecached.sock \
    STAGECACHED_SOCKET=/run/stagecache/stagecached.sock \
    STAGECACHED_METRICS_PORT=9470 \
    STAGECACHED_METRICS_ADDRESS=0.0.0.0 \
    STAGECACHED_LOG_FORMAT=json

USER 990:990
EXPOSE 9470
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=30s --timeout=5s --start-period=10s --retries=3 CMD ["stagecache", "ping", "--timeout", "3"]

ENTRYPOINT ["stagecached"]
