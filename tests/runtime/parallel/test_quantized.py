"""Codes of few bits: what comes out is near what went in, block by block."""

from __future__ import annotations

import pytest
import torch

from holdfast.options.quantized.apply import BLOCK, BlockCode

SIZES = (3, 2 * BLOCK + 1, 0, BLOCK)


def _through(code: BlockCode, rows: torch.Tensor) -> torch.Tensor:
    packed, out = code.pack(rows), torch.empty_like(rows)
    assert packed.shape == (len(rows), code.row_bytes)
    code.unpack(packed, out)
    return out


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_element_is_further_away_than_half_a_code(bits: int, dtype: torch.dtype) -> None:
    rows = torch.randn(3, sum(SIZES), generator=torch.Generator().manual_seed(1)).to(dtype)
    rows[:, :3] *= 1000  # a parameter of another size does not coarsen its neighbours
    out = _through(BlockCode(SIZES, bits), rows)
    for before, after in zip(rows.split(SIZES, 1), out.split(SIZES, 1), strict=True):
        for block, found in zip(before.split(BLOCK, 1), after.split(BLOCK, 1), strict=True):
            if block.numel():
                largest = block.float().abs().amax(1, keepdim=True)
                step = largest / (2 ** (bits - 1) - 1)
                rounding = largest * 2.0**-8 if dtype == torch.bfloat16 else 1e-6 * largest
                assert ((block.float() - found.float()).abs() <= step / 2 + rounding).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_a_row_takes_its_codes_and_its_scales(bits: int) -> None:
    code = BlockCode((1000, 24), bits)
    assert code.row_bytes == 1024 * bits // 8 + 4 * (8 + 1)
    zeros = torch.zeros(2, 1024)
    assert torch.equal(_through(code, zeros), zeros)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_spoils_its_block_and_no_other(bits: int, odd: float) -> None:
    rows = torch.ones(1, 3 * BLOCK)
    rows[0, BLOCK + 5] = odd
    out = _through(BlockCode((3 * BLOCK,), bits), rows)[0].isfinite()
    assert not out[BLOCK : 2 * BLOCK].any()
    assert out[:BLOCK].all()
    assert out[2 * BLOCK :].all()
