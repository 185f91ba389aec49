"""Linear layers whose forward pass rounds, by torchao (`quantization.qat`).

The layers keep their names and their weights, in the precision of the run. What an export rounds
(`holdfast export RUN --to FOLDER --quantize int4`) is then what the passes computed with.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from holdfast.config.run import RunConfig
from holdfast.errors import ConfigError
from holdfast.model.quantized_layers import torchao_config
from holdfast.options.protocols import Apply
from holdfast.options.qat.keys import GROUP


def round_units(config: RunConfig, units: Sequence[nn.Module]) -> None:
    """Change the linear layers of the units in place. Raises ConfigError."""
    kind = config.train.qat
    for unit in units:
        for name, layer in unit.named_modules():
            if isinstance(layer, nn.Linear) and layer.in_features % GROUP:
                raise ConfigError(
                    f"train.qat {kind} needs multiples of {GROUP} inputs, and layer {name} has "
                    f"{layer.in_features}",
                    where="train.qat",
                    remedy="use none",
                )
    made = torchao_config(kind, "train.qat")
    from torchao.quantization import quantize_
    from torchao.quantization.qat import QATConfig

    for unit in units:
        quantize_(unit, QATConfig(made, step="prepare"))


APPLY = Apply(units=round_units)
