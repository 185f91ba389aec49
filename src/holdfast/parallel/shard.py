"""The `dp_shard` axis: FSDP2 inside a replica, its buckets summed over replicas by the reducer.

Each block is one FSDP2 unit, the root takes what is left. Its reduce-scatter adds up the parts
of a logical microbatch over the shards; the flat result, which the all-reduce hook is given, is
a ready bucket of this shard's gradient. Replicas of one sharding therefore sum the same buckets
in the same tree and are bit-equal for any number of them.

The reduce-scatter is our own: an all-to-all and a sum in shard order. gloo's moves twice the
bytes; and where a leaf replaces what its slot holds, the sum is written straight into the slot.

Gradients are sums, so FSDP2's own division is switched off. Its sharded `.grad` is dropped after
each microbatch, or FSDP2 would go on adding in sequence; the optimizer reads the reducer's
buffer instead, through the same offsets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from holdfast.parallel.buckets import FlatLayout
from holdfast.parallel.reducer import Reducer
from holdfast.parallel.torch_compat import ShardedParameter, fsdp_group
from holdfast.parallel.transport import Peers


def apply_fsdp(
    root: nn.Module, blocks: Sequence[nn.Module], mesh: DeviceMesh, compute: torch.dtype | None,
    zero: int = 3,
) -> None:  # fmt: skip
    """Shard `root` over the mesh in place: each of `blocks` as a unit, the rest as the last one.

    compute: dtype of parameters in the forward and backward (bf16 in mixed precision); None: as
        they are. They stay in their own dtype between steps, and so does the reduction. Inputs
        are not cast, so that the rotary tables keep their precision.
    zero: 3 shards parameters between forward and backward too; 2 gathers them once for both
        (Rajbhandari et al., 2020, section 5: stages of ZeRO). State is sharded alike.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=compute,
        reduce_dtype=None if compute is None else torch.float32,
        cast_forward_inputs=False,
    )
    again = None if zero == 3 else False  # None: all but the root, which the backward begins with
    for module in (*blocks, root):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=again)
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


class ShardedGradients:
    """Feeds a Reducer from the units of a module that `apply_fsdp` sharded."""

    def __init__(
        self, root: nn.Module, blocks: Sequence[nn.Module], peers: Peers, *,
        dtype: torch.dtype, fast: bool = False,
    ):  # fmt: skip
        units = [m for m in (*reversed(blocks), root) if fsdp_group(m)]
        self._members: list[tuple[ShardedParameter, ...]] = [fsdp_group(m) for m in units]
        self._parameters = list(root.parameters())
        # A unit is one slice: FSDP2 packs its parameters without gaps.
        sizes = [sum(member.flat_size for member in members) for members in self._members]
        layout = FlatLayout.build([[(size,)] for size in sizes])
        self.reducer = Reducer(
            layout, peers, dtype=dtype, device=local(self._parameters[0]).device, fast=fast
        )
        self._target: Tensor | None = None
        self._accumulate = False
        self._missing: set[int] = set()
        for index, unit in enumerate(units):
            assert isinstance(unit, FSDPModule)
            unit.set_all_reduce_hook(self._hook(index))
            scatter: Any = SumInOrder(sizes[index], self._slot_of(index))
            unit.set_custom_reduce_scatter(scatter)

    def start_leaf(self, leaf: int) -> None:
        """The next backward pass belongs to `leaf`."""
        self._target = self.reducer.slot(self.reducer.start_leaf(leaf))
        self._accumulate = self.reducer.accumulate
        self._missing = set(range(len(self._members)))

    def end_leaf(self) -> None:
        """The backward pass is over: drop FSDP2's own gradients."""
        if self._missing and self._target is not None:
            self.reducer.fail(RuntimeError(f"units {sorted(self._missing)} gave no gradient"))
        self._target = None
        for parameter in self._parameters:
            parameter.grad = None

    def gradients(self) -> list[Tensor]:
        """Views of this shard's summed gradient, one per parameter of the root, in its order."""
        views: dict[int, Tensor] = {}
        for members, unit in zip(self._members, self.reducer.layout.slices, strict=True):
            at = unit.start
            for member in members:
                shard = local(member.parameter)
                flat = self.reducer.gradient[at : at + shard.numel()]
                views[id(member.parameter)] = flat.view(shard.shape)
                at += member.flat_size
        return [views[id(parameter)] for parameter in self._parameters]

    def _slot_of(self, index: int) -> Callable[[], Tensor | None]:
        def slot() -> Tensor | None:
            if self._target is None or self._accumulate:
                return None
            return self.reducer.layout.slices[index].view(self._target)

        return slot

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        def take(output: Tensor) -> None:
            if self._target is None:
                return
            try:
                part = self.reducer.layout.slices[index].view(self._target)
                if output.numel() != part.numel():
                    raise RuntimeError(
                        f"unit {index} gave {output.numel()} elements, {part.numel()} are due"
                    )
                if self._accumulate:
                    part.add_(output)
                elif part.data_ptr() != output.data_ptr():
                    part.copy_(output)
                self._missing.discard(index)
                self.reducer.done(index)
            except Exception as error:  # raised by check(), not inside the backward
                self.reducer.fail(error)

        return take


class SumInOrder:
    """FSDP2's reduce-scatter of one unit (`fully_shard`'s custom communication interface).

    output_size: elements of the result. slot: where the result may be written, or None.
    """

    def __init__(self, output_size: int, slot: Callable[[], Tensor | None]):
        self._output_size, self._slot = output_size, slot

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for the input (all shards' parts) or the output (this shard's sum)."""
        slot = self._slot() if prod(size) == self._output_size else None
        if slot is not None and slot.dtype == dtype:
            return slot
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any,
        async_op: bool = False,
    ) -> None:  # fmt: skip
        """output: [n]; input: [shards * n], the parts of all shards one after another."""
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        first, second, *rest = received.view(group.size(), -1)
        torch.add(first, second, out=output_tensor)
        for part in rest:
            output_tensor.add_(part)


def local(tensor: Tensor) -> Tensor:
    """What this rank holds: the local part of a DTensor, a plain tensor as it is."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()
