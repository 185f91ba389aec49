"""Initial weights: keyed by name, blind to shards, the same in every precision."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.sharding.parameters import Normal, Parameter, Uniform, Zeros, decoder_parameters
from holdfast.model import init
from holdfast.model.init import initial_box, initial_tensor
from tests.support.marks import in_campaign
from tests.support.models import config, decoder

WIDE = Parameter("some.weight", (6, 5, 7), True, Normal(0.5))


def test_two_models_of_one_seed_are_equal_and_of_two_are_not() -> None:
    one, same, other = (decoder(config(), seed) for seed in (1, 1, 2))
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, same.get_parameter(name)), name
        assert (parameter.dim() == 1) == torch.equal(parameter, other.get_parameter(name)), name


def test_no_two_parameters_share_numbers() -> None:
    heads = [
        initial_tensor(row, 1).flatten()[:8]
        for row in decoder_parameters(config())
        if isinstance(row.init, Normal)
    ]
    signs = torch.stack(heads).sign()
    assert len({tuple(row.tolist()) for row in torch.stack(heads)}) == len(heads)
    assert signs.mean().abs() < 0.5


def test_order_and_depth_do_not_matter() -> None:
    shallow, deep = decoder(config(layers=1)), decoder(config(layers=3))
    for name, parameter in shallow.named_parameters():
        if not name.endswith(("o.weight", "down.weight")):  # their std follows the depth
            assert torch.equal(parameter, deep.get_parameter(name)), name


def test_float64_starts_from_the_float32_numbers() -> None:
    single, double = decoder(config()), decoder(config(), dtype=torch.float64)
    for name, parameter in single.named_parameters():
        assert torch.equal(parameter.double(), double.get_parameter(name)), name


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_boxes_are_cut_from_the_whole(data: st.DataObject) -> None:
    offsets = [data.draw(st.integers(0, n)) for n in WIDE.shape]
    lengths = [data.draw(st.integers(0, n - o)) for n, o in zip(WIDE.shape, offsets, strict=True)]
    whole = initial_tensor(WIDE, 3)
    cut = tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))
    assert torch.equal(initial_box(WIDE, 3, offsets, lengths), whole[cut])


def test_boxes_outside_are_refused() -> None:
    with pytest.raises(ValueError, match=r"outside some\.weight"):
        initial_box(WIDE, 3, (0, 3, 0), (6, 3, 7))


def test_spread_is_as_declared() -> None:
    value = initial_tensor(Parameter("x", (400, 500), True, Normal(0.02)), 1)
    assert value.std().item() == pytest.approx(0.02, rel=0.01)
    assert abs(value.mean().item()) < 0.02 / 400**0.5 / 500**0.5 * 5
    assert initial_tensor(Parameter("x", (3,), True, Zeros()), 1).eq(0).all()


CHECKSUM = """
import hashlib
from holdfast.model.init import initial_tensor
from holdfast.core.sharding.parameters import Normal, Parameter
value = initial_tensor(Parameter("layers.0.ffn.up.weight", (512, 129), True, Normal(0.02)), 1)
print(hashlib.sha256(value.numpy().tobytes()).hexdigest())
"""


@pytest.mark.parametrize("kernels", ["default", in_campaign("avx2")])
def test_vector_units_do_not_matter(kernels: str) -> None:
    """The same bits on processors of other generations; the value is part of the format."""
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": kernels, "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        [sys.executable, "-c", CHECKSUM],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert (
        found.stdout.strip() == "1484619e8efc17b3ac642e79376d4abc6747c7092f755f2b0a218e655a12a28c"
    )


def test_memory_in_chunks_is_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = initial_tensor(WIDE, 3)
    monkeypatch.setattr(init, "_CHUNK", 17)
    assert torch.equal(initial_tensor(WIDE, 3), whole)


def test_uniform_draws_fill_their_range_and_belong_to_the_name() -> None:
    row = Parameter("layers.0.attention.q.lora_A", (64, 32), True, Uniform(0.25))
    value = initial_tensor(row, 3)
    assert -0.25 <= float(value.min()) < -0.24
    assert 0.24 < float(value.max()) <= 0.25
    assert abs(float(value.mean())) < 0.01
    assert torch.equal(value, initial_tensor(row, 3))
    assert not torch.equal(value, initial_tensor(replace(row, name="other"), 3))
    part = initial_box(row, 3, (16, 0), (8, 32))
    assert torch.equal(part, value[16:24])
