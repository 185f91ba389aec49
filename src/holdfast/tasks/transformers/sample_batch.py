"""Recordings, images and texts of shards as tensors, and batches of unlike lengths."""

from __future__ import annotations

import io
import json
import wave
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast.data.read.features import decode_wav
from holdfast.data.read.tar_shards import SHARDS_KEY
from holdfast.errors import TaskError


def read_wav(content: bytes, rate: int, place: str) -> NDArray[np.float32]:
    """Return the mean of the channels, from -1 to 1. rate: samples a second that it must have.
    Raises TaskError."""
    try:
        values, has = decode_wav(content)
    except (wave.Error, ValueError) as error:
        raise _refused(place, f"is no PCM wav ({error})", "convert it to 16-bit PCM") from None
    if has != rate:
        what = f"has {has} samples a second, and the model's feature extractor takes {rate}"
        raise _refused(place, what, f"write shards with {rate}")
    return values.astype(np.float32)


def read_image(content: bytes, place: str) -> Any:
    """Return a Pillow image in RGB. Raises TaskError."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise TaskError(
            f"images need the package pillow ({error})",
            where=SHARDS_KEY,
            remedy="pip install 'holdfast[vision]'",
        ) from None
    try:
        return Image.open(io.BytesIO(content)).convert("RGB")
    except (UnidentifiedImageError, OSError, ValueError) as error:
        raise _refused(place, f"is no image ({error})", "write the sample again") from None


def read_texts(parts: Mapping[str, bytes], place: str) -> tuple[str, str]:
    """Return the prompt and the completion: of a .json those two keys, a .txt is a completion.
    Raises TaskError."""
    try:
        if (text := parts.get(".txt")) is not None:
            return "", text.decode("utf-8").strip()
        row = json.loads(parts[".json"])
        prompt, completion = row["prompt"], row["completion"]
    except (UnicodeDecodeError, ValueError, KeyError, TypeError) as error:
        what = f"has no texts ({type(error).__name__}: {error})"
        remedy = 'write .txt in UTF-8, or .json with "prompt" and "completion"'
        raise _refused(place, what, remedy) from None
    if unknown := sorted(set(row) - {"prompt", "completion"}):
        raise _refused(place, f"has the key {unknown[0]!r}", 'leave "prompt" and "completion"')
    if not isinstance(prompt, str) or not isinstance(completion, str):
        raise _refused(place, "has a prompt or completion that is no text", "write texts")
    return prompt, completion


def padded_batch(
    items: Sequence[Mapping[str, Tensor]], fill: Mapping[str, int]
) -> dict[str, Tensor]:
    """Stack the tensors of each name, each at the start of the longest one's shape. fill: what
    stands behind a shorter one, by name; 0 for other names."""
    return {name: _padded([item[name] for item in items], fill.get(name, 0)) for name in items[0]}


def _padded(values: Sequence[Tensor], fill: int) -> Tensor:
    shape = [max(sizes) for sizes in zip(*(value.shape for value in values), strict=True)]
    out = torch.full((len(values), *shape), fill, dtype=values[0].dtype)
    for row, value in zip(out, values, strict=True):
        row[tuple(slice(size) for size in value.shape)] = value
    return out


def _refused(place: str, what: str, remedy: str) -> TaskError:
    return TaskError(f"{place} {what}", where=SHARDS_KEY, remedy=remedy)
