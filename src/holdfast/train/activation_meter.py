"""Counts the bytes that forward passes leave on a device for their backward passes, exactly.

The meter notes the memory of each tensor that a forward pass makes, and whether it still exists
when the pass ends. So it counts what autograd keeps, what recomputation keeps, and a block's input
alike, each memory once. Parameters, buffers and gathered parameters are not counted, as they exist
before the pass. Nor are gradients that wait in `.grad`. Run one step before: what a process makes
once (angles, buffers of FSDP2) is then there. A buffer of one gathered block, which FSDP2 may hold
longer than the pass, is counted.

It looks at each operation, which makes a pass slower. Compiled code runs without the compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class ActivationMeter:
    """Watches one objective until `close`.

    peak: most bytes that existed when a forward pass ended. after_first: those after the first
    one, so of one microbatch.
    """

    def __init__(self, objective: nn.Module) -> None:
        self.peak = self.after_first = 0
        self._objective = objective
        self._memories = _Memories()
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
        for tensor in _tensors((given, named)):
            if tensor.requires_grad:  # comes from the stage before
                self._memories.add(tensor)
        self._watch.__enter__()

    def _leave(self, _: nn.Module, given: Any, output: Any) -> None:
        self._watch.__exit__(None, None, None)
        held = (p.grad for p in self._objective.parameters())
        live = self._memories.live_bytes(without=_tensors(list(held)))
        self.peak = max(self.peak, live)
        self.after_first = self.after_first or live


class _Memories(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The memory of tensors that operations made while this is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sizes: dict[int, tuple[Any, int]] = {}

    def add(self, tensor: Tensor) -> None:
        """Count the memory of a tensor, for as long as it exists."""
        storage = tensor.untyped_storage()
        reference: Any = _weak_reference(storage)
        self._sizes.setdefault(reference.cdata, (reference, storage.nbytes()))

    def live_bytes(self, without: Iterable[Tensor] = ()) -> int:
        """Bytes of those that exist still, but for these tensors."""
        self._sizes = {key: kept for key, kept in self._sizes.items() if not kept[0].expired()}
        left_out = {tensor.untyped_storage()._cdata for tensor in without}
        return sum(size for key, (_, size) in self._sizes.items() if key not in left_out)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        known = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
        output = func(*args, **(kwargs or {}))
        for tensor in _tensors(output):
            if tensor.untyped_storage()._cdata not in known:
                self.add(tensor)
        return output


_weak_reference: Callable[[torch.UntypedStorage], Any] = StorageWeakRef


def _tensors(values: Any) -> Iterator[Tensor]:
    """The plain tensors in it: those of a subclass have no memory of their own."""
    return (t for t in tree_leaves(values) if type(t) in (Tensor, nn.Parameter))
