"""Cells on random topologies: whoever computes them gets the same ones, and adding up gradients
by them gives each holder the whole gradient of every element, once."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.config.sections.model import ModelConfig
from holdfast.core.sharding.boxes import Box
from holdfast.core.sharding.parameters import count_parameters, decoder_parameters
from holdfast.core.sharding.reduction_cells import (
    Cell,
    cells_of_rows,
    decoder_rows,
    reduction_cells,
)
from holdfast.core.sharding.sharding_table import gradient_is_partial, sharding_table
from holdfast.core.sharding.state_table import TensorSpec, mesh_box, parameter_table, stages_of
from holdfast.layout import Layout, Replica, Topology, place_layout, place_replicas
from tests.support.topologies import MODELS, tiny, topologies


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.offsets, box.stops, strict=True))


def unsharded(spec: TensorSpec) -> TensorSpec:
    return TensorSpec(
        spec.name, spec.dtype, spec.shape, None, spec.tp_dim, spec.tp_units, spec.positions
    )


def part_along_cp(spec: TensorSpec, replica: Replica, cp: int) -> int:
    """Which part of a gradient a rank has of its tokens. Tokens come to the experts that are spread
    from all ranks, so only copies of one expert have parts."""
    degree, shards = replica.expert_degree(spec.ep), replica.degree("dp_shard")
    if degree == 1:
        return cp
    return cp % (replica.degree("cp") // degree) if shards == 1 else 0


class World:
    """Gradients of every rank, as a backward pass would leave them, and what they add up to.

    The gradient of a replica is dealt out at random to the ranks that see a part of it; ranks
    that see all of it hold equal copies.
    """

    def __init__(
        self, topo: Topology, model: ModelConfig, sequence_parallel: bool, zero: int, ep: int = 1
    ):
        self.topology = topo
        self.table = parameter_table(model, ep=ep)
        self.zero = zero
        self.sharding = sharding_table(model)
        self.sequence_parallel = sequence_parallel
        self.total = {s.name: np.zeros(s.shape, int) for s in self.table}
        self.local: list[dict[str, np.ndarray]] = [
            {s.name: np.zeros(s.shape, int) for s in self.table} for _ in topo.nodes
        ]
        rng = np.random.default_rng(0)
        for replica in topo.replicas:
            for spec in self.table:
                self.deal(rng, replica, spec)

    def deal(self, rng: np.random.Generator, replica: Replica, spec: TensorSpec) -> None:
        parts: dict[tuple[int, ...], np.ndarray] = {}
        row = self.sharding[spec.name]
        partial = gradient_is_partial(row, self.sequence_parallel)
        _, dp_shard, cp, tp = replica.mesh_shape
        for at in product(stages_of(spec, replica), range(dp_shard), range(cp), range(tp)):
            rank = replica.rank_at(*at)
            held = self.contributed(rank, spec)
            key = (
                at[0],
                at[1] if self.zero == 1 else 0,
                part_along_cp(spec, replica, at[2]),
                at[3] if partial else 0,
            )
            part = parts.setdefault(key, rng.integers(1, 1000, spec.shape))
            self.local[rank][spec.name][slices(held)] = part[slices(held)]
        # What the ranks of one key hold together is one part of the replica's gradient.
        for key, part in parts.items():
            seen = np.zeros(spec.shape, bool)
            for at in product((key[0],), range(dp_shard), range(cp), range(tp)):
                if part_along_cp(spec, replica, at[2]) != key[2]:
                    continue
                if (self.zero != 1 or at[1] == key[1]) and (not partial or at[3] == key[3]):
                    seen[slices(self.contributed(replica.rank_at(*at), spec))] = True
            self.total[spec.name] += np.where(seen, part, 0)

    def contributes(self, rank: int, spec: TensorSpec) -> bool:
        """Unless another tp rank of its replica has the same and unlike replicas forbid copies."""
        row = self.sharding[spec.name]
        copies = {r.degree("tp") for r in self.topology.replicas}
        partial = gradient_is_partial(row, self.sequence_parallel)
        return partial or len(copies) == 1 or self.topology.coordinate(rank).tp == 0

    def contributed(self, rank: int, spec: TensorSpec) -> Box:
        row = unsharded(spec) if self.zero == 1 else spec
        return mesh_box(row, self.topology.replica_of(rank), self.topology.coordinate(rank))

    def held(self, rank: int, spec: TensorSpec) -> Box:
        return mesh_box(spec, self.topology.replica_of(rank), self.topology.coordinate(rank))


def all_cells(
    topo: Topology, model: ModelConfig, sp: bool, zero: int = 3, ep: int = 1
) -> list[tuple[Cell, ...]]:
    rows = decoder_rows(model, sp, ep)
    return [cells_of_rows(topo, rows, rank, zero=zero) for rank in range(topo.world_size)]


MIXTURE = tiny(family="mixtral", qk_norm=False, experts={"count": 4, "top_k": 2})


@given(
    st.data(),
    st.sampled_from([*((model, zero, 1) for model in MODELS for zero in (1, 3)), (MIXTURE, 3, 4)]),
    st.booleans(),
)
@settings(max_examples=20, deadline=None)
def test_cells_add_up_every_gradient_once(
    data: st.DataObject, of: tuple[ModelConfig, int, int], sequence_parallel: bool
) -> None:
    model, zero, ep = of
    topo = data.draw(topologies(model.layers))
    world = World(topo, model, sequence_parallel, zero, ep)
    cells = all_cells(topo, model, sequence_parallel, zero, ep)
    squares = {r.index: 0 for r in topo.replicas}
    for rank, mine in enumerate(cells):
        assert_each_element_once(world, rank, mine)
        result = {s.name: np.zeros(s.shape, int) for s in world.table}
        for cell in mine:
            replicas = {m.replica for m in cell.members if m.contributes}
            assert replicas == {r.index for r in topo.replicas}
            for box in cell.boxes:
                added = sum(
                    world.local[m.rank][box.name][slices(box)]
                    for m in cell.members
                    if m.contributes
                )
                if cell.member(rank).receives:
                    result[box.name][slices(box)] = added
                if cell.answers_for_norm(rank):
                    squares[topo.coordinate(rank).replica] += int((added**2).sum())
        for spec in world.table:
            box = world.held(rank, spec)
            want = np.zeros(spec.shape, int)
            want[slices(box)] = world.total[spec.name][slices(box)]
            assert np.array_equal(result[spec.name], want), (rank, spec.name)
    norm = sum(int((g**2).sum()) for g in world.total.values())
    assert set(squares.values()) == {norm}


def assert_each_element_once(world: World, rank: int, cells: tuple[Cell, ...]) -> None:
    """The boxes of a rank's cells tile what it contributes to or holds, in the table's order."""
    seen = {s.name: np.zeros(s.shape, int) for s in world.table}
    rows = {s.name: number for number, s in enumerate(world.table)}
    for cell in cells:
        numbers = [rows[box.name] for box in cell.boxes]
        assert numbers == sorted(set(numbers))
        for box in cell.boxes:
            assert box.size
            seen[box.name][slices(box)] += 1
    for spec in world.table:
        want = np.zeros(spec.shape, int)
        want[slices(world.held(rank, spec))] = 1
        if world.contributes(rank, spec):
            want[slices(world.contributed(rank, spec))] = 1
        assert np.array_equal(seen[spec.name], want)


@given(st.data(), st.sampled_from(MODELS), st.booleans(), st.sampled_from([1, 2, 3]))
@settings(max_examples=20, deadline=None)
def test_members_agree(
    data: st.DataObject, model: ModelConfig, sequence_parallel: bool, zero: int
) -> None:
    topo = data.draw(topologies(model.layers))
    found: dict[Cell, set[int]] = {}
    orders: list[list[Cell]] = []
    for rank, mine in enumerate(all_cells(topo, model, sequence_parallel, zero)):
        assert len(set(mine)) == len(mine)
        orders.append(list(mine))
        for cell in mine:
            found.setdefault(cell, set()).add(rank)
    for cell, ranks in found.items():
        assert ranks == set(cell.ranks)  # every member found the very same cell, nobody else did
        order = [(m.replica, topo.coordinate(m.rank).mesh_rank) for m in cell.members]
        assert order == sorted(set(order))
        for replica in topo.replicas:
            parts = [m.part for m in cell.members if m.replica == replica.index and m.contributes]
            assert parts == list(range(len(parts)))
    for one, other in combinations(orders, 2):
        assert [c for c in one if c in other] == [c for c in other if c in one]


def test_plain_replicas_have_one_cell_of_whole_parameters() -> None:
    model = MODELS[0]
    topo = place_layout(Layout(dp_replicate=3), 1, ("n",) * 3)
    for sequence_parallel, zero in product((True, False), (1, 2, 3)):
        for cells in all_cells(topo, model, sequence_parallel, zero):
            (cell,) = cells
            assert cell.ranks == (0, 1, 2)
            assert [(b.name, b.lengths) for b in cell.boxes] == [
                (p.name, p.shape) for p in decoder_parameters(model)
            ]
            assert all(m.contributes and m.receives and m.part == 0 for m in cell.members)


def test_shards_have_one_cell_for_each_index() -> None:
    model = MODELS[0]
    topo = place_layout(Layout(dp_replicate=2, dp_shard=3), 1, ("n",) * 6)
    cells = all_cells(topo, model, True)
    assert [len(mine) for mine in cells] == [1] * 6
    assert [mine[0].ranks for mine in cells[:3]] == [(0, 3), (1, 4), (2, 5)]
    assert sum(mine[0].size for mine in cells[:3]) == count_parameters(model)


def test_zero_1_contributes_whole_boxes_and_receives_shards() -> None:
    model = MODELS[0]
    topo = place_layout(Layout(dp_replicate=2, dp_shard=2), 1, ("n",) * 4)
    cells = all_cells(topo, model, True, zero=1)
    first, second = cells[0]
    assert all(mine == (first, second) for mine in cells)
    assert [m.part for m in first.members] == [0, 1, 0, 1]
    assert [m.receives for m in first.members] == [True, False, True, False]
    assert [m.receives for m in second.members] == [False, True, False, True]
    assert first.size + second.size == count_parameters(model)


def test_parts_of_tensor_parallelism() -> None:
    """With the sequence cut, norms are added over tp; without, each rank's copy is a cell."""
    model = tiny(kv_heads=1, qk_norm=False)
    topo = place_layout(Layout(dp_replicate=2, tp=2), 1, ("n",) * 4)
    own, shared = all_cells(topo, model, True)[1]
    # By the table's order: the embedding is cut, then comes a norm.
    assert own.ranks == (1, 3)
    assert shared.ranks == (0, 1, 2, 3)
    names = {box.name for box in shared.boxes}
    assert names == {
        p.name
        for p in decoder_parameters(model)
        if "norm" in p.name or ".k." in p.name or ".v." in p.name
    }
    cells = all_cells(topo, model, False)
    kinds = [[(c.ranks, c.copy, len(c.boxes)) for c in mine] for mine in cells[:2]]
    assert kinds == [
        [((0, 2), 0, 2 + 5 * 3 + 7), ((0, 1, 2, 3), 0, 6)],
        [((1, 3), 0, 2 + 5 * 3), ((1, 3), 1, 7), ((0, 1, 2, 3), 0, 6)],
    ]


def test_copies_of_unlike_replicas_have_one_contributor_each() -> None:
    topo = place_replicas((Layout(tp=2), Layout()), 1, ("n",) * 3)
    cells = reduction_cells(topo, tiny(qk_norm=False), 1, sequence_parallel=False)
    norms = next(c for c in cells if any(b.name == "norm.weight" for b in c.boxes))
    assert [(m.rank, m.contributes, m.receives) for m in norms.members] == [
        (0, True, True),
        (1, False, True),
        (2, True, True),
    ]


def test_a_tied_embedding_has_a_part_on_the_first_and_on_the_last_stage() -> None:
    topo = place_replicas((Layout(pp=3, stages=(1, 1, 1)), Layout()), 1, ("n",) * 4)
    cells = all_cells(topo, MODELS[1], True)
    embed = cells[0][0]
    assert [b.name for b in embed.boxes] == ["embed.weight"]
    assert [(m.rank, m.part) for m in embed.members] == [(0, 0), (2, 1), (3, 0)]
    assert not any("embed" in box.name for cell in cells[1] for box in cell.boxes)


def test_a_thousand_ranks_cost_a_rank_its_own_boxes_only() -> None:
    """128 replicas of pp2·dp_shard2·tp2 and 32 blocks: work is counted, not timed."""
    model = tiny(layers=32, dim=8, ffn_dim=8, vocab_size=64)
    layout = Layout(dp_replicate=128, pp=2, dp_shard=2, tp=2, stages=(17, 15))
    topo = place_layout(layout, 1, ("n",) * 1024)
    cells = reduction_cells(topo, model, 1001, sequence_parallel=True)
    assert [len(c.members) for c in cells] == [256, 128] or [len(c.members) for c in cells] == [
        128,
        256,
    ]
    replica, here = topo.replica_of(1001), topo.coordinate(1001)
    held = sum(mesh_box(spec, replica, here).size for spec in parameter_table(model))
    assert sum(c.size for c in cells) == held
