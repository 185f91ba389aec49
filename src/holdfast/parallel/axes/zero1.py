"""ZeRO-1: each rank of the `dp_shard` axis has all parameters and a part of the optimizer state.

The three stages of ZeRO (Rajbhandari et al., 2020, section 5) are modes of `dp_shard`. The table
shows the bytes that a rank keeps of P parameters over n shards in mixed precision. Those are 2
for the bf16 copy, 4 for the gradient sum, and 12 for the fp32 parameter and two moments. (The
paper calls them K = 12.)

    stage   computed with   gradient sum   optimizer state   from
    1       2 P             4 P            12 P / n          this file and `replicated.py`
    2       2 P             4 P / n        12 P / n          `fsdp.py`, gathered once per leaf
    3       2 U             4 P / n        12 P / n          `fsdp.py`, gathered unit by unit

counted between the forward and the backward of a leaf. U are the units that are gathered just
then; the last one is always among them. FSDP2 keeps no bf16 copy of a shard but casts while it
gathers. So stage 3 holds less than the paper's 2 P / n until a unit is needed. Partial sums of
several leaves (`core/sharding/reduction_tree.py`) and data from other ranks come on top in every
stage.

Here every rank contributes its complete gradient to the sum and receives its rows of it. The cells
of `core/sharding/reduction_cells.py` say which. The rank updates these rows alone; then the rows
are gathered. With one replica and one leaf, a rank sends (n - 1) / n of the model's gradients to
their owners in each step. It receives as much of its parameters from them. In all, that is what an
all-reduce moves.

Stage 2 adds up the parts of each leaf, so it sends the gradients once per leaf. If it adds them up
once per step (`LayoutConfig.shards_add_each`), it sends them as often. Then it needs complete sums,
as stage 1, because parts are added after leaves. So it is made of the same parts as stage 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from holdfast.core.sharding.boxes import Box
from holdfast.core.sharding.sharding_table import chunk_range
from holdfast.errors import PeerLostError
from holdfast.parallel.comm.collectives import Collectives
from holdfast.parallel.comm.comm_stats import TrafficCounter
from holdfast.parallel.gradients.buckets import cut_into_runs
from holdfast.parallel.torch_compat import MakeMemory, is_peer_loss

_DIRECT_GATHER_BYTES = 1 << 16  # bytes from which a parameter is gathered where it lies


def _on_device(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    return [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]


@dataclass(frozen=True)
class GatherPack:
    """Parameters that are gathered together, through a buffer: small or unevenly cut ones.

    parameters: indices. sizes: elements of the largest part of each, which every rank sends.
    """

    parameters: tuple[int, ...]
    sizes: tuple[int, ...]


class OwnedRows:
    """The part that one rank trains of the parameters of its `dp_shard` group.

    named: the complete parameters by name (of what tp and pp left to this rank). boxes: this
        rank's part of each in global coordinates, cut along dim 0 by torch.chunk's rule; may be
        empty.
    `whole`: the boxes of `named`. group: the ranks of the dp_shard axis, in its order.
    state: dtype of what is trained. If the model computes in another, `master_tensors` are copies
        of their own (the fp32 masters); otherwise views of the rows in place.
    make_masters: gives the memory of the fp32 masters; None: on the device.
    Raises ValueError if a box is not the part that this rank's place in the group has.
    """

    def __init__(
        self,
        named: Mapping[str, Tensor],
        whole: Mapping[str, Box],
        boxes: Mapping[str, Box],
        group: dist.ProcessGroup,
        *,
        state: torch.dtype,
        bucket_bytes: int = 1 << 25,
        traffic: TrafficCounter | None = None,
        make_masters: MakeMemory | None = None,
    ):
        self._collectives = Collectives(group, traffic, kind="gather")
        self._size, self._rank = self._collectives.size, self._collectives.rank
        self._tensors = [tensor.data for tensor in named.values()]  # no graph sees their updates
        rows = [self._rows(tensor, self._rank) for tensor in self._tensors]
        for name, part in zip(named, rows, strict=True):
            start = boxes[name].offsets[0] - whole[name].offsets[0]
            due = chunk_range(whole[name].lengths[0], self._size, self._rank)
            if boxes[name].size and (start, boxes[name].lengths[0]) != due:
                raise ValueError(f"{boxes[name]} is not part {self._rank} of {whole[name]}")
            if tuple(part.shape) != boxes[name].lengths:
                raise ValueError(f"{name} is {tuple(part.shape)} here, its box {boxes[name]}")
        self._own_rows = rows
        mixed = self._tensors[0].dtype != state
        self.master_tensors = (
            (make_masters or partial(_on_device, device=self._tensors[0].device))(
                [tuple(part.shape) for part in rows], state
            )
            if mixed
            else rows
        )
        self._direct, indirect = self._split_direct_and_packed()
        shapes = [tuple(self._tensors[i].shape) for i in indirect]
        item = self._tensors[0].element_size()
        self._packs = [
            GatherPack(
                tuple(indirect[i] for i in run), tuple(self._largest_part(indirect[i]) for i in run)
            )
            for run in cut_into_runs(shapes, bucket_bytes, item)
        ]

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the buffer that was sent last, which stays until the next `gather`."""
        if not (self._packs and self._collectives.reports_loss):
            return 0
        return self._size * sum(self._packs[-1].sizes) * self._tensors[0].element_size()

    @torch.no_grad()
    def gather(self) -> None:
        """Bring every rank's rows to all ranks; call after each change of `master_tensors`.
        Collective.

        Raises PeerLostError when a rank of the group is lost: its rows are missing then.
        """
        if self.master_tensors is not self._own_rows:
            torch._foreach_copy_(self._own_rows, self.master_tensors)
        try:
            for index in self._direct:
                self._collectives.all_gather(self._own_rows[index], self._tensors[index])
            for pack in self._packs:
                self._gather_pack(pack)
        except RuntimeError as error:
            if is_peer_loss(error):
                raise PeerLostError(
                    f"a peer was lost while gathering parameters: {error}"
                ) from error
            raise

    def _gather_pack(self, pack: GatherPack) -> None:
        """Through a buffer with one row per rank.  buffer: [ranks, sum of sizes]"""
        first = self._tensors[pack.parameters[0]]
        buffer = first.new_empty(self._size, sum(pack.sizes))
        for index, place in self._places(pack, buffer[self._rank]):
            place[: self._own_rows[index].numel()].copy_(self._own_rows[index].reshape(-1))
        self._collectives.all_gather(buffer[self._rank], buffer.view(-1))
        for rank in range(self._size):
            if rank == self._rank:
                continue
            for index, place in self._places(pack, buffer[rank]):
                rows = self._rows(self._tensors[index], rank)
                rows.copy_(place[: rows.numel()].view(rows.shape))

    def _places(self, pack: GatherPack, row: Tensor) -> Sequence[tuple[int, Tensor]]:
        return list(zip(pack.parameters, torch.split(row, list(pack.sizes)), strict=True))

    def _rows(self, tensor: Tensor, rank: int) -> Tensor:
        start, length = chunk_range(tensor.shape[0], self._size, rank)
        return tensor.narrow(0, start, length)

    def _largest_part(self, index: int) -> int:
        """Elements of the largest part of a parameter."""
        rows, *rest = self._tensors[index].shape
        return -(-rows // self._size) * prod(rest)

    def _split_direct_and_packed(self) -> tuple[list[int], list[int]]:
        """Return the parameters gathered in place, and the rest; empty ones are in neither.

        In place, this rank's rows are a part of the output, and they are its state. So a backend
        that leaves a void output behind gathers none of them so."""
        direct: list[int] = []
        packed: list[int] = []
        for index, tensor in enumerate(self._tensors):
            even = tensor.numel() > 0 and tensor.shape[0] % self._size == 0
            even = even and self._collectives.reports_loss
            if even and tensor.nbytes >= _DIRECT_GATHER_BYTES and tensor.is_contiguous():
                direct.append(index)
            elif tensor.numel():
                packed.append(index)
        return direct, packed
