"""Gradients summed cell by cell, over real connections: whole for every holder, whatever shapes
the replicas have, and the same bits for any number of replicas of one shape."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from holdfast.config.sections.model import ModelConfig
from holdfast.core.seeds import key_seed
from holdfast.core.sharding.boxes import Box
from holdfast.core.sharding.reduction_cells import Cell, Member, reduction_cells
from holdfast.core.sharding.reduction_tree import Shares, deal
from holdfast.core.sharding.state_table import TensorSpec, mesh_box, parameter_table
from holdfast.errors import PeerLostError
from holdfast.layout import Layout, Topology, place_replicas
from holdfast.parallel.axes.replicated import ReplicatedGradients
from holdfast.parallel.comm.transport import PeerGroup, exchange
from holdfast.parallel.gradients.cell_team import FIRST_TAG, TAGS_PER_REDUCER, CellTeam
from holdfast.parallel.gradients.feeder import Cells
from tests.support.marks import in_campaign
from tests.support.ranks import RankContext, rank_values

MODEL = {
    "preset": None,
    "layers": 3,
    "dim": 8,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 2,
    "ffn_dim": 6,
    "vocab_size": 5,
    "qk_norm": True,
}

TP4 = Layout(tp=4)  # more ranks than key/value heads, and than can share 5 tokens evenly
PP2 = Layout(pp=2, stages=(2, 1))
PP3 = Layout(pp=3, stages=(1, 1, 1))
SHARDED = Layout(dp_shard=2)
MIXED = Layout(pp=2, tp=2, stages=(1, 2))
SINGLE = Layout()

UNLIKE: dict[str, list[Layout]] = {
    "tp4": [TP4],
    "tp4_tp4": [TP4, TP4],
    "pp2_pp3": [PP2, PP3],
    "pp3_pp2": [PP3, PP2],
    "single_tp4": [SINGLE, TP4],
    "dpshard2_pp2tp2_single": [SHARDED, MIXED, SINGLE],
    "dpshard2_dpshard3": [SHARDED, Layout(dp_shard=3)],
    "dpshard2tp2_tp2": [Layout(dp_shard=2, tp=2), Layout(tp=2)],
}


ONE_SHAPE: dict[str, Layout] = {
    "tp2": Layout(tp=2),
    "pp2": PP2,
    "dpshard2": SHARDED,
    "pp2tp2": MIXED,
}
WORLDS = UNLIKE | {
    f"{n}x{shape}": [layout] * n for shape, layout in ONE_SHAPE.items() for n in (1, 2, 3)
}


def _topology(layouts: list[Layout]) -> Topology:
    return place_replicas(layouts, 1, ("n",) * sum(layout.world_size for layout in layouts))


def _teams(topology: Topology, model: ModelConfig, peers: PeerGroup, **how: Any) -> Cells:
    """Tags by the number of a cell in the whole world, which every rank works out."""
    every = [reduction_cells(topology, model, rank, **how) for rank in range(topology.world_size)]
    numbers: dict[Cell, int] = {}
    for cells in every:
        for cell in cells:
            numbers.setdefault(cell, len(numbers))
    return [
        (
            cell,
            CellTeam(
                peers,
                cell.members,
                cell.members.index(cell.member(peers.rank)),
                tuple(m.rank for m in cell.members),
                FIRST_TAG + numbers[cell] * TAGS_PER_REDUCER,
            ),
        )
        for cell in every[peers.rank]
    ]


def _gradient(name: str, leaf: int, part: int, shape: tuple[int, ...], whole: bool) -> Tensor:
    """What part `part` has of a leaf's gradient. Whole numbers add up exactly in any order."""
    generator = torch.Generator().manual_seed(key_seed(3, "test", name, leaf, part) % 2**31)
    if whole:
        return torch.randint(-9, 9, shape, generator=generator).double()
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _inside(box: Box, held: Box) -> tuple[slice, ...]:
    pairs = zip(box.offsets, box.lengths, held.offsets, strict=True)
    return tuple(slice(at - start, at - start + length) for at, length, start in pairs)


class World:
    """What one rank would find after the backward of a leaf, without a model."""

    def __init__(self, rank: RankContext, name: str, zero: int, sequence: bool, tied: bool):
        model = ModelConfig.model_validate({**MODEL, "tied_embeddings": tied})
        topology = _topology(WORLDS[name])
        self.rank, self.table = rank.rank, parameter_table(model)
        self.peers = PeerGroup(
            rank.store(f"{name}{zero}{sequence}{tied}"),
            "g1",
            rank.rank,
            topology.world_size,
            seconds=120,
        )
        self.cells = _teams(topology, model, self.peers, sequence_parallel=sequence, zero=zero)
        self.replica = topology.replica_of(rank.rank)
        self.replicas = len(topology.replicas)
        at = topology.coordinate(rank.rank)

        def held(spec: TensorSpec) -> Box:
            return mesh_box(spec, self.replica, at)

        self.wanted = {spec.name: held(spec) for spec in self.table}
        self.boxes = dict(self.wanted)
        if zero == 1:
            self.boxes = {s.name: held(replace(s, shard_dim=None)) for s in self.table}
        self.named = {
            name: nn.Parameter(torch.zeros(box.lengths, dtype=torch.float64))
            for name, box in self.boxes.items()
        }
        self.feeder = ReplicatedGradients(
            self.named,
            self.boxes,
            self.cells,
            dtype=torch.float64,
            bucket_bytes=400,
            wanted=self.wanted,
        )

    def parts(self, cell: Cell) -> int:
        return sum(m.contributes for m in cell.members if m.replica == self.replica.index)

    def found(self, leaf: int, whole: bool) -> dict[str, Tensor]:
        """Gradients of this rank: its part of each cell; rubbish where it does not contribute."""
        shapes = {spec.name: spec.shape for spec in self.table}
        out = {name: torch.full(box.lengths, 1e9) for name, box in self.boxes.items()}
        out = {name: tensor.double() for name, tensor in out.items()}
        for cell, team in self.cells:
            if not team.own_member.contributes:
                continue
            count, part = self.parts(cell), team.own_member.part
            for box in cell.boxes:
                mine = _gradient(box.name, leaf, part, shapes[box.name], whole)
                if part == count - 1:  # the last part makes all of them the leaf's gradient
                    mine = _gradient(box.name, leaf, -1, shapes[box.name], whole)
                    for other in range(count - 1):
                        mine = mine - _gradient(box.name, leaf, other, shapes[box.name], whole)
                target = out[box.name][_inside(box, self.boxes[box.name])]
                target.copy_(mine[tuple(map(slice, box.offsets, box.stops))])
        return out

    def reduce(self, shares: Shares, whole: bool) -> None:
        """All that comes after `begin`, until the sum is there."""
        for leaf in sorted(shares[self.replica.index]):
            found = self.found(leaf, whole)
            self.feeder.start_leaf(leaf)
            torch.stack(
                [(p * found[name]).sum() for name, p in self.named.items()]
            ).sum().backward()
            self.feeder.end_leaf()
            self.feeder.check()
        self.feeder.finish()

    def step(self, leaves: int, shares: Shares, whole: bool) -> list[Tensor]:
        self.feeder.begin(leaves, shares)
        self.reduce(shares, whole)
        self.squares = self.feeder.squared_norm()
        vote = torch.zeros(1, dtype=torch.int64)
        exchange(self.peers, vote, [1] * self.peers.size, tag=1)
        return self.feeder.gradients()


def _sums(rank: RankContext, names: list[str], zero: int, sequence: bool, tied: bool) -> list[Any]:
    """Two steps of different dealings: gradients against the sum of all leaves. Returns the sum
    of squares that this rank answers for and that of the whole gradient, by world."""
    out = []
    for name in names:
        world = World(rank, name, zero, sequence, tied)
        for leaves in (5, 4):
            gradients = world.step(leaves, deal(leaves, world.replicas), whole=True)
            total = 0.0
            for spec, gradient in zip(world.table, gradients, strict=True):
                want = torch.stack(
                    [_gradient(spec.name, leaf, -1, spec.shape, True) for leaf in range(leaves)]
                ).sum(0)
                box = world.wanted[spec.name]
                assert torch.equal(gradient, want[tuple(map(slice, box.offsets, box.stops))])
                total += float(want.square().sum())
        out.append([world.replica.index, world.squares, total])
    return out


@pytest.mark.parametrize(
    ("zero", "sequence", "tied"),
    [in_campaign(3, True, True), in_campaign(3, False, False), (1, True, True)],
)
def test_every_holder_gets_the_whole_sum_and_the_norm_counts_each_element_once(
    zero: int, sequence: bool, tied: bool
) -> None:
    by_size: dict[int, list[str]] = {}
    for name, layouts in UNLIKE.items():
        by_size.setdefault(sum(layout.world_size for layout in layouts), []).append(name)
    for size, names in by_size.items():
        arguments = {"names": names, "zero": zero, "sequence": sequence, "tied": tied}
        by_rank = rank_values(_sums, size, arguments)
        for world in range(len(names)):
            squares: dict[int, float] = {}
            wanted: dict[int, float] = {}
            for replica, own, total in (values[world] for values in by_rank):
                squares[replica] = squares.get(replica, 0.0) + own
                wanted[replica] = total
            assert squares == pytest.approx(wanted, rel=1e-12)


def _bits(rank: RankContext, name: str, zero: int, shares: list[list[int]]) -> list[str]:
    world = World(rank, name, zero, sequence=True, tied=True)
    dealt = tuple(tuple(share) for share in shares)
    return [
        hashlib.sha256(gradient.numpy().tobytes()).hexdigest()
        for gradient in world.step(7, dealt, whole=False)
    ] + [world.squares.hex()]


@pytest.mark.parametrize(
    ("shape", "zero"),
    [in_campaign("tp2", 3), in_campaign("pp2", 3), ("dpshard2", 1), ("pp2tp2", 3)],
)
def test_bits_do_not_depend_on_the_number_of_replicas_of_one_shape(shape: str, zero: int) -> None:
    size = ONE_SHAPE[shape].world_size
    seen: list[set[tuple[str, ...]]] = [set() for _ in range(size)]
    odd: dict[int, list[Shares]] = {
        1: [deal(7, 1)],
        2: [deal(7, 2), ((1, 2, 6), (0, 3, 4, 5))],
        3: [((6, 0), (5, 2), (1, 3, 4)), ((0,), (), (1, 2, 3, 4, 5, 6))],
    }
    for replicas, dealings in odd.items():
        if replicas * size > 8:
            continue
        for shares in dealings:
            arguments = {"name": f"{replicas}x{shape}", "zero": zero, "shares": shares}
            for rank, bits in enumerate(rank_values(_bits, replicas * size, arguments)):
                seen[rank % size].add(tuple(bits))
    assert [len(bits) for bits in seen] == [1] * size


def test_a_team_that_makes_no_sense_is_refused() -> None:
    peers = PeerGroup(torch.distributed.HashStore(), "g1", 0, 1)
    twice = (Member(0, 0, 0, True, True), Member(1, 0, 0, True, True))
    with pytest.raises(ValueError, match="contributed twice"):
        CellTeam(peers, twice, 0, (0, 1))
    with pytest.raises(ValueError, match="nobody receives"):
        CellTeam(peers, (Member(0, 0, 0, True, False),), 0, (0,))


def _killed(rank: RankContext) -> None:
    """Stage 1 of the first replica dies. Nobody is left waiting in a cell that it is not in."""
    world = World(rank, "2xpp2", 3, sequence=True, tied=True)
    shares = deal(4, 2)
    world.step(4, shares, whole=True)
    world.feeder.begin(4, shares)
    rank.barrier("begun")
    if rank.rank == 1:
        rank.kill(1)
    with pytest.raises(PeerLostError):
        world.reduce(shares, whole=True)


def test_a_loss_in_one_cell_ends_the_step_in_all_cells() -> None:
    rank_values(_killed, 4, dies={1: "SIGKILL"})
