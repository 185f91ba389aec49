"""Which dtype holds the state, and which one the model computes in.

`bf16` is mixed precision as FSDP2 does it. Parameters, moments and every sum of gradients are
float32. A microbatch's forward and backward run in bfloat16 on a copy of the parameters that is
refreshed once per step. No autocast: each operation runs in the dtype of its inputs. `fp16` is the
same in float16, with a scaled loss (`loss_scale.py`). `fp8` is `bf16` with float8 products in the
blocks (`float8.py`).
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.errors import ConfigError


@dataclass(frozen=True)
class Precision:
    """`state` for parameters, moments and reduction; `compute` for forward and backward.

    has_float8: the blocks' products with weights are of float8 copies of both factors.
    """

    state: torch.dtype
    compute: torch.dtype
    has_float8: bool = False

    @property
    def mixed(self) -> bool:
        return self.state != self.compute

    @property
    def scales_loss(self) -> bool:
        """Return True if gradients would leave the range of the dtype without a scale."""
        return self.compute == torch.float16

    @staticmethod
    def of(name: str) -> Precision:
        """The precision named in `train.precision`. Raises KeyError for an unknown name."""
        return _TABLE[name]


_TABLE = {
    "fp32": Precision(torch.float32, torch.float32),
    "float64": Precision(torch.float64, torch.float64),
    "bf16": Precision(torch.float32, torch.bfloat16),
    "fp16": Precision(torch.float32, torch.float16),
    "fp8": Precision(torch.float32, torch.bfloat16, has_float8=True),
}


def same_products_on_any_threads() -> None:
    """Call in a worker before its first matrix product.

    MKL cuts a product differently for each number of threads, and a worker has cores / workers of
    them. So on the same machine two workers would end with other bits than one. In its strict mode
    (Conditional Numerical Reproducibility) it does not, at about 2 % of a CPU step. A value that
    the person has set stands. bfloat16 products on a CPU are oneDNN's, which has no such mode.
    """
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")


def same_kernels_each_time(*, compiled: bool) -> None:
    """Call in a worker of an accelerator before it touches the device.

    Some kernels there add in the order in which their threads come: the backward pass of fused
    attention is one. torch then takes another kernel. The compiler tries no kernels out, because
    its choice would depend on the machine's load. cuBLAS gets a workspace of a fixed size, unless
    the person has set one. torch would also fill new memory with NaN, which only costs time.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ["TORCHINDUCTOR_DETERMINISTIC"] = "1"  # for a model that calls the compiler itself
    if compiled or "torch._inductor.config" in sys.modules:
        torch.use_deterministic_algorithms(True)
    else:  # the same, without an import of the compiler, which takes seconds
        torch.set_deterministic_debug_mode("error")
    settings: Any = torch.utils.deterministic
    settings.fill_uninitialized_memory = False


def as_indeterminate(error: BaseException) -> ConfigError | None:
    """Return the sentence for a kernel that torch refuses since `same_kernels_each_time`, or None
    for any other error."""
    found = re.search(r"(\S+) does not have a deterministic implementation", str(error))
    if found is None or not isinstance(error, RuntimeError):
        return None
    return ConfigError(
        f"{found[1]} gives other bits each time on this device",
        where="train.deterministic",
        remedy="use train.deterministic=false, or another operation in the model",
    )
