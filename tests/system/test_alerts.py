"""`make observe`: a real Prometheus and a real Alertmanager watch a disturbed run of four nodes.

An alert is fired by its real fault, a webhook receives it, and it clears. The table has a fault for
each alert of the catalogue. HOLDFAST_ALERT_FAULTS='loop, stall' causes those two alone.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from holdfast.config.loading.load import load_config
from holdfast.elastic.protocol.fault_orders import CorruptLossRule, FaultOrder, FaultOrders
from holdfast.events import CheckpointCommitted, RunFailed, StepDone
from holdfast.report.alerts.catalogue import ALERTS
from holdfast.report.alerts.objectives import NAME as BURN
from holdfast_platform.observe.boards import queries_of
from tests.support.commands import within
from tests.support.monitoring import Monitoring, missing_program, monitoring
from tests.support.nodes import Nodes, nodes_of, prepared
from tests.support.ranks import wait_until

NODES = ("a", "b", "c", "d")
PACE_S = 0.05  # of each microbatch, so that steps take a time that a person would notice
OBJECTIVES = """\
observe:
  objectives:
    - {indicator: goodput, target: 0.5, period: 6h}
"""
SETTINGS = (
    "train.steps=1000000",
    "train.batch_size=8",
    "train.evaluate.every=0",
    "layout.workers=4",
    "cluster.min_nodes=3",
    "cluster.progress_seconds=5",
    "cluster.check_every_steps=5",
    "cluster.alone_seconds=8",
    "checkpoint.every_steps=10",
    "checkpoint.keep_last=3",
)


@dataclass
class Scene:
    """A run under observation, and its faults."""

    run: Nodes
    faults: FaultOrders
    seen: Monitoring
    bucket: Path
    orders: int = 0

    def order(self, deed: str, point: str, rank: int = 1) -> None:
        """Have a rank break at a point of its next step."""
        self.orders += 1
        newest = max((r.generation for r in self.run.records()), default=0)
        self.faults.arm(
            FaultOrder(self.orders, deed, deed, point, 0, rank, generation=max(0, newest - 1))
        )

    @property
    def step(self) -> int:
        return max(event.step for event in self.run.events(StepDone))

    def wait_steps(self, number: int) -> None:
        """Wait until so many more steps are done."""
        self.run.wait_step(self.step + number)

    def pace(self, **slower: float) -> None:
        """Set the seconds of a microbatch; `PACE_S` for ranks that are not named."""
        self.faults.set_slow_ranks(
            {rank: slower.get(f"rank{rank}", PACE_S) for rank in range(len(NODES))}
        )

    def heal(self) -> None:
        """Have four nodes at work."""
        for name in NODES:
            if name not in self.run.agents or self.run.agents[name].poll() is not None:
                self.run.agents.pop(name, None)
                self.run.start(name)
        newest = self.run.newest
        if self.run.nodes(newest) != set(NODES):
            self.run.wait_generation(set(NODES), after=newest)
        self.wait_steps(2)


def _silent_node(scene: Scene) -> None:
    scene.run.signal("d", signal.SIGSTOP)


def _kill_silent_node(scene: Scene) -> None:
    os.killpg(scene.run.agents["d"].pid, signal.SIGKILL)
    scene.run.kill("d")
    scene.heal()


def _replace_the_slow_node(scene: Scene) -> None:
    scene.pace()
    os.killpg(scene.run.agents["d"].pid, signal.SIGKILL)
    scene.run.kill("d")
    scene.heal()


def _block(folder: Path) -> None:
    """Put a file where a folder was."""
    folder.rename(folder.with_name(f"{folder.name}.away"))
    folder.write_text("")


def _unblock(folder: Path) -> None:
    folder.unlink()
    folder.with_name(f"{folder.name}.away").rename(folder)


def _diverge(scene: Scene) -> None:
    scene.wait_steps(25)
    step = scene.step
    scene.faults.set_corrupt_losses(CorruptLossRule(step, step + 60, None, times=3.0))


def _stall(scene: Scene) -> None:
    scene.faults.open_gate(scene.step)


def _flow(scene: Scene) -> None:
    (scene.faults.folder / "gate").unlink()


def _loop(scene: Scene) -> None:
    for rank in range(16):
        scene.order("kill", "forward", rank % 4)


def _stop_looping(scene: Scene) -> None:
    wait_until(lambda: scene.run.events(RunFailed), what=scene.run.story)
    scene.run.end()
    scene.run.agents.clear()
    for number in range(1, scene.orders + 1):
        scene.faults.disarm(number)
    scene.heal()


def _kill_all(scene: Scene) -> None:
    for name in list(scene.run.agents):
        os.killpg(scene.run.agents[name].pid, signal.SIGKILL)
        scene.run.kill(name)


def _return_with_a_damaged_checkpoint(scene: Scene) -> None:
    """The bucket's copy is damaged, too: a start would take its bytes instead."""
    newest = max(event.step for event in scene.run.events(CheckpointCommitted))
    for place in (scene.run.folder, scene.bucket):
        found = [*place.rglob(f"{newest:010d}-*.safetensors")]
        assert found, f"no blob of step {newest} in {place}"
        for path in found:
            damaged = bytearray(path.read_bytes())
            damaged[-1] ^= 1
            path.write_bytes(damaged)
    scene.heal()


def _notice(scene: Scene) -> None:
    within("notice", scene.run.outside, "--seconds", "60", "--node", "c")


def _let_it_go(scene: Scene) -> None:
    scene.run.signal("c", signal.SIGTERM)
    wait_until(lambda: scene.run.agents["c"].poll() is not None, what=scene.run.story)
    scene.heal()


@dataclass(frozen=True)
class Fault:
    """A fault, the alerts that it has to fire, and how it is mended."""

    name: str
    alerts: tuple[str, ...]
    cause: Callable[[Scene], None]
    mend: Callable[[Scene], None] = lambda scene: None


FAULTS = (
    Fault("NaN", ("StepNotFinite",), lambda s: s.order("not finite", "backward")),
    Fault("bit", ("StateDiffers",), lambda s: s.order("corrupt state", "applied", 2)),
    Fault("kill", ("WorkerLost",), lambda s: s.order("kill", "forward", 2)),
    Fault("slow", ("WorkerSlow",), lambda s: s.pace(rank3=0.6), _replace_the_slow_node),
    Fault("silent node", ("NetworkFault", "WorkersMissing"), _silent_node, _kill_silent_node),
    Fault("wrong loss", ("LossDiverging",), _diverge),
    Fault("stall", ("RunStuck", BURN, "DataWaiting"), _stall, _flow),
    Fault(
        "no bucket", ("UploadFailing",), lambda s: _block(s.bucket), lambda s: _unblock(s.bucket)
    ),
    Fault(
        "no commits",
        ("SaveFailing", "WorkAtRisk"),
        lambda s: _block(s.run.folder / "commits"),
        lambda s: _unblock(s.run.folder / "commits"),
    ),
    Fault("notice", ("NodePreempted",), _notice, _let_it_go),
    Fault("loop", ("RestartLoop", "RunFailed"), _loop, _stop_looping),
    Fault(
        "all killed",
        ("RunLost", "RunRequeued", "CheckpointCorrupt"),
        _kill_all,
        _return_with_a_damaged_checkpoint,
    ),
)
AFTER_MENDING = {"RunRequeued", "CheckpointCorrupt", "DataWaiting"}
"""Alerts that the way back fires."""


def chosen_faults() -> list[Fault]:
    """Return the faults that the environment names; all if it names none."""
    names = [name.strip() for name in os.environ.get("HOLDFAST_ALERT_FAULTS", "").split(",")]
    if names == [""]:
        return list(FAULTS)
    assert set(names) <= {fault.name for fault in FAULTS}, f"a fault of {names} is not known"
    return [fault for fault in FAULTS if fault.name in names]


def test_every_alert_has_a_real_fault() -> None:
    assert {name for fault in FAULTS for name in fault.alerts} == {*ALERTS, BURN}


@pytest.mark.slow
@pytest.mark.skipif(
    missing_program() is not None,
    reason=f"no {missing_program()} in PATH: apt install prometheus prometheus-alertmanager",
)
def test_each_alert_is_fired_by_its_fault_and_clears(tmp_path: Path) -> None:
    run_file = prepared(tmp_path)
    run_file.write_text(run_file.read_text() + OBJECTIVES)
    config = load_config(run_file).config
    faults, bucket = FaultOrders(tmp_path / "faults"), tmp_path / "bucket"
    faults.prepare()
    bucket.mkdir()
    more = (f"cluster.faults={faults.folder}", f"checkpoint.bucket={bucket}")
    with nodes_of(run_file, tmp_path / "run", *SETTINGS, *more) as run:
        faults.set_slow_ranks(dict.fromkeys(range(4), PACE_S))
        run.start(*NODES)
        run.wait_step(5, nodes=set(NODES))
        with monitoring(config, run.folder, tmp_path / "observe") as seen:
            scene = Scene(run, faults, seen, bucket)
            scene.wait_steps(40)
            assert run.events(CheckpointCommitted)
            assert seen.firing() == set(), "an undisturbed run is silent"
            check_boards(seen, tmp_path / "observe/grafana/boards")
            for fault in chosen_faults():
                show(fault, scene)
            check_boards(seen, tmp_path / "observe/grafana/boards")
            print("\n| fault | alert | fired after s | cleared after s |\n|---|---|---|---|")
            for name, fired, cleared in seen.times:
                print(f"| {name} | {fired:.1f} | {cleared:.1f} |")
            for body in seen.hook.bodies:
                assert {a["labels"]["run_id"] for a in body["alerts"]} == {"tiny"}
                assert len({a["labels"]["cause"] for a in body["alerts"]}) == 1, "one cause each"


def show(fault: Fault, scene: Scene) -> None:
    """Bring a fault about, wait for its alerts, mend it, and wait until they have cleared.

    What the last mending fired has to be over: an alert that fires already is not sent again."""
    wait_until(lambda: is_silent(scene.seen, fault.alerts), what=scene.seen.story)
    before = counts(scene.seen)
    caused = time.monotonic()
    fault.cause(scene)
    fired = {}
    for name in fault.alerts:
        if name not in AFTER_MENDING:
            scene.seen.wait_message(name, "firing", before.get((name, "firing"), 0))
            fired[name] = time.monotonic() - caused
    mended = time.monotonic()
    fault.mend(scene)
    for name in fault.alerts:
        if name in AFTER_MENDING:
            scene.seen.wait_message(name, "firing", before.get((name, "firing"), 0))
            fired[name] = time.monotonic() - mended
    for name in fault.alerts:
        scene.seen.wait_message(name, "resolved", before.get((name, "resolved"), 0))
        cleared = time.monotonic() - mended
        scene.seen.times.append((f"{fault.name} | {name}", fired[name], cleared))
        print(
            f"{fault.name}: {name} fired {fired[name]:.1f} s, cleared {cleared:.1f} s", flush=True
        )
    scene.heal()


def is_silent(seen: Monitoring, names: Sequence[str]) -> bool:
    """Return True if no alert fires, and the webhook knows it of these."""
    sent = counts(seen)
    return not seen.firing() and all(
        sent.get((name, "firing"), 0) == sent.get((name, "resolved"), 0) for name in names
    )


def counts(seen: Monitoring) -> Mapping[tuple[str, str], int]:
    """Return how many messages there were, by alert and status."""
    found: dict[tuple[str, str], int] = {}
    for body in seen.hook.bodies:
        for alert in body["alerts"]:
            key = alert["labels"]["alertname"], alert["status"]
            found[key] = found.get(key, 0) + 1
    return found


def check_boards(seen: Monitoring, folder: Path) -> None:
    """Every query of every board returns a value."""
    for path in sorted(folder.iterdir()):
        for query in queries_of(json.loads(path.read_text())):
            wait_until(lambda q=query: seen.query(q), what=f"{path.name}: {query}", pause_s=0.5)
