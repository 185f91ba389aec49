"""AdamW, SGD and Lion on moments of fewer bytes than the parameters' (`state_dtype`).

An update unpacks the moments of some rows into float32, applies the optimizer to these rows, and
packs the moments again. So the room for unpacked moments is bounded. What is packed is a function
of the moment, the step and the element's place in the complete parameter. Therefore neither a
restore nor a move to another layout changes a bit of it.

    bf16    each moment is rounded to bfloat16 at random, up or down, such that its mean stays. The
            nearest number would lose each change below a 256th, and a second moment with
            beta 0.999 would never fall. The random bits are a hash of parameter, slot, step and
            element. The run's seed does not enter.
    8bit    `EightBitCode`. Moments of vectors, of rows shorter than a block and of parameters with
            less than 4096 elements stay float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.config.sections.optimizer import BLOCKS, OptimizerConfig, Slot
from holdfast.core.seeds import key_seed
from holdfast.core.sharding.boxes import Box
from holdfast.core.sharding.optimizer_state import ParameterSettings, blocks_of, parameter_settings
from holdfast.core.sharding.parameters import Parameter
from holdfast.errors import LayoutError
from holdfast.options.protocols import Apply
from holdfast.options.short_state.keys import BLOCK
from holdfast.parallel.torch_compat import fused_adamw
from holdfast.training.optimizers.lion import lion_update
from holdfast.training.optimizers.optimizer import SlotTensors, merge_buffers

_LOWER_BITS = 13
_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny


def dynamic_map(*, signed: bool) -> tuple[float, ...]:
    """The 256 values of the dynamic map, rising from 0 or about -1 to 1.

    Seven decades, from 1e-6 to 1. Each decade has twice as many values as the one below it.
    """
    decades, found = 7, [0.0, 1.0]
    for decade in range(decades):
        count = 2 ** (decade if signed else decade + 1)
        width = 0.9 / count
        for index in range(count):
            value = (0.1 + (index + 0.5) * width) * 10.0 ** (decade - decades + 1)
            found += [value, -value] if signed else [value]
    return tuple(sorted(found))


class EightBitCode:
    """Packs float32 rows into codes and scales, and unpacks them. signed: for a first moment.

    (Dettmers et al., 2022, "8-bit Optimizers via Block-wise Quantization".) A block is `BLOCK`
    elements of one row. It has one scale, its largest magnitude. Each element is a code of 8 bits,
    the nearest value of the dynamic map of section 1.3 times the scale. No layout cuts a block, so
    the bits of a block depend on its elements alone.

    Two rules differ from the paper. A second moment above 0 never becomes 0, because its root
    divides the update. And a table has the code for the upper 19 bits of a float32. On a CPU, that
    is ten times faster than a search.
    """

    def __init__(self, device: torch.device, *, signed: bool) -> None:
        values = dynamic_map(signed=signed)
        self.values = torch.tensor(values, dtype=torch.float32, device=device)
        # The code of the value nearest to the middle of all float32 with the same upper bits.
        known = torch.tensor(values, dtype=torch.float64)
        upper = torch.arange(2 ** (32 - _LOWER_BITS), dtype=torch.int64)
        bits = (upper << _LOWER_BITS) + (1 << (_LOWER_BITS - 1))
        middles = bits.int().view(torch.float32).double().nan_to_num_(0.0)
        codes = torch.bucketize(middles, (known[1:] + known[:-1]) / 2)
        if values[0] == 0.0:
            codes.clamp_min_(1)
        zero = values.index(0.0)
        codes[0] = codes[len(codes) // 2] = zero  # of 0 and of -0
        self.codes = codes.to(torch.uint8).to(device)

    def unpack(self, codes: Tensor, scales: Tensor) -> Tensor:
        """codes: [r, n] uint8, scales: [r, blocks] -> [r, n] float32"""
        found = self.values.index_select(0, codes.reshape(-1).int()).view(codes.shape)
        return _by_block(found).mul_(scales.unsqueeze(-1)).flatten(1)[:, : codes.shape[1]]

    def pack(self, values: Tensor, codes: Tensor, scales: Tensor) -> None:
        """Write the codes and scales of `values`, which are finite.

        values: [r, n] float32 -> codes: [r, n] uint8, scales: [r, blocks]
        """
        blocks = _by_block(values)
        torch.amax(blocks.abs(), dim=-1, out=scales)
        quotients = blocks / scales.clamp_min(_SMALLEST_NORMAL).unsqueeze(-1)
        upper = quotients.view(torch.int32).bitwise_right_shift_(_LOWER_BITS)
        upper.bitwise_and_(len(self.codes) - 1)
        found = self.codes.index_select(0, upper.view(-1)).view(len(values), -1)
        codes.copy_(found[:, : codes.shape[1]])


def _by_block(rows: Tensor) -> Tensor:
    """[r, n] -> [r, blocks, BLOCK], with zeros after the last element"""
    rest = -rows.shape[1] % BLOCK
    return (F.pad(rows, (0, rest)) if rest else rows).view(len(rows), -1, BLOCK)


CHUNK_ELEMENTS = {"cpu": 1 << 18}
"""Elements that are unpacked together, by type of device."""
_CHUNK_ELSEWHERE = 1 << 24


class Moment(Protocol):
    """One slot of one parameter's part. Rows are those of dim 0."""

    @property
    def tensor(self) -> Tensor:
        """The state, in the shape of the parameter's part."""
        ...

    @property
    def scales(self) -> Tensor | None: ...

    def unpack(self, rows: slice) -> Tensor:
        """-> [r, n] float32; written in place, or given to `pack`"""
        ...

    def pack(self, rows: slice, values: Tensor, step: int) -> None: ...


class PlainMoment:
    """A moment in the parameter's own dtype."""

    scales = None

    def __init__(self, part: Tensor) -> None:
        self.tensor = torch.zeros_like(part)

    def unpack(self, rows: slice) -> Tensor:
        return _as_rows(self.tensor)[rows]

    def pack(self, rows: slice, values: Tensor, step: int) -> None:
        """The update has written the values in place."""


class EightBitMoment:
    """A moment in codes and scales. Raises LayoutError if the box cuts a block."""

    def __init__(self, part: Tensor, row: Parameter, box: Box, code: EightBitCode) -> None:
        if box.lengths[1:] != row.shape[1:] and not _is_even_cut(row.shape, box):
            raise LayoutError(
                f"tp cuts {row.name} {list(row.shape)} into other parts than equal ones of "
                f"complete blocks of {BLOCK} elements",
                where="train.optimizer.state_dtype",
                remedy="use state_dtype bf16, or tp 1",
            )
        self._code = code
        self.tensor = torch.zeros_like(part, dtype=torch.uint8)
        self.scales: Tensor | None = part.new_zeros(len(part), blocks_of(box.lengths))
        self._codes = _as_rows(self.tensor)

    def unpack(self, rows: slice) -> Tensor:
        assert self.scales is not None
        return self._code.unpack(self._codes[rows], self.scales[rows]).contiguous()

    def pack(self, rows: slice, values: Tensor, step: int) -> None:
        assert self.scales is not None
        self._code.pack(values, self._codes[rows], self.scales[rows])


def _is_even_cut(shape: tuple[int, ...], box: Box) -> bool:
    """Return True for one of several equal parts of a matrix' columns, each of complete blocks."""
    size = box.lengths[1]
    whole = size % BLOCK == 0 and shape[1] % size == 0
    return len(shape) == 2 and whole and box.offsets[1] % size == 0


class Bfloat16Moment:
    """A moment in bfloat16, rounded at random. key: of the slot and the parameter."""

    scales = None

    def __init__(self, part: Tensor, shape: tuple[int, ...], box: Box, key: str) -> None:
        self.tensor = torch.zeros_like(part, dtype=torch.bfloat16)
        self._key, self._rows = key, _as_rows(self.tensor)
        self._shape, self._box = shape, box

    def unpack(self, rows: slice) -> Tensor:
        return self._rows[rows].float()

    def pack(self, rows: slice, values: Tensor, step: int) -> None:
        random = _hash(self._places(rows), key_seed(0, "bfloat16", self._key, step)).bitwise_and_(
            0xFFFF
        )
        bits = random.add_(values.view(torch.int32)).bitwise_and_(-0x10000)
        self._rows[rows].copy_(bits.view(torch.float32))

    def _places(self, rows: slice) -> Tensor:
        """The number of each element in the complete parameter, as 32 bits.  -> [r, n]"""
        found = torch.zeros(1, dtype=torch.int32, device=self.tensor.device)
        for dim, (offset, length) in enumerate(
            zip(self._box.offsets, self._box.lengths, strict=True)
        ):
            start, stop = (rows.start, rows.stop) if dim == 0 else (0, length)
            indices = torch.arange(
                offset + start, offset + stop, dtype=torch.int32, device=found.device
            )
            stride = _wrap(prod(self._shape[dim + 1 :]))
            found = (found.unsqueeze(-1) + indices * stride).flatten()
        return found.view(rows.stop - rows.start, -1)


@dataclass(frozen=True)
class _Held:
    """A parameter with elements on this rank, and its moments in the order of the slots."""

    index: int
    settings: ParameterSettings
    moments: tuple[Moment, ...]


Update = Callable[[Tensor, Tensor, Sequence[Tensor], ParameterSettings], None]
"""(parameter, gradient, moments, settings): updates the parameter and its moments in place."""


class ShortStateOptimizer:
    """See `train.optimizer.Optimizer`. rows, boxes: of all parameters of the rank. Raises
    LayoutError if a box cuts a block of 8-bit state. codes: for signed moments and the rest; they
    take 1 MiB."""

    def __init__(
        self,
        config: OptimizerConfig,
        rows: Sequence[Parameter],
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        boxes: Sequence[Box] | None,
    ) -> None:
        boxes = boxes or [Box(row.name, (0,) * len(row.shape), row.shape) for row in rows]
        self._config, self._parameters = config, list(parameters)
        self._gradients = list(gradients)
        self._merges = {i: row.merge for i, row in enumerate(rows) if row.merge}
        self._slots = [slot for slot in config.state_slots if slot.rule != BLOCKS]
        device = parameters[0].device
        is_used = config.state_dtype == "8bit"
        self.codes = {s: EightBitCode(device, signed=s) for s in (True, False) if is_used}
        self._moments = [
            tuple(self._moment(slot, *each) for slot in self._slots)
            for each in zip(parameters, rows, boxes, strict=True)
        ]
        self._held = [
            _Held(i, parameter_settings(config, rows[i]), self._moments[i])
            for i, part in enumerate(parameters)
            if part.numel() and not (rows[i].merge or rows[i].frozen)
        ]
        self._chunk = CHUNK_ELEMENTS.get(device.type, _CHUNK_ELSEWHERE)

    def _moment(self, slot: Slot, part: Tensor, row: Parameter, box: Box) -> Moment:
        if self._config.state_dtype == "bf16":
            return Bfloat16Moment(part, row.shape, box, f"{slot.name}.{row.name}")
        if self._config.is_in_8bit(row.shape):
            return EightBitMoment(part, row, box, self.codes[slot.name != "exp_avg_sq"])
        return PlainMoment(part)

    @property
    def slots(self) -> list[SlotTensors]:
        found = [
            SlotTensors(slot, [moments[place].tensor for moments in self._moments])
            for place, slot in enumerate(self._slots)
        ]
        scales = [slot for slot in self._config.state_slots if slot.rule == BLOCKS]
        return found + [
            SlotTensors(slot, [moments[place].scales for moments in self._moments])
            for place, slot in enumerate(scales)
        ]

    def set_gradients(self, gradients: Sequence[Tensor]) -> None:
        self._gradients = list(gradients)

    @torch.no_grad()
    def apply(self, step: int, learning_rate: float, divisor: float, microbatches: int = 1) -> None:
        """As `train.optimizer.Optimizer.apply`."""
        merge_buffers(self._parameters, self._gradients, self._merges, microbatches)
        update = self._update(step, learning_rate, divisor)
        for held in self._held:
            values = _as_rows(self._parameters[held.index])
            gradient = _as_rows(self._gradients[held.index])
            count = max(1, self._chunk // values.shape[1])
            for start in range(0, len(values), count):
                rows = slice(start, min(start + count, len(values)))
                moments = [moment.unpack(rows) for moment in held.moments]
                update(values[rows], gradient[rows], moments, held.settings)
                for moment, found in zip(held.moments, moments, strict=True):
                    moment.pack(rows, found, step)

    def _update(self, step: int, rate: float, divisor: float) -> Update:
        config, device = self._config, self._parameters[0].device
        if config.name == "lion":
            return partial(_lion, rate, divisor, config.betas)
        if config.name == "sgd":
            return partial(_sgd, rate, divisor, config.momentum or 0.0, bool(config.nesterov))
        count = torch.tensor(float(step), dtype=torch.float32, device=device)
        scale = torch.tensor(divisor, dtype=torch.float32, device=device)
        return partial(_adamw, rate, scale, count, config)


def _adamw(
    rate: float,
    scale: Tensor,
    count: Tensor,
    config: OptimizerConfig,
    parameter: Tensor,
    gradient: Tensor,
    moments: Sequence[Tensor],
    settings: ParameterSettings,
) -> None:
    fused_adamw(
        [parameter],
        [gradient],
        [moments[0]],
        [moments[1]],
        count,
        learning_rate=rate * settings.rate_scale,
        betas=config.betas,
        eps=config.eps,
        weight_decay=settings.weight_decay,
        gradient_scale=scale,
    )


def _lion(
    rate: float,
    divisor: float,
    betas: tuple[float, float],
    parameter: Tensor,
    gradient: Tensor,
    moments: Sequence[Tensor],
    settings: ParameterSettings,
) -> None:
    lion_update(
        parameter,
        gradient.div_(divisor),
        moments[0],
        learning_rate=rate * settings.rate_scale,
        betas=betas,
        weight_decay=settings.weight_decay,
    )


def _sgd(
    rate: float,
    divisor: float,
    momentum: float,
    nesterov: bool,
    parameter: Tensor,
    gradient: Tensor,
    moments: Sequence[Tensor],
    settings: ParameterSettings,
) -> None:
    """SGD with momentum (Sutskever et al., 2013, section 2), as `torch.optim.SGD` has it."""
    gradient.div_(divisor).add_(parameter, alpha=settings.weight_decay)
    for kept in moments:  # none without momentum
        kept.mul_(momentum).add_(gradient)
        gradient = gradient.add(kept, alpha=momentum) if nesterov else kept
    parameter.add_(gradient, alpha=-rate * settings.rate_scale)


def _as_rows(part: Tensor) -> Tensor:
    """A view.  [r, ...] -> [r, n]"""
    return part.view(len(part), -1) if part.numel() else part.view(0, 1)


def _wrap(number: int) -> int:
    """As a signed number of 32 bits."""
    return (number + 2**31) % 2**32 - 2**31


def _hash(numbers: Tensor, key: int) -> Tensor:
    """Mix each int32 with a key (Wellons' lowbias32). The upper half of the key is added between
    two rounds.  [...] int32 -> [...] int32, of its own memory"""
    found = numbers.bitwise_xor(_wrap(key))
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        found.bitwise_xor_(found.bitwise_right_shift(shift).bitwise_and_((1 << (32 - shift)) - 1))
        found.mul_(_wrap(factor))
        found.add_(_wrap(key >> 32))
    return found.bitwise_xor_(found.bitwise_right_shift(15))


APPLY = Apply(optimizer=ShortStateOptimizer)
