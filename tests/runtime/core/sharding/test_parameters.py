"""The parameter table against published sizes, and against the module that it describes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.config.sections.lora import LoraConfig
from holdfast.config.sections.model import PRESETS, ModelConfig
from holdfast.core.flops import flops_per_token
from holdfast.core.sharding.adapters import (
    adapted_layers,
    linear_layers,
    lora_parameters,
    refuse_unknown_targets,
)
from holdfast.core.sharding.parameters import Normal, Ones, count_parameters, decoder_parameters
from holdfast.core.sharding.pipeline_stages import (
    BlockCosts,
    best_split,
    block_costs,
    check_number_of_stages,
)
from holdfast.errors import ConfigError, LayoutError
from holdfast.model.decoder import Decoder
from tests.support.adapters import MODEL

# Billions of parameters as the models' own pages give them: all, and without embeddings (Qwen).
PUBLISHED = {
    "llama3.2-1b": (1.24, None),
    "llama3.2-3b": (3.21, None),
    "llama3.1-8b": (8.03, None),
    "llama3.1-70b": (70.6, None),
    "llama3.1-405b": (405.9, None),
    "qwen3-0.6b": (0.6, 0.44),
    "qwen3-1.7b": (1.7, 1.4),
    "qwen3-4b": (4.0, 3.6),
    "qwen3-8b": (8.2, 6.95),
    "qwen3-14b": (14.8, 13.2),
    "qwen3-32b": (32.8, 31.2),
}


def config(**changes: object) -> ModelConfig:
    return ModelConfig.model_validate({"preset": "tiny", "vocab_size": 100, **changes})


def rounded(value: int, like: float) -> float:
    """Billions, to as many decimals as the published figure has."""
    return round(value / 1e9, len(str(like).split(".")[1]))


@pytest.mark.parametrize("preset", PUBLISHED)
def test_published_sizes(preset: str) -> None:
    model = ModelConfig.model_validate({"preset": preset})
    whole, inner = PUBLISHED[preset]
    assert rounded(count_parameters(model), whole) == whole
    if inner is not None:
        untied_head = 0 if model.tied_embeddings else model.vocab_size * model.dim
        assert rounded(count_parameters(model, embeddings=False) - untied_head, inner) == inner


@pytest.mark.parametrize("preset", PRESETS)
def test_table_is_the_module(preset: str) -> None:
    model = ModelConfig.model_validate({"vocab_size": 512, "preset": preset})
    with torch.device("meta"):
        decoder = Decoder(model)
    rows = [(row.name, row.shape) for row in decoder_parameters(model)]
    assert [(name, tuple(p.shape)) for name, p in decoder.named_parameters()] == rows
    assert all(p.is_meta for p in decoder.parameters())
    assert not list(decoder.buffers())
    assert count_parameters(model) == sum(p.numel() for p in decoder.parameters())


def test_small_presets_rise_from_one_million() -> None:
    names = ("tiny", "small", "15m", "medium", "125m", "350m")
    sizes = [
        count_parameters(ModelConfig.model_validate({"preset": n, "vocab_size": 4096}))
        for n in names
    ]
    assert sizes == sorted(sizes)
    assert sizes[0] < 1.2e6
    assert 15e6 < sizes[2] < 16e6


def test_matrices_decay_and_gains_do_not() -> None:
    for row in decoder_parameters(config(qk_norm=True, family="qwen3")):
        assert row.decay == (len(row.shape) == 2), row.name
        assert (row.init == Ones()) == (len(row.shape) == 1), row.name


def test_residual_outputs_start_smaller() -> None:
    model = config(layers=8, init_std=0.04)
    for row in decoder_parameters(model):
        if row.name.endswith(("attention.o.weight", "ffn.down.weight")):
            assert row.init == Normal(0.04 / math.sqrt(16))
        elif len(row.shape) == 2:
            assert row.init == Normal(0.04)


def test_tied_head_has_no_row() -> None:
    untied, tied = config(tied_embeddings=False), config(tied_embeddings=True)
    assert "head.weight" in {row.name for row in decoder_parameters(untied)}
    assert "head.weight" not in {row.name for row in decoder_parameters(tied)}
    assert count_parameters(untied) - count_parameters(tied) == 100 * untied.dim


# --- targets of adapters --------------------------------------------------------------------------
SHAPE = ModelConfig.model_validate(MODEL)


def _layers(*targets: str, model: ModelConfig = SHAPE) -> list[str]:
    return list(adapted_layers(model, LoraConfig(rank=2, targets=targets)))


def test_all_linear_is_each_linear_layer_of_each_block_and_not_the_head() -> None:
    found = _layers("all-linear")
    assert found == list(linear_layers(SHAPE))
    assert len(found) == 7 * SHAPE.layers
    assert not [name for name in found if "embed" in name or "head" in name]


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (("q_proj",), ["layers.0.attention.q", "layers.1.attention.q"]),
        (("attention.q",), ["layers.0.attention.q", "layers.1.attention.q"]),
        (("model.layers.1.mlp.up_proj",), ["layers.1.ffn.up"]),
        (("layers.0.attention.*",), [f"layers.0.attention.{part}" for part in "qkvo"]),
        (("*.1.self_attn.[kv]_proj",), ["layers.1.attention.k", "layers.1.attention.v"]),
        (
            ("down_proj", "layers.0.ffn.up"),
            ["layers.0.ffn.up", "layers.0.ffn.down", "layers.1.ffn.down"],
        ),
        (("proj",), []),
    ],
)
def test_a_target_is_a_name_or_its_end_or_a_pattern(
    targets: tuple[str, ...], expected: list[str]
) -> None:
    assert _layers(*targets) == expected


def test_unknown_targets_are_refused_with_the_names_that_exist() -> None:
    layers = {ours: theirs for ours, (theirs, _) in linear_layers(SHAPE).items()}
    with pytest.raises(ConfigError) as refused:
        refuse_unknown_targets(["q_proj", "query", "lm_head"], layers, "run.yaml:3")
    text = str(refused.value)
    assert "run.yaml:3: lora.targets query, lm_head: no linear layer" in text
    assert "use all-linear, or some of q_proj, k_proj, v_proj, o_proj, gate_proj" in text


def test_rows_have_the_rank_and_the_layer_s_sides() -> None:
    rows = lora_parameters(SHAPE, LoraConfig(rank=3, targets=("v_proj",)))
    assert [(row.name, row.shape) for row in rows] == [
        ("layers.0.attention.v.lora_A", (3, 32)),
        ("layers.0.attention.v.lora_B", (16, 3)),
        ("layers.1.attention.v.lora_A", (3, 32)),
        ("layers.1.attention.v.lora_B", (16, 3)),
    ]


# --- balanced pipeline stages ---------------------------------------------------------------------
def splits(blocks: int, stages: int) -> Iterator[tuple[int, ...]]:
    for cuts in combinations(range(1, blocks), stages - 1):
        ends = (0, *cuts, blocks)
        yield tuple(b - a for a, b in pairwise(ends))


def merit(costs: BlockCosts, stages: tuple[int, ...]) -> tuple[float, float, tuple[int, ...]]:
    """(slowest stage, largest stage, the split itself): the smallest is the best."""
    times, sizes, start = [], [], 0
    for held in stages:
        times.append(sum(costs.times[start : start + held]))
        sizes.append(sum(costs.parameters[start : start + held]))
        start += held
    for row, index in ((times, 0), (sizes, 1)):
        row[0] += costs.first[index]
        row[-1] += costs.last[index]
    return max(times), max(sizes), stages


whole = st.integers(0, 9)


@given(
    rows=st.lists(st.tuples(st.integers(1, 9), whole), min_size=1, max_size=8),
    ends=st.tuples(whole, whole, whole, whole),
    data=st.data(),
)
def test_no_split_is_better(
    rows: list[tuple[int, int]], ends: tuple[int, int, int, int], data: st.DataObject
) -> None:
    costs = BlockCosts(
        tuple(float(time) for time, _ in rows),
        tuple(size for _, size in rows),
        (float(ends[0]), ends[1]),
        (float(ends[2]), ends[3]),
    )
    stages = data.draw(st.integers(1, len(rows)))
    best = min(splits(len(rows), stages), key=lambda each: merit(costs, each))
    assert split_stages(costs, stages) == best


def split_stages(costs: BlockCosts, stages: int) -> tuple[int, ...]:
    """The best contiguous split by time, and by parameters among equally fast ones."""
    time, parameters = (partial(costs.cost, which, stages) for which in (0, 1))
    return best_split(len(costs.times), stages, time, parameters)


def model(**changes: object) -> ModelConfig:
    shape = {
        "preset": None,
        "layers": 8,
        "dim": 64,
        "heads": 4,
        "kv_heads": 2,
        "ffn_dim": 192,
        "vocab_size": 512,
    }
    return ModelConfig.model_validate(shape | changes)


def balance_stages(shape: ModelConfig, pp: int, length: int) -> tuple[int, ...]:
    check_number_of_stages(shape.layers, pp)
    return split_stages(block_costs(shape, length), pp)


@given(st.integers(1, 12), st.integers(1, 12), st.sampled_from([0, 64, 512, 9000]))
def test_every_stage_holds_a_block_and_all_hold_all(layers: int, pp: int, vocabulary: int) -> None:
    shape = model(layers=layers, vocab_size=vocabulary)
    if pp > layers:
        with pytest.raises(LayoutError, match=f"use {layers} or less"):
            balance_stages(shape, pp, 128)
        return
    stages = balance_stages(shape, pp, 128)
    assert len(stages) == pp
    assert sum(stages) == layers
    assert min(stages) >= 1


def test_a_head_that_costs_nothing_leaves_equal_stages() -> None:
    assert balance_stages(model(vocab_size=0), 4, 128) == (2, 2, 2, 2)


def test_the_head_counts_as_what_it_costs() -> None:
    """A vocabulary whose head costs about three blocks takes three blocks off the last stage."""
    shape = model(layers=9)
    block, head = block_costs(shape, 128).times[0], block_costs(shape, 128).last[0]
    vocabulary = round(shape.vocab_size * 3 * block / head)
    assert balance_stages(model(layers=9, vocab_size=vocabulary), 2, 128) == (6, 3)
    assert balance_stages(model(layers=9, vocab_size=vocabulary), 3, 128) == (4, 4, 1)


def test_of_equally_fast_splits_the_embedding_goes_to_fewer_blocks() -> None:
    """Six blocks over four stages: two stages hold two. Neither is the one with the embedding."""
    assert balance_stages(model(layers=6, vocab_size=64), 4, 128) == (1, 2, 2, 1)


@pytest.mark.parametrize("tied", [False, True])
def test_costs_are_those_of_the_whole_model(tied: bool) -> None:
    shape = model(tied_embeddings=tied)
    costs = block_costs(shape, 128)
    assert sum(costs.times) + costs.last[0] == pytest.approx(flops_per_token(shape, 128, "causal"))
    held = sum(costs.parameters) + costs.first[1] + costs.last[1]
    assert held == count_parameters(shape) + (shape.vocab_size * shape.dim if tied else 0)
