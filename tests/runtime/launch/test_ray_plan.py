"""What a run wants of Ray, and what the supervisor does about it, without a Ray."""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.launch import _running_job
from holdfast.config.loading.load import resolve_config
from holdfast.config.sections.launch import LaunchConfig
from holdfast.errors import ConfigError
from holdfast.launch.owners.owner import LaunchRequest, NodeState, OwnedJob, OwnerAwayError
from holdfast.launch.owners.ray import owner as ray_owner
from holdfast.launch.owners.ray.job import RayAnswer
from holdfast.launch.owners.ray.node import (
    RAY_LIMIT_VARIABLE,
    READ_INTERVAL_S,
    SpecWatch,
    head_limit_s,
    leave_after_s,
    place_of,
)
from holdfast.launch.owners.ray.plan import (
    Deeds,
    JobStatus,
    NodeReport,
    NodeStatus,
    Observation,
    PlacedGroup,
    RaySpec,
    decide,
    kept_groups,
    make_groups,
    node_states,
)
from tests.support.commands import apart, within, write_run_file
from tests.support.marks import in_campaign
from tests.support.ranks import ROOT

A, B = ("node-0",), ("node-1",)
SPEC = RaySpec("run-1", (A, B), {"CPU": 1.0}, ("join", "/run", "--node", "{node}"))
TWO = {A: PlacedGroup("a", True), B: PlacedGroup("b", True)}


def report(group: str, code: int | None = None) -> NodeReport:
    """Of a node on the machine that is called as its group."""
    return NodeReport(group, group, f"host-{group}", 7, code)


def seen(
    groups: dict[tuple[str, ...], PlacedGroup],
    a: NodeReport | None = None,
    b: NodeReport | None = None,
    *,
    alive: str = "ab",
    draining: str = "",
) -> Observation:
    reports = {"node-0": a, "node-1": b}
    there = {node: found for node, found in reports.items() if found is not None}
    return Observation(groups, there, frozenset(alive), frozenset(draining))


def request(*settings: str, nodes: int = 4, spares: int = 0) -> LaunchRequest:
    config = resolve_config("name: r\n", "run.yaml", settings).config
    return LaunchRequest("r", "/r", Path("/r"), Path("/r/secret"), config, nodes, spares)


def test_the_nodes_of_a_replica_are_a_group_and_each_spare_is_its_own() -> None:
    pair = request("layout.pp=2", "layout.tp=2", "layout.workers=8", "cluster.places=2", spares=1)
    assert make_groups(pair) == (("node-0", "node-1"), ("node-2", "node-3"), ("node-4",))
    fits = request("layout.tp=2", "layout.workers=8", "cluster.places=2", nodes=2)
    assert make_groups(fits) == (A, B), "a replica fits on one node"
    together = request("launch.ray.groups=run", nodes=2)
    assert make_groups(together) == (("node-0", "node-1"),)


def test_another_number_of_nodes_tears_no_group_apart() -> None:
    pair = ("node-0", "node-1")
    assert kept_groups((A,), (A, B)) == (A, B)
    assert kept_groups((A, B), (A,)) == (A,)
    assert kept_groups((A,), (pair, ("node-2", "node-3"))) == (A, B, ("node-2", "node-3"))


def test_groups_are_made_at_once_and_wait_for_machines() -> None:
    assert decide(SPEC, seen({})) == Deeds(create=(A, B))
    waiting = seen({A: PlacedGroup("a", True), B: PlacedGroup("b", False)}, report("a"))
    assert decide(SPEC, waiting) == Deeds(), "Ray's autoscaler sees what waits"
    states = node_states(SPEC, waiting)
    assert [each.state for each in states] == [NodeState.RUNNING, NodeState.WAITING]
    assert "no machine" in states[1].detail


def test_a_node_whose_machine_drains_is_placed_again_once_it_has_left() -> None:
    draining = seen(TWO, report("a"), report("b"), draining="b")
    assert decide(SPEC, draining) == Deeds(), "the agent leaves by itself"
    assert "drains" in node_states(SPEC, draining)[1].detail
    left = seen(TWO, report("a"), report("b", 0), draining="b")
    assert decide(SPEC, left) == Deeds(remove=(B,), forget=B)
    assert decide(SPEC, seen({A: TWO[A]}, report("a"))) == Deeds(create=(B,))


def test_all_machines_drain_at_once_and_the_run_waits_for_others() -> None:
    left = seen(TWO, report("a", 0), report("b", 0), draining="ab")
    assert decide(SPEC, left) == Deeds(remove=(A, B), forget=(*A, *B))


def test_a_lost_machine_is_left_to_ray() -> None:
    lost = seen({A: TWO[A], B: PlacedGroup("b", False)}, report("a"), report("b"), alive="a")
    assert decide(SPEC, lost) == Deeds()
    assert node_states(SPEC, lost)[1].state is NodeState.WAITING
    again = seen(TWO, report("a"), report("b"), alive="ac")
    assert decide(SPEC, again) == Deeds(), "the report of the lost machine does not count"
    assert node_states(SPEC, again)[1].detail == "Ray starts it"


def test_a_node_that_failed_gives_its_machine_back_and_is_not_started_again() -> None:
    failed = seen(TWO, report("a"), report("b", 2))
    assert decide(SPEC, failed) == Deeds(remove=(B,))
    assert decide(SPEC, seen({A: TWO[A]}, report("a"), report("b", 2))) == Deeds()
    state = node_states(SPEC, failed)[1]
    assert (state.state, state.detail) == (NodeState.FAILED, "host-b, exit code 2")


@pytest.mark.parametrize(
    "end",
    [
        seen(TWO, report("a", 0), report("b", 0)),
        seen(TWO, report("a", 0), report("b", 1)),
        seen(TWO, report("a", 3), report("b", 3)),
        seen({A: TWO[A], B: PlacedGroup("b", False)}, report("a", 0)),
    ],
    ids=["complete", "one failed", "gave up", "complete, and a machine is still awaited"],
)
def test_the_job_is_over(end: Observation) -> None:
    assert decide(SPEC, end) == Deeds(remove=(A, B), is_over=True)


def test_down_ends_the_job_when_the_agents_have_left() -> None:
    stop = replace(SPEC, stop=True)
    assert decide(stop, seen(TWO, report("a"), report("b", 0))) == Deeds(remove=(B,))
    assert decide(stop, seen({B: PlacedGroup("b", False)}, report("a", 0))).is_over


def test_a_node_that_is_no_longer_wanted_leaves() -> None:
    one = replace(SPEC, groups=(A,))
    assert decide(one, seen(TWO, report("a"), report("b"))) == Deeds()
    assert decide(one, seen(TWO, report("a"), report("b", 0))) == Deeds(remove=(B,))
    assert decide(one, seen({A: TWO[A], B: PlacedGroup("b", False)}, report("a"))) == Deeds(
        remove=(B,)
    )


def test_what_is_stored_is_read_again() -> None:
    status = JobStatus(tuple(node_states(SPEC, seen(TWO, report("a")))), is_over=True)
    assert JobStatus.from_json(status.to_json()) == status
    assert RaySpec.from_json(SPEC.to_json()) == SPEC
    assert NodeReport.from_json(report("a", 3).to_json()) == report("a", 3)
    assert SPEC.command("node-1") == ["join", "/run", "--node", "node-1"]


def test_labels_of_a_machine_name_its_place() -> None:
    labels = {"ray.io/availability-zone": "eu-1a", "rack": "r7", "team": "x"}
    assert place_of(labels) == "zone=eu-1a,rack=r7"


# --- `--on ray` where ray is not installed, and at addresses where no Ray answers -----------------
GOLDEN = ROOT / "tests" / "golden" / "launch" / "ray.json"
SETTINGS = (
    "folder=/shared/runs/tiny",
    "cluster.places=1",
    "layout.pp=2",
    "launch.spares=1",
    "launch.ray.address=head.example:6379",
    "launch.ray.cpus=8",
    "launch.ray.resources={slot: 1}",
    "launch.ray.runtime_env={env_vars: {NCCL_DEBUG: WARN}}",
)


def test_a_dry_run_prints_what_would_be_submitted(tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path)
    settings = ("model.layers=2", "layout.workers=4", "data.folder=/shared/tiny", *SETTINGS)
    done = within("launch", run_file, "--on", "ray", "--nodes", "4", "--dry-run", *settings)
    assert done.code == 0, done.err
    assert done.out == GOLDEN.read_text()
    assert "ray" not in sys.modules


@pytest.fixture
def refusing(tmp_path: Path) -> Iterator[str]:
    """An address where nothing listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.2", 0))
        yield f"127.0.0.2:{taken.getsockname()[1]}"


def job_at(address: str) -> OwnedJob:
    return OwnedJob("ray", "tiny-1", 2, {"address": address, "logs": "/nowhere"})


def test_a_head_that_is_away_is_one_sentence(refusing: str) -> None:
    with pytest.raises(OwnerAwayError, match=r"Ray's head at 127\.0\.0\.2:\d+, which knows"):
        ray_owner.RayOwner().status(job_at(refusing))


def test_a_run_whose_ray_is_away_resumes_on_another_one(
    refusing: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job_at(refusing).write(tmp_path)
    launch = {"on": "ray", "ray": {"address": refusing}}
    with pytest.raises(OwnerAwayError):
        _running_job(tmp_path, LaunchConfig(**launch), fresh=False)
    launch["ray"] = {"address": "head.example:6379"}
    assert _running_job(tmp_path, LaunchConfig(**launch), fresh=False) is None
    assert "the run resumes elsewhere" in capsys.readouterr().err
    with pytest.raises(OwnerAwayError):
        _running_job(tmp_path, LaunchConfig(**launch), fresh=True)


class Board:
    """A board whose head answers while `spec` is set."""

    job, spec = "tiny-1", None

    def read_spec(self) -> RaySpec:
        if self.spec is None:
            raise ConnectionError
        return self.spec


def test_the_watch_of_a_spec_knows_how_long_the_head_is_away() -> None:
    board: Any = Board()
    board.spec = RaySpec("tiny-1", (("node-0",),), {"CPU": 1.0}, (), "")
    watch = SpecWatch(board)
    assert watch.newest() is board.spec
    spec, board.spec = board.spec, None
    while watch.silent_s < 2 * READ_INTERVAL_S:
        time.sleep(0.01)
    board.spec = spec
    watch.wait_answer()
    assert watch.newest() is spec


def test_an_agent_saves_before_ray_ends_its_node() -> None:
    assert head_limit_s({}) == 60.0
    assert [leave_after_s(s) for s in (head_limit_s({RAY_LIMIT_VARIABLE: "600"}), 24.0)] == [
        580,
        16,
    ]


def test_a_server_that_is_no_ray_does_not_hang_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_owner, "ANSWER_TIMEOUT_S", 0.2)
    stuck = [sys.executable, "-c", "import time; time.sleep(600)"]
    monkeypatch.setattr(ray_owner, "module_command", lambda *_: stuck)
    with pytest.raises(ConfigError, match="does not answer as Ray's head does"):
        ray_owner.RayOwner().release(job_at("head:6379"))


def test_a_child_that_ends_without_an_answer_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    crash = [sys.executable, "-c", "raise SystemExit('the client lost its head')"]
    monkeypatch.setattr(ray_owner, "module_command", lambda *_: crash)
    with pytest.raises(ConfigError, match="refused: the client lost its head"):
        ray_owner.RayOwner().status(job_at("head:6379"))


def test_the_status_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    known = (NodeStatus("node-0", NodeState.RUNNING, "10.0.0.1, process 7"),)
    answers = iter([json.dumps(JobStatus(known).to_json()), ""])
    monkeypatch.setattr(ray_owner, "_ask", lambda _: RayAnswer(status=next(answers)))
    owner = ray_owner.RayOwner()
    assert owner.status(job_at("head:6379")) == list(known)
    assert owner.status(job_at("head:6379")) == [], "Ray does not know the job"


@pytest.mark.parametrize("address", ["127.0.0.1:6379", in_campaign("ray://localhost:10001")])
def test_an_address_that_hangs_is_refused(tmp_path: Path, address: str) -> None:
    run_file = write_run_file(tmp_path)
    done = apart("launch", run_file, "--on", "ray", f"launch.ray.address={address}")
    done.refuses("launch.ray.address", "use the address that ray start --head prints")


def test_keys_of_ray_that_are_wrong_are_refused(tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path)
    done = apart("launch", run_file, "--on", "ray", "launch.ray.address=head")
    done.refuses("launch.ray.address", "HOST:PORT")
    done = apart("launch", run_file, "--on", "ray", "launch.ray.cpus=0")
    done.refuses("set cpus to 1")


def test_the_order_is_all_that_the_child_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    echo = [
        sys.executable,
        "-c",
        "import sys, json; order = json.load(sys.stdin); print(json.dumps({'error': 'running', "
        "'detail': order['job'], 'status': '', 'nodes': 0}))",
    ]
    monkeypatch.setattr(ray_owner, "module_command", lambda *_: echo)
    with pytest.raises(ConfigError, match=r"nodes of this run already \(job tiny-1\)"):
        ray_owner.RayOwner().status(job_at("head:6379"))
    assert json.loads(GOLDEN.read_text())["verb"] == "submit"
