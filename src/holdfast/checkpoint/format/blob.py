"""A blob's bytes: a safetensors file that stock readers understand.

First come eight bytes of little-endian header length. A JSON header follows, padded with spaces so
that tensor data starts at a multiple of 4 KiB. Then come the tensors without gaps. (The safetensors
reader refuses holes and trailing bytes, so a tensor itself is aligned only to its own element.) The
metadata holds each tensor's offsets in its global shape under `DCP_SHARDING_INFO`, which is how
PyTorch's own `HuggingFaceStorageReader` (torch.distributed.checkpoint, 2.13) puts shards together.

The header depends on the boxes alone, not on the step: it is written into a slot once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from xxhash import xxh3_128

from holdfast.core.format.manifest import BLOB_ALIGNMENT, Blob, PlacedBox, parse_placed_boxes
from holdfast.core.json_parsing import parse_json
from holdfast.errors import CorruptError

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # safetensors refuses longer headers

Bytes = bytes | bytearray | memoryview


def blob_header(tensors: Sequence[PlacedBox]) -> bytes:
    """Everything before the first tensor byte; its length is a multiple of 4 KiB."""
    sharding = {p.box.name: {"saved_offsets": list(p.box.offsets)} for p in tensors}
    content: dict[str, Any] = {
        "__metadata__": {
            "format": "pt",
            "DCP_VERSION": "1.0",
            "DCP_SHARDING_INFO": json.dumps(sharding, separators=(",", ":")),
        }
    }
    for p in tensors:
        content[p.box.name] = {
            "dtype": p.dtype,
            "shape": list(p.box.lengths),
            "data_offsets": [p.start, p.start + p.nbytes],
        }
    text = json.dumps(content, separators=(",", ":")).encode()
    length = -(-(_LENGTH_BYTES + len(text)) // BLOB_ALIGNMENT) * BLOB_ALIGNMENT - _LENGTH_BYTES
    if length > _MAX_HEADER_BYTES:
        raise ValueError(f"{len(tensors)} tensors do not fit into one blob's header")
    return length.to_bytes(_LENGTH_BYTES, "little") + text.ljust(length)


def blob_size(head: bytes, tensors: Iterable[PlacedBox]) -> int:
    """Return the bytes of the complete blob."""
    return len(head) + sum(p.nbytes for p in tensors)


def parse_header(data: bytes, where: str) -> tuple[PlacedBox, ...]:
    """The tensors that a header (as `header` made it) lists, in the order of their bytes.

    Raises CorruptError for anything else.
    """
    try:
        content: dict[str, Any] = parse_json(data[_LENGTH_BYTES:])
        metadata: Mapping[str, str] = content.pop("__metadata__")
        sharding = parse_json(metadata["DCP_SHARDING_INFO"])
        found = parse_placed_boxes(
            {
                name: (
                    entry["dtype"],
                    sharding[name]["saved_offsets"],
                    entry["shape"],
                    entry["data_offsets"][0],
                )
                for name, entry in content.items()
            }
        )
        return tuple(sorted(found, key=lambda p: p.start))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise CorruptError(f"{where}: not a blob's header: {error}") from error


class ExtentHasher:
    """Checksums of a stream of bytes, one per extent, made in the pass that writes them."""

    def __init__(self, extent_bytes: int) -> None:
        self._extent_bytes = extent_bytes
        self._state = xxh3_128()
        self._filled = 0
        self._checksums: list[str] = []
        self.size = 0

    def pass_through(self, data: Iterable[Bytes]) -> Iterator[memoryview]:
        """Pass the bytes through, unchanged and not copied."""
        for chunk in data:
            view = memoryview(chunk).cast("B")
            rest = view
            while rest:
                piece = rest[: self._extent_bytes - self._filled]
                self._state.update(piece)
                self._filled += len(piece)
                if self._filled == self._extent_bytes:
                    self._finish_extent()
                rest = rest[len(piece) :]
            self.size += len(view)
            yield view

    def _finish_extent(self) -> None:
        self._checksums.append(self._state.hexdigest())
        self._state.reset()
        self._filled = 0

    def finish(self, key: str, data_start: int) -> Blob:
        """The manifest entry of what has passed through; call once, at the end."""
        if self._filled:
            self._finish_extent()
        return Blob(key, self.size, data_start, self._extent_bytes, tuple(self._checksums))
