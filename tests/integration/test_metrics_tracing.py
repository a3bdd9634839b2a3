"""One trace a step, across worker and daemon; and nothing of it while tracing is off."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest

from stagecache.errors import StageCacheError
from stagecache.step import NewRequest, SchedulerStep
from tests.daemon_process import DaemonProcess
from tests.integration.metrics_kit import MiniEngine

pytest.importorskip("opentelemetry.sdk", reason="stagecache[tracing] is not installed")


class Collector:
    """An OTLP collector that keeps what it gets: (service, span)."""

    def __init__(self) -> None:
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as pb_grpc

        self.spans: list[tuple[str, Any]] = []
        keep = self.spans

        class Service(pb_grpc.TraceServiceServicer):
            def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
                for group in request.resource_spans:
                    names = {pair.key: pair.value.string_value for pair in group.resource.attributes}
                    keep.extend((names["service.name"], span) for scope in group.scope_spans for span in scope.spans)
                return pb.ExportTraceServiceResponse()

        self.server = grpc.server(futures.ThreadPoolExecutor(2))
        pb_grpc.add_TraceServiceServicer_to_server(Service(), self.server)
        self.url = f"http://127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.server.start()


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    made = Collector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", made.url)
    monkeypatch.setenv("STAGECACHE_TRACING", "1")
    yield made
    made.server.stop(None)


def test_a_step_is_one_trace_across_worker_and_daemon(collector: Collector, tmp_path: Path) -> None:
    daemon = DaemonProcess(tmp_path, "--tracing", "true")
    daemon.start()
    try:
        engine = MiniEngine(daemon.socket, "thinker")
        engine.turn(requests=1, decodes=1, new_tokens=20)
        engine.turn(requests=1, decodes=0, new_tokens=20)  # a hit, or not: either way two more steps at most
        with pytest.raises(StageCacheError):
            engine.step(SchedulerStep({"x": 4}, [NewRequest("x", 16, [200, 201])]), ["x"])
        engine.close()
    finally:
        daemon.close()
    spans = {span.span_id: (service, span) for service, span in collector.spans}
    steps = [span for service, span in spans.values() if span.name == "stagecache.step"]
    assert len(steps) == engine.cache.counters.steps == 4
    for step in steps:
        children = {span.name: span for _, span in spans.values() if span.parent_span_id == step.span_id}
        assert set(children) == {"stagecache.begin", "stagecache.save", "stagecache.materialize"}
        assert {span.trace_id for span in children.values()} == {step.trace_id}
        assert all(step.start_time_unix_nano <= span.start_time_unix_nano for span in children.values())
        saves = [
            span
            for service, span in spans.values()
            if service == "stagecached" and span.parent_span_id == children["stagecache.save"].span_id
        ]
        assert [span.name for span in saves] == ["stagecached.SAVE"], "the daemon's share is a child of the save"
        about = {pair.key: pair.value.int_value for pair in saves[0].attributes}
        assert about["stagecache.rows"] > 0
        assert about["stagecache.waited_us"] >= 0
    begins = [span for _, span in spans.values() if span.name == "stagecached.BEGIN"]
    assert begins, "the gather of the hit that failed"
    failed = [span for _, span in spans.values() if span.name == "stagecache.materialize" and span.status.code == 2]
    assert len(failed) == 1


def test_tracing_off_imports_nothing_and_replaces_nothing(daemon: DaemonProcess) -> None:
    script = f"""
import sys
sys.path[:0] = {sys.path!r}
from tests.integration.metrics_kit import MiniEngine
engine = MiniEngine({str(daemon.socket)!r}, "plain")
engine.turn()
assert not any(name.startswith(("opentelemetry", "stagecache.tracing")) for name in sys.modules)
assert not {{"save_outputs", "materialize", "new_step_starts"}} & set(vars(engine.cache))
assert "append" not in vars(engine.cache.session.log)
words = engine.cache.session.control.words
from stagecache_wire import layout
assert not any(words[layout.W_TRACES : layout.W_TRACES + 4 * layout.TRACE_ENTRIES])
engine.close()
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    maps = Path(f"/proc/{daemon.pid}/maps").read_text()
    assert "opentelemetry" not in maps


def test_daemon_without_opentelemetry_says_what_to_install(tmp_path: Path) -> None:
    script = "import sys; sys.modules['opentelemetry'] = None; from stagecached.main import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", script, "--socket", str(tmp_path / "d.sock"), "--tracing", "true"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 3
    assert "stagecache[tracing]" in done.stderr
