"""Nodes in networks of their own: what reaches whom, cut and healed, late and lossy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest
from benchmarks.lab.links import HOLDFAST_WAITS, link_seconds

from holdfast.errors import UserError
from holdfast_lab.chaos.network import Network, why_unavailable
from holdfast_lab.chaos.relay import LinkShape
from holdfast_lab.score.harness.harness import RunOptions, run_scenario
from holdfast_lab.score.harness.node_processes import LineReader, NodeProcesses
from holdfast_lab.score.harness.trainer import TrainerRun, Workplace, trainer_named
from holdfast_lab.score.record import Commit, samples_once
from holdfast_lab.score.scenarios import LEVEL_1, ScenarioRun, draw_scenario
from tests.support.ranks import wait_until

WHY_NOT = why_unavailable()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

# Each line that is asked for is sent to the server, which answers with the same.
SERVE = """
import socket
listening = socket.create_server((ADDRESS, 7000))
print("ready", flush=True)
while True:
    taken, _ = listening.accept()
    while data := taken.recv(65536):
        taken.sendall(data)
"""
ASK = """
import socket, sys, time
line = socket.create_connection((ADDRESS, 7000), timeout=SECONDS)
for size in map(int, sys.argv[1:]):
    began, due = time.monotonic(), size
    line.sendall(b"x" * size)
    while due:
        due -= len(line.recv(65536))
    print(time.monotonic() - began)
"""


def asked(network: Network, node: str, of: str, *sizes: int, seconds: float = 10) -> list[float]:
    """How long each answer took; [] where none came."""
    script = ASK.replace("ADDRESS", repr(network.address(of))).replace("SECONDS", str(seconds))
    command = [*network.command(node), sys.executable, "-c", script, *map(str, sizes)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return [float(line) for line in done.stdout.split()] if done.returncode == 0 else []


@pytest.fixture
def network() -> Iterator[Network]:
    """Two nodes; the second one answers."""
    with Network() as network:
        network.up(["a", "b"])
        script = SERVE.replace("ADDRESS", repr(network.address("b")))
        server = subprocess.Popen(
            [*network.command("b"), sys.executable, "-c", script], stdout=subprocess.PIPE
        )
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
        try:
            yield network
        finally:
            server.kill()
            server.communicate()


def test_a_cut_node_is_reached_again_when_it_is_healed(network: Network) -> None:
    assert asked(network, "a", "b", 10)
    network.cut("b")
    assert asked(network, "a", "b", 10, seconds=1) == []
    network.heal("b")
    assert asked(network, "a", "b", 10)


def test_two_that_are_parted_reach_the_others(network: Network) -> None:
    network.up(["c"])
    assert asked(network, "a", "b", 10)
    network.disconnect("a", "b")
    assert asked(network, "a", "b", 10, seconds=1) == []
    assert asked(network, "c", "b", 10)
    network.reconnect("b", "a")
    assert asked(network, "a", "b", 10)


def test_a_slow_line_delays_both_directions_until_it_is_healed(network: Network) -> None:
    network.set_delay("b", 150)
    *_, last = asked(network, "a", "b", 10, 10)
    assert last >= 0.3
    network.cut("b")
    assert asked(network, "a", "b", 10, seconds=1) == []
    network.heal("b")
    assert min(asked(network, "a", "b", *[10] * 20)) < 0.3


def test_what_a_lossy_line_drops_is_sent_again(network: Network) -> None:
    network.set_loss("b", 10)
    network.set_delay("b", 1)
    assert len(asked(network, "a", "b", *[10_000] * 20, seconds=30)) == 20
    network.set_loss("b", 100)
    assert asked(network, "a", "b", 10, seconds=1) == []


def test_a_node_has_nothing_but_its_network_and_keeps_its_process_id(network: Network) -> None:
    process = subprocess.Popen(
        [
            *network.command("a"),
            sys.executable,
            "-c",
            "import os, socket; print(os.getpid(), [n for _, n in socket.if_nameindex()])",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    out, _ = process.communicate(timeout=120)
    number, _, devices = out.partition(" ")
    assert int(number) == process.pid
    assert "eth0" in devices
    assert network.settings("a")[0] == "cluster.interface=10.77.0.1"


def test_two_networks_do_not_meet_and_nothing_is_left_of_one_that_is_down(network: Network) -> None:
    with Network() as other:
        other.up(["x", "b"])
        assert asked(other, "x", "b", 10, seconds=1) == []  # the same address, elsewhere
        target = other.command("x")[2]
    other.down()
    wait_until(lambda: not os.path.exists(f"/proc/{target}"), what="the end of a node")
    with pytest.raises(UserError, match="'x' is no node"):
        other.cut("x")


def test_a_line_between_two_regions_changes_its_shape_and_loses_nothing(network: Network) -> None:
    network.up(["c", "far"])
    link = network.split(["far"])
    assert asked(network, "far", "b", 10)
    link.shape(LinkShape(delay_s=0.1))
    answers = asked(network, "far", "b", *[10] * 5)
    assert len(answers) == 5
    assert min(answers) >= 0.2
    assert min(asked(network, "c", "b", *[10] * 5)) < 0.2, "they are in the same region"
    link.shape(LinkShape(gbit_per_s=0.02))
    assert max(asked(network, "far", "b", 250_000)) >= 0.1, "0.1 s in each direction"
    link.shape(LinkShape(loss=1.0))
    assert asked(network, "far", "b", 10, seconds=1) == []
    link.shape(LinkShape())
    assert min(asked(network, "far", "b", *[10] * 5)) < 0.2


# --- F9 at level 1 --------------------------------------------------------------------------------
K = 400.0
"""The scenario takes 3 s. A round trip takes 0.4 ms then, so the test asks for longer ones."""

ECHO = """\
import socket, sys
listening = socket.create_server((sys.argv[1], 7000))
while True:
    taken, _ = listening.accept()
    while data := taken.recv(64):
        taken.sendall(data)
"""
# Each round trip to the helper is a step. The devices are part of what it says.
LOOP = """\
import json, os, socket, sys, time
address, lines = sys.argv[1:]
while True:
    try:
        line = socket.create_connection((address, 7000), timeout=5)
        break
    except OSError:
        time.sleep(0.02)
for step in range(1, 10**9):
    time.sleep(0.02)
    began = time.time()
    line.sendall(b"x")
    line.recv(1)
    row = {"t": time.time(), "step": step, "generation": 1, "rank": 0, "workers": 4,
           "samples": [[step - 1, step]], "loss": time.time() - began}
    with open(lines, "a") as out:
        out.write(json.dumps(row) + "\\n")
    if step == 1:
        with open(lines + "-devices", "w") as out:
            json.dump([name for _, name in socket.if_nameindex()], out)
"""


class _Asking:
    """Node n1, in the far region, asks a helper; the other nodes only wait."""

    def __init__(self, at: Workplace) -> None:
        self._at = at
        self.processes = NodeProcesses(at.folder / "nodes", at.environment(), at.network)
        self.processes.start_helper("echo", [sys.executable, "-c", ECHO, at.helper_address])

    def start(self, nodes: Sequence[str]) -> None:
        lines = str(self._at.folder / "lines")
        for node in nodes:
            words = ["-c", LOOP, self._at.helper_address, lines] if node == "n1" else ["-c", ""]
            self.processes.start(node, [sys.executable, *words])

    def kill(self, node: str) -> None:
        self.processes.kill(node)

    def warn(self, node: str, seconds: float) -> None: ...

    def worker_pids(self, node: str) -> list[int]:
        return []

    def commits(self) -> list[Commit]:
        return LineReader(self._at.folder / "lines").commits()

    def corrupt_checkpoint(self) -> bool:
        return False

    def stop(self) -> None:
        self.processes.stop()


class _Trainer:
    name = "own"
    obeys_network = True

    def __init__(self) -> None:
        self.addresses: set[str] = set()

    def why_unavailable(self, python: str) -> str:
        return ""

    def open(self, workplace: Workplace) -> TrainerRun:
        self.addresses = {workplace.address(f"n{n}") for n in range(1, 5)}
        self.addresses.add(workplace.helper_address)
        return _Asking(workplace)


def slower(run: ScenarioRun, factor: float) -> ScenarioRun:
    """The same with longer round trips."""
    extra = {"rtt_ms": factor * 153.0}
    events = (replace(e, extra=extra) if e.kind == "net" else e for e in run.events)
    return replace(run, events=tuple(events))


def test_nodes_reach_a_helper_over_a_line_that_becomes_slow(tmp_path: Path) -> None:
    run = slower(draw_scenario("F9", 5, LEVEL_1), 40.0)
    trainer = _Trainer()
    record = run_scenario(trainer, run, tmp_path / "w", RunOptions(K, keeps_folder=True))
    at = 0.2 * record.seconds
    calm = [c.loss for c in record.commits if c.t_s < at and c.loss is not None]
    degraded = [c.loss for c in record.commits if c.t_s > at + 0.1 and c.loss is not None]
    assert median(calm) < 0.0153
    assert min(degraded) >= 0.0153
    assert record.faults == (), "a slow line takes nothing away"
    assert sorted(json.loads((tmp_path / "w" / "lines-devices").read_text())) == ["eth0", "lo"]
    assert len(trainer.addresses) == 5


@pytest.mark.slow
def test_steps_of_holdfast_wait_for_the_slow_line(tmp_path: Path) -> None:
    run = slower(draw_scenario("F9", 5, LEVEL_1), 20.0)
    record = run_scenario(trainer_named("holdfast"), run, tmp_path / "w", RunOptions(20.0))
    (event, _) = (e for e in run.compressed(20.0).events if e.kind == "net")
    gaps = [(b.t_s, b.t_s - a.t_s) for a, b in pairwise(record.commits)]
    calm = median(gap for at, gap in gaps if at < event.t_s)
    degraded = median(gap for at, gap in gaps if at - gap > event.t_s)
    expected = link_seconds(event, HOLDFAST_WAITS, 4 * 577.0)
    assert expected == pytest.approx(0.306)
    assert degraded - calm >= 0.8 * expected
    assert samples_once(record) == ""
