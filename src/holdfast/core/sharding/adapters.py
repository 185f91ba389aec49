"""The adapters of a run as data: which linear layers have one, and the rows of their parameters.

A layer has two names: ours (`layers.0.attention.q`) and that of Hugging Face
(`model.layers.0.self_attn.q_proj`). A target is one of them, its end (`q_proj`), or a pattern.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from holdfast.config.sections.lora import ALL_LINEAR, NF4
from holdfast.core.format.hf_names import huggingface_map
from holdfast.core.sharding.parameters import (
    SCORE,
    Init,
    Parameter,
    Uniform,
    Zeros,
    decoder_parameters,
)
from holdfast.core.sharding.sharding_table import Sharding, sharding_table
from holdfast.errors import ConfigError

if TYPE_CHECKING:  # the mover has no use for pydantic
    from holdfast.config.sections.lora import LoraConfig
    from holdfast.config.sections.model import ModelConfig

DOWN, UP = "lora_A", "lora_B"
"""Names of an adapter's matrices, as PEFT has them: [rank, inputs] and [outputs, rank]."""
_SHOWN = 20  # names in a message


def linear_layers(model: ModelConfig) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Our name -> (theirs, shape of the weight) of each linear layer in a block."""
    theirs = huggingface_map(model).to_theirs()
    return {
        row.name.removesuffix(".weight"): (theirs[row.name][0].theirs[: -len(".weight")], row.shape)
        for row in decoder_parameters(model)
        if len(row.shape) == 2 and row.name.startswith("layers.")
    }


def adapted_layers(model: ModelConfig, lora: LoraConfig) -> dict[str, tuple[int, ...]]:
    """Our name -> shape of the weight of each layer with an adapter, in the module's order."""
    return {
        ours: shape
        for ours, (theirs, shape) in linear_layers(model).items()
        if any(is_target(target, (ours, theirs)) for target in lora.targets)
    }


def packed_weights(model: ModelConfig, lora: LoraConfig) -> frozenset[str]:
    """The names of the base's matrices that a worker keeps in 4 bits."""
    layers = linear_layers(model) if lora.base_dtype == NF4 else {}
    return frozenset(f"{layer}.weight" for layer in layers)


def is_target(target: str, names: Iterable[str]) -> bool:
    """Return True if a target means the layer with these names."""
    return target == ALL_LINEAR or any(
        name == target or name.endswith(f".{target}") or fnmatchcase(name, target) for name in names
    )


def refuse_unknown_targets(targets: Iterable[str], layers: Mapping[str, str], where: str) -> None:
    """Raises ConfigError for targets that mean no layer. layers: our names to theirs."""
    unknown = [
        target for target in targets if not any(is_target(target, pair) for pair in layers.items())
    ]
    if not unknown:
        return
    ends = dict.fromkeys(theirs.rpartition(".")[2] for theirs in layers.values())
    named = list(ends)[:_SHOWN] + (["..."] if len(ends) > _SHOWN else [])
    remedy = f"use {ALL_LINEAR}, or some of {', '.join(named)}"
    if any("," in target for target in unknown):
        remedy += f", as a list: '[{', '.join(named[:2])}]'"
    raise ConfigError(
        f"lora.targets {', '.join(unknown)}: no linear layer has such a name",
        where=where,
        remedy=remedy,
    )


def adapter_rows(layers: Mapping[str, tuple[int, ...]], rank: int) -> tuple[Parameter, ...]:
    """The parameters of adapters."""
    return tuple(
        Parameter(name, shape, True, adapter_init(name, shape))
        for layer, (outputs, inputs) in layers.items()
        for name, shape in ((f"{layer}.{DOWN}", (rank, inputs)), (f"{layer}.{UP}", (outputs, rank)))
    )


def adapter_init(name: str, shape: tuple[int, ...]) -> Init:
    """A begins as PEFT's does (uniform within 1 / sqrt(inputs), which is `kaiming_uniform_` with
    a = sqrt(5)), B at zero."""
    return Uniform(1 / math.sqrt(shape[1])) if name.endswith(f".{DOWN}") else Zeros()


def lora_parameters(model: ModelConfig, lora: LoraConfig) -> tuple[Parameter, ...]:
    """The rows of all that a run of adapters trains, in the order of the module's. A score head is
    new, so it is trained in full."""
    score = tuple(row for row in decoder_parameters(model) if row.name == SCORE)
    return adapter_rows(adapted_layers(model, lora), lora.rank) + score


def adapter_shardings(model: ModelConfig, lora: LoraConfig) -> dict[str, Sharding]:
    """How tp and pp cut the adapters: by parameter name, in the order of `lora_parameters`.

    B of a layer whose outputs tp cuts is cut as they are, and A of a layer whose inputs it cuts.
    The other matrix is complete on each rank. Its gradient is a sum over ranks: each has some
    outputs, or some inputs. So it counts as used inside a region.
    """
    base, found = sharding_table(model), dict[str, Sharding]()
    for layer in adapted_layers(model, lora):
        row = base[f"{layer}.weight"]
        for matrix, dim in ((DOWN, 1), (UP, 0)):
            is_cut = row.tp_dim == dim
            units = row.tp_units if is_cut else 1
            cut = Sharding(dim if is_cut else None, units, row.positions, per_token=False)
            found[f"{layer}.{matrix}"] = cut
    return found | {name: row for name, row in base.items() if name == SCORE}


def refuse_bare_stage(
    model: ModelConfig, lora: LoraConfig, blocks: Collection[int], where: str
) -> None:
    """Raises ConfigError for blocks of a worker of a pipeline that have no adapter at all."""
    sharding = adapter_shardings(model, lora)
    if not any(row.positions[0] in blocks for row in sharding.values()):
        raise ConfigError(
            f"a worker of the pipeline has blocks {', '.join(map(str, sorted(blocks)))}, and "
            "lora.targets means no layer in them, so it would have nothing to train",
            where=where,
            remedy="use layout.pp 1, or name layers of each block, such as q_proj",
        )
