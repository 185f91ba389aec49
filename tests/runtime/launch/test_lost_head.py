"""A run on a real Ray whose head is killed while it trains. Each test prints its times."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from holdfast.errors import ConfigError
from holdfast_platform.clusters.processes import living
from holdfast_platform.clusters.ray import FIRST_NODE
from tests.support.disposable_clusters import clusters_ended, down, lose, read, up
from tests.support.ray_cluster import needs_ray
from tests.support.ray_run import ENDLESS, RayRun

pytestmark = [pytest.mark.slow, needs_ray]
NODES = {"node-0", "node-1"}
AWAY = "which knows the nodes of this run, does not answer"
LIMIT_S = 24  # Ray's raylets end so long after their head. Ray's own default is 60.


@dataclass(frozen=True)
class Address:
    address: str


@pytest.fixture(autouse=True)
def _states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with clusters_ended():
        yield


def address_of(name: str = "try") -> Address:
    return Address(f"127.0.0.2:{read(name).ports['head']}")


def begin(root: Path, machines: int = 2) -> RayRun:
    up("ray", machines)
    run = RayRun(root, address_of(), workers=2)
    run.launch(2, ENDLESS)
    run.first_step(0, NODES)
    return run


def report(what: str, **seconds: float) -> None:
    print(f"\n{what}: " + ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items()))


def test_a_run_loses_no_step_if_the_head_keeps_its_tables_on_a_disk(tmp_path: Path) -> None:
    run = begin(tmp_path)
    lost = time.time()
    lose(read(), "head")
    run.wait(lambda: time.time() > lost + 5, "", looks=False)
    run.wait_more_steps()
    refused = run.command("status")
    assert (refused.code, AWAY in refused.err) == (ConfigError.exit_code, True), refused
    asked = time.time()
    assert "has lost head" in up("ray", 2).err
    back = time.time() - asked
    run.wait_state("running")
    known = time.time() - asked
    run.wait_more_steps()
    assert run.generation == 1, "the loss of the head has disturbed the run"
    assert run.command("down").code == 0
    run.wait_state("finished")
    steps = run.step + 20
    run.launch(2, f"train.steps={steps}")
    run.check_end(steps)
    report("head lost, with tables on a disk", head_back=back, status_answers=known)
    down(read())


def test_a_node_that_is_lost_while_the_head_is_away_is_replaced_later(tmp_path: Path) -> None:
    run = begin(tmp_path, machines=3)
    last = run.states()["node-1"][1].rpartition(".")[2]
    machine = f"n{int(last) - FIRST_NODE + 1}"
    lose(read(), "head")
    lost = time.time()
    lose(read(), machine)
    before = run.generation
    continued = run.first_step(before, {"node-0"}) - lost
    back = time.time()
    assert f"has lost head, {machine}" in up("ray", 3).err
    replaced = run.first_step(before, NODES) - back
    assert run.command("down").code == 0
    run.wait_state("finished")
    steps = run.step + 20
    run.launch(2, f"train.steps={steps}")
    run.check_end(steps)
    report("node lost meanwhile", rest_continued=continued, replaced_after_up=replaced)
    down(read())


def test_a_run_saves_before_ray_ends_its_nodes_and_resumes_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_gcs_storage", "memory")
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", str(LIMIT_S))
    run = begin(tmp_path)
    lost = time.time()
    lose(read(), "head")
    logs = [run.folder / "launch" / f"{node}.log" for node in sorted(NODES)]
    run.wait(
        lambda: all("stopped after step" in each.read_text() for each in logs),
        "agents do not save",
        looks=False,
    )
    saved = time.time() - lost
    text = logs[0].read_text()
    assert "Ray's head has not answered" in text
    (stopped,) = re.findall(r"stopped after step (\d+) \(", text)[-1:]
    state = read()
    run.wait(lambda: not living(state), "Ray's nodes stay", looks=False)
    ended = time.time() - lost
    down(state)
    up("ray", 2, "other")
    steps = int(stopped) + 20
    run.settings = (*run.settings, f"launch.ray.address={address_of('other').address}")
    resumed = time.time()
    run.launch(2, f"train.steps={steps}")
    run.first_step(run.generation, NODES)
    resumed = time.time() - resumed
    run.check_end(steps)
    assert run.step == steps
    report("head lost, without", saved=saved, ray_ended_nodes=ended, resumed_elsewhere=resumed)
