"""Runs blocks again in the backward pass, so that less of their forward pass is kept.

`full` keeps the input of a block alone. `selective` also keeps the results of some operations:
`OPERATIONS` has their names. With products it runs attention, norms and activations again.
(Korthikanti et al. 2022, section 5, runs the core of attention alone again, because no fused kernel
was there.) Each operation is run again with the same values, so the bits of gradients stay.

The wrapper lies inside the module's own call. So FSDP2 has gathered a block's parameters before the
block is run again, and drops them afterwards. Under tp the collectives of the block are run again,
in the same order on each rank. They take the shape of the last forward pass, and all microbatches
of a step have one shape. A compiled block is compiled inside of the wrapper. The compiler therefore
makes the same code as without recomputation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from holdfast.config.sections.recompute import KeptOperation, RecomputePolicy
from holdfast.parallel.axes.partitioned_input import PartitionedInput

_aten: Any = torch.ops.aten

OPERATIONS: Mapping[KeptOperation, frozenset[Any]] = {
    "matmul": frozenset((_aten.mm.default, _aten.addmm.default)),
    "attention": frozenset(
        (
            _aten._scaled_dot_product_flash_attention_for_cpu.default,
            _aten._scaled_dot_product_flash_attention.default,
            _aten._scaled_dot_product_efficient_attention.default,
            _aten._scaled_dot_product_cudnn_attention.default,
            _aten._scaled_dot_product_fused_attention_overrideable.default,
            _aten._flash_attention_forward.default,
            _aten._efficient_attention_forward.default,
        )
    ),
    "activation": frozenset((_aten.silu.default, _aten.gelu.default)),
}
"""Operations whose results `selective` may keep. matmul: products with the weights, not those of
attention."""


def apply_recompute(
    blocks: Sequence[nn.Module],
    policy: RecomputePolicy,
    *,
    is_random: bool,
    is_compiled: bool,
    partition: PartitionedInput | None = None,
) -> None:
    """Change the blocks in place; call it before they are sharded.

    is_random: a block may draw random numbers. The generator's state before each block is kept, and
        is set again while the block is run again.
    is_compiled: compile each block.
    partition: what cuts the kept input of each block; None to keep all of it.
    """
    for block in blocks:
        forward = torch.compile(block.forward) if is_compiled else block.forward
        block.forward = _run_again(forward, policy, is_random, partition)


def _run_again(
    forward: Callable[..., Any],
    policy: RecomputePolicy,
    is_random: bool,
    partition: PartitionedInput | None,
) -> Callable[..., Any]:
    from torch.utils import checkpoint

    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": is_random}
    if policy.word == "selective":
        make: Callable[[Any], Any] = checkpoint.create_selective_checkpoint_contexts
        operations = frozenset().union(*(OPERATIONS[name] for name in policy.keep))
        options["context_fn"] = functools.partial(make, functools.partial(_choose, operations))

    @functools.wraps(forward)
    def wrapped(*given: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*given, **named)
        cuts: AbstractContextManager[Any] = nullcontext()
        if partition is not None:
            cuts = partition.hooks(given[0])
        with cuts:  # inside of the block, those of the checkpoint take its place
            return checkpoint.checkpoint(forward, *given, **options, **named)

    return wrapped


def _choose(operations: frozenset[Any], _: Any, op: Any, *given: Any, **named: Any) -> Any:
    from torch.utils.checkpoint import CheckpointPolicy

    if op in operations and not drops_out(op, given, named):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def drops_out(op: Any, given: Sequence[Any], named: Mapping[str, Any]) -> bool:
    """Return True if this call of an operation draws random numbers. Its result is not kept: only
    if it is run again are the numbers that are drawn after it the same."""
    names = [argument.name for argument in op._schema.arguments]
    if "dropout_p" not in names:
        return False
    index = names.index("dropout_p")
    return bool(named.get("dropout_p", given[index] if index < len(given) else 0.0))
