"""A replica on one device: hooks that carry each parameter's gradient into the reducer.

Autograd calls a hook once per parameter and backward pass, when its gradient is complete. The
hook adds it to the current leaf's slot and drops it, so no gradient outlives its use and no
`zero_grad` is needed. Buckets fill in the order of the backward pass and leave while it goes on.

Of two sibling leaves the left one is held in `.grad`, where autograd itself adds the right one:
that is one pass over the gradients less. Not in mixed precision, where it would add in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from holdfast.parallel.buckets import FlatLayout, fill
from holdfast.parallel.reducer import Reducer, Slot
from holdfast.parallel.transport import Peers


class ReplicatedGradients:
    """Feeds a Reducer from the parameters of an unsharded module.

    parameters: the tensors that the module computes with (bf16 in mixed precision), in forward
        order. Gradients are summed in `dtype`, whatever theirs is.
    """

    def __init__(
        self, parameters: Sequence[Tensor], peers: Peers, *, dtype: torch.dtype,
        bucket_bytes: int, fast: bool = False,
    ):  # fmt: skip
        self._parameters = list(reversed(parameters))
        shapes = [tuple(p.shape) for p in self._parameters]
        groups = fill(shapes, bucket_bytes, dtype.itemsize)
        layout = FlatLayout.build([[shapes[i] for i in group] for group in groups])
        self.reducer = Reducer(
            layout, peers, dtype=dtype, device=self._parameters[0].device, fast=fast,
            pairs=self._parameters[0].dtype == dtype,
        )  # fmt: skip
        self._bucket_of = [b for b, group in enumerate(groups) for _ in group]
        self._members = [set(group) for group in groups]
        self._missing: list[set[int]] = []
        self._views: dict[Slot, list[Tensor]] = {}
        self._target: list[Tensor] = []
        self._accumulate = False
        self._listening = False
        for index, parameter in enumerate(self._parameters):
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                self._hook(index)
            )

    def start_leaf(self, leaf: int) -> None:
        """The next backward pass belongs to `leaf`."""
        slot = self.reducer.start_leaf(leaf)
        if self.reducer.hold:
            return
        if slot not in self._views:
            flat = self.reducer.slot(slot)
            self._views[slot] = [piece.view(flat) for piece in self.reducer.layout.slices]
        self._target, self._accumulate = self._views[slot], self.reducer.accumulate
        self._missing = [set(members) for members in self._members]
        self._listening = True

    def end_leaf(self) -> None:
        """The backward pass is over. Parameters without a gradient count as zero."""
        if not self._listening:
            return
        self._listening = False
        for bucket, missing in enumerate(self._missing):
            for index in missing:
                self._take(index, self._parameters[index])
            if missing:
                self._done(bucket)

    def gradients(self) -> list[Tensor]:
        """Views of the summed gradient, one per parameter, in forward order."""
        flat = self.reducer.gradient
        return [piece.view(flat) for piece in reversed(self.reducer.layout.slices)]

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        bucket = self._bucket_of[index]

        def listen(parameter: Tensor) -> None:
            if not self._listening:
                return
            self._take(index, parameter)
            missing = self._missing[bucket]
            missing.discard(index)
            if not missing:
                self._done(bucket)

        return listen

    def _take(self, index: int, parameter: Tensor) -> None:
        """Move one gradient into the current slot."""
        gradient, parameter.grad = parameter.grad, None
        target = self._target[index]
        if gradient is None:
            if not self._accumulate:
                target.zero_()
        elif self._accumulate:
            target.add_(gradient)
        else:
            target.copy_(gradient)

    def _done(self, bucket: int) -> None:
        try:
            self.reducer.done(bucket)
        except Exception as error:  # raised by check(), not inside the backward
            self.reducer.fail(error)
