"""What every rank holds: its share of the model, and bytes by ZeRO's formulas."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.config.run import RunConfig
from holdfast.core.sharding.adapters import lora_parameters
from holdfast.core.sharding.parameters import count_parameters
from holdfast.core.sharding.state_table import ITEM_BYTES, local_boxes, state_table
from holdfast.elastic.node.launch_specs import plan_topology
from holdfast.plan.memory.memory_use import RankContents, contents_by_rank


def held(precision: str = "fp32", **layout: Any) -> tuple[RunConfig, tuple[RankContents, ...]]:
    config = RunConfig.model_validate(
        {
            "data": {"sequence_length": 16},
            "model": {
                "preset": None,
                "layers": 6,
                "dim": 32,
                "heads": 4,
                "kv_heads": 2,
                "ffn_dim": 48,
                "vocab_size": 64,
                **layout.pop("model", {}),
            },
            "train": {"batch_size": 32, "microbatch_size": 2, "precision": precision},
            "layout": layout,
        }
    )
    return config, contents_by_rank(config, plan_topology(config, 1, "here"))


@pytest.mark.parametrize(
    ("precision", "zero", "whole", "cut"),
    [
        # (parameters, gradients, moments) per element that tp and pp leave, and of it per
        # element that dp_shard leaves (Rajbhandari et al. 2020, section 5)
        ("fp32", 1, (4, 4, 0), (0, 0, 8)),
        ("fp32", 2, (4, 0, 0), (4, 4, 8)),
        ("fp32", 3, (0, 0, 0), (4, 4, 8)),
        ("bf16", 1, (2, 4, 0), (4, 0, 8)),
        ("bf16", 2, (2, 0, 0), (4, 4, 8)),
        ("bf16", 3, (0, 0, 0), (4, 4, 8)),
        ("float64", 3, (0, 0, 0), (8, 8, 16)),
    ],
)
def test_bytes_by_zero(
    precision: str, zero: int, whole: tuple[int, ...], cut: tuple[int, ...]
) -> None:
    config, ranks = held(precision, workers=4, dp_shard=2, zero=zero)
    psi = count_parameters(config.model)
    expected = [w * psi + c * psi // 2 for w, c in zip(whole, cut, strict=True)]
    for each in ranks:
        assert [each.held.parameters, each.held.gradients, each.held.moments] == expected
        assert each.held.total == sum(expected)


@pytest.mark.parametrize(("precision", "bytes_each"), [("fp32", (4, 4, 8)), ("bf16", (6, 4, 8))])
def test_without_dp_shard_the_mode_does_not_matter(
    precision: str, bytes_each: tuple[int, ...]
) -> None:
    for zero in (1, 2, 3):
        config, (each,) = held(precision, workers=1, zero=zero)
        psi = count_parameters(config.model)
        found = (each.held.parameters, each.held.gradients, each.held.moments)
        assert found == tuple(psi * size for size in bytes_each)


def test_moments_are_those_of_the_state_table() -> None:
    """On any layout: what a checkpoint holds of a rank's moments, byte for byte."""
    layout = {"workers": 9, "replicas": [{"pp": 2, "tp": 2}, {"pp": 3}, {"dp_shard": 2}]}
    config, ranks = held(**layout, model={"vocab_size": 61, "tied_embeddings": True})
    topology = plan_topology(config, 1, "here")
    table = [s for s in state_table(config.model) if s.name.startswith("optimizer.")]
    for each in ranks:
        boxes = local_boxes(topology, tuple(table), each.rank)
        sizes = (b.size * ITEM_BYTES[s.dtype] for b, s in zip(boxes, table, strict=True))
        assert each.held.moments == sum(sizes)


def test_shares_of_the_model() -> None:
    _, ranks = held(workers=4, pp=2, tp=2, stages=[4, 2])
    assert [(each.at.pp, each.at.tp) for each in ranks] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [each.blocks for each in ranks] == [(0, 1, 2, 3), (0, 1, 2, 3), (4, 5), (4, 5)]
    assert [each.embedding for each in ranks] == [True, True, False, False]
    assert [each.head for each in ranks] == [False, False, True, True]
    assert [each.heads for each in ranks] == [(0, 2), (2, 2)] * 2
    assert [each.vocabulary for each in ranks] == [(0, 32), (32, 32)] * 2


def test_key_value_heads_fewer_than_tp_are_held_by_several() -> None:
    _, ranks = held(workers=4, tp=4)
    assert [each.kv_heads for each in ranks] == [(0, 1), (0, 1), (1, 1), (1, 1)]


def test_a_vocabulary_not_known_yet_counts_as_nothing() -> None:
    config, ranks = held(workers=4, tp=2, pp=2, model={"vocab_size": 0})
    for each in ranks:
        assert each.vocabulary == (0, 0)
        assert 0 < each.held.moments < 8 * count_parameters(config.model)


def test_adapters_have_the_base_on_each_rank_and_nothing_else_of_it() -> None:
    for precision, item in (("fp32", 4), ("bf16", 2)):
        config, _ = held(precision, workers=1)
        lora = config.lora.model_copy(update={"rank": 2})
        adapted = config.model_copy(update={"lora": lora})
        (rank,) = contents_by_rank(adapted, plan_topology(adapted, 1, "here"))
        trained = sum(row.size for row in lora_parameters(adapted.model, lora))
        copies = 4 if precision == "fp32" else 2 + 4
        base = item * count_parameters(config.model)
        assert rank.held.parameters == base + copies * trained
        assert (rank.held.gradients, rank.held.moments) == (4 * trained, 8 * trained)
