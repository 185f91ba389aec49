"""The checksum of a folder's weights: of model files or of an adapter, read without torch."""

from __future__ import annotations

import json
from pathlib import Path

import xxhash

from holdfast.data.read.files import file_checksum
from holdfast.errors import ModelFolderError

INDEX = "model.safetensors.index.json"
SINGLE_FILES = ("model.safetensors", "adapter_model.safetensors")


def weights_checksum(folder: Path, remedy: str = "") -> str:
    """xxh3-128 of names and bytes of the folder's safetensors files. remedy: if there are none.
    Raises ModelFolderError."""
    total = xxhash.xxh3_128()
    try:
        for name in _weight_files(folder, remedy):
            total.update(f"{name}\0{file_checksum(folder / name)}\0".encode())
    except OSError as error:
        raise ModelFolderError(
            f"the weights cannot be read ({error.strerror}: {error.filename})",
            where=str(folder),
            remedy="put the folder back, or name where it is now",
        ) from None
    return total.hexdigest()


def refuse_other_weights(folder: Path, checksum: str, key: str) -> None:
    """Raises ModelFolderError unless the folder's weights have the checksum. key: of the run file,
    which names the folder."""
    found = weights_checksum(folder)
    if found != checksum:
        raise ModelFolderError(
            f"the weights here are not those that the run was begun with: their checksum is "
            f"{found}, and it was {checksum}",
            where=str(folder),
            remedy=f"put the files back, or name a folder that has them in {key}",
        )


def _weight_files(folder: Path, remedy: str) -> list[str]:
    """Names of the files, in order."""
    if (folder / INDEX).is_file():
        try:
            located = json.loads((folder / INDEX).read_text("utf-8"))["weight_map"].values()
            return sorted({Path(str(name)).name for name in located})
        except (ValueError, KeyError, AttributeError):
            raise ModelFolderError(
                "this index has no weight_map from tensors to files",
                where=str(folder / INDEX),
                remedy="fetch it again",
            ) from None
    found = [name for name in SINGLE_FILES if (folder / name).is_file()]
    if not found:
        raise ModelFolderError(
            "there are no safetensors files of weights here",
            where=str(folder),
            remedy=remedy or "name a folder that has them",
        )
    return found
