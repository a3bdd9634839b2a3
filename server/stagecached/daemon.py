"""The daemon as a whole: what starts before what, and what stops before what.

    claim the run directory      both locks; a second daemon is refused here
    adopt and sweep              sessions whose workers live go on at once
    peer socket, gRPC, health    only now does anybody get an answer

A stop goes the other way round: SIGTERM and SIGINT drain and end every session, SIGUSR1 keeps them for the next
daemon on this socket.
"""

from __future__ import annotations

import asyncio
import gc
import os
import secrets
import signal
import time
from collections.abc import Callable
from typing import Any, Final

import grpc
import structlog
import uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from stagecache_wire.v1 import stagecache_pb2 as pb
from stagecache_wire.v1 import stagecache_pb2_grpc as pb_grpc
from stagecached.adoption import take_over
from stagecached.auth import SERVICE, Tokens
from stagecached.background import Background
from stagecached.budget import Budget, mib
from stagecached.config import Settings
from stagecached.consumer import Consumer
from stagecached.interceptor import Guard, WrappingServer
from stagecached.keymemory import KeyMemory
from stagecached.manifest import ManifestStore
from stagecached.ownership import RunDirectory
from stagecached.peer import PeerServer
from stagecached.service import StageCacheService
from stagecached.sessions import ConsumerFactory, SessionManager
from stagecached.shared.calls import SharedCalls
from stagecached.shared.manager import SharedBlocks, StoreFactory
from stagecached.shared.manifest import NamespaceManifests
from stagecached.shared.owners import LeaseOwners
from stagecached.shared.store import NamespaceStore
from stagecached.stats import package_version, resident_bytes
from stagecached.watch import WatchHub
from stagecached.watchdog import Watchdog
from stagecached.web.observatory import Observatory

MAX_MESSAGE_BYTES: Final = 16 << 20
MAX_CALLS: Final = 1024
"""Calls at once, open streams included."""
CALLS_GRACE_S: Final = 1.0

log = structlog.get_logger()


class Daemon:
    """Composes one daemon. Made and run on its event loop, once."""

    def __init__(
        self,
        settings: Settings,
        directory: RunDirectory,
        make_consumer: ConsumerFactory = Consumer,
        make_store: StoreFactory = NamespaceStore,
    ) -> None:
        paths = directory.paths
        background = Background()
        self._settings = settings
        self._directory = directory
        self._boot_id = secrets.randbits(63) | 1
        self._manifests = ManifestStore(paths.sessions)
        self._shared = SharedBlocks(
            directory.node,
            NamespaceManifests(paths.namespaces),
            self._manifests,
            background,
            limit_bytes=settings.shared_bytes,
            parts=settings.shared_namespaces,
            make_store=make_store,
        )
        self._owners = LeaseOwners(directory.node, settings.access, self._shared.owner_gone)
        self._manager = SessionManager(
            directory.node,
            self._boot_id,
            budget=Budget(settings.memory_budget),
            manifests=self._manifests,
            shared=self._shared,
            memory=KeyMemory(paths.directory / "keys.json"),
            hub=WatchHub(self._boot_id),
            access=settings.access,
            background=background,
            max_sessions=settings.max_sessions,
            merge_threads=settings.merge_threads,
            make_consumer=make_consumer,
        )
        self._observatory = Observatory(self._manager, paths.socket)
        if self._shared.is_on:
            self._observatory.monitor.index = self._shared.totals
            self._observatory.monitor.on_tick.append(self._shared.tick)
        tokens = Tokens.at(paths.secret)
        self._peer = PeerServer(paths.peer_socket, settings.access, tokens, self._manager, self._boot_id, self._owners)
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._server = self._make_server(tokens)
        self._watchdog = Watchdog(
            paths.socket,
            self._manager.all,
            self._gets_on,
            limit_s=settings.watchdog_s,
            note_stuck=self._manifests.note_stuck,
        )
        self._stop: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Serve until a signal says stop; all own shared memory is given back or kept, as the signal says."""
        started = time.monotonic()
        loop = asyncio.get_running_loop()
        for number, keep in ((signal.SIGTERM, False), (signal.SIGINT, False), (signal.SIGUSR1, True)):
            loop.add_signal_handler(number, self._ask_stop, number, keep)
        loop.add_signal_handler(signal.SIGUSR2, _collect_garbage)
        self._directory.remove_stale_socket()
        settings, paths = self._settings, self._directory.paths
        await self._observatory.start(
            paths.http_socket, settings.access, settings.metrics_address, settings.metrics_port
        )
        await self._shared.recover()
        found = await take_over(self._manager, self._manifests)
        self._shared.settle(lambda owner: self._manager.has(owner) or self._owners.is_alive(owner))
        polling = [loop.create_task(watch.poll()) for watch in (self._manager.liveness, self._owners.liveness)]
        await self._serve()
        log.info(
            "ready",
            socket=str(self._settings.paths.socket),
            pid=os.getpid(),
            version=package_version(),
            budget_mib=mib(self._settings.memory_budget),
            adopted=found.adopted,
            lost=found.lost,
            swept_files=found.removed_files,
            took_s=round(time.monotonic() - started, 3),
            resident_mib=mib(resident_bytes()),
        )
        self._manager.background.keep(self._manager.pin_adopted())
        keep = await self._stop
        for task in polling:
            task.cancel()
        await self._shut_down(keep=keep)

    async def _serve(self) -> None:
        socket = self._settings.paths.socket
        await self._peer.start()
        self._server.add_insecure_port(f"unix:{socket}")
        self._settings.access.open_file(socket)
        await self._server.start()
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)
        self._observatory.serving(True)
        self._watchdog.start()

    def _gets_on(self, why: str) -> None:
        """The watchdog's verdict. why: what is stuck; nothing where nothing is."""
        status = health_pb2.HealthCheckResponse
        self._manager.background.keep(self._set_health(status.NOT_SERVING if why else status.SERVING))
        self._observatory.serving(not why, why)

    async def _shut_down(self, *, keep: bool) -> None:
        self._watchdog.stop()
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        self._observatory.serving(False)
        await self._peer.stop()
        await self._manager.stop(keep=keep, drain_s=self._settings.drain_timeout_s)
        await self._server.stop(CALLS_GRACE_S)
        self._owners.stop(keep=keep)
        self._shared.stop(keep=keep)
        await self._observatory.stop()
        self._settings.paths.socket.unlink(missing_ok=True)
        self._directory.release(keep_sessions=keep)
        log.info("stopped", sessions_kept=keep)

    def _ask_stop(self, number: signal.Signals, keep: bool) -> None:
        log.info("stopping", signal=number.name, keep_sessions=keep)
        if not self._stop.done():
            self._stop.set_result(keep)

    async def _set_health(self, status: Any) -> None:
        for service in ("", SERVICE):
            await self._health.set(service, status)

    def _make_server(self, tokens: Tokens) -> grpc.aio.Server:
        """No keepalive: a stopped worker is not a dead one."""
        server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
                ("grpc.so_reuseport", 0),
            ],
            maximum_concurrent_rpcs=MAX_CALLS,
        )
        calls = SharedCalls(self._shared, self._owners, self._manager.all, self._manager.background)
        guarded = WrappingServer(server, [self._observatory.call_timer(), Guard(tokens)])
        pb_grpc.add_StageCacheServicer_to_server(StageCacheService(self._manager, calls), guarded)  # type: ignore[arg-type]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (pb.DESCRIPTOR.services_by_name["StageCache"].full_name, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        return server


def _collect_garbage() -> None:
    """Tells memory that is held from memory that only waits for the collector."""
    before = time.monotonic()
    found = gc.collect()
    took = round(time.monotonic() - before, 3)
    log.info("garbage collected", objects=found, took_s=took, resident_mib=mib(resident_bytes()))


def run(
    settings: Settings, make_consumer: ConsumerFactory = Consumer, make_store: StoreFactory = NamespaceStore
) -> None:
    """Run a daemon until it is told to stop.

    Raises:
        StartError: it cannot start here.
    """
    os.umask(0o077)
    finish: Callable[[], None] | None = None
    if settings.tracing:
        from stagecached.tracing import traced

        make_consumer, finish = traced(make_consumer)
    directory = RunDirectory.claim(settings.paths, settings.access)

    async def main() -> None:
        await Daemon(settings, directory, make_consumer, make_store).run()

    try:
        uvloop.run(main())
    finally:
        if finish is not None:
            finish()
