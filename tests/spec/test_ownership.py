"""Who saves what: everything exactly once, evenly, and the same answer every time."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.config.model import ModelConfig
from holdfast.layout import Layout, Replica, Topology, place
from holdfast.spec.boxes import Box, coverage
from holdfast.spec.ownership import owned_boxes
from holdfast.spec.state import ITEM_BYTES, StateTable, TensorSpec, local_boxes, state_table


def check(topo: Topology, table: StateTable) -> list[int]:
    """Exactly-once ownership of what is held; -> bytes per rank."""
    owned: dict[str, list[Box]] = {spec.name: [] for spec in table}
    dtypes = {spec.name: spec.dtype for spec in table}
    sizes = []
    for rank in range(topo.world_size):
        held = {b.name: b for b in local_boxes(topo, table, rank)}
        mine = owned_boxes(topo, table, rank)
        assert len({b.name for b in mine}) == len(mine)
        for box in mine:
            assert box.size
            assert held[box.name].contains(box)
            owned[box.name].append(box)
        sizes.append(sum(b.size * ITEM_BYTES[dtypes[b.name]] for b in mine))
    for spec in table:
        assert coverage(spec.shape, owned[spec.name]) is None
    return sizes


@st.composite
def tables(draw: st.DrawFn) -> StateTable:
    shapes = draw(
        st.lists(st.lists(st.integers(1, 9), max_size=3).map(tuple), min_size=1, max_size=6)
    )
    return tuple(
        TensorSpec(
            f"t{i}",
            draw(st.sampled_from(["F32", "F64", "BF16"])),
            shape,
            draw(st.sampled_from([None, *range(len(shape))])) if shape else None,
        )
        for i, shape in enumerate(shapes)
    )


@given(tables(), st.integers(1, 4), st.integers(1, 4), st.integers(1, 2), st.integers(1, 2))
@settings(max_examples=150, deadline=None)
def test_everything_is_owned_exactly_once(
    table: StateTable, replicas: int, dp_shard: int, pp: int, tp: int
) -> None:
    layout = Layout(dp_replicate=replicas, dp_shard=dp_shard, pp=pp, tp=tp)
    check(place(layout, 1, ("n",) * layout.world_size), table)


def test_shares_are_even_on_a_real_model() -> None:
    table = state_table(ModelConfig.model_validate({"preset": "small", "vocab_size": 5000}))
    total = sum(spec.nbytes for spec in table)
    row = 4 * 768
    for replicas, dp_shard in [(4, 1), (3, 1), (2, 2), (1, 4), (6, 1)]:
        layout = Layout(dp_replicate=replicas, dp_shard=dp_shard)
        sizes = check(place(layout, 1, ("n",) * layout.world_size), table)
        assert sum(sizes) == total
        spread = max(sizes) - min(sizes)
        # Replicas share out to the row; what dp_shard leaves uneven is torch.chunk's rounding.
        assert spread <= 2 * row + (dp_shard > 1) * len(table) * row, (replicas, dp_shard)


def test_a_large_tensor_is_cut() -> None:
    table = (TensorSpec("embed", "F32", (1000, 4), 0), TensorSpec("norm", "F32", (4,), 0))
    topo = place(Layout(dp_replicate=2), 1, ("n", "n"))
    assert owned_boxes(topo, table, 0) == (Box("embed", (0, 0), (501, 4)),)
    assert owned_boxes(topo, table, 1) == (
        Box("embed", (501, 0), (499, 4)),
        Box("norm", (0,), (4,)),
    )


def test_replicas_of_different_shapes() -> None:
    replicas = (
        Replica(0, (0, 1), (1, 2, 1, 1)),
        Replica(1, (2,), (1, 1, 1, 1)),
        Replica(2, (3, 4), (1, 2, 1, 1)),
    )
    topo = Topology(1, replicas, ("n",) * 5)
    table = (TensorSpec("w", "F32", (7, 3), 0), TensorSpec("s", "F64", (), None))
    sizes = check(topo, table)
    assert sizes[2] == 0  # the odd one out saves nothing
    assert sum(sizes) == 7 * 3 * 4 + 8
