"""The parameter table against published sizes, and against the module that it describes."""

from __future__ import annotations

import math

import pytest
import torch

from holdfast.config.sections.lora import LoraConfig
from holdfast.config.sections.model import PRESETS, ModelConfig
from holdfast.core.sharding.adapters import (
    adapted_layers,
    linear_layers,
    lora_parameters,
    refuse_unknown_targets,
)
from holdfast.core.sharding.parameters import Normal, Ones, count_parameters, decoder_parameters
from holdfast.errors import ConfigError
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
