"""Which dtype holds the state, and which one the model computes in.

`bf16` is mixed precision as FSDP2 does it. Parameters, moments and every sum of gradients are
float32. A microbatch's forward and backward run in bfloat16 on a copy of the parameters that is
refreshed once per step. No autocast: each operation runs in the dtype of its inputs.
"""

from __future__ import annotations

import os
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


def same_products_on_any_threads() -> None:
    """Call in a worker before its first matrix product.

    MKL cuts a product differently for each number of threads, and a worker has cores / workers of
    them. So on the same machine two workers would end with other bits than one. In its strict mode
    (Conditional Numerical Reproducibility) it does not, at about 2 % of a CPU step. A value that
    the person has set stands. bfloat16 products on a CPU are oneDNN's, which has no such mode.
    """
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
