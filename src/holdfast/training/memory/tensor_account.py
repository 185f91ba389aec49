"""An exact account of the bytes of tensors on a device, through a step.

While it is entered, it notes the memory of each tensor that an operation makes, once, whatever
views there are of it. After each operation it adds up what still exists. Enter it before the engine
is built: then parameters, gradients, optimizer states, gathered parameters, messages and
activations are all in it. A CPU's tensors are accounted as those of a device are, so the memory of
a run can be tested without one.

Not seen are an operation's own temporary memory, and what other threads allocate: `add` takes that.
It looks at each operation, which makes a step slower. Compiled code runs without the compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from holdfast.config.sections.memory import DEVICE
from holdfast.training.memory.places import StateMemory


class TensorAccount(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of the tensors that operations made while this is entered.

    peak: most bytes that existed after an operation, since `reset_peak`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._references: dict[int, Any] = {}

    def add(self, tensor: Tensor) -> None:
        """Count the memory of a tensor, for as long as it exists."""
        if tensor.device.type != "meta":
            reference: Any = _weak_reference(tensor.untyped_storage())
            self._references.setdefault(reference.cdata, reference)

    def reset_peak(self) -> None:
        """Begin another peak with what exists now."""
        self.peak = self.live_bytes()

    def live_bytes(self, without: Iterable[Tensor] = ()) -> int:
        """Bytes of those that exist still, but for these tensors. A memory may have been resized
        since it was made: FSDP2 does that with what it gathers."""
        left_out = {tensor.untyped_storage()._cdata for tensor in without}
        total = 0
        for key, reference in list(self._references.items()):
            if reference.expired():
                del self._references[key]
            elif key not in left_out:
                total += _open(key).nbytes()
        return total

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        known = {t.untyped_storage()._cdata for t in plain_tensors((args, kwargs))}
        output = func(*args, **(kwargs or {}))
        for tensor in plain_tensors(output):
            if tensor.untyped_storage()._cdata not in known:
                self.add(tensor)
        self.peak = max(self.peak, self.live_bytes())
        return output


_weak_reference: Callable[[torch.UntypedStorage], Any] = StorageWeakRef
_open: Callable[[int], torch.UntypedStorage] = torch.UntypedStorage._new_with_weak_ptr


def plain_tensors(values: Any) -> Iterator[Tensor]:
    """The plain tensors in it: those of a subclass have no memory of their own."""
    return (t for t in tree_leaves(values) if type(t) in (Tensor, nn.Parameter))


class PassMeter:
    """Ends the run if passes need more of the device than its limit.

    On an accelerator its allocator tells the peak. On a CPU tensors are counted, which makes a step
    slower. So passes are metered only if there is a limit. What a script's own thread computes, and
    what is compiled on a CPU, is not counted.
    """

    def __init__(self, memory: StateMemory) -> None:
        self._memory = memory
        self._account = TensorAccount()  # one for all steps: FSDP2 keeps what it gathers into

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Run passes inside. Raises StateMemoryError at the end if they needed too much."""
        device = self._memory.device
        if device.type == "cpu":
            self._account.reset_peak()
            with self._account:
                yield
            nbytes = self._account.peak
        else:
            before = int(torch.accelerator.memory_allocated(device))
            torch.accelerator.reset_peak_memory_stats(device)
            yield
            nbytes = max(0, int(torch.accelerator.max_memory_allocated(device)) - before)
        with self._memory.ledger.held(DEVICE, "activations", nbytes):
            return
