"""A run's own alerts: evaluated from the journal, posted once for each change, also after kills."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Gauge

from holdfast.events import GenerationStarted, NonFinite, RunFailed, WorkerLost
from holdfast.layout import Layout, place_layout
from holdfast.report.alerts.catalogue import ALERTS
from holdfast.report.alerts.evaluate import AlertEvaluator
from holdfast.report.alerts.webhook import AlertWatch, NotConnectedError, post
from holdfast.report.live.metrics import RunFacts
from holdfast.wire.journal import JournalWriter
from holdfast.wire.store.run_store import FolderStore
from tests.support.alert_cases import CASES, INTERVAL_S, AlertCase
from tests.support.journal_builder import Scribe, started_run
from tests.support.monitoring import receiver

EVERY_ALERT = [*ALERTS.values()]


def values_of(text: str) -> Iterator[float]:
    """The numbers of promtool's notation: `3x2` is 3 and two more, `0+15x2` is 0, 15, 30."""
    for part in text.split():
        found = re.fullmatch(r"([0-9.]+)(?:\+([0-9.]+))?(?:x([0-9]+))?", part)
        assert found is not None, part
        first, by, times = float(found[1]), float(found[2] or 0), int(found[3] or 0)
        yield from (first + by * number for number in range(times + 1))


def states(name: str, case: AlertCase) -> dict[float, bool]:
    """Evaluate a case of promtool here; return by minute whether the alert fires."""
    evaluator, registry = AlertEvaluator([ALERTS[name]]), CollectorRegistry()
    series = []
    for text, values in case.series.items():
        metric, _, inside = text.rstrip("}").partition("{")
        labels = dict(re.findall(r'(\w+)="([^"]*)"', inside))
        gauge = Gauge(metric, "-", labels.keys(), registry=registry)
        series.append((gauge.labels(**labels), [*values_of(values)]))
    found = {}
    for number in range(round(case.clears * 60 / INTERVAL_S) + 1):
        for child, numbers in series:
            child.set(numbers[min(number, len(numbers) - 1)])
        now = float(number * INTERVAL_S)
        evaluator.add_sample(now, registry)
        found[now / 60] = name in evaluator.firing(now)
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_run_evaluates_the_cases_as_prometheus_does(name: str) -> None:
    """tests/platform/observe has the same cases for promtool."""
    case = CASES[name]
    found = states(name, case)
    assert not found[case.silent]
    assert found[case.fires]
    assert not found[case.clears]


class Sender:
    """Takes bodies; raises the error that a test sets."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.error: Exception | None = None

    def __call__(self, body: dict[str, Any]) -> None:
        if self.error is not None:
            raise self.error
        self.bodies.append(body)

    @property
    def said(self) -> list[tuple[str, str]]:
        return [
            (alert["labels"]["alertname"], alert["status"])
            for body in self.bodies
            for alert in body["alerts"]
        ]


class Journal:
    """A journal in a run store that gets the records of a scribe, and evaluators that read it."""

    def __init__(self, folder: Path, run: Scribe) -> None:
        self.store, self.run, self._written = FolderStore(folder), run, 0
        self.sender = Sender()

    def watch(self) -> AlertWatch:
        facts = RunFacts(steps=100, workers=2, progress_limit_s=60)
        return AlertWatch("demo", self.store, EVERY_ALERT, facts, self.sender)

    def look(self, watch: AlertWatch, after: float = 0.0) -> None:
        for record in self.run.records[self._written :]:
            writer = JournalWriter(
                self.store, record.writer, record.generation, lambda at=record.time: at
            )
            writer.emit(record.event)
            writer.flush()
        self._written = len(self.run.records)
        self.run.at += after
        watch.look(self.run.at)


def test_a_change_is_posted_once_also_by_another_evaluator(tmp_path: Path) -> None:
    journal = Journal(tmp_path, started_run(10))
    first, second = journal.watch(), journal.watch()
    journal.look(first)
    assert journal.sender.said == []
    journal.run.write(NonFinite(0, "embed.weight", step=10))
    for watch in (first, second, first, journal.watch()):
        journal.look(watch, after=5)
    assert journal.sender.said == [("StepNotFinite", "firing")]
    for watch in (first, second, journal.watch()):
        journal.look(watch, after=500)
    said = [status for name, status in journal.sender.said if name == "StepNotFinite"]
    assert said == ["firing", "resolved"]


def test_a_killed_agent_is_a_lost_worker_and_no_fault_of_the_network(tmp_path: Path) -> None:
    journal = Journal(tmp_path, started_run(10))
    watch = journal.watch()
    journal.look(watch)
    lost = WorkerLost(1, 0, "its agent has ended", "heartbeat", "b", step=10)
    journal.run.write(lost)
    journal.look(watch, after=1)
    assert journal.sender.said == [("WorkerLost", "firing")]
    journal.run.write(replace(lost, cause="not heard for 6.0 s"))
    journal.look(watch, after=1)
    assert journal.sender.said[1:] == [("NetworkFault", "firing")]


def test_a_new_evaluator_knows_what_fires_and_since_when(tmp_path: Path) -> None:
    journal = Journal(tmp_path, started_run(10))
    journal.look(journal.watch())
    journal.run.write(NonFinite(0, "embed.weight", step=10), after=30)
    journal.run.steps(11, 40)
    journal.look(journal.watch(), after=1)
    journal.look(journal.watch(), after=1)
    assert journal.sender.said == [("StepNotFinite", "firing")]


def test_alerts_of_a_cause_are_one_message(tmp_path: Path) -> None:
    run = started_run(10)
    journal = Journal(tmp_path, run)
    watch = journal.watch()
    journal.look(watch)
    topology = place_layout(Layout(1), 2, ("a",)).to_json()
    run.lose(0)
    run.open_generation()
    run.write(GenerationStarted(topology, "worker_lost", step=10))
    run.steps(11, 12)
    journal.look(watch, after=1)
    journal.look(watch, after=301)
    causes = [body["groupLabels"]["cause"] for body in journal.sender.bodies]
    assert ("WorkerLost", "firing") in journal.sender.said
    assert ("WorkersMissing", "firing") in journal.sender.said
    assert ("RunStuck", "firing") in journal.sender.said
    for body in journal.sender.bodies:
        assert body["version"] == "4"
        assert {a["labels"]["cause"] for a in body["alerts"]} == {body["groupLabels"]["cause"]}
        assert body["commonLabels"]["run_id"] == "demo"
    assert causes.count("progress") == 1


def test_a_refused_connection_is_tried_again_and_another_failure_is_not(tmp_path: Path) -> None:
    run = started_run(10)
    journal = Journal(tmp_path, run)
    watch = journal.watch()
    journal.look(watch)
    run.write(RunFailed("the disk is full", step=10))
    journal.sender.error = NotConnectedError("refused")
    journal.look(watch, after=1)
    journal.sender.error = None
    journal.look(watch, after=1)
    assert journal.sender.said == [("RunFailed", "firing")]
    journal.run.start(resumed=True)
    journal.sender.error = OSError("status 500")
    journal.look(watch, after=1)
    journal.sender.error = None
    journal.look(watch, after=1)
    assert ("RunFailed", "resolved") not in journal.sender.said


def test_the_token_is_sent_and_no_other_status_is_taken() -> None:
    with receiver() as hook:
        post(hook.address, "a-token", {"alerts": []})
        assert hook.headers[0]["authorization"] == "Bearer a-token"
        hook.answer = 302
        with pytest.raises(OSError, match="302"):
            post(hook.address, "a-token", {"alerts": []})
        address = hook.address
    with pytest.raises(NotConnectedError):
        post(address, "", {"alerts": []})
