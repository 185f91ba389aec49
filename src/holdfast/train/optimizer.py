"""AdamW on what this rank holds: plain tensors, the state of which is tensors only.

AdamW's step count is the number of the step being applied, so nothing but the two moments has
to be saved. Matrices decay, vectors do not: the parameter table says which. Dividing by the
global token count and clipping are one scalar, handed to the fused kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.config.train import OptimizerConfig
from holdfast.parallel.torch_compat import fused_adamw


@dataclass(frozen=True)
class _Group:
    """Indices of parameters that share a weight decay."""

    indices: list[int]
    weight_decay: float


class AdamW:
    """Fused AdamW (Loshchilov and Hutter, 2019) with moments in the parameters' own dtype.

    gradients: one view per parameter of the summed, undivided gradient; overwritten by `apply`.
    merges: by index, how a buffer that is no parameter takes its sum (`Parameter.merge`).
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        decays: Sequence[bool],
        config: OptimizerConfig,
        merges: Mapping[int, str] | None = None,
    ):
        self._config = config
        self._parameters, self._gradients = list(parameters), list(gradients)
        self.exp_avg = [torch.zeros_like(p) for p in parameters]
        self.exp_avg_sq = [torch.zeros_like(p) for p in parameters]
        self._merges = dict(merges or {})
        held = [  # a shard may be empty
            i for i, p in enumerate(parameters) if p.numel() and i not in self._merges
        ]
        self._groups = [
            _Group([i for i in held if decays[i]], config.weight_decay),
            _Group([i for i in held if not decays[i]], 0.0),
        ]

    def set_gradients(self, gradients: Sequence[Tensor]) -> None:
        """From now on the gradients lie elsewhere."""
        self._gradients = list(gradients)

    @torch.no_grad()
    def apply(self, step: int, learning_rate: float, divisor: float, microbatches: int = 1) -> None:
        """Update `step`, which had so many microbatches, with gradients divided by `divisor`.

        In float64 the division is done beforehand: the kernel's own divisor is a float32.
        """
        for index, merge in self._merges.items():
            part = 1.0 / microbatches if merge == "mean" else 1.0
            self._parameters[index].add_(self._gradients[index], alpha=part)
        device = self._parameters[0].device
        count = torch.tensor(float(step), dtype=torch.float32, device=device)
        scale: Tensor | None = torch.tensor(divisor, dtype=torch.float32, device=device)
        if self._parameters[0].dtype == torch.float64:
            torch._foreach_div_(self._gradients, divisor)
            scale = None
        for group in self._groups:
            if not group.indices:
                continue
            fused_adamw(
                [self._parameters[i] for i in group.indices],
                [self._gradients[i] for i in group.indices],
                [self.exp_avg[i] for i in group.indices],
                [self.exp_avg_sq[i] for i in group.indices],
                count,
                learning_rate=learning_rate,
                betas=self._config.betas,
                eps=self._config.eps,
                weight_decay=group.weight_decay,
                gradient_scale=scale,
            )
