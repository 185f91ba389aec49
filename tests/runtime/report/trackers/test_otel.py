"""Spans and metrics over real HTTP to a receiver that reads OTLP's protobuf."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import ConfigError
from holdfast.report.ledger.ordering import order_records
from holdfast.report.trackers.otel import OtelTracker
from holdfast.report.trackers.registry import OTEL_PACKAGE, check_options, is_installed
from holdfast.report.trackers.run_spans import RUN, SpanMaker
from holdfast.report.trackers.tracker import RunInfo
from tests.runtime.report.trackers.test_process import deliver as deliver_by_process
from tests.runtime.report.trackers.test_process import spec_of
from tests.support.journal_builder import lossy_run, store_run
from tests.support.monitoring import posts_to

needs_otel = pytest.mark.skipif(not is_installed(OTEL_PACKAGE), reason="needs opentelemetry")


class OtlpReceiver:
    """What was sent: spans by id, and the newest value of each metric by name and labels."""

    def __init__(self) -> None:
        self.address, self.status = "", 200
        self.spans: dict[bytes, Any] = {}
        self.values: dict[tuple[str, ...], float] = {}

    def take(self, path: str, body: bytes) -> None:
        from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

        if path == "/v1/traces":
            traces = trace_service_pb2.ExportTraceServiceRequest.FromString(body)
            for spans in traces.resource_spans:
                self.spans |= {s.span_id: s for scope in spans.scope_spans for s in scope.spans}
            return
        assert path == "/v1/metrics"
        points = metrics_service_pb2.ExportMetricsServiceRequest.FromString(body)
        for metric in points.resource_metrics[0].scope_metrics[0].metrics:
            for point in getattr(metric, metric.WhichOneof("data")).data_points:
                labels = (each.value.string_value for each in point.attributes[1:])
                self.values[metric.name, *labels] = point.as_double

    def named(self, name: str) -> list[Any]:
        return [span for span in self.spans.values() if span.name == name]


@contextmanager
def otlp_receiver() -> Iterator[OtlpReceiver]:
    found = OtlpReceiver()

    def take(path: str, headers: dict[str, str], body: bytes) -> int:
        if found.status == 200:
            found.take(path, body)
        return found.status

    with posts_to(take) as found.address:
        yield found


def deliver(run: Path, address: str, delivered: int = 0) -> None:
    tracker = OtelTracker()
    options, done = {"endpoint": address}, {"train": delivered}
    tracker.start(RunInfo("demo", "key-1", run, run, options=options, delivered=done))
    tracker.flush()
    tracker.finish("finished")


@needs_otel
def test_a_run_with_a_loss_is_one_trace(tmp_path: Path) -> None:
    store_run(tmp_path / "run", lossy_run().records, 30)
    with otlp_receiver() as receiver:
        deliver(tmp_path / "run", receiver.address)
        assert len({span.trace_id for span in receiver.spans.values()}) == 1
        (run,) = receiver.named("run")
        sessions = receiver.named("session")
        assert {span.parent_span_id for span in sessions} == {run.span_id}
        assert len(sessions) == 2
        assert len(receiver.named("step")) == 33, "30 steps, of which 3 were done twice"
        assert {s.parent_span_id for s in receiver.named("step")} <= {s.span_id for s in sessions}
        assert len(receiver.named("save")) == 4
        assert len(receiver.named("validation")) == 2
        (recovery,) = (s for s in receiver.named("recovery") if s.status.code == 2)
        first = min(span.start_time_unix_nano for span in sessions)
        assert first < recovery.start_time_unix_nano < recovery.end_time_unix_nano
        assert all(s.start_time_unix_nano <= s.end_time_unix_nano for s in receiver.spans.values())
        assert receiver.values["holdfast_step",] == 30
        assert receiver.values["holdfast_tokens", "replayed"] == 3 * 1024
        before = len(receiver.spans)
        deliver(tmp_path / "run", receiver.address)
        assert len(receiver.spans) == before, "the same spans have the same ids"


@needs_otel
def test_after_a_restart_only_new_steps_are_sent(tmp_path: Path) -> None:
    store_run(tmp_path / "run", lossy_run().records, 30)
    with otlp_receiver() as receiver:
        deliver(tmp_path / "run", receiver.address, delivered=25)
        assert len(receiver.named("step")) == 5
        receiver.status = 400
        with pytest.raises(ConnectionError, match="did not take"):
            deliver(tmp_path / "run", receiver.address)


def test_spans_lie_inside_their_parents() -> None:
    maker = SpanMaker()
    records = order_records(lossy_run().records)
    spans = [span for record in records for span in maker.observe(record)]
    newest = {span.key: span for span in spans}
    for span in newest.values():
        if span.key != RUN:
            around = newest[span.parent]
            assert around.start - 1e-6 <= span.start <= span.stop <= around.stop + 1e-6, span


@pytest.mark.parametrize(("address", "said"), [("", "no address"), ("localhost:4318", "4318")])
def test_a_wrong_address_is_refused(address: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_options("otel", OtelTracker, {"endpoint": address}, environment={})


@needs_otel
@pytest.mark.slow
def test_the_process_of_the_tracker_delivers(tmp_path: Path) -> None:
    store_run(tmp_path / "run", lossy_run().records, 30)
    with otlp_receiver() as receiver:
        spec = spec_of(tmp_path / "run", "otel", options={"endpoint": receiver.address})
        assert deliver_by_process(spec) == 0
        assert len(receiver.named("step")) == 33
