"""Targets of adapters, by our names and Hugging Face's, and the rows of their parameters."""

from __future__ import annotations

import pytest

from holdfast.config.sections.lora import LoraConfig
from holdfast.config.sections.model import ModelConfig
from holdfast.core.sharding.adapters import (
    adapted_layers,
    linear_layers,
    lora_parameters,
    refuse_unknown_targets,
)
from holdfast.errors import ConfigError
from tests.support.adapters import MODEL

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
