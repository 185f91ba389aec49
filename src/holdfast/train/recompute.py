"""Runs blocks again in the backward pass, so that less of their forward pass is kept.

`full` keeps the input of a block alone. `selective` also keeps the results of the products with
weights. So it runs attention, norms and activations again. (Korthikanti et al. 2022, section 5,
runs the core of attention alone again, because no fused kernel was there.) Each operation is run
again with the same values, so the bits of gradients stay.

The wrapper lies inside the module's own call. So FSDP2 has gathered a block's parameters before the
block is run again, and drops them afterwards. Under tp the collectives of the block are run again,
in the same order on each rank. They take the shape of the last forward pass, and all microbatches
of a step have one shape. A compiled block is compiled inside of the wrapper. The compiler therefore
makes the same code as without recomputation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from holdfast.config.train import Recompute

KEPT_OPERATIONS: tuple[Any, ...] = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
"""Operations whose results `selective` keeps: products with the weights, not those of attention."""


def apply_recompute(
    blocks: Sequence[nn.Module], policy: Recompute, *, is_random: bool, is_compiled: bool
) -> None:
    """Change the blocks in place; call it before they are sharded.

    is_random: a block may draw random numbers. The generator's state before each block is kept, and
        is set again while the block is run again.
    is_compiled: compile each block.
    """
    for block in blocks:
        forward = torch.compile(block.forward) if is_compiled else block.forward
        block.forward = _run_again(forward, policy, is_random)


def _run_again(
    forward: Callable[..., Any], policy: Recompute, is_random: bool
) -> Callable[..., Any]:
    from torch.utils import checkpoint

    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": is_random}
    if policy == "selective":
        make: Callable[[list[Any]], Any] = checkpoint.create_selective_checkpoint_contexts
        options["context_fn"] = functools.partial(make, list(KEPT_OPERATIONS))

    @functools.wraps(forward)
    def wrapped(*given: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*given, **named)
        return checkpoint.checkpoint(forward, *given, **options, **named)

    return wrapped
