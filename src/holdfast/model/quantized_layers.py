"""torchao's settings of rounded weights, for `train.qat` and
`holdfast export RUN --to FOLDER --quantize int4`."""

from __future__ import annotations

from typing import Any

import torch

from holdfast.errors import ConfigError
from holdfast.options.qat.keys import GROUP


def torchao_config(kind: str, where: str) -> Any:
    """Return the settings of int8, int4 or int8-int4. where: the key or option that names it.
    Raises ConfigError without torchao."""
    try:
        from torchao import quantization
        from torchao.quantization.granularity import PerGroup
    except ImportError as error:
        raise ConfigError(
            f"{kind} weights need the package torchao, and the import ended: {error}",
            where=where,
            remedy="install it on this node with pip install 'holdfast[fp8]'",
        ) from error
    if kind == "int8":
        return quantization.Int8WeightOnlyConfig(version=2)
    four_bits: Any = getattr(torch, "int4")  # noqa: B009 - torch's stubs lack it
    if kind == "int4":
        return quantization.IntxWeightOnlyConfig(
            weight_dtype=four_bits, granularity=PerGroup(GROUP)
        )
    assert kind == "int8-int4", kind
    return quantization.Int8DynamicActivationIntxWeightConfig(
        weight_dtype=four_bits, weight_granularity=PerGroup(GROUP)
    )
