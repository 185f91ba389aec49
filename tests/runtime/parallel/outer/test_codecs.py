"""Codecs of changes: lengths, errors within their bounds, and nothing that feedback loses."""

from __future__ import annotations

import pytest
import torch

from holdfast.parallel.outer.codecs import BLOCK, CHUNK, make_codec

COUNT = 2 * CHUNK + 777
BLOCKS, CHUNKS = -(-COUNT // BLOCK), 3
NAMES = ("bf16", "int8", "int4", "int2", "topk", "powersgd")
SHAPES = ((64, 96), (COUNT - 64 * 96,))


def _values(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(COUNT, generator=generator) * torch.linspace(0.001, 2, COUNT)


@pytest.mark.parametrize(
    ("name", "share", "nbytes"),
    [
        ("bf16", 1.0, 2 * COUNT),
        ("int8", 1.0, BLOCKS * (BLOCK + 4)),
        ("int4", 1.0, BLOCKS * (BLOCK // 2 + 4)),
        ("int2", 1.0, BLOCKS * (BLOCK // 4 + 4)),
        ("topk", 0.01, CHUNKS * 41 * 4),
    ],
)
def test_a_payload_has_its_length_and_decodes_to_what_it_says(
    name: str, share: float, nbytes: int
) -> None:
    codec, values = make_codec(name, share), _values(1)
    payload = codec.encode(values)
    assert payload.dtype == torch.uint8
    assert payload.numel() == codec.payload_bytes(COUNT) == nbytes
    decoded = codec.decode(payload, COUNT)
    assert torch.equal(codec.decode(codec.encode(decoded), COUNT), decoded), "it is on the grid"


@pytest.mark.parametrize(("name", "largest"), [("int8", 127), ("int4", 7)])
def test_a_block_is_off_by_half_a_level_at_most(name: str, largest: int) -> None:
    codec, values = make_codec(name, 1.0), _values(2)[: 8 * BLOCK]
    error = (codec.decode(codec.encode(values), len(values)) - values).abs().view(-1, BLOCK)
    level = values.abs().view(-1, BLOCK).amax(1) / largest
    assert bool((error.amax(1) <= level * 0.5001).all())


def test_two_bits_keep_seven_eighths_of_a_normal_block() -> None:
    """The best four levels for a normal distribution lose 0.118 of its variance (Max, 1960)."""
    values = torch.randn(64 * BLOCK, generator=torch.Generator().manual_seed(5))
    codec = make_codec("int2", 1.0)
    error = codec.decode(codec.encode(values), len(values)) - values
    assert float(error.square().mean() / values.square().mean()) < 0.125


def test_powersgd_sends_thin_factors_of_each_matrix() -> None:
    """Of a matrix whose singular values fall, the error is that of the best factors."""
    rank, shapes = 4, ((60, 80), (33,), (3, 5), (30, 4, 10))
    generator = torch.Generator().manual_seed(6)
    left, right = (torch.randn(n, 40, generator=generator) for n in (60, 80))
    first = (left * 0.6 ** torch.arange(40)) @ right.T
    rest = [torch.randn(shape, generator=generator) for shape in shapes[1:]]
    values = torch.cat([t.reshape(-1) for t in (first, *rest)])
    codec = make_codec("powersgd", 1.0, shapes, rank)
    payload = codec.encode(values)
    factors = rank * (60 + 80) + rank * (30 + 40)
    assert payload.numel() == codec.payload_bytes(len(values)) == 2 * (factors + 33 + 15)
    decoded = codec.decode(payload, len(values))
    error = (decoded[:4800].view(60, 80) - first).norm()
    assert error < 1.05 * torch.linalg.svdvals(first)[rank:].norm()
    small = slice(4800, 4848)
    assert torch.allclose(decoded[small], values[small], rtol=0.01)
    assert torch.equal(codec.encode(values), payload)


def test_topk_keeps_the_largest_of_each_chunk() -> None:
    codec, values = make_codec("topk", 0.25), _values(3)[:CHUNK]
    decoded = codec.decode(codec.encode(values), CHUNK)
    kept = decoded != 0
    assert int(kept.sum()) == CHUNK // 4
    assert values[kept].abs().min() >= values[~kept].abs().max()


@pytest.mark.parametrize("name", NAMES)
def test_what_is_sent_and_what_is_left_are_all_there_was(name: str) -> None:
    codec = make_codec(name, 0.05, SHAPES, 3)
    left, sent, total = torch.zeros(COUNT), torch.zeros(COUNT), torch.zeros(COUNT)
    for seed in range(8):
        change = _values(seed)
        total += change
        given = change + left
        decoded = codec.decode(codec.encode(given), COUNT)
        sent, left = sent + decoded, given - decoded
    assert torch.allclose(sent + left, total, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(name: str, bad: float) -> None:
    codec, values = make_codec(name, 0.01, SHAPES, 3), _values(4)
    values[5000] = bad
    assert not bool(torch.isfinite(codec.decode(codec.encode(values), COUNT)).all())
