"""The `dp_shard` axis: FSDP2 inside a replica, its units summed over replicas by the reducer.

Each block is one FSDP2 unit, and the root takes the rest. On a pipeline stage that is the
embedding, or the last norm and the head, or nothing. A unit's reduce-scatter adds up the parts of
a logical microbatch over the shards. The flat result, which the all-reduce hook is given, is this
shard's gradient of the unit. Replicas of one sharding therefore sum the same buckets in the same
tree and are bit-equal for any number of them.

The reduce-scatter is our own: an all-to-all and a sum in shard order. gloo's moves twice the bytes.
If a leaf replaces its slot's content, and the unit is in one cell as FSDP2 packs it, the sum is
written into the slot directly.

Gradients are sums, so FSDP2's own division is switched off. Its sharded `.grad` is dropped after
each microbatch, because FSDP2 would continue to add in sequence. The optimizer reads the reducer's
buffer instead, through the same offsets. A unit's `.grad` is dropped when the next unit is reduced:
all of them at once would be a second copy of the rank's gradients.

Under ZeRO 2 parameters are gathered once a step: they stay until the sum of the step is wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from holdfast.core.sharding.boxes import Box
from holdfast.core.sharding.reduction_tree import Shares
from holdfast.core.sharding.step_resume import Computed
from holdfast.parallel.comm.comm_stats import TrafficCounter, waiting
from holdfast.parallel.gradients.buckets import Slot
from holdfast.parallel.gradients.feeder import Cells, GradientFeeder
from holdfast.parallel.gradients.leaf_progress import StageParameters
from holdfast.parallel.gradients.reducer import MakeBuffer
from holdfast.parallel.torch_compat import (
    ShardedParameter,
    fsdp_parameters,
    gather_parts,
    is_plain,
    local_tensor,
)


class Code(Protocol):
    """Packs rows of some parameters' parts into bytes, and unpacks them."""

    def pack(self, rows: Tensor) -> Tensor: ...
    def unpack(self, packed: Tensor, out: Tensor) -> None: ...


MakeCode = Callable[[Sequence[int]], Code]
"""sizes of the parts -> their code"""
ShardCodes = tuple[MakeCode | None, MakeCode | None]
"""Of parameters, and of gradients. None: numbers are sent."""
NO_CODES: ShardCodes = (None, None)


def apply_fsdp(
    root: nn.Module,
    blocks: Sequence[nn.Module],
    mesh: DeviceMesh,
    compute: torch.dtype | None,
    zero: int = 3,
    *,
    is_offloaded: bool = False,
    unshared: Collection[nn.Parameter] = (),
) -> None:
    """Shard `root` over the mesh in place: each of `blocks` as a unit, the rest as the last one.

    compute: dtype of parameters in the forward and backward (bf16 in mixed precision); None: as
        they are. They stay in their own dtype between steps, and so does the reduction. Inputs
        are not cast, so that the rotary tables keep their precision.
    zero: 3 shards parameters between forward and backward too; 2 gathers them once a step
        (Rajbhandari et al., 2020, section 5: stages of ZeRO). State is sharded alike.
    is_offloaded: shards lie on the host, and each unit is gathered on the device.
    unshared: stay as they are. This rank alone computes with them.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=compute,
        reduce_dtype=None if compute is None else torch.float32,
        cast_forward_inputs=False,
    )
    again = None if zero == 3 else False  # None: all but the root, which the backward begins with
    nothing = {p for p in root.parameters() if p.numel() == 0} | set(unshared)  # has no shards
    for module in (*blocks, root):
        fully_shard(
            module,
            mesh=mesh,
            mp_policy=policy,
            reshard_after_forward=again,
            ignored_params=nothing,
            offload_policy=CPUOffloadPolicy(pin_memory=False) if is_offloaded else OffloadPolicy(),
        )
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        module.set_reshard_after_backward(zero == 3, recurse=False)


@dataclass(frozen=True)
class FsdpUnit:
    """The unit that FSDP2 reduces: a flat output of `size` elements.

    placements: (index of the parameter, its first element) in the output's order. cell_run: (cell,
    first element) if all of it lies in one cell's buffer just as FSDP2 packs it. None: it is copied
    box by box, because it is padded, or unaligned, or another replica is cut differently.
    """

    size: int
    placements: tuple[tuple[int, int], ...]
    cell_run: tuple[int, int] | None


class ShardedGradients(GradientFeeder):
    """Feeds reducers from the units of a module that `apply_fsdp` sharded.

    named: the parameters by name in forward order: what FSDP2 made of them, or plain ones that no
        other shard has. boxes: what this rank holds of each. traffic: counts FSDP2's own
        collectives.
    are_sums_here: the sums lie on the device, so FSDP2 may write to them.
    codes: what shards send each other; a code that is None: they send numbers.
    See `GradientFeeder` for the rest.
    """

    def __init__(
        self,
        root: nn.Module,
        named: Mapping[str, Tensor],
        boxes: Mapping[str, Box],
        cells: Cells,
        *,
        dtype: torch.dtype,
        fast: bool = False,
        traffic: TrafficCounter | None = None,
        buffers: MakeBuffer | None = None,
        are_sums_here: bool = True,
        codes: ShardCodes = NO_CODES,
    ):
        self._parameters = list(named.values())
        self._codes = codes
        super().__init__(
            {name: boxes[name] for name in named},
            cells,
            dtype=dtype,
            by_unit=True,
            fast=fast,
            device=local_tensor(self._parameters[0]).device,
            bucket_bytes=0,
            buffers=buffers,
        )
        self._units: list[FsdpUnit] = []
        self._modules: list[FSDPModule] = []
        self._slot: Slot | None = None
        self._are_sums_here = are_sums_here
        self._stored_units: list[FsdpUnit] = []  # FSDP2 has their sums in `.grad` still
        self._missing_units: set[int] = set()
        index_of = {id(parameter): i for i, parameter in enumerate(self._parameters)}
        self._plain = [i for i, p in enumerate(self._parameters) if is_plain(p) and p.numel()]
        for index in self._plain:
            parameter = self._parameters[index]
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                self._hook(index)
            )
        for module in root.modules():
            members = fsdp_parameters(module) if isinstance(module, FSDPModule) else ()
            if isinstance(module, FSDPModule) and members:
                number = len(self._units)
                self._modules.append(module)
                self._units.append(self._make_unit(members, index_of))
                sizes = [member.flat_size for member in members]
                self._install_hooks(module, number, sizes, traffic)

    def begin(self, leaves: int, shares: Shares, computed: Computed = ()) -> None:
        """Start a step, see `GradientFeeder.begin`. What is still gathered, for an evaluation or a
        step that was given up, may be older than the shards."""
        self._drop_gathered()
        super().begin(leaves, shares, computed)

    def finish(self) -> None:
        """Return when `gradients` hold the full sum, see `GradientFeeder.finish`."""
        self._drop_gathered()
        super().finish()

    def _drop_gathered(self) -> None:
        for module in self._modules:
            module.reshard()

    def start_leaf(self, leaf: int, part: StageParameters | None = None) -> None:
        """The next backward pass belongs to `leaf`. A part cannot be told apart from the rest."""
        assert part is None, "the run file's rules refuse stages of a rank with ZeRO 2 and 3"
        self._slot = self._open_slot(leaf)
        self._is_listening = self._slot is not None
        self._missing_units = set(range(len(self._units)))
        self._missing_parameters = set(self._plain)

    def end_leaf(self) -> None:
        """The backward pass is over. Take what units without all of their gradients have, and drop
        FSDP2's own gradients."""
        if self._slot is not None:
            for number in sorted(self._missing_units):
                self._store_partial_unit(self._units[number])
            for index in sorted(self._missing_parameters):
                self._take(index, None)
        self._progress.close()
        self._slot, self._is_listening = None, False
        self._stored_units.clear()
        for parameter in self._parameters:
            parameter.grad = None

    def _make_unit(
        self, members: Sequence[ShardedParameter], index_of: Mapping[int, int]
    ) -> FsdpUnit:
        places: list[tuple[int, int]] = []
        at, starts = 0, set[tuple[int, int] | None]()
        for member in members:
            index = index_of[id(member.parameter)]
            places.append((index, at))
            starts.add(self._unit_start(index, at, member.flat_size))
            at += member.flat_size
        return FsdpUnit(at, tuple(places), starts.pop() if len(starts) == 1 else None)

    def _unit_start(self, index: int, at: int, flat_size: int) -> tuple[int, int] | None:
        """Return (cell, place) at which a unit begins, if this member of it, `at` elements further
        on, lies in that cell's buffer complete and unpadded."""
        patches = self.placement.patches[index]
        if len(patches) != 1 or patches[0].region is not None:
            return None
        piece = self.reducers[patches[0].cell].layout.slices[patches[0].slice_index]
        return (patches[0].cell, piece.start - at) if piece.size == flat_size else None

    def _install_hooks(
        self, module: Any, number: int, sizes: Sequence[int], traffic: TrafficCounter | None
    ) -> None:
        """Put our own parts into a unit's communication. sizes: of its parameters' parts."""
        unit = self._units[number]
        weight_code, gradient_code = (make and make(sizes) for make in self._codes)
        module.set_all_reduce_hook(self._unit_hook(number))
        module.set_custom_reduce_scatter(
            OrderedReduceScatter(
                unit.size,
                lambda: self._direct_output(unit),
                traffic,
                self._drop_stored,
                gradient_code,
            )
        )
        if traffic is not None or weight_code is not None:
            module.set_custom_all_gather(CountedGather(traffic, weight_code))

    def _direct_output(self, unit: FsdpUnit) -> Tensor | None:
        """Return the slot's place that FSDP2 may write a unit's sum to, if that is replaced."""
        if self._slot is None or self.accumulates or not self._are_sums_here:
            return None
        return self._slot_view(unit)

    def _drop_stored(self) -> None:
        """Drop the gradients that FSDP2 has of units whose sums are in the slot."""
        for unit in self._stored_units:
            for index, _ in unit.placements:
                self._parameters[index].grad = None
        self._stored_units.clear()

    def _slot_view(self, unit: FsdpUnit) -> Tensor | None:
        if self._slot is None or unit.cell_run is None:
            return None
        cell, start = unit.cell_run
        return self.reducers[cell].slot(self._slot).narrow(0, start, unit.size)

    def _unit_hook(self, number: int) -> Callable[[Tensor], None]:
        unit = self._units[number]

        def take(output: Tensor) -> None:
            if self._slot is None:
                return
            if output.numel() != unit.size:
                return  # FSDP2 leaves out parameters without a gradient: `end_leaf` takes the rest
            try:
                self._missing_units.discard(number)
                self._store_output(unit, output)
                if output.device.type != "cpu":  # this stream is not the one it was made on
                    output.record_stream(torch.accelerator.current_stream(output.device))
                self._stored_units.append(unit)
            except Exception as error:  # raised by check(), not inside the backward
                self.fail(error)

        return take

    def _store_output(self, unit: FsdpUnit, output: Tensor) -> None:
        """Move a unit's sum into the current slot.  output: [unit.size]"""
        place = self._slot_view(unit)
        if place is not None:
            if self.accumulates:
                place.add_(output.to(place.device))
            elif place.data_ptr() != output.data_ptr():
                place.copy_(output)
        for index, at in unit.placements:
            if place is None:
                shard = local_tensor(self._parameters[index])
                self._take(index, output[at : at + shard.numel()].view(shard.shape))
            else:
                self._on_slices_filled(index)

    def _store_partial_unit(self, unit: FsdpUnit) -> None:
        """Move the gradients that FSDP2 left at a unit's parameters into the current slot. A
        parameter that was not used in the pass, or is frozen, has none, which counts as zero."""
        for index, _ in unit.placements:
            gradient = self._parameters[index].grad
            self._take(index, None if gradient is None else local_tensor(gradient))


@dataclass(eq=False)
class CountedGather:
    """FSDP2's all-gather of one unit, counted (`fully_shard`'s custom communication interface).

    code: of what is sent. All shards then compute with what comes out of it, the owner too.
    """

    traffic: TrafficCounter | None
    code: Code | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for the output."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """output: [shards * n]; input: [n], maybe a part of the output"""
        sent = input_tensor if self.code is None else self.code.pack(input_tensor[None])[0]
        if self.traffic is not None:
            self.traffic.add("gather", (group.size() - 1) * sent.nbytes)
        if self.code is None:
            with waiting(self.traffic, "gather", "unit"):
                return gather_parts(output_tensor, sent, group, async_op)
        received = sent.new_empty(group.size(), len(sent))
        with waiting(self.traffic, "gather", "unit"):
            gather_parts(received.view(-1), sent, group)
        self.code.unpack(received, output_tensor.view(group.size(), -1))
        return None


@dataclass(eq=False)
class OrderedReduceScatter:
    """FSDP2's reduce-scatter of one unit (`fully_shard`'s custom communication interface).

    output_size: elements of the result. output_slot: where the result may be written, or None.
    on_start: called before memory for a unit is taken.
    code: of what is sent, this shard's own part included. Without it, and for a unit in which some
        parameter has no gradient, numbers are sent.
    """

    output_size: int
    output_slot: Callable[[], Tensor | None]
    traffic: TrafficCounter | None = None
    on_start: Callable[[], None] = lambda: None
    code: Code | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for the input (all shards' parts) or the output (this shard's sum)."""
        slot = self.output_slot() if prod(size) == self.output_size else None
        if prod(size) != self.output_size:
            self.on_start()
        if slot is not None and (slot.dtype, slot.device.type) == (dtype, device.type):
            return slot
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """output: [n]; input: [shards * n], the parts of all shards one after another."""
        parts = input_tensor.view(group.size(), -1)
        code = self.code if output_tensor.numel() == self.output_size else None
        sent = parts if code is None else code.pack(parts)
        if self.traffic is not None:
            self.traffic.add("scatter", (group.size() - 1) * sent[0].nbytes)
        received = torch.empty_like(sent)
        with waiting(self.traffic, "scatter", "unit"):
            dist.all_to_all_single(received, sent, group=group)
        if code is not None:
            code.unpack(received, parts)
            received = parts
        first, second, *rest = received
        torch.add(first, second, out=output_tensor)
        for part in rest:
            output_tensor.add_(part)
        received.untyped_storage().resize_(0)  # a thread of gloo may hold it for some time
