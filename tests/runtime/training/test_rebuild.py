"""A layout that changes while the run lives: torn down in mid-run and rebuilt in the same
processes, with other ranks or as another layout, and the curve goes on as if nothing had been.

Every layout of `test_parity.py` and every kind of move between two is tried; before the first move
all parameters and moments are compared with a single process, too.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from holdfast.core.sharding.boxes import Box
from holdfast.layout import Topology
from holdfast.training.engine.objective import NextTokenObjective
from tests.support.layouts import (
    assert_all_state,
    case,
    load_complete,
    model_flags,
    of_one_model,
    pieces,
    pieces_of_curve,
    save_pieces,
    topology_of,
)
from tests.support.marks import in_campaign
from tests.support.mesh_caches import count_mesh_cache_entries
from tests.support.ranks import RankContext, rank_values, run_ranks
from tests.support.step_recovery import Survivor, config_for
from tests.support.tiny_training import digest

REBUILT, ALIKE, MORE = 1, 3, 2
"""Rebuilt after step 1, when there are moments to move; the undisturbed run goes as far as step 3,
and so does the rebuilt one, which is rebuilt once more for the last two."""
CURVE = 14  # steps of the process that is alone

LAYOUTS = {
    "dp2": "tp2",
    "shard2": "dp2",
    "tp2": "pp2",
    "pp2": "shard2",
    "dp4": "pp4",
    "shard4": "tp4",
    "tp4": "shard4",
    "pp4": "pp2-tp2",
    "dp2-shard2": "shard2-tp2",
    "dp2-tp2": "dp2-shard2",
    "pp2-dp2": "dp4",
    "shard2-tp2": "pp2-shard2",
    "pp2-shard2": "dp2-tp2",
    "pp2-tp2": "pp2-dp2",
    "pp2-dp2-tp2": "shard4-tp2",
    "pp2-shard2-tp2": "dp4-tp2",
    "pp3+pp2": "tp4+one",
    "tp2+one": "pp3",
    "pp2-tp2+tp4": "pp4-dp2",
    "shard4+shard2+one": "pp3+tp4",
    "pp2-shard2+tp2": "pp3-dp2",
    "zero1.2": "shard2",
    "zero2.2": "zero1.2",
    "zero2.2-dp2": "once.zero2.2-dp2",
    "once.zero2.2": "tp2",
    "tp2-dp2": "once.zero2.2",
    "zero1.2-dp2": "dp2-tp2",
    "pp2-zero1.2": "tp4",
    "plain.tp2": "plain.pp2",
    "zbv.pp2": "zbv.tp2",
    "interleaved.dp2": "interleaved.pp2",
    "deep.uneven.pp2": "deep.pp2",
    "deep.pp2": "deep.uneven.pp2",
    "pipedream.pp2": "pipedream.dp2",
    "2bw.dp2": "2bw.pp2",
    "untied.pipemare.pp2": "untied.pipemare.tp2",
    "plain.tp4": "plain.shard4",
    "plain.pp2-tp2": "plain.dp4",
    "plain.tp2-shard2": "plain.pp4",
    "plain.tp2+one": "plain.dp3",
    "gpipe.pp4": "gpipe.tp4",
    "untied.pp2-tp2": "untied.shard4",
    "untied.shard2-tp2": "untied.pp4",
    "qknorm.tp4": "qknorm.pp2-dp2",
    "qknorm.untied.pp2-tp2": "qknorm.untied.dp4",
    "pp3": "dp3",
    "experts.ep2.shard4": "experts.pp2-tp2",
    "experts.pp2-shard2": "experts.ep4.shard4",
    "experts.ep2.cp2": "experts.ep2.shard2",
    "experts.ep2.tp2": "experts.ep2.cp2",
    "experts.ep4.shard2-cp2": "experts.ep4.shard2-tp2",
    "experts.copies.ep2.shard4": "experts.copies.ep4.shard4",
    "att2.tp4": "att2.pp2-dp2",
    "att1.pp2-tp2": "att1.shard4",
    "att2ffn1.tp4": "att2ffn1.shard2-tp2",
    "att1.shard2-tp2": "att1.tp2-dp2",
    "cp2": "tp2",
    "ring.shard2-cp2": "ring.pp2-cp2",
    "heads.ulysses.cp2-tp2": "heads.ulysses.dp2-cp2",
    "dp2-shard2-tp2": "shard2-cp2-tp2",
    "files.dp2": "files.tp2",
    "files.zero1.2": "files.shard2",
    "files.pp2-shard2": "files.dp2-shard2",
}
"""Every kind of layout (the names are those of `tests/support/layouts.py`), and the other one that
it becomes."""
EACH_AXIS = ("dp2", "shard2", "tp2", "pp2", "cp2", "shard2-tp2", "tp2+one")
"""Each axis, one product, unlike replicas and each kind of model; the campaign takes all."""


def world(name: str, generation: int, ranks: Sequence[int] | None = None) -> Topology:
    return topology_of(case(name), config_for(name, microbatches(name)), generation, ranks)


def microbatches(name: str) -> int:
    """As its flags want it, else one for each stage of the deepest pipeline."""
    return 2 if "small." in name else 4


def begin(name: str, rank: RankContext) -> Survivor:
    made = Survivor(rank, name, microbatches(name))
    made.begin(world(name, 1))
    return made


def go_on(made: Survivor, name: str, topology: Topology, came_from: Sequence[int | None]) -> None:
    """Into `topology`, a placement of the layout `name`."""
    assert made.session is not None
    made.config = made.session.config = config_for(name, microbatches(name))
    made.recover(topology, came_from)


@cache
def alone(flags: str) -> dict[str, list[float]]:
    """Loss and norm of every step in a single process with the model that `flags` name."""
    (curve,) = rank_values(_whole_curve, 1, {"flags": flags})
    return dict(curve)


def _whole_curve(rank: RankContext, flags: str) -> dict[int, list[float]]:
    made = begin(f"{flags}one", rank)
    made.train(CURVE)
    return made.curve


def _close(curve: Mapping[str, Sequence[float]], first: int, last: int, name: str = "") -> None:
    """Steps `first` to `last`, each within 1e-10 of the single process."""
    assert sorted(map(int, curve)) == list(range(first, last + 1))
    for step, pair in curve.items():
        assert pair == pytest.approx(alone(model_flags(name))[step], rel=1e-10), f"step {step}"


def _where(made: Survivor) -> list[str]:
    at = made.engine.groups.coordinate
    return [f"replica {at.replica}, mesh rank {at.mesh_rank}", digest(made.engine)]


class Rewind:
    """A copy of what a process has after a step, to go back to."""

    def __init__(self, made: Survivor) -> None:
        self._step = made.step
        self._copies = {held.name: held.tensor.clone() for held in made.engine.state()}

    def back(self, made: Survivor) -> None:
        made.engine.load(self._read)
        made.engine.set_applied_step(self._step)
        made.step = self._step

    def _read(self, box: Box, out: Tensor) -> None:
        out.copy_(self._copies[box.name])


def _rebuilt(rank: RankContext, name: str, other: str) -> dict[str, Any]:
    """One process: 3 steps undisturbed; back to step 1, rebuilt with every rank elsewhere, and on
    to step 3; rebuilt as `other`, two more."""
    made = begin(name, rank)
    made.train(REBUILT)
    before = Rewind(made)
    made.train(ALIKE)
    save_pieces(rank.folder / f"{rank.rank}.npz", pieces_of_curve(made.engine))
    undisturbed, out = dict(made.curve), {"before": _where(made)}
    before.back(made)
    del before
    size = rank.world_size
    # Rank numbers are reversed; the place in the mesh is the next one's.
    ranks = [size - 1 - (place - 1) % size for place in range(size)]
    go_on(made, name, world(name, 2, ranks), list(reversed(range(size))))
    made.train(ALIKE)
    out |= {"undisturbed": undisturbed, "rebuilt": dict(made.curve), "after": _where(made)}
    go_on(made, other, world(other, 3), [(r - 1) % size for r in range(size)])
    made.train(ALIKE + MORE)
    return out | {"curve": made.result()["curve"]}


def _state_alone(rank: RankContext, flags: str) -> None:
    made = begin(f"{flags}one", rank)
    made.train(ALIKE)
    save_pieces(rank.folder / "alone.npz", pieces(made.engine))


@cache
def state_alone(flags: str, folder: Path) -> dict[str, np.ndarray]:
    """All parameters and moments after step 3, in a single process."""
    here = folder / f"{flags}one"
    here.mkdir()
    rank_values(_state_alone, 1, {"flags": flags}, folder=here)
    return load_complete(here / "alone.npz")


@pytest.fixture(scope="session")
def states(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("states")


@pytest.mark.parametrize(
    "name",
    [name if name in EACH_AXIS else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS],
)
def test_rebuild(name: str, states: Path, tmp_path: Path) -> None:
    size = case(name).world_size
    name, other = of_one_model(name, LAYOUTS[name])
    arguments = {"name": name, "other": other}
    values = rank_values(_rebuilt, size, arguments, deadline=240, folder=tmp_path)
    whole = state_alone(model_flags(name), states)
    assert_all_state(whole, [tmp_path / f"{rank}.npz" for rank in range(size)], 1e-10)
    for value in values:
        _close(value["curve"], 1, ALIKE + MORE, name)
        assert value["rebuilt"] == value["undisturbed"]  # bit by bit
        assert value["before"][0] != value["after"][0]
    before, after = (dict(value[when] for value in values) for when in ("before", "after"))
    assert len(before) == size
    assert before == after


@pytest.mark.parametrize(
    "name",
    [
        *(in_campaign("bf16.tp2"), in_campaign("bf16.zero1.2")),
        *("bf16.pp2-shard2", in_campaign("fp32.tp2")),
    ],
)
def test_rebuild_in_lower_precision(name: str) -> None:
    """The copies that are computed with follow the state that was moved."""
    (name,) = of_one_model(name)
    for value in rank_values(_rebuilt, case(name).world_size, {"name": name, "other": name}):
        assert value["rebuilt"] == value["undisturbed"]  # bit by bit


# --- fewer and more processes ---------------------------------------------------------------


def _grown_and_shrunk(rank: RankContext) -> dict[int, list[float]]:
    """dp2 in ranks 0 and 1; rank 2 joins after step 2; rank 0 leaves after step 4."""
    first, second, third = of_one_model("dp2", "tp2+one", "shard2")
    before, both, after = world(first, 1), world(second, 2), world(third, 3)
    if rank.rank == 2:
        made = Survivor(rank, second, microbatches(second))
        made.join(both, before, (0, 1, None), 2)
    else:
        made = begin(first, rank)
        made.train(2)
        go_on(made, second, both, (0, 1, None))
    made.train(4)
    if rank.rank:
        go_on(made, third, after, (2, 1))
        made.train(8)
    return dict(made.result()["curve"])


def test_a_process_joins_and_another_leaves() -> None:
    """The one that leaves held half of a replica; the whole one beside it is enough."""
    first, second, third = rank_values(_grown_and_shrunk, 3)
    _close(first, 1, 4, "shallow.")
    _close(second, 1, 8, "shallow.")
    _close(third, 3, 8, "shallow.")


def _killed(rank: RankContext, name: str, dead: int, after: str) -> dict[int, list[float]]:
    """Rank `dead` is killed in the backward of step 2; the others go on as `after`."""
    made = begin(name, rank)
    made.train(1)
    if rank.rank == dead:
        decoder = cast(NextTokenObjective, made.engine.objective).decoder
        block = next(iter(decoder.layers))
        block.register_full_backward_pre_hook(lambda *_: rank.kill(dead))
    made.lose(2)
    go_on(made, after, world(after, 2), [r for r in range(rank.world_size) if r != dead])
    made.train(4)
    return dict(made.result()["curve"])


@pytest.mark.parametrize(
    ("name", "dead", "after"),
    [
        ("dp3", 0, "shard2"),
        in_campaign("dp2-shard2", 3, "dp3"),
        in_campaign("dp2-tp2", 0, "pp3"),
        ("pp2-dp2", 3, "tp2+one"),
        ("shard4+one", 1, "dp4"),
        in_campaign("tp4+one", 2, "pp4"),
        in_campaign("att2.tp4+one", 2, "att2.pp2-tp2"),
        in_campaign("att1ffn1.tp2-dp2", 1, "att1ffn1.tp2+one"),
        in_campaign("ring.cp2+one", 1, "dp2"),
    ],
)
def test_survivors_of_a_loss_go_on_from_what_they_hold(name: str, dead: int, after: str) -> None:
    name, after = of_one_model(name, after)
    arguments = {"name": name, "dead": dead, "after": after}
    for result in run_ranks(_killed, case(name).world_size, arguments, dies={dead: "SIGKILL"}):
        if result.rank != dead:
            assert result.exit == 0, result.log
            _close(result.value, 1, 4, name)


# --- what is left behind --------------------------------------------------------------------


class LeftBehind:
    """What a process has, now that all that can be collected is collected."""

    def __init__(self) -> None:
        gc.collect()
        links = [_link(fd) for fd in os.listdir("/proc/self/fd")]
        tables: Any = dist.distributed_c10d._world
        things = gc.get_objects()
        self.counts = {
            "sockets": sum(link.startswith("socket:") for link in links),
            "descriptors": len(links),
            "threads": len(os.listdir("/proc/self/task")),
            "groups that torch has registered": sum(
                len(getattr(tables, table))
                for table in (
                    *("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag"),
                    *("tags_to_pg", "pg_coalesce_state"),
                )
            ),
            "meshes": sum(isinstance(thing, DeviceMesh) for thing in things),
            "parameters": sum(type(thing) in (nn.Parameter, DTensor) for thing in things),
            "cache entries by mesh": count_mesh_cache_entries(),
        }
        self.megabytes = int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6

    def more_than(self, other: LeftBehind) -> bool:
        return any(count > other.counts[what] for what, count in self.counts.items())


def _link(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:  # the descriptor of this listing
        return ""


def _again_and_again(rank: RankContext, cycle: list[str], rebuilds: int) -> list[Any]:
    """`rebuilds` times to the next layout of `cycle`, ranks in reverse order, a step in each."""
    came_from = list(reversed(range(rank.world_size)))
    made = begin(cycle[0], rank)
    made.train(1)
    three: LeftBehind | None = None
    for number in range(1, rebuilds + 1):
        name = cycle[number % len(cycle)]
        go_on(made, name, world(name, number + 1), came_from)
        made.train(number + 1)
        if number == 3:
            three = LeftBehind()
    assert three is not None
    many = _settled(three)
    curve = {step: pair for step, pair in made.result()["curve"].items() if step <= CURVE}
    return [curve, three.counts, many.counts, many.megabytes - three.megabytes]


def _settled(bound: LeftBehind, seconds: float = 10.0) -> LeftBehind:
    """What is left, once gloo's thread has closed the sockets of the newest old group."""
    found = LeftBehind()
    end = time.monotonic() + seconds
    while found.more_than(bound) and time.monotonic() < end:
        found = LeftBehind()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "cycle",
    [pytest.param("shard2 tp2 pp2", marks=pytest.mark.slow), "pp2-shard2 shard2-tp2 pp2-tp2"],
)
def test_thirty_rebuilds_leave_no_more_behind_than_three(cycle: str) -> None:
    names = of_one_model(*(f"small.{name}" for name in cycle.split()))
    size = case(names[0]).world_size
    # After 3 and after 33 rebuilds each process has the same layout and place in it.
    arguments = {"cycle": names, "rebuilds": 33}
    for curve, three, many, grown in rank_values(_again_and_again, size, arguments, deadline=170):
        _close(curve, 1, CURVE, names[0])
        assert not {what: n for what, n in many.items() if n > three[what]}, (three, many)
        assert grown < 20
