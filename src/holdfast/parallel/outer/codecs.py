"""Codecs of what learners exchange: from a change of the weights to bytes, and back.

A codec is a function of the change alone. It rounds to the nearest value and draws no random
number, so every rank decodes the same bits. A payload has the same length for every change of one
size, so no lengths travel.

    none   fp32 as it is: 4 bytes
    bf16   the upper half of each fp32, rounded: 2 bytes
    int8   blocks of `BLOCK` values with one fp32 scale, the largest magnitude / 127: 1 byte
    int4   the same with 7 in place of 127: half a byte
    int2   blocks of `BLOCK` values with two bf16 magnitudes: a sign and a choice of magnitude, a
           quarter of a byte. A value at or above the block's root mean square takes the larger one.
           Each is the mean of the magnitudes that it stands for
    powersgd  two thin factors of each matrix (`low_rank.py`)
    topk   of each chunk of `CHUNK` values the largest `share`, as index and bf16: 4 bytes for each
           that is kept. The rest is 0

With error feedback a learner adds to its change what earlier rounds left out (Seide et al., 2014;
Stich et al., 2018).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from holdfast.core.round_bytes import BLOCK, CHUNK, kept_of, low_rank_bytes, payload_bytes, runs_of
from holdfast.parallel.outer.low_rank import decode_factors, encode_factors


@dataclass(frozen=True)
class Codec:
    """payload_bytes: of a number of values. encode: [n] fp32 -> [bytes] uint8. decode: the inverse,
    given the number of values."""

    payload_bytes: Callable[[int], int]
    encode: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor, int], Tensor]


def make_codec(
    name: str, share: float, shapes: Sequence[Sequence[int]] = (), rank: int = 1
) -> Codec:
    """Return the codec that the run file names. share: of the values that `topk` keeps.
    shapes, rank: of the tensors of a change, and of their factors, for `powersgd`. Raises
    ValueError for an unknown name."""
    if name == "powersgd":
        encode = partial(encode_factors, shapes, rank)
        decode = partial(decode_factors, shapes, rank)
        return Codec(lambda n: low_rank_bytes(shapes, rank), encode, decode)
    size = partial(payload_bytes, name, share)
    if name == "none":
        return Codec(size, _bytes, lambda payload, n: payload.view(torch.float32))
    if name == "bf16":
        return Codec(size, _encode_bf16, _decode_bf16)
    if name in ("int8", "int4"):
        bits = int(name.removeprefix("int"))
        return Codec(size, partial(_encode_blocks, bits), partial(_decode_blocks, bits))
    if name == "int2":
        return Codec(size, _encode_signs, _decode_signs)
    if name == "topk":
        kept = kept_of(share)
        return Codec(size, partial(_encode_largest, kept), partial(_decode_largest, kept))
    raise ValueError(f"no codec {name!r}")


def _rows(values: Tensor, size: int) -> Tensor:
    """values: [n] -> [runs, size], the last one filled with zeros"""
    missing = runs_of(values.numel(), size) * size - values.numel()
    return pad(values, (0, missing)).view(-1, size)


def _bytes(values: Tensor) -> Tensor:
    return values.contiguous().view(-1).view(torch.uint8)


def _encode_bf16(values: Tensor) -> Tensor:
    return _bytes(values.to(torch.bfloat16))


def _decode_bf16(payload: Tensor, count: int) -> Tensor:
    return payload.view(torch.bfloat16).to(torch.float32)


def _encode_blocks(bits: int, values: Tensor) -> Tensor:
    """Scales first, then the codes; of 4 bits, two neighbours share a byte."""
    largest = 2 ** (bits - 1) - 1
    rows = _rows(values, BLOCK)
    scales = rows.abs().amax(1, keepdim=True) / largest
    codes = torch.where(scales > 0, rows / scales, 0).round().clamp_(-largest, largest)
    stored = codes.to(torch.int8).view(-1).view(torch.uint8)
    if bits == 4:
        pairs = stored.view(-1, 2)
        stored = (pairs[:, 0] & 15) | (pairs[:, 1] << 4)
    return torch.cat([_bytes(scales), stored])


def _decode_blocks(bits: int, payload: Tensor, count: int) -> Tensor:
    blocks = runs_of(count, BLOCK)
    scales = payload[: 4 * blocks].clone().view(torch.float32).view(-1, 1)
    stored = payload[4 * blocks :]
    if bits == 4:
        stored = torch.stack([stored & 15, stored >> 4], 1).view(-1)
        stored = ((stored ^ 8) - 8).view(torch.int8).view(torch.uint8)  # the sign of 4 bits
    codes = stored.view(torch.int8).to(torch.float32).view(blocks, BLOCK)
    return (codes * scales).view(-1)[:count]


def _encode_signs(values: Tensor) -> Tensor:
    """The two magnitudes of all blocks first, then the codes: 1: the larger one; 2: a minus."""
    rows, is_value = _rows(values, BLOCK), _rows(torch.ones_like(values), BLOCK) > 0
    sizes, largest = rows.abs(), rows.abs().amax(1, keepdim=True)
    shares = torch.where(largest > 0, sizes / largest, 0).square().sum(1, keepdim=True)
    level = largest * (shares / is_value.sum(1, keepdim=True)).sqrt()
    is_large = sizes >= level
    groups = torch.stack([is_value & ~is_large, is_value & is_large], 1)  # [blocks, 2, BLOCK]
    totals = torch.where(groups, sizes[:, None], 0).sum(2)
    magnitudes = totals / groups.sum(2).clamp_min(1)
    codes = (is_large.to(torch.uint8) | (rows < 0).to(torch.uint8) << 1).view(-1, 4)
    stored = codes[:, 0] | codes[:, 1] << 2 | codes[:, 2] << 4 | codes[:, 3] << 6
    return torch.cat([_bytes(magnitudes.to(torch.bfloat16)), stored])


def _decode_signs(payload: Tensor, count: int) -> Tensor:
    blocks = runs_of(count, BLOCK)
    magnitudes = payload[: 4 * blocks].clone().view(torch.bfloat16).to(torch.float32).view(-1, 2)
    stored = payload[4 * blocks :]
    codes = torch.stack([stored >> shift & 3 for shift in (0, 2, 4, 6)], 1).view(blocks, BLOCK)
    sizes = magnitudes.gather(1, (codes & 1).to(torch.int64))
    return torch.where(codes > 1, -sizes, sizes).view(-1)[:count]


def _encode_largest(kept: int, values: Tensor) -> Tensor:
    rows = _rows(values, CHUNK)
    places = rows.abs().topk(kept, dim=1, sorted=False).indices.sort(1).values
    found = rows.gather(1, places)
    return torch.cat([_bytes(places.to(torch.int16)), _bytes(found.to(torch.bfloat16))])


def _decode_largest(kept: int, payload: Tensor, count: int) -> Tensor:
    chunks = runs_of(count, CHUNK)
    half = 2 * chunks * kept
    places = payload[:half].view(torch.int16).to(torch.int64).view(chunks, kept)
    found = payload[half:].clone().view(torch.bfloat16).to(torch.float32).view(chunks, kept)
    return found.new_zeros((chunks, CHUNK)).scatter_(1, places, found).view(-1)[:count]
