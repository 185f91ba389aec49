"""Tiny models and random topologies: replicas of any shapes side by side, ranks dealt at random."""

from __future__ import annotations

from hypothesis import strategies as st

from holdfast.config.sections.model import ModelConfig
from holdfast.layout import Layout, Replica, Topology, place_replicas


def tiny(**changes: object) -> ModelConfig:
    """Few units of everything, and numbers that tp and dp_shard do not divide."""
    shape = {
        "preset": None,
        "layers": 3,
        "dim": 4,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 2,
        "ffn_dim": 5,
        "vocab_size": 7,
        "qk_norm": True,
    }
    return ModelConfig.model_validate(shape | changes)


MODELS = (tiny(), tiny(tied_embeddings=True), tiny(kv_heads=1, layers=4, vocab_size=3))


@st.composite
def stages(draw: st.DrawFn, pp: int, layers: int) -> tuple[int, ...]:
    """Blocks of each stage, at least one in each."""
    if pp == 1:
        return ()
    cuts = sorted(draw(st.integers(0, layers - pp)) for _ in range(pp - 1))
    return tuple(1 + b - a for a, b in zip([0, *cuts], [*cuts, layers - pp], strict=True))


@st.composite
def layouts(draw: st.DrawFn, layers: int, size: int) -> Layout:
    """One replica of at most `size` ranks."""
    pp = draw(st.integers(1, min(3, size)))
    tp = draw(st.sampled_from([n for n in (1, 2, 4) if pp * n <= size]))
    dp_shard = draw(st.integers(1, min(3, size // (pp * tp))))
    cp = draw(st.integers(1, min(2, size // (pp * tp * dp_shard))))
    return Layout(pp=pp, dp_shard=dp_shard, cp=cp, tp=tp, stages=draw(stages(pp, layers)))


@st.composite
def topologies(draw: st.DrawFn, layers: int, size: int = 12) -> Topology:
    """One to four replicas of up to three kinds, each of at most `size` ranks."""
    kinds = draw(st.lists(layouts(layers, size), min_size=1, max_size=3))
    chosen = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=4))
    world = sum(layout.world_size for layout in chosen)
    order = draw(st.permutations(range(world)))
    plain = place_replicas(chosen, 1, ("n",) * world)
    replicas = tuple(
        Replica(r.index, tuple(order[i] for i in r.ranks), r.mesh_shape, r.stages)
        for r in plain.replicas
    )
    return Topology(1, replicas, plain.nodes)
