"""Which dtype holds the state, and which one the model computes in.

`bf16` is mixed precision as FSDP2 does it: parameters, moments and every sum of gradients are
float32; a microbatch's forward and backward run in bfloat16 on a copy of the parameters that is
refreshed once per step. No autocast: each operation runs in the dtype of its inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Precision:
    """`state` for parameters, moments and reduction; `compute` for forward and backward."""

    state: torch.dtype
    compute: torch.dtype

    @property
    def mixed(self) -> bool:
        return self.state != self.compute

    @staticmethod
    def of(name: str) -> Precision:
        """The precision named in `train.precision`. Raises KeyError for an unknown name."""
        return _TABLE[name]


_TABLE = {
    "fp32": Precision(torch.float32, torch.float32),
    "float64": Precision(torch.float64, torch.float64),
    "bf16": Precision(torch.float32, torch.bfloat16),
}
