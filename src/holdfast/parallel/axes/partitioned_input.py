"""Keeps a part of a block's input on each rank of tp, instead of all of it on each.

Without sequence parallelism the input of a block is the same on all ranks of tp, to the bit. If the
block is run again in the backward pass, that input is all that `full` keeps. So each rank keeps its
part. It gathers the rest right before the block is run again. (Megatron-LM calls it
`distribute-saved-activations`, DeepSpeed `partition_activations`: Rajbhandari et al. 2020, section
6.1.) A rank sends (n - 1) / n * T * D elements more for a block.

The gather is one more collective of the backward pass. All ranks run their blocks again in the same
order, so they also gather in the same order.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from holdfast.parallel.comm.collectives import Collectives


@dataclass(frozen=True)
class KeptPart:
    """What a rank keeps of a tensor. values: its part of all elements, in order."""

    values: Tensor
    shape: torch.Size


class PartitionedInput:
    """Cuts and gathers over the ranks of one group."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def hooks(self, x: Tensor) -> AbstractContextManager[Any]:
        """While this is entered, autograd keeps a part of x where it would keep x."""
        address, shape = x.data_ptr(), x.shape  # not x itself: the hooks live as long as the part

        def pack(kept: Tensor) -> Tensor | KeptPart:
            is_input = kept.data_ptr() == address and kept.shape == shape
            return self.cut(kept) if is_input else kept

        def unpack(kept: Tensor | KeptPart) -> Tensor:
            return self.gather(kept) if isinstance(kept, KeptPart) else kept

        return saved_tensors_hooks(pack, unpack)

    def cut(self, x: Tensor) -> KeptPart:
        """This rank's part, a copy. The last parts end in zeros if the ranks do not divide x."""
        flat, size = x.detach().reshape(-1), self._collectives.size
        length = -(-flat.numel() // size)
        part = flat[self._collectives.rank * length :][:length]
        missing = length - part.numel()
        return KeptPart(F.pad(part, (0, missing)) if missing else part.clone(), x.shape)

    @torch.no_grad()
    def gather(self, kept: KeptPart) -> Tensor:
        """All of it. Collective over the group."""
        whole = self._collectives.all_gather(kept.values)
        return whole[: kept.shape.numel()].view(kept.shape)
