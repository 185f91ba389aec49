"""A real Prometheus scrapes every node of a run once a second. The leader is killed,
another node leads, and the lost node joins. What Prometheus stored agrees with the journal.

HOLDFAST_PROMETHEUS names the program; otherwise it is looked for in PATH.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import time
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest

from holdfast.elastic.protocol.fault_orders import FaultOrders
from holdfast.events import CheckpointCommitted, GenerationStarted, StepDone
from tests.support.commands import within
from tests.support.listener import free_ports
from tests.support.nodes import Nodes, nodes_of
from tests.support.ranks import wait_until

PROGRAM = os.environ.get("HOLDFAST_PROMETHEUS") or shutil.which("prometheus")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        PROGRAM is None, reason="no prometheus in PATH; HOLDFAST_PROMETHEUS=FILE names the program"
    ),
]

LATENESS_S = 10.0  # a quiet machine shows a record about two seconds after it was written
STEPS = 200
SETTINGS = (
    f"train.steps={STEPS}",
    "train.batch_size=6",
    "train.evaluate.every=0",
    "checkpoint.every_steps=20",
    "layout.workers=3",
    "cluster.min_nodes=2",
)
GAUGES = ("step", "generation", "world_size")


@dataclass(frozen=True)
class Sample:
    time: float  # seconds since the epoch, when the scrape began
    value: float


class Prometheus:
    """A server that scrapes named targets once a second, and its HTTP interface."""

    def __init__(self, address: str) -> None:
        self._address = address

    def is_ready(self) -> bool:
        with suppress(URLError, OSError):
            return bool(urlopen(f"http://{self._address}/-/ready", timeout=5).status == 200)
        return False

    def samples(self, selector: str, since: float = 0.0) -> dict[str, list[list[Sample]]]:
        """Return the stored samples of each series that fits, by node, scraped after `since`."""
        query = urlencode({"query": f"{selector}[1h]"})
        with urlopen(f"http://{self._address}/api/v1/query?{query}", timeout=120) as answer:
            found = json.load(answer)
        assert found["status"] == "success", found
        out: dict[str, list[list[Sample]]] = {}
        for series in found["data"]["result"]:
            samples = [Sample(float(time), float(value)) for time, value in series["values"]]
            if kept := [sample for sample in samples if sample.time > since]:
                out.setdefault(series["metric"]["node"], []).append(kept)
        return out

    def newest(self, selector: str, since: float) -> dict[str, float]:
        """Return the sum of the newest values by node."""
        return {
            node: sum(series[-1].value for series in found)
            for node, found in self.samples(selector, since).items()
        }


@contextmanager
def prometheus_for(folder: Path, targets: Mapping[str, int]) -> Iterator[Prometheus]:
    """Scrape the ports of these nodes while the context is open."""
    folder.mkdir()
    jobs = [
        {"targets": [f"127.0.0.1:{port}"], "labels": {"node": node}}
        for node, port in targets.items()
    ]
    settings = {
        "global": {"scrape_interval": "1s"},
        "scrape_configs": [{"job_name": "holdfast", "static_configs": jobs}],
    }
    (folder / "prometheus.yml").write_text(json.dumps(settings))  # JSON is YAML
    address = f"127.0.0.1:{free_ports(1)[0]}"
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                str(PROGRAM),
                f"--config.file={folder}/prometheus.yml",
                f"--storage.tsdb.path={folder}/data",
                f"--web.listen-address={address}",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        found = Prometheus(address)
        wait_until(found.is_ready, what="Prometheus")
        yield found
    finally:
        process.kill()
        process.wait()


class Timeline:
    """The values that an observer without any delay would have seen."""

    def __init__(self, initial: float, changes: list[tuple[float, float]]) -> None:
        self._times = [time for time, _ in changes]
        self._values = [initial, *(value for _, value in changes)]

    def lateness(self, sample: Sample) -> float | None:
        """Return the seconds since the value was true last; None: it never was before."""
        last = bisect_right(self._times, sample.time)
        if self._values[last] == sample.value:
            return 0.0
        for place in range(last - 1, -1, -1):
            if self._values[place] == sample.value:
                return sample.time - self._times[place]
        return None


def timelines(nodes: Nodes) -> dict[str, Timeline]:
    """From the journal's records, by gauge; a gauge is 0 before its first record."""
    records = sorted(nodes.records(), key=lambda record: record.time)
    changes: dict[str, list[tuple[float, float]]] = {name: [] for name in GAUGES}
    for record in records:
        if isinstance(record.event, StepDone):
            changes["step"].append((record.time, record.event.step))
        elif isinstance(record.event, GenerationStarted):
            changes["generation"].append((record.time, record.generation))
            changes["world_size"].append((record.time, len(record.event.topology["nodes"])))
    return {name: Timeline(0.0, found) for name, found in changes.items()}


class Watched:
    """A run whose nodes are scraped, and the comparison of both."""

    def __init__(self, nodes: Nodes, prometheus: Prometheus, gate: FaultOrders) -> None:
        self._nodes, self._prometheus, self._gate = nodes, prometheus, gate

    def expected(self) -> dict[str, float]:
        """Return the newest values by selector, counted in the journal; the report's goodput."""
        done = self._nodes.events(StepDone)
        tokens = {event.step: event.tokens for event in done}
        begun = [r for r in self._nodes.records() if isinstance(r.event, GenerationStarted)]
        report = within("report", self._nodes.folder, "--json").succeeds()
        summary = json.loads(report.out)
        assert summary["last_step"] == max(tokens)
        assert isinstance(begun[-1].event, GenerationStarted)
        return {
            "holdfast_step": max(tokens),
            "holdfast_generation": begun[-1].generation,
            "holdfast_world_size": len(begun[-1].event.topology["nodes"]),
            'holdfast_tokens_total{kind="unique"}': sum(tokens.values()),
            "holdfast_tokens_total": sum(event.tokens for event in done),
            "holdfast_membership_changes_total": len(begun),
            'holdfast_checkpoints_total{tier="2",result="ok"}': len(
                self._nodes.events(CheckpointCommitted)
            ),
            'holdfast_goodput_ratio{window="run"}': summary["goodput"],
        }

    def hold_at(self, step: int, names: set[str]) -> None:
        """Let the run come to a step, and wait until each node shows what the journal has."""
        self._gate.open_gate(step)
        self._nodes.wait_step(step, nodes=names)
        since = time.time()
        shown: dict[str, dict[str, float]] = {}
        expected: dict[str, float] = {}

        def agrees() -> bool:
            expected.update(self.expected())
            for selector in expected:
                shown[selector] = self._prometheus.newest(selector, since)
            return all(
                shown[selector].keys() == names
                and all(
                    math.isclose(found, value, rel_tol=1e-9) for found in shown[selector].values()
                )
                for selector, value in expected.items()
            )

        try:
            wait_until(agrees, 10 * LATENESS_S, "the nodes' metrics")
        except TimeoutError:
            raise AssertionError(f"journal: {expected}\nPrometheus: {shown}") from None

    def largest_lateness(self) -> float:
        """Return the largest age of any scraped value. Fails for a value that was never true."""
        largest = 0.0
        for gauge, timeline in timelines(self._nodes).items():
            for node, series in self._prometheus.samples(f"holdfast_{gauge}").items():
                for sample in (sample for samples in series for sample in samples):
                    late = timeline.lateness(sample)
                    assert late is not None, f"{node}: {gauge} was never {sample.value:g}"
                    largest = max(largest, late)
        return largest


@pytest.mark.parametrize("recovery", ["live", "restart"])
def test_what_prometheus_stores_of_every_node_agrees_with_the_journal(
    recovery: str, run_file: Path, tmp_path: Path
) -> None:
    """restart: steps since the newest checkpoint are done again, and count as replayed."""
    gate = FaultOrders(tmp_path / "gate")
    gate.prepare(0)
    everyone = {"a", "b", "c"}
    ports = dict(zip(sorted(everyone), free_ports(3), strict=True))
    own = {
        name: ("cluster.interface=127.0.0.1", f"cluster.metrics_port={port}")
        for name, port in ports.items()
    }
    settings = (*SETTINGS, f"cluster.recovery={recovery}", f"cluster.faults={gate.folder}")
    with (
        prometheus_for(tmp_path / "prometheus", ports) as prometheus,
        nodes_of(run_file, tmp_path / "run", *settings) as nodes,
    ):
        run = Watched(nodes, prometheus, gate)
        for name in sorted(everyone):
            nodes.start(name, settings=own[name])
        nodes.wait_generation(everyone)
        run.hold_at(30, everyone)

        lost = nodes.leader
        gate.open_gate(60)
        nodes.wait_step(50)
        killed_at = time.time()
        os.killpg(nodes.agents[lost].pid, signal.SIGKILL)
        nodes.kill(lost)
        run.hold_at(90, everyone - {lost})
        assert nodes.leader != lost
        done = [event.step for event in nodes.events(StepDone)]
        assert (len(done) > len(set(done))) == (recovery == "restart")

        gate.open_gate(120)
        without = nodes.newest
        nodes.join(lost, settings=own[lost])
        nodes.wait_generation(everyone, after=without)
        run.hold_at(STEPS - 1, everyone)
        scraped = prometheus.samples("up", killed_at)
        for name in everyone - {lost}:
            assert all(sample.value == 1 for sample in scraped[name][0]), f"{name} was not scraped"
        late = run.largest_lateness()
        print(f"the oldest value that was scraped was {late:.1f} s old")
        assert late < LATENESS_S

        gate.open_gate(STEPS)
        assert set(nodes.end().values()) == {0}, nodes.story()
