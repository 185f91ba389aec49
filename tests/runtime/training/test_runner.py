"""The loop: what it reports, when it saves, how it leaves, and that a resume loses nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast.config.run import RunConfig
from holdfast.core.sharding.boxes import Box
from holdfast.errors import NonFiniteError, PeerLostError
from holdfast.events import Evaluated, Event
from holdfast.layout import Layout, place_layout
from holdfast.policy.saving.destinations import SaveDestinations
from holdfast.training.engine.build import TrainingSession, make_session
from holdfast.training.engine.runner import TrainingLoop, TrainingOutcome
from holdfast.training.engine.state import LocalTensor
from holdfast.training.engine.vote import Wishes
from holdfast.training.recover.recover import GenerationEntry
from tests.support.corpus import batches, data_config, make, text_folder, text_source
from tests.support.layouts import engine_of
from tests.support.ranks import RankContext, rank_values
from tests.support.tiny_training import CPU, digest

STEPS = 6


def _config(folder: Path, **checkpoint: Any) -> dict[str, Any]:
    """The dataset of `folder` is made by the test's own process; ranks only open it."""
    text_folder(folder / "text", 12, 400)
    data = data_config(folder / "data", text_source(folder / "text"))
    vocabulary = make(data).vocab_size
    made = RunConfig.model_validate(
        {
            "data": data.model_dump(),
            "model": {
                "preset": None,
                "layers": 2,
                "dim": 16,
                "heads": 2,
                "kv_heads": 2,
                "ffn_dim": 24,
                "vocab_size": vocabulary,
                "qk_norm": True,
            },
            "train": {
                "steps": STEPS,
                "batch_size": 8,
                "microbatch_size": 2,
                "optimizer": {"clip_norm": 0.05},
                "evaluate": {"every": 3, "samples": 5},
            },
            "checkpoint": checkpoint,
        }
    )
    values: dict[str, Any] = json.loads(made.model_dump_json())
    return values


class World:
    """Membership, reporter and saver of one rank, all in memory; `log` keeps the order of calls."""

    def __init__(self, stop_after: int = 0, save_at: int = 0):
        self.log: list[Any] = []
        self.saved: dict[int, dict[str, Tensor]] = {}
        self.into: dict[int, SaveDestinations] = {}
        self._stop_after, self._save_at = stop_after, save_at

    def requests(self, step: int) -> Wishes:
        return Wishes(stop=step == self._stop_after, save=step == self._save_at)

    def emit(self, event: Event) -> None:
        self.log.append(event)

    def progress(self, step: int, phase: str) -> None:
        assert phase in ("compute", "reduce", "vote", "capture", "evaluate", "data")

    def has_free_slot(self) -> bool:
        return True

    def capture(self, step: int, state: Sequence[LocalTensor], wait: float, durable: bool) -> bool:
        self.saved[step] = {local.name: local.tensor.clone() for local in state}
        return True

    def fence(self) -> float:
        return 0.0

    def announce(self, step: int, meta: Mapping[str, Any], into: SaveDestinations) -> None:
        self.into[step] = into
        self.log.append(("announce", step, meta["tokens"]))

    def wait_until_committed(self, step: int, seconds: float, durable: bool = True) -> str | None:
        return None if step in self.saved else f"step {step} was never captured"

    def kinds(self) -> list[str]:
        return [e[0] if isinstance(e, tuple) else e.kind for e in self.log]

    def events(self, kind: str) -> list[Any]:
        return [e for e in self.log if not isinstance(e, tuple) and e.kind == kind]


def _session(
    rank: RankContext, values: dict[str, Any], layout: Layout | None = None
) -> TrainingSession:
    """With initial weights. layout: None: each rank is a replica."""
    config = RunConfig.model_validate(values)
    sizes = {name: getattr(config.train, name) for name in ("batch_size", "microbatch_size")}
    data = batches(make(config.data), config.data, config.seed, **sizes)
    layout = layout or Layout(dp_replicate=rank.world_size)
    topology = place_layout(layout, 1, ("node",) * rank.world_size)
    engine = engine_of(config, topology, rank.rank, rank.store("first"))
    engine.initialise(config.seed)
    return make_session(config, engine, data, CPU)


def loop_of(session: TrainingSession, world: World, **how: Any) -> TrainingLoop:
    engine, evaluator, config = session.engine, session.evaluator, session.config
    return TrainingLoop(engine, world, world, world, evaluator, config, **how)


def _run(session: TrainingSession, world: World, start: int = 0) -> TrainingOutcome:
    with session.loader(start) as loader:
        return loop_of(session, world, start_step=start).run(loader)


def _whole_run(rank: RankContext, config: dict[str, Any], dp_shard: int = 1) -> dict[str, Any]:
    """From initial weights to the end, in one go; returns what was reported, and the state."""
    layout = Layout(dp_replicate=rank.world_size // dp_shard, dp_shard=dp_shard)
    session = _session(rank, config, layout)
    world = World()
    outcome = _run(session, world)
    assert (outcome.kind, outcome.step, outcome.unsaved_reason) == ("finished", STEPS, None)
    state = digest(session.engine)
    session.close()
    return {
        "kinds": world.kinds(),
        "state": state,
        "saved": sorted(world.saved),
        "losses": [e.loss.hex() for e in world.events("step_done")],
        "evaluated": [
            (e.step, e.loss.hex(), e.bits_per_byte.hex(), e.tokens)
            for e in world.events("evaluated")
        ],
        "fed": [[e.step, e.rank, e.entries] for e in world.events("batch_fed")],
        "phases": [sorted(e.phases) for e in world.events("step_done")],
    }


def _ledger(values: list[dict[str, Any]]) -> list[tuple[int, int, str]]:
    """(start, stop, hash) of everything that any rank fed, in order."""
    entries = [entry for value in values for _, _, fed in value["fed"] for entry in fed]
    return sorted((e["start"], e["stop"], e["hash"]) for e in entries)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return _config(tmp_path_factory.mktemp("run"), every_steps=4)


def test_a_whole_run_reports_everything_once_and_alike_on_any_world(config: dict[str, Any]) -> None:
    (alone,) = rank_values(_whole_run, 1, {"config": config})
    three = rank_values(_whole_run, 3, {"config": config})
    assert len(alone["losses"]) == STEPS
    assert [step for step, *_ in alone["evaluated"]] == [3, 6]
    assert three[0]["losses"] == alone["losses"]
    assert three[0]["evaluated"] == alone["evaluated"]
    assert three[1]["losses"] == three[1]["evaluated"] == []
    assert {value["state"] for value in (alone, *three)} == {alone["state"]}
    assert all(value["saved"] == [4, STEPS] for value in (alone, *three))
    starts = [start for start, _, _ in _ledger([alone])]
    assert starts == list(range(0, STEPS * 8, 2))
    assert _ledger(three) == _ledger([alone])
    assert alone["phases"][0] == ["apply", "compute", "data", "reduce"]
    assert alone["phases"][3] == ["apply", "capture", "compute", "data", "reduce"]
    # A snapshot is announced after everything that its step reported.
    assert alone["kinds"][-4:] == ["batch_fed", "step_done", "evaluated", "announce"]
    assert alone["kinds"].count("announce") == 2


def test_validation_is_the_same_number_when_sharded_dpshard2(config: dict[str, Any]) -> None:
    """The last validation microbatch has one row, so one shard computes padding only."""
    config = json.loads(json.dumps(config))
    config["train"]["precision"] = "float64"
    (alone,) = rank_values(_whole_run, 1, {"config": config})
    sharded = rank_values(_whole_run, 2, {"config": config, "dp_shard": 2})[0]
    for got, want in zip(sharded["evaluated"], alone["evaluated"], strict=True):
        assert math.isclose(float.fromhex(got[1]), float.fromhex(want[1]), rel_tol=1e-10)
        assert got[3] == want[3]


def _stopped(rank: RankContext, config: dict[str, Any]) -> dict[str, Any]:
    """Only rank 1 wishes to stop at step 2, and only rank 0 to save at step 1."""
    session = _session(rank, config)
    world = World(stop_after=2 if rank.rank == 1 else 0, save_at=1 if rank.rank == 0 else 0)
    outcome = _run(session, world)
    torch.save(world.saved[2], rank.folder / f"rank{rank.rank}.state")
    session.close()
    return {"kind": outcome.kind, "step": outcome.step, "saved": sorted(world.saved)}


def _resumed(rank: RankContext, config: dict[str, Any], path: Path) -> str:
    session = _session(rank, config)
    saved = torch.load(path, weights_only=True)

    def read(box: Box, out: Tensor) -> None:
        out.copy_(saved[box.name])

    session.engine.load(read)
    outcome = _run(session, World(), start=2)
    assert outcome.kind == "finished"
    state = digest(session.engine)
    session.close()
    return state


def test_a_wish_of_any_rank_stops_all_after_one_step_and_a_resume_on_another_world_is_bit_equal(
    config: dict[str, Any], tmp_path: Path
) -> None:
    left = rank_values(_stopped, 2, {"config": config}, folder=tmp_path)
    assert left == [{"kind": "left", "step": 2, "saved": [1, 2]}] * 2
    (alone,) = rank_values(_whole_run, 1, {"config": config})
    arguments = {"config": config, "path": tmp_path / "rank1.state"}
    assert set(rank_values(_resumed, 3, arguments)) == {alone["state"]}


def _poisoned(rank: RankContext, config: dict[str, Any]) -> list[Any]:
    session = _session(rank, config)
    if rank.rank == 1:
        session.engine.parameters.master_tensors[0].fill_(math.inf)
    world = World()
    with pytest.raises(NonFiniteError, match=r"embed\.weight is not finite on rank 1"):
        _run(session, world)
    return [[e.rank, e.parameter, e.step] for e in world.events("non_finite")]


def test_a_non_finite_step_is_journalled_once(config: dict[str, Any]) -> None:
    assert rank_values(_poisoned, 2, {"config": config}) == [[[1, "embed.weight", 1]], []]


def _finished(rank: RankContext, config: dict[str, Any]) -> list[Any]:
    session = _session(rank, config)
    outcome = _run(session, world := World(), start=STEPS)
    return [outcome.kind, outcome.step, world.log]


class NoRoom(World):
    """Nothing can be captured of the step after which it is to stop: its mover is gone."""

    def __init__(self, stop_after: int) -> None:
        super().__init__(stop_after)
        self.settled: list[tuple[int, bool]] = []

    def capture(self, step: int, state: Sequence[LocalTensor], wait: float, durable: bool) -> bool:
        return False

    def wait_until_committed(self, step: int, seconds: float, durable: bool = True) -> str | None:
        self.settled.append((step, durable))
        return None


def _left_without(rank: RankContext, config: dict[str, Any]) -> tuple[str, int, str | None, Any]:
    session = _session(rank, config)
    world = NoRoom(stop_after=2)
    outcome = _run(session, world)
    session.close()
    return outcome.kind, outcome.step, outcome.unsaved_reason, world.settled


def test_no_end_of_a_save_is_waited_for_that_never_began(config: dict[str, Any]) -> None:
    (found,) = rank_values(_left_without, 1, {"config": config})
    assert found == ["left", 2, "no snapshot could be made of it", [[2, False]]]


def test_a_finished_run_does_nothing_more(config: dict[str, Any]) -> None:
    assert rank_values(_finished, 1, {"config": config}) == [["finished", STEPS, []]]


class BrokenOff(World):
    """A peer is lost as soon as this rank comes to `phase` of `step`."""

    def __init__(self, step: int, phase: str, dies: bool) -> None:
        super().__init__()
        self._where, self._dies = (step, phase), dies

    def progress(self, step: int, phase: str) -> None:
        if (step, phase) == self._where:
            raise PeerLostError("a peer is lost")

    def emit(self, event: Event) -> None:
        if not (self._dies and isinstance(event, Evaluated)):
            super().emit(event)


def _broken_off(
    rank: RankContext, config: dict[str, Any], where: tuple[int, str], left: Sequence[int]
) -> list[tuple[int, str]]:
    """What is evaluated in both generations; those that are not `left` end with the first."""
    session = _session(rank, config)
    world = BrokenOff(*where, dies=rank.rank not in left)
    with pytest.raises(PeerLostError):
        _run(session, world)
    if rank.rank in left:
        me, topology = (
            left.index(rank.rank),
            place_layout(Layout(len(left)), 2, ("node",) * len(left)),
        )
        before, store = session.groups.topology, rank.store("next")
        entry = GenerationEntry(session.config, topology, me, store, CPU, before, left, seconds=60)
        found = entry.recover(session, 0)
        session, later = found.session, World()
        outcome = _run(session, later, found.step)
        assert outcome.kind == "finished"
        world.log += [*found.events, *later.log]
    session.close()
    return [(e.step, e.loss.hex()) for e in world.events("evaluated")]


@pytest.mark.parametrize(
    ("where", "left"),
    [
        ((3, "evaluate"), [0, 1]),
        ((3, "evaluate"), [1]),
        ((4, "compute"), [0, 1]),
        ((4, "compute"), [1]),
    ],
    ids=["in it", "in it, rank 0 lost", "after it", "after it, rank 0 lost untold"],
)
def test_a_validation_that_broke_off_is_done_by_those_who_go_on(
    config: dict[str, Any], where: tuple[int, str], left: list[int]
) -> None:
    """None that was told of is done twice, and one that rank 0 did not live to tell is told."""
    (alone,) = rank_values(_whole_run, 1, {"config": config})
    found = rank_values(_broken_off, 2, {"config": config, "where": where, "left": left})
    told = sorted(tuple(each) for value in found for each in value)
    assert told == [(step, loss) for step, loss, *_ in alone["evaluated"]]


def _ignored(rank: RankContext, config: dict[str, Any], pp: int) -> list[Any]:
    session = _session(rank, config, Layout(pp=2, stages=(1, 1)) if pp == 2 else None)
    _run(session, world := World())
    session.close()
    return [[e.key, e.step] for e in world.events("setting_ignored")]


def test_what_of_the_layout_is_not_followed_is_said_once(config: dict[str, Any]) -> None:
    """One microbatch for two stages, and a tied embedding, which both of them add to."""
    config = json.loads(json.dumps(config))
    config["layout"] |= {"reduction": "fast"}
    assert rank_values(_ignored, 2, {"config": config, "pp": 1}) == [[], []]
    config["model"]["tied_embeddings"] = True
    config["train"]["batch_size"] = 2
    stages = rank_values(_ignored, 2, {"config": config, "pp": 2})
    assert stages == [[["layout.reduction", 1], ["layout.schedule", 1]], []]
