"""Processes that outlive generations: real workers, a real mover; the coordinator is the test.

Each run is compared with one that nobody disturbed: the same loss at every step (to the last bit
where only replicas changed) and every sample once, read from what the journal would say. On a
device the workers communicate by `tests/support/fake_nccl.py`, which reports no lost peer.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.config.run import RunConfig
from holdfast.core.sharding.state_table import state_table
from holdfast.layout import Layout, Topology, place_layout
from holdfast.wire.store.run_store import FolderStore
from tests.support.marks import in_campaign
from tests.support.mover_process import newest_verified
from tests.support.processes import STOPPED, runs, state
from tests.support.ranks import DEADLINE_S, wait_until
from tests.support.worker_generations import (
    FAULT,
    STEPS,
    Run,
    Undisturbed,
    one_node,
    run,
    undisturbed,
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return undisturbed(tmp_path_factory.mktemp("whole"))


class Drive:
    """Runs a script against workers, and compares the run with the undisturbed one."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, whole: Undisturbed) -> None:
        self.folder, self._monkeypatch, self.whole = folder / "run", monkeypatch, whole

    def __call__(
        self,
        script: Callable[[Run], None],
        topology: Topology,
        *,
        config: RunConfig | None = None,
        tolerance: float = 0.0,
        **faults: Any,
    ) -> None:
        """tolerance: relative, of a loss; 0 if only replicas changed. faults: as for `run`."""
        config = config or self.whole.config
        journal = run(self.folder, config, topology, self._monkeypatch, script, **faults)
        assert journal.losses() == pytest.approx(self.whole.losses, rel=tolerance, abs=0.0)
        assert journal.fed() == self.whole.fed


@pytest.fixture
def drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Undisturbed) -> Drive:
    return Drive(tmp_path, monkeypatch, whole)


PIPELINE = {"pp": 2, "stages": (1, 1)}


def replicas(count: int, generation: int = 1, **layout: Any) -> Topology:
    made = Layout(dp_replicate=count, **layout)
    return place_layout(made, generation, one_node(made.world_size))


def hold_survivors(
    run: Run, lost: int, left: list[int], *, on_device: bool, inside: bool = False
) -> list[dict[str, Any]]:
    """What the survivors hold. On a device they hang until the coordinator, which has seen the end
    of the process, halts them."""
    if on_device:
        wait_until(lambda: not runs(run.pid(lost)), DEADLINE_S, "the loss")
        assert not run.desk.held, "a process knew of it before the agent had said so"
        run.halt(left, 1, inside=inside)
    held = run.wait_held(left, 1)
    assert {(h["applied"], h["torn"]) for h in held} == {(FAULT - 1, False)}
    assert on_device or {h["kind"] for h in held} == {"peer"}
    return held


@pytest.mark.parametrize("on_device", [in_campaign(False), True])
def test_survivors_hold_and_go_on_without_the_lost_one(drive: Drive, on_device: bool) -> None:
    def script(run: Run) -> None:
        held = hold_survivors(run, 1, [0, 2], on_device=on_device)
        assert [h["state"] for h in held] == [[1, 0], [1, 2]]
        run.begin(replicas(2, 2), [2, 0], FAULT - 1, came_from=[2, 0], before=replicas(3))

    drive(script, replicas(3), deeds={"die": [1, 1, FAULT]}, dies=[1], on_device=on_device)


@pytest.mark.parametrize("deed", ["raise", "tear"])
def test_an_exception_in_a_step_ends_no_process(drive: Drive, deed: str) -> None:
    """In the midst of an update it costs the process its state, which the others send it."""
    torn = deed == "tear"
    step = FAULT if torn else FAULT - 1

    def script(run: Run) -> None:
        held = run.wait_held([1], 1)[0]
        assert (held["kind"], held["applied"], held["torn"]) == ("error", FAULT - 1, torn)
        assert held["text"] == "MemoryError: the test took all of it"
        run.halt([0, 1, 2], 1)
        others = run.wait_held([0, 2], 1)
        assert {(h["applied"], h["torn"]) for h in others} == {(step, False)}
        came_from = [0, None if torn else 1, 2]
        run.begin(replicas(3, 2), [0, 1, 2], step, came_from=came_from, before=replicas(3))

    drive(script, replicas(3), deeds={deed: [1, 1, FAULT]})


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{}, {"tp": 2}, PIPELINE])
def test_on_a_device_an_exception_ends_no_process(drive: Drive, layout: dict[str, Any]) -> None:
    before, after = (replicas(1 if layout else 3, number, **layout) for number in (1, 2))
    everybody = list(range(before.world_size))

    def script(run: Run) -> None:
        held = run.wait_held([1], 1)[0]
        assert (held["kind"], held["torn"]) == ("error", False)
        run.halt(everybody, 1)
        run.wait_held(everybody, 1)
        run.begin(after, everybody, FAULT - 1, came_from=everybody, before=before)

    drive(script, before, on_device=True, deeds={"raise": [1, 1, FAULT]}, tolerance=1e-10)


@pytest.mark.parametrize("on_device", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_standby_takes_a_lost_place(drive: Drive, on_device: bool) -> None:
    def script(run: Run) -> None:
        hold_survivors(run, 1, [0, 2], on_device=on_device)
        wait_until(lambda: run.pid(3) in run.desk.asked, what="the standby to be ready")
        came_from = [0, None, 2]
        run.begin(replicas(3, 2), [0, 3, 2], FAULT - 1, came_from=came_from, before=replicas(3))
        run.desk.give(run.pid(4), {"kind": "end"})

    deeds = {"die": [1, 1, FAULT]}
    drive(script, replicas(3), standbys=2, deeds=deeds, dies=[1], on_device=on_device)


def test_who_waits_for_one_that_hangs_is_woken(drive: Drive) -> None:
    def script(run: Run) -> None:
        wait_until((run.folder / "still.1.mark").exists, what="the one that hangs")
        run.halt([0, 2], 1)
        held = run.wait_held([0, 2], 1)
        assert {(h["applied"], h["torn"]) for h in held} == {(FAULT - 1, False)}
        # the first to be halted may end its connections before the other one is
        assert "halt" in {h["kind"] for h in held} <= {"halt", "peer"}
        run.kill(1)
        run.begin(replicas(2, 2), [0, 2], FAULT - 1, came_from=[0, 2], before=replicas(3))

    drive(script, replicas(3), deeds={"stand still": [1, 1, FAULT]}, dies=[1])


def test_a_loss_while_the_next_generation_is_made(drive: Drive) -> None:
    """Nothing has moved yet, so who is left still holds its state: that of generation 1."""

    def script(run: Run) -> None:
        run.wait_held([0, 2], 1)
        run.begin(replicas(2, 2), [0, 2], FAULT - 1, came_from=[0, 2], before=replicas(3))
        wait_until(lambda: not runs(run.pid(2)), DEADLINE_S, "the second loss")
        begun = run.journal.speaking  # who is halted before has never begun
        wait_until(lambda: (2, 0) in begun, what="who is left to begin")
        run.halt([0], 2)
        held = run.wait_held([0], 2)[0]
        assert (held["kind"], held["applied"], held["torn"]) == ("halt", FAULT - 1, False)
        assert held["state"] == [1, 0]
        alone = replicas(1, 3)
        run.begin(alone, [0], FAULT - 1, came_from=[0], before=replicas(3))

    drive(
        script,
        replicas(3),
        deeds={"die": [1, 1, FAULT], "die while joining": [2, 2, 0]},
        dies=[1, 2],
    )


@pytest.mark.slow
def test_one_that_stands_still_while_the_next_generation_is_made(drive: Drive) -> None:
    """It has met the others, and they wait for what it says: they are woken all the same."""

    def script(run: Run) -> None:
        run.wait_held([0, 2], 1)
        run.begin(replicas(2, 2), [0, 2], FAULT - 1, came_from=[0, 2], before=replicas(3))
        wait_until(lambda: state(run.pid(2)) == STOPPED, DEADLINE_S, "the stopped rank")
        run.halt([0], 2)
        held = run.wait_held([0], 2)[0]
        run.kill(2)
        assert (held["kind"], held["applied"], held["torn"]) == ("halt", FAULT - 1, False)
        alone = replicas(1, 3)
        run.begin(alone, [0], FAULT - 1, came_from=[0], before=replicas(3))

    drive(
        script,
        replicas(3),
        deeds={"die": [1, 1, FAULT], "stand still while joining": [2, 2, 0]},
        dies=[1, 2],
    )


@pytest.mark.parametrize(
    ("before", "after", "came_from", "on_device"),
    [
        (replicas(2), replicas(1, 2, dp_shard=2), [1, 0], False),
        pytest.param(
            *(replicas(1, tp=2), replicas(1, 2, **PIPELINE), [1, 0], False), marks=pytest.mark.slow
        ),
        pytest.param(
            *(replicas(1, dp_shard=2), replicas(1, 2, dp_shard=2), [1, 0], False),
            marks=pytest.mark.slow,
        ),
        pytest.param(replicas(2), replicas(3, 2), [0, 1, None], True, marks=pytest.mark.slow),
    ],
    ids=["dp2-shard2", "tp2-pp2", "shard2-shard2", "device-standby-joins"],
)
def test_a_pause_loses_nothing_and_saves_nothing(
    drive: Drive, before: Topology, after: Topology, came_from: list[int | None], on_device: bool
) -> None:
    """The workers adopt another topology, and a halt that comes too late changes nothing."""

    def script(run: Run) -> None:
        wait_until(lambda: FAULT - 1 in run.journal.losses(), what="the steps before")
        if on_device:
            wait_until(lambda: run.pid(2) in run.desk.asked, what="the standby to be ready")
        run.journal.pause = 1
        held = run.wait_held([0, 1], 1)
        step = held[0]["applied"]
        assert FAULT <= step < STEPS
        assert [(h["kind"], h["applied"], h["torn"]) for h in held] == [("paused", step, False)] * 2
        assert not run.mover.store.list("checkpoints/")
        run.halt([0, 1], 1)
        processes = [2 if number is None else number for number in came_from]
        run.begin(after, processes, step, came_from=came_from, before=before)

    drive(
        script,
        before,
        deeds={"wait for a pause": [1, 0, FAULT]},
        standbys=int(on_device),
        on_device=on_device,
        tolerance=0.0 if on_device else 1e-10,
    )
    newest = newest_verified(FolderStore(drive.folder / "run"), lambda *_: None)
    assert (newest.commit.step, newest.commit.generation) == (STEPS, 2)


@pytest.mark.parametrize(
    ("on_device", "rung", "layout"),
    [
        (False, 4, {"dp_shard": 2}),
        *(
            pytest.param(True, rung, layout, marks=pytest.mark.slow)
            for rung in (3, 4)
            for layout in ({"dp_shard": 2}, {"tp": 2}, PIPELINE)
        ),
    ],
)
def test_what_was_lost_with_a_part_of_a_replica_is_read_from_memory(
    drive: Drive, on_device: bool, rung: int, layout: dict[str, Any]
) -> None:
    """With a standby in the lost place (rung 3), and with one rank less (rung 4)."""
    checkpoint = drive.whole.config.checkpoint.model_copy(update={"memory_every_steps": 1})
    config = drive.whole.config.model_copy(update={"checkpoint": checkpoint})

    def script(run: Run) -> None:
        hold_survivors(run, 1, [0], on_device=on_device, inside=True)
        after = replicas(1, 2, **(layout if rung == 3 else {}))
        run.mover.client(1).drain(10.0, until_durable=False)
        client = run.mover.begin(after, state_table(config.model, config.train.precision))
        newest = client.find_restore_point()
        assert 0 < newest.step < FAULT
        assert not newest.durable
        processes = [0, 2] if rung == 3 else [0]
        run.begin(after, processes, newest.step, restore=newest.key, opened=True)

    drive(
        script,
        replicas(1, **layout),
        config=config,
        standbys=int(rung == 3),
        deeds={"die": [1, 1, FAULT]},
        dies=[1],
        on_device=on_device,
        tolerance=1e-10,
    )


@pytest.mark.slow
@pytest.mark.parametrize("on_device", [False, True])
def test_what_lies_inside_a_whole_replica_outlives_the_loss_of_another(
    drive: Drive, on_device: bool
) -> None:
    """Its ranks compute in lockstep, and are woken between the replicas only."""
    before = replicas(2, dp_shard=2)

    def script(run: Run) -> None:
        if on_device:
            wait_until(lambda: not runs(run.pid(3)), DEADLINE_S, "the loss")
            run.halt([2], 1)
        else:
            run.wait_held([2], 1)
        run.halt([0, 1], 1, inside=False)
        held = run.wait_held([0, 1, 2], 1)
        assert {(h["applied"], h["torn"]) for h in held[:2]} == {(FAULT - 1, False)}
        after = replicas(1, 2, dp_shard=2)
        run.begin(after, [0, 1], FAULT - 1, came_from=[0, 1], before=before)
        run.desk.give(run.pid(2), {"kind": "end"})

    deeds = {"die": [1, 3, FAULT]}
    drive(script, before, deeds=deeds, dies=[3], on_device=on_device, tolerance=1e-10)
    said = (drive.folder / "ranks" / "rank0.log").read_text()
    assert "goes on from step" in said
    assert "build" not in said


def test_a_loss_in_the_last_step_leaves_a_checkpoint_of_it(drive: Drive) -> None:
    def script(run: Run) -> None:
        held = run.wait_held([0, 2], 1)
        assert {(h["applied"], h["torn"]) for h in held} == {(STEPS, False)}
        run.begin(replicas(2, 2), [0, 2], STEPS, came_from=[0, 2], before=replicas(3))

    drive(script, replicas(3), deeds={"die in the update": [1, 1, STEPS]}, dies=[1])
    newest = newest_verified(FolderStore(drive.folder / "run"), lambda *_: None)
    assert (newest.commit.step, newest.commit.generation) == (STEPS, 2)


def test_what_is_not_finite_or_rotten_is_said_and_ends_no_process(drive: Drive) -> None:
    def script(run: Run) -> None:
        (held,) = run.wait_held([0], 1)
        assert (held["kind"], held["applied"], held["torn"]) == ("non_finite", FAULT - 1, False)
        run.mover.store.create("rotten", b"{")
        run.begin(replicas(1, 2), [0], 2, restore="rotten")
        (held,) = run.wait_held([0], 2)
        assert (held["kind"], held["torn"], held["state"]) == ("rotten", True, None)
        assert "rotten" in held["text"]
        run.begin(replicas(1, 3), [0], 0)

    drive(script, replicas(1, 1), deeds={"not finite": [1, 0, FAULT]})
