"""Plain parameters on one device: hooks that carry each one's gradient into the reducers.

Autograd calls a hook once per parameter and backward pass, when its gradient is complete. The hook
adds it to the current leaf's slot and drops it, so no gradient outlives its use and no `zero_grad`
is needed. Buckets fill in the order of the backward pass and leave while it continues.

Of two sibling leaves the left one is held in `.grad`, and autograd itself adds the right one. That
saves one pass over the gradients. It is not done in mixed precision, where autograd would add in
bfloat16. Nor is it done if the sums do not lie on the device, which has no room for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from holdfast.core.sharding.boxes import Box
from holdfast.core.sharding.reduction_tree import Shares
from holdfast.core.sharding.step_resume import Computed
from holdfast.parallel.gradients.feeder import Cells, GradientFeeder
from holdfast.parallel.gradients.leaf_progress import StageParameters
from holdfast.parallel.gradients.reducer import MakeBuffer


class ReplicatedGradients(GradientFeeder):
    """Feeds reducers from plain parameters: nothing is gathered or scattered around them.

    named: the tensors that the module computes with (bf16 in mixed precision), in forward order;
        one of no elements is legal. boxes: what each is of its global tensor.
    See `GradientFeeder` for the rest. ZeRO-1 needs of the sum its part of the rows only: `wanted`.
    """

    def __init__(
        self,
        named: Mapping[str, Tensor],
        boxes: Mapping[str, Box],
        cells: Cells,
        *,
        dtype: torch.dtype,
        bucket_bytes: int,
        by_unit: bool = False,
        fast: bool = False,
        wanted: Mapping[str, Box] | None = None,
        buffers: MakeBuffer | None = None,
        may_hold_leaf: bool = True,
    ):
        self.parameters = list(named.values())
        for name, parameter in named.items():
            if tuple(parameter.shape) != boxes[name].lengths:
                raise ValueError(f"{name} is {tuple(parameter.shape)}, its box {boxes[name]}")
        first = self.parameters[0]
        super().__init__(
            {name: boxes[name] for name in named},
            cells,
            dtype=dtype,
            device=first.device,
            bucket_bytes=bucket_bytes,
            by_unit=by_unit,
            fast=fast,
            wanted=wanted,
            pairs=may_hold_leaf and first.dtype == dtype,
            buffers=buffers,
        )
        self._index_of = {id(p): index for index, p in enumerate(self.parameters)}
        for index, parameter in enumerate(self.parameters):
            if not parameter.requires_grad:
                continue  # a frozen one: its gradient counts as zero
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                self._hook(index)
            )

    def begin(self, leaves: int, shares: Shares, computed: Computed = ()) -> None:
        """Start a step, see `GradientFeeder.begin`. One that was given up between two sibling
        leaves left the first in `.grad`, where it would be added to this step's."""
        self._is_listening = False
        for parameter in self.parameters:
            parameter.grad = None
        super().begin(leaves, shares, computed)

    def start_leaf(self, leaf: int, part: StageParameters | None = None) -> None:
        """The next backward pass belongs to `leaf`, see `GradientFeeder.start_leaf`."""
        if self._open_slot(leaf, 1 if part is None else part.stages) is not None:
            held = self.parameters if part is None else part.parameters
            self._missing_parameters = {self._index_of[id(p)] for p in held}
            self._is_listening = True

    def give(self, parameter: Tensor, gradient: Tensor) -> None:
        """Add to a parameter's gradient of the open leaf what no backward pass of autograd does."""
        index, held = self._index_of[id(parameter)], parameter.grad
        parameter.grad = gradient if held is None else held + gradient
        if self._is_listening:
            self._missing_parameters.discard(index)
            self._take_gradient(index, parameter)

    def fill_leaf(self, leaf: int, gradients: Sequence[Tensor]) -> None:
        """A complete leaf that no backward pass gave: one tensor for each parameter."""
        self._open_slot(leaf)
        for index, gradient in enumerate(gradients):
            self._take(index, gradient)
        self._progress.close()

    def end_leaf(self) -> None:
        """The backward pass is over. Parameters without a gradient count as zero."""
        if self._is_listening:
            self._is_listening = False
            for index in self._missing_parameters:
                self._take_gradient(index, self.parameters[index])
        self._progress.close()

    def _flush_held_leaf(self, target: list[list[Tensor]]) -> None:
        for index, parameter in enumerate(self.parameters):
            gradient, parameter.grad = parameter.grad, None
            for patch, place in zip(self.placement.patches[index], target[index], strict=True):
                if gradient is None:
                    place.zero_()
                else:
                    place.copy_(patch.of(gradient))
