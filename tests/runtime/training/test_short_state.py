"""Moments in bf16 and in 8 bits: their values, and that no cut of a parameter changes a bit."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast.config.sections.optimizer import BLOCK, OptimizerConfig
from holdfast.core.sharding.boxes import Box
from holdfast.core.sharding.parameters import Own, Parameter
from holdfast.errors import LayoutError
from holdfast.options.short_state.apply import EightBitCode, dynamic_map
from holdfast.training.optimizers.make_optimizer import make_optimizer
from holdfast.training.optimizers.optimizer import Optimizer

CPU = torch.device("cpu")
SHAPES = {"wide": (70, 208), "cube": (9, 16, 40), "narrow": (300, 16), "vector": (6400,)}
"""208 is no multiple of a block. Rows of `narrow` are shorter than one. No part ends within the 16
elements that a CPU's kernel updates together, because it rounds the rest otherwise."""
DIVISOR = 3.0
NAMES: dict[str, dict[str, Any]] = {"adamw": {}, "lion": {}, "sgd": {"nesterov": True}}


def _config(name: str, short: str, **options: Any) -> OptimizerConfig:
    given = {"name": name, "state_dtype": short, **NAMES[name], **options}
    return OptimizerConfig.model_validate(given)


def _values(step: int) -> dict[str, Tensor]:
    """Rows of unlike size."""
    drawn = torch.Generator().manual_seed(step)
    return {
        name: torch.randn(shape, generator=drawn)
        * 10 ** (-4 * torch.rand(shape[0], *[1] * (len(shape) - 1), generator=drawn))
        for name, shape in SHAPES.items()
    }


class Part:
    """The rows of each parameter between two fractions, and their optimizer."""

    def __init__(self, config: OptimizerConfig, first: float = 0.0, last: float = 1.0) -> None:
        self._cut = {n: (int(first * s[0]), int(last * s[0])) for n, s in SHAPES.items()}
        self.rows = [Parameter(name, shape, True, Own()) for name, shape in SHAPES.items()]
        boxes = [
            Box(n, (a, *[0] * (len(SHAPES[n]) - 1)), (b - a, *SHAPES[n][1:]))
            for n, (a, b) in self._cut.items()
        ]
        self.parameters = self._own(_values(0))
        self._gradients = [torch.zeros_like(p) for p in self.parameters]
        self.made: Optimizer = make_optimizer(
            config, self.rows, self.parameters, self._gradients, boxes=boxes
        )

    def _own(self, complete: dict[str, Tensor]) -> list[Tensor]:
        return [complete[name][a:b].clone() for name, (a, b) in self._cut.items()]

    def train(self, *steps: int) -> None:
        for step in steps:
            for place, value in zip(self._gradients, self._own(_values(step)), strict=True):
                place.copy_(value * DIVISOR)
            self.made.apply(step, 0.01, DIVISOR)

    def state(self) -> dict[str, Tensor]:
        found = dict(zip(SHAPES, self.parameters, strict=True))
        for slots in self.made.slots:
            for name, tensor in zip(SHAPES, slots.tensors, strict=True):
                if tensor is not None:
                    found[f"{slots.slot.name}.{name}"] = tensor
        return found

    def restore(self, state: dict[str, Tensor]) -> None:
        for name, tensor in self.state().items():
            tensor.copy_(state[name])


@pytest.mark.parametrize("short", ["bf16", "8bit"])
@pytest.mark.parametrize("name", NAMES)
def test_parts_have_the_bits_of_the_complete_parameters(name: str, short: str) -> None:
    """Rows are cut anywhere, and each part continues in other memory, from its slots alone."""
    config = _config(name, short)
    complete, found = Part(config), []
    complete.train(1, 2, 3, 4)
    for cut in itertools.pairwise((0.0, 0.13, 0.5, 0.51, 1.0)):
        half, rest = Part(config, *cut), Part(config, *cut)
        half.train(1, 2)
        rest.restore(half.state())
        rest.train(3, 4)
        found.append(rest.state())
    for key, tensor in complete.state().items():
        assert torch.equal(tensor, torch.cat([part[key] for part in found])), key


@pytest.mark.parametrize(("short", "most"), [("bf16", 0.02), ("8bit", 0.03)])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_an_update_is_near_that_on_complete_state(name: str, short: str, most: float) -> None:
    """The mean difference of four updates from fp32's, in parts of a mean update."""
    made, wanted = Part(_config(name, short)), Part(_config(name, "fp32"))
    for each in (made, wanted):
        each.train(1, 2, 3, 4)
    start = _values(0)
    for key, begun in start.items():
        moved = (wanted.state()[key] - begun).abs().mean()
        other = (made.state()[key] - wanted.state()[key]).abs().mean()
        assert other < most * moved, key
        if short == "8bit" and key in ("narrow", "vector"):
            assert torch.equal(made.state()[key], wanted.state()[key])


def test_what_is_kept_in_which_dtype() -> None:
    state = Part(_config("adamw", "8bit")).state()
    for name, shape in SHAPES.items():
        short = name in ("wide", "cube")
        assert state[f"exp_avg.{name}"].dtype == (torch.uint8 if short else torch.float32)
        assert state[f"exp_avg.{name}"].shape == shape
    assert {k: tuple(t.shape) for k, t in state.items() if "scale" in k} == {
        f"{slot}_scale.{name}": (SHAPES[name][0], blocks)
        for slot in ("exp_avg", "exp_avg_sq")
        for name, blocks in (("wide", 4), ("cube", 10))
    }
    moments = [t for k, t in Part(_config("adamw", "bf16")).state().items() if k not in SHAPES]
    assert {t.dtype for t in moments} == {torch.bfloat16}


@pytest.mark.parametrize("signed", [True, False])
def test_a_code_is_that_of_the_nearest_value(signed: bool) -> None:
    """Apart from what the lower bits decide."""
    drawn = torch.Generator().manual_seed(1)
    values = torch.randn(70, 200, generator=drawn)
    values *= 10 ** (-8 * torch.rand(70, 200, generator=drawn))
    values = values if signed else values.abs()
    values[3] = 0.0
    code = EightBitCode(CPU, signed=signed)
    codes, scales = torch.empty(70, 200, dtype=torch.uint8), torch.empty(70, 4)
    code.pack(values, codes, scales)
    unpacked = code.unpack(codes, scales)
    scale = scales.repeat_interleave(BLOCK, 1)[:, :200]
    quotients = (values / scale.clamp_min(1e-30)).double()
    known = torch.tensor(dynamic_map(signed=signed), dtype=torch.float64)
    nearest = (quotients.unsqueeze(-1) - known).abs().amin(-1)
    ours = (quotients - (unpacked / scale.clamp_min(1e-30)).double()).abs()
    kept = (quotients == 0) | (quotients.abs() > known[known > 0].min())
    assert torch.all((ours <= nearest + 2**-10 * quotients.abs() + 1e-12)[kept])
    assert torch.equal(unpacked[3], torch.zeros(200))
    assert signed or torch.all((unpacked > 0) == (values > 0))


def test_bfloat16_keeps_the_mean() -> None:
    """A second moment that falls by a thousandth a step falls; the nearest number would stay."""
    config = _config("adamw", "bf16", betas=(0.9, 0.999))
    part = Part(config)
    part.train(1)
    (moment,) = [t for k, t in part.state().items() if k == "exp_avg_sq.vector"]
    moment.fill_(1.0)
    for step in range(2, 302):
        for place in part._gradients:
            place.zero_()
        part.made.apply(step, 0.0, 1.0)
    assert float(moment.float().mean()) == pytest.approx(0.999**300, rel=0.005)


def test_a_cut_of_a_block_is_refused() -> None:
    row = Parameter("w", (64, 192), True, Own())
    for columns in (96, 128):
        part = torch.zeros(64, columns)
        box = Box("w", (0, 0), (64, columns))
        with pytest.raises(LayoutError, match="use state_dtype bf16, or tp 1"):
            make_optimizer(_config("adamw", "8bit"), [row], [part], [part], boxes=[box])
