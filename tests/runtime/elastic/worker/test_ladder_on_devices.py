"""The recovery ladder over a backend with NCCL's habits: only the agent says which rank is lost.

As `test_generation_loop.py`: real workers and a real mover, and the coordinator is the test. The
stand-in of `tests/support/fake_nccl.py` reports no lost peer. So the survivors hang until the
coordinator, which sees the end of a process, halts them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.sharding.state_table import state_table
from holdfast.layout import Layout, Topology, place_layout
from tests.support.processes import runs
from tests.support.ranks import DEADLINE_S, wait_until
from tests.support.worker_generations import (
    FAULT,
    Journal,
    Run,
    Undisturbed,
    one_node,
    run,
    undisturbed,
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return undisturbed(tmp_path_factory.mktemp("whole"))


Play = Callable[[Run], None]


@pytest.fixture
def on_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Undisturbed
) -> Callable[..., Journal]:
    def begin(topology: Topology, script: Play, **more: Any) -> Journal:
        config = more.pop("config", whole.config)
        return run(tmp_path / "run", config, topology, monkeypatch, script, on_device=True, **more)

    return begin


PIPELINE = {"pp": 2, "stages": (1, 1)}


def replicas(count: int, generation: int = 1, **layout: Any) -> Topology:
    made = Layout(dp_replicate=count, **layout)
    return place_layout(made, generation, one_node(made.world_size))


def halt_survivors(run: Run, lost: int, left: list[int], *, inside: bool) -> None:
    """As the agent does when it has seen the end of a process."""
    wait_until(lambda: not runs(run.pid(lost)), DEADLINE_S, "the loss")
    assert not run.desk.held, "a process knew of it before the agent had said so"
    run.halt(left, 1, inside=inside)
    held = run.wait_held(left, 1)
    assert {(h["applied"], h["torn"]) for h in held} == {(FAULT - 1, False)}


def test_rung_0_complete_replicas_go_on(
    on_device: Callable[..., Journal], whole: Undisturbed
) -> None:
    def script(run: Run) -> None:
        halt_survivors(run, 1, [0, 2], inside=False)
        run.begin(replicas(2, 2), [2, 0], FAULT - 1, came_from=[2, 0], before=replicas(3))

    journal = on_device(replicas(3), script, deeds={"die": [1, 1, FAULT]}, dies=[1])
    assert journal.losses() == whole.losses
    assert journal.fed() == whole.fed


@pytest.mark.slow
def test_rung_0_the_inside_of_a_complete_replica_stays(
    on_device: Callable[..., Journal], whole: Undisturbed, tmp_path: Path
) -> None:
    def script(run: Run) -> None:
        wait_until(lambda: not runs(run.pid(3)), DEADLINE_S, "the loss")
        run.halt([2], 1)
        run.halt([0, 1], 1, inside=False)
        run.wait_held([0, 1, 2], 1)
        after = replicas(1, 2, dp_shard=2)
        before = replicas(2, dp_shard=2)
        run.begin(after, [0, 1], FAULT - 1, came_from=[0, 1], before=before)
        run.desk.give(run.pid(2), {"kind": "end"})

    journal = on_device(replicas(2, dp_shard=2), script, deeds={"die": [1, 3, FAULT]}, dies=[3])
    said = (tmp_path / "run" / "ranks" / "rank0.log").read_text()
    assert "goes on from step" in said
    assert "build" not in said
    assert journal.losses() == pytest.approx(whole.losses, rel=1e-10)
    assert journal.fed() == whole.fed


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{}, {"tp": 2}, PIPELINE])
def test_rung_1_an_exception_ends_no_process(
    on_device: Callable[..., Journal], whole: Undisturbed, layout: dict[str, Any]
) -> None:
    count = 3 if not layout else 1
    everybody = list(range(replicas(count, **layout).world_size))

    def script(run: Run) -> None:
        held = run.wait_held([1], 1)[0]
        assert (held["kind"], held["torn"]) == ("error", False)
        run.halt(everybody, 1)
        run.wait_held(everybody, 1)
        before, after = replicas(count, **layout), replicas(count, 2, **layout)
        run.begin(after, everybody, FAULT - 1, came_from=everybody, before=before)

    journal = on_device(replicas(count, **layout), script, deeds={"raise": [1, 1, FAULT]})
    assert journal.losses() == pytest.approx(whole.losses, rel=1e-10)
    assert journal.fed() == whole.fed


@pytest.mark.slow
def test_rung_2_a_standby_takes_the_place(
    on_device: Callable[..., Journal], whole: Undisturbed
) -> None:
    def script(run: Run) -> None:
        halt_survivors(run, 1, [0, 2], inside=False)
        wait_until(lambda: run.pid(3) in run.desk.asked, what="the standby to be ready")
        come = [0, None, 2]
        run.begin(replicas(3, 2), [0, 3, 2], FAULT - 1, came_from=come, before=replicas(3))

    journal = on_device(replicas(3), script, standbys=1, deeds={"die": [1, 1, FAULT]}, dies=[1])
    assert journal.losses() == whole.losses
    assert journal.fed() == whole.fed


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"dp_shard": 2}, {"tp": 2}, PIPELINE])
@pytest.mark.parametrize("rung", [3, 4])
def test_rungs_3_and_4_a_broken_replica_begins_from_memory(
    on_device: Callable[..., Journal], whole: Undisturbed, rung: int, layout: dict[str, Any]
) -> None:
    """With a standby in the lost place (3), and with one rank less (4)."""
    config = whole.config.model_copy(
        update={"checkpoint": whole.config.checkpoint.model_copy(update={"memory_every_steps": 1})}
    )

    def script(run: Run) -> None:
        halt_survivors(run, 1, [0], inside=True)
        after = replicas(1, 2, **(layout if rung == 3 else {}))
        run.mover.client(1).drain(10.0, until_durable=False)
        client = run.mover.begin(after, state_table(config.model, config.train.precision))
        newest = client.find_restore_point()
        assert 0 < newest.step < FAULT
        processes = [0, 2] if rung == 3 else [0]
        run.begin(after, processes, newest.step, restore=newest.key, opened=True)

    journal = on_device(
        replicas(1, **layout),
        script,
        config=config,
        standbys=int(rung == 3),
        deeds={"die": [1, 1, FAULT]},
        dies=[1],
    )
    assert journal.losses() == pytest.approx(whole.losses, rel=1e-10)
    assert journal.fed() == whole.fed


@pytest.mark.slow
def test_rung_5_a_process_joins_between_two_steps(
    on_device: Callable[..., Journal], whole: Undisturbed
) -> None:
    def script(run: Run) -> None:
        wait_until(lambda: FAULT - 1 in run.journal.losses(), what="the steps before")
        wait_until(lambda: run.pid(2) in run.desk.asked, what="the standby to be ready")
        run.journal.pause = 1
        step = run.wait_held([0, 1], 1)[0]["applied"]
        come = [0, 1, None]
        run.begin(replicas(3, 2), [0, 1, 2], step, came_from=come, before=replicas(2))

    journal = on_device(replicas(2), script, standbys=1, deeds={"wait for a pause": [1, 0, FAULT]})
    assert journal.losses() == whole.losses
    assert journal.fed() == whole.fed
