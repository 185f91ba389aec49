"""Processes that outlive generations: real workers, a real mover; the coordinator is the test.

Each run is compared with one that nobody disturbed: the same loss at every step (to the last bit
where only replicas changed) and every sample once, read from what the journal would say.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.checkpoint.restore.verify import find_newest_verified
from holdfast.core.sharding.state_table import state_table
from holdfast.layout import Layout, Topology, place_layout
from holdfast.wire.store.run_store import FolderStore
from tests.support.processes import STOPPED, runs, state
from tests.support.ranks import wait_until
from tests.support.worker_generations import (
    FAULT,
    SECONDS,
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


def _three(generation: int = 1) -> Topology:
    return place_layout(Layout(dp_replicate=3), generation, one_node(3))


def _two(generation: int) -> Topology:
    return place_layout(Layout(dp_replicate=2), generation, one_node(2))


def test_survivors_hold_and_go_on_without_the_lost_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Undisturbed
) -> None:
    def script(run: Run) -> None:
        held = run.wait_held([0, 2], 1)
        assert {(h["kind"], h["applied"], h["torn"]) for h in held} == {("peer", FAULT - 1, False)}
        assert [h["state"] for h in held] == [[1, 0], [1, 2]]
        run.begin(_two(2), [2, 0], FAULT - 1, came_from=[2, 0], before=_three())

    journal = run(
        tmp_path / "run",
        whole.config,
        _three(),
        monkeypatch,
        script,
        deeds={"die": [1, 1, FAULT]},
        dies=[1],
    )
    assert journal.losses() == whole.losses
    assert journal.fed() == whole.fed


@pytest.mark.parametrize("deed", ["raise", "tear"])
def test_an_exception_in_a_step_ends_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Undisturbed, deed: str
) -> None:
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
        run.begin(_three(2), [0, 1, 2], step, came_from=came_from, before=_three())

    journal = run(
        tmp_path / "run",
        whole.config,
        _three(),
        monkeypatch,
        script,
        deeds={deed: [1, 1, FAULT]},
    )
    assert journal.losses() == whole.losses
    assert journal.fed() == whole.fed


def test_a_standby_takes_a_lost_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Undisturbed
) -> None:
    def script(run: Run) -> None:
        run.wait_held([0, 2], 1)
        wait_until(lambda: run.pid(3) in run.desk.asked, SECONDS, "the standby to be ready")
        run.begin(_three(2), [0, 3, 2], FAULT - 1, came_from=[0, None, 2], before=_three())
        run.desk.give(run.pid(4), {"kind": "end"})

    journal = run(
        tmp_path / "run",
        whole.config,
        _three(),
        monkeypatch,
        script,
        standbys=2,
        deeds={"die": [1, 1, FAULT]},
        dies=[1],
    )
    assert journal.losses() == whole.losses
    assert journal.fed() == whole.fed


def test_who_waits_for_one_that_hangs_is_woken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Undisturbed
) -> None:
    def script(run: Run) -> None:
        wait_until((run.folder / "still.1.mark").exists, SECONDS, "the one that hangs")
        run.halt([0, 2], 1)
        held = run.wait_held([0, 2], 1)
        assert {(h["applied"], h["torn"]) for h in held} == {(FAULT - 1, False)}
        # the first to be halted may end its connections before the other one is
        assert "halt" in {h["kind"] for h in held} <= {"halt", "peer"}
        run.kill(1)
        run.begin(_two(2), [0, 2], FAULT - 1, came_from=[0, 2], before=_three())

    journal = run(
        tmp_path / "run",
        whole.config,
        _three(),
        monkeypatch,
        script,
        deeds={"stand still": [1, 1, FAULT]},
        dies=[1],
    )
    assert journal.losses() == whole.losses
    assert journal.fed() == whole.fed


def test_a_loss_while_the_next_generation_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Undisturbed
) -> None:
    """Nothing has moved yet, so who is left still holds its state: that of generation 1."""

    def script(run: Run) -> None:
        run.wait_held([0, 2], 1)
        run.begin(_two(2), [0, 2], FAULT - 1, came_from=[0, 2], before=_three())
        wait_until(lambda: not runs(run.pid(2)), SECONDS, "the second loss")
        begun = run.journal.speaking  # who is halted before has never begun
        wait_until(lambda: (2, 0) in begun, SECONDS, "who is left to begin")
        run.halt([0], 2)
        held = run.wait_held([0], 2)[0]
        assert (held["kind"], held["applied"], held["torn"]) == ("halt", FAULT - 1, False)
        assert held["state"] == [1, 0]
        alone = place_layout(Layout(), 3, one_node(1))
        run.begin(alone, [0], FAULT - 1, came_from=[0], before=_three())

    journal = run(
        tmp_path / "run",
        whole.config,
        _three(),
        monkeypatch,
        script,
        deeds={"die": [1, 1, FAULT], "die while joining": [2, 2, 0]},
        dies=[1, 2],
    )
    assert journal.losses() == whole.losses
    assert journal.fed() == whole.fed


@pytest.mark.slow
def test_one_that_stands_still_while_the_next_generation_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Undisturbed
) -> None:
    """It has met the others, and they wait for what it says: they are woken all the same."""

    def script(run: Run) -> None:
        run.wait_held([0, 2], 1)
        run.begin(_two(2), [0, 2], FAULT - 1, came_from=[0, 2], before=_three())
        wait_until(lambda: state(run.pid(2)) == STOPPED, SECONDS, "the one that stands still")
        run.halt([0], 2)
        held = run.wait_held([0], 2)[0]
        run.kill(2)
        assert (held["kind"], held["applied"], held["torn"]) == ("halt", FAULT - 1, False)
        alone = place_layout(Layout(), 3, one_node(1))
        run.begin(alone, [0], FAULT - 1, came_from=[0], before=_three())

    journal = run(
        tmp_path / "run",
        whole.config,
        _three(),
        monkeypatch,
        script,
        deeds={"die": [1, 1, FAULT], "stand still while joining": [2, 2, 0]},
        dies=[1, 2],
    )
    assert journal.losses() == whole.losses
    assert journal.fed() == whole.fed


def test_a_pause_loses_nothing_and_saves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Undisturbed
) -> None:
    """From two replicas to one of two shards, and a halt that comes too late changes nothing."""

    def script(run: Run) -> None:
        wait_until(lambda: FAULT - 1 in run.journal.losses(), SECONDS, "the steps before")
        run.journal.pause = 1
        held = run.wait_held([0, 1], 1)
        step = held[0]["applied"]
        assert FAULT <= step < STEPS
        assert [(h["kind"], h["applied"], h["torn"]) for h in held] == [("paused", step, False)] * 2
        assert not run.mover.store.list("checkpoints/")
        run.halt([0, 1], 1)
        after = place_layout(Layout(dp_shard=2), 2, one_node(2))
        run.begin(after, [1, 0], step, came_from=[1, 0], before=_two(1))

    journal = run(
        tmp_path / "run",
        whole.config,
        _two(1),
        monkeypatch,
        script,
        deeds={"wait for a pause": [1, 0, FAULT]},
    )
    losses = journal.losses()
    assert losses == pytest.approx(whole.losses, rel=1e-10)
    assert journal.fed() == whole.fed


def test_what_was_lost_with_a_shard_is_read_from_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Undisturbed
) -> None:
    """The survivor begins anew in the same process, on its own."""
    config = whole.config.model_copy(
        update={"checkpoint": whole.config.checkpoint.model_copy(update={"memory_every_steps": 1})}
    )

    def script(run: Run) -> None:
        (held,) = run.wait_held([0], 1)
        assert (held["kind"], held["torn"]) == ("peer", False)
        alone = place_layout(Layout(), 2, one_node(1))
        run.mover.client(1).drain(10.0, until_durable=False)
        client = run.mover.begin(alone, state_table(config.model, config.train.precision))
        newest = client.find_restore_point()
        assert 0 < newest.step < FAULT
        assert not newest.durable
        run.begin(alone, [0], newest.step, restore=newest.key, opened=True)

    journal = run(
        tmp_path / "run",
        config,
        place_layout(Layout(dp_shard=2), 1, one_node(2)),
        monkeypatch,
        script,
        deeds={"die": [1, 1, FAULT]},
        dies=[1],
    )
    losses = journal.losses()
    assert losses == pytest.approx(whole.losses, rel=1e-10)
    assert journal.fed() == whole.fed


@pytest.mark.slow
def test_what_lies_inside_a_whole_replica_outlives_the_loss_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Undisturbed
) -> None:
    """Its ranks compute in lockstep, and are woken between the replicas only."""
    layout = Layout(dp_replicate=2, dp_shard=2)

    def script(run: Run) -> None:
        run.wait_held([2], 1)
        run.halt([0, 1], 1, inside=False)
        held = run.wait_held([0, 1], 1)
        assert {(h["applied"], h["torn"]) for h in held} == {(FAULT - 1, False)}
        after = place_layout(Layout(dp_shard=2), 2, one_node(2))
        before = place_layout(layout, 1, one_node(4))
        run.begin(after, [0, 1], FAULT - 1, came_from=[0, 1], before=before)
        run.desk.give(run.pid(2), {"kind": "end"})

    journal = run(
        tmp_path / "run",
        whole.config,
        place_layout(layout, 1, one_node(4)),
        monkeypatch,
        script,
        deeds={"die": [1, 3, FAULT]},
        dies=[3],
    )
    said = (tmp_path / "run" / "ranks" / "rank0.log").read_text()
    assert "goes on from step" in said
    assert "build" not in said
    assert journal.losses() == pytest.approx(whole.losses, rel=1e-10)
    assert journal.fed() == whole.fed


def test_a_loss_in_the_last_step_leaves_a_checkpoint_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Undisturbed
) -> None:
    def script(run: Run) -> None:
        held = run.wait_held([0, 2], 1)
        assert {(h["applied"], h["torn"]) for h in held} == {(STEPS, False)}
        run.begin(_two(2), [0, 2], STEPS, came_from=[0, 2], before=_three())

    journal = run(
        tmp_path / "run",
        whole.config,
        _three(),
        monkeypatch,
        script,
        deeds={"die in the update": [1, 1, STEPS]},
        dies=[1],
    )
    assert journal.losses() == whole.losses
    assert journal.fed() == whole.fed
    newest = find_newest_verified(FolderStore(tmp_path / "run" / "run"), lambda *_: None)
    assert newest is not None
    assert (newest.commit.step, newest.commit.generation) == (STEPS, 2)


def test_what_is_not_finite_or_rotten_is_said_and_ends_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Undisturbed
) -> None:
    def script(run: Run) -> None:
        (held,) = run.wait_held([0], 1)
        assert (held["kind"], held["applied"], held["torn"]) == ("non_finite", FAULT - 1, False)
        run.mover.store.create("rotten", b"{")
        run.begin(place_layout(Layout(), 2, one_node(1)), [0], 2, restore="rotten")
        (held,) = run.wait_held([0], 2)
        assert (held["kind"], held["torn"], held["state"]) == ("rotten", True, None)
        assert "rotten" in held["text"]
        run.begin(place_layout(Layout(), 3, one_node(1)), [0], 0)

    journal = run(
        tmp_path / "run",
        whole.config,
        place_layout(Layout(), 1, one_node(1)),
        monkeypatch,
        script,
        deeds={"not finite": [1, 0, FAULT]},
    )
    assert journal.losses() == whole.losses
    assert journal.fed() == whole.fed
