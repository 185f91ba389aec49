"""The tracker `otel`: spans and metrics of a run, sent by OTLP over HTTP.

Spans are those of `run_spans.py`. Metrics are the gauges and counters of the catalogue that
`/metrics` has; histograms are left to `/metrics`. The environment has the rest, for example
OTEL_EXPORTER_OTLP_HEADERS for a token.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

from prometheus_client.core import Metric

from holdfast.report.ledger.ordering import order_records
from holdfast.report.live.metrics import RunMetrics
from holdfast.report.trackers.run_spans import STEP, RunSpan, SpanMaker, span_id, trace_id
from holdfast.report.trackers.tracker import RunInfo, Tracker
from holdfast.wire.journal import JournalTail
from holdfast.wire.store.run_location import store_of_run

ENDPOINT_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"
_BATCH = 512  # spans of one request
_SCOPE = "holdfast"


class OtelTracker(Tracker):
    """Reads the journal itself from its beginning, because metrics are sums over all of it. Steps
    that were delivered before are not sent again."""

    option_names = ("endpoint",)
    places = f"logging.options (otel.endpoint), and {ENDPOINT_VARIABLE} of the environment"

    @classmethod
    def problems(
        cls, options: Mapping[str, str], environment: Mapping[str, str]
    ) -> Iterator[tuple[str, str, str]]:
        address = options.get("endpoint") or environment.get(ENDPOINT_VARIABLE, "")
        remedy = f"set otel.endpoint or {ENDPOINT_VARIABLE} to http://HOST:4318"
        if not address:
            yield "endpoint", "the tracker otel has no address to send to", remedy
        elif urlsplit(address).scheme not in ("http", "https") or not urlsplit(address).netloc:
            yield "endpoint", f"{address!r} is no address of an OTLP receiver", remedy

    def start(self, info: RunInfo) -> None:
        base = (info.options.get("endpoint") or os.environ.get(ENDPOINT_VARIABLE, "")).rstrip("/")
        otlp = "opentelemetry.exporter.otlp.proto.http"
        spans: Any = import_module(f"{otlp}.trace_exporter")
        points: Any = import_module(f"{otlp}.metric_exporter")
        self._trace: Any = import_module("opentelemetry.trace")
        self._sdk: Any = import_module("opentelemetry.sdk.trace")
        self._export: Any = import_module("opentelemetry.sdk.metrics.export")
        resources: Any = import_module("opentelemetry.sdk.resources")
        scopes: Any = import_module("opentelemetry.sdk.util.instrumentation")
        self._span_exporter = spans.OTLPSpanExporter(f"{base}/v1/traces")
        self._point_exporter = points.OTLPMetricExporter(f"{base}/v1/metrics")
        about = {"service.name": _SCOPE, "service.instance.id": info.key, "run": info.name}
        self._resource = resources.Resource.create(about)
        self._scope = scopes.InstrumentationScope(_SCOPE)
        self._key, self._sent_step = info.key, info.delivered.get("train", 0)
        self._tail = JournalTail(store_of_run(info.run_folder))
        self._metrics, self._maker = RunMetrics(info.name), SpanMaker()
        self._began_at: float | None = None

    def flush(self) -> None:
        """Raises ConnectionError if the receiver does not take it."""
        found: list[RunSpan] = []
        for record in order_records(self._tail.read_new()):
            self._began_at = self._began_at or record.time
            self._metrics.observe(record)
            found += self._maker.observe(record)
        spans = [s for s in found if s.name != STEP or int(s.attributes["step"]) > self._sent_step]
        for begin in range(0, len(spans), _BATCH):
            batch = [self._span(span) for span in spans[begin : begin + _BATCH]]
            self._require(self._span_exporter.export(batch))
        self._require(self._point_exporter.export(self._points()))

    def finish(self, reason: str) -> None:
        self.flush()

    def _require(self, result: Any) -> None:
        if result.name != "SUCCESS":
            raise ConnectionError("the OTLP receiver did not take spans or metrics")

    def _span(self, span: RunSpan) -> Any:
        flags = self._trace.TraceFlags(self._trace.TraceFlags.SAMPLED)
        context, parent = (
            self._trace.SpanContext(
                trace_id(self._key), span_id(self._key, key), False, trace_flags=flags
            )
            if key
            else None
            for key in (span.key, span.parent)
        )
        codes = self._trace.StatusCode
        return self._sdk.ReadableSpan(
            span.name,
            context,
            parent,
            self._resource,
            span.attributes,
            status=self._trace.Status(codes.ERROR if span.is_error else codes.OK),
            start_time=_nanoseconds(span.start),
            end_time=_nanoseconds(span.stop),
            instrumentation_scope=self._scope,
        )

    def _points(self) -> Any:
        made = [
            self._metric(family)
            for family in self._metrics.refresh().collect()
            if family.type in ("gauge", "counter") and family.samples
        ]
        scope = self._export.ScopeMetrics(self._scope, made, "")
        return self._export.MetricsData([self._export.ResourceMetrics(self._resource, [scope], "")])

    def _metric(self, family: Metric) -> Any:
        now, begun = _nanoseconds(time.time()), _nanoseconds(self._began_at or 0.0)
        samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
        points = [
            self._export.NumberDataPoint(sample.labels, begun, now, sample.value)
            for sample in samples
        ]
        data = self._export.Gauge(points)
        if family.type == "counter":
            cumulative = self._export.AggregationTemporality.CUMULATIVE
            data = self._export.Sum(points, cumulative, True)
        return self._export.Metric(family.name, family.documentation, "", data)


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
