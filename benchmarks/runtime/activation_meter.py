"""Counts the bytes that forward passes leave on a device for their backward passes, exactly.

The meter notes the memory of each tensor that a forward pass makes, and whether it still exists
when the pass ends. So it counts what autograd keeps, what recomputation keeps, and a block's input
alike, each memory once. Parameters, buffers and gathered parameters are not counted, as they exist
before the pass. Nor are gradients that wait in `.grad`. Run one step before: what a process makes
once (angles, buffers of FSDP2) is then there. A buffer of one gathered block, which FSDP2 may hold
longer than the pass, is counted.

It looks at each operation (`tensor_account.py`), which makes a pass slower.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from holdfast.training.memory.tensor_account import TensorAccount, plain_tensors


class ActivationMeter:
    """Watches one objective until `close`.

    peak: most bytes that existed when a forward pass ended. after_first: those after the first
    one, so of one microbatch.
    """

    def __init__(self, objective: nn.Module) -> None:
        self.peak = self.after_first = 0
        self._objective = objective
        self._memories = TensorAccount()
        self._watch: AbstractContextManager[Any] = self._memories
        before = objective.register_forward_pre_hook(self._enter, with_kwargs=True)
        after = objective.register_forward_hook(self._leave, always_call=True)
        self._handles = (before, after)

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def live_bytes(self) -> int:
        """Bytes that exist now."""
        return self._memories.live_bytes()

    def _enter(self, _: nn.Module, given: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        for tensor in plain_tensors((given, named)):
            if tensor.requires_grad:  # comes from the stage before
                self._memories.add(tensor)
        self._watch.__enter__()

    def _leave(self, _: nn.Module, given: Any, output: Any) -> None:
        self._watch.__exit__(None, None, None)
        held = (p.grad for p in self._objective.parameters())
        live = self._memories.live_bytes(without=plain_tensors(list(held)))
        self.peak = max(self.peak, live)
        self.after_first = self.after_first or live
