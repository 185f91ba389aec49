"""The weight files of a model's folder: where each tensor lies, by headers alone.

The header of a safetensors file is a JSON object behind its length in 8 bytes. For each tensor it
has a dtype, a shape, and where the tensor's bytes begin and end after the header.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from holdfast.borders import Border, Unread
from holdfast.config.huggingface.folder import FETCH_AGAIN, read_json_object, refuse_pointer
from holdfast.errors import ModelFolderError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_model.safetensors"
READABLE = ("F64", "F32", "BF16", "F16")
MAX_HEADER_BYTES = 10**8  # as the library has it
FILES = Border(
    "weight files of a model folder", frozenset({SINGLE, INDEX}), unknown="count", entry="file"
)
INDEX_KEYS = Border(INDEX, frozenset({"weight_map"}), frozenset({"metadata"}))
_WEIGHTS = re.compile(r"\.(safetensors|bin|pt|pth|ckpt|gguf|h5|msgpack|onnx)$")
_PICKLES = re.compile(r"\.(bin|pt|pth|ckpt)$")
_PART = re.compile(r"model(-\d+-of-\d+)?\.safetensors")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file."""

    file: Path
    name: str
    dtype: str  # by the format's name, such as BF16
    shape: tuple[int, ...]
    begin: int  # of its bytes, in the file
    end: int


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file by name. Raises ModelFolderError for a file that is
    not complete."""
    try:
        refuse_pointer(path)
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > MAX_HEADER_BYTES:
                raise ValueError("its header is too long")
            header = json.loads(file.read(length))
            size = os.fstat(file.fileno()).st_size
        found = {
            name: StoredTensor(
                path,
                name,
                str(entry["dtype"]),
                tuple(map(int, entry["shape"])),
                *(8 + length + int(place) for place in entry["data_offsets"]),
            )
            for name, entry in header.items()
            if name != "__metadata__"
        }
        if size != max((each.end for each in found.values()), default=8 + length):
            raise ValueError("it has another size than its header says")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as error:
        raise ModelFolderError(
            f"this is not a complete safetensors file ({error})",
            where=str(path),
            remedy=FETCH_AGAIN,
        ) from error
    return found


def read_weights(folder: Path, remedy: str = "") -> dict[str, StoredTensor]:
    """Return the tensors of a model's folder by name. remedy: if it has no weights. Raises
    ModelFolderError for weights that are not complete, or may be those of two models."""
    if (folder / INDEX).is_file():
        found = _indexed(folder)
    elif (folder / SINGLE).is_file():
        found = read_header(folder / SINGLE)
    else:
        raise _no_weights(folder, SINGLE, remedy)
    used = {each.file.name for each in found.values()}
    unused = {path.name for path in folder.glob("model*.safetensors")} - used
    if stale := sorted(name for name in unused if _PART.fullmatch(name)):
        raise ModelFolderError(
            f"{stale[0]} is here too, and {min(used)} is taken: they may be of two models",
            where=str(folder),
            remedy="leave the files of one model in the folder",
        )
    if (folder / "adapter_config.json").is_file():
        raise ModelFolderError(
            "this folder has an adapter too, which transformers adds to the weights",
            where=str(folder),
            remedy="move the adapter_* files to a folder of their own, and name it in lora.from",
        )
    return found


def read_adapter_weights(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of an adapter's folder by name. Raises ModelFolderError."""
    if not (folder / ADAPTER).is_file():
        raise _no_weights(folder, ADAPTER, "")
    return read_header(folder / ADAPTER)


def describe_unread(folder: Path, tensors: Iterable[StoredTensor]) -> list[str]:
    """A line about other weight files of the folder, and one about an index of another size."""
    used, unread, size = set(), Unread(FILES), 0
    for each in tensors:
        used.add(each.file.name)
        size += each.end - each.begin
    names = sorted(path.name for path in folder.iterdir() if _WEIGHTS.search(path.name))
    unread.add([name for name in names if name not in used], str(folder))
    lines = [unread.line()]
    if (folder / INDEX).is_file():
        metadata = read_json_object(folder / INDEX).get("metadata")
        total = metadata.get("total_size") if isinstance(metadata, dict) else None
        if total is not None and total != size:
            lines.append(f"{folder / INDEX} says {total:,} bytes, and its tensors have {size:,}")
    return [line for line in lines if line]


def _no_weights(folder: Path, name: str, remedy: str) -> ModelFolderError:
    there = sorted(p.name for p in folder.glob("*") if _WEIGHTS.search(p.name))
    if there and all(_PICKLES.search(each) for each in there):
        return ModelFolderError(
            f"the weights are a pickle, which could run code when it is read: {there[0]}",
            where=str(folder),
            remedy="convert them to safetensors (save_pretrained does) and try again",
        )
    return ModelFolderError(
        f"there is no {name} here" + (f", only {', '.join(there[:3])}" if there else ""),
        where=str(folder),
        remedy=remedy or "name a folder that has it",
    )


def _indexed(folder: Path) -> dict[str, StoredTensor]:
    """By the index, which must name exactly what is in the files."""
    where = str(folder / INDEX)

    def wrong(what: str) -> ModelFolderError:
        return ModelFolderError(what, where=where, remedy=FETCH_AGAIN)

    index = read_json_object(folder / INDEX)
    INDEX_KEYS.check(index, where, ModelFolderError, FETCH_AGAIN)
    located = index.get("weight_map")
    if not isinstance(located, dict) or not all(isinstance(f, str) for f in located.values()):
        raise wrong("this index has no weight_map from tensors to files")
    files: dict[str, set[str]] = {}
    for tensor, file in located.items():
        files.setdefault(file, set()).add(tensor)
    found: dict[str, StoredTensor] = {}
    for file, named in files.items():
        if Path(file).name != file or not (folder / file).is_file():
            raise wrong(f"the index names {file}, which is not in the folder")
        inside = read_header(folder / file)
        if lost := named - inside.keys():
            raise wrong(f"the index looks for {min(lost)} in {file}, which has no such tensor")
        if more := inside.keys() - named:
            raise wrong(f"{file} has {min(more)}, which the index does not name there")
        found |= inside
    return found
