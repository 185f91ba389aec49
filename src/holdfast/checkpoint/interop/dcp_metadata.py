"""Reading the folder of `torch.distributed.checkpoint`, in a process of its own: no torch.

    python -m holdfast.checkpoint.interop.dcp_metadata FOLDER

DCP (torch.distributed.checkpoint, 2.13) describes a checkpoint in a pickle, `.metadata`. It wraps
each tensor in the data files (`__<rank>_<n>.distcp`) into a zip archive with another pickle. A
pickle may call anything that it names. So the unpickler here knows a short list of names, gives a
stand-in of this module for each, and refuses any other name. Nothing of torch is imported, no
tensor is made. The answer on stdout is JSON: for each tensor its dtype, shape and chunks, for each
chunk its file and byte range. So the caller reads plain byte ranges. Objects that are not tensors
(data loaders, schedules) are named. Those of plain numbers, texts and containers are in the answer
with their values; any other object is left unread.

DCP's own `FileSystemReader` is no replacement. It gives `.metadata` to plain `pickle`, whatever
`torch.serialization.safe_globals` says, so a folder can run code. torch's `weights_only` unpickler
refuses every `.metadata`, because it does not know pickle's protocol 4. That reader also follows
`../` out of the folder, leaves missing elements uninitialised, and needs twenty times the memory.
"""

from __future__ import annotations

import io
import json
import pickle
import re
import resource
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any, BinaryIO

METADATA = ".metadata"

LEAST_MEMORY_BYTES = 2**30
MEMORY_PER_METADATA_BYTE = 256
"""Memory for each byte of `.metadata`; DCP's own need less than 50."""
MAX_VALUE_BYTES = 2**20
MAX_VALUE_ITEMS = 20_000
"""Limits of an object that is no tensor; a larger one is left unread."""

TORCH_DTYPE_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
"""torch's names of the dtypes that a checkpoint can hold, and safetensors'."""

TORCH_STORAGE_DTYPES = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "BFloat16Storage": "BF16",
    "HalfStorage": "F16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}


class UnsupportedDcpError(Exception):
    """One sentence: what is not as DCP writes it."""


class Placeholder:
    """In place of a dataclass: holds its fields, and does nothing."""

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:  # TensorProperties gives a tuple, its dtype first
            self.__dict__["state"] = state

    def field(self, name: str) -> Any:
        return self.__dict__.get(name)


class Metadata(Placeholder):
    pass


class TensorStorageMetadata(Placeholder):
    pass


class BytesStorageMetadata(Placeholder):
    pass


class MetadataIndex(Placeholder):
    pass


class IgnoredObject(Placeholder):
    """Known, and of no use here."""


def _sizes(values: Any = ()) -> tuple[int, ...]:
    return tuple(int(value) for value in values)


def _ignore(*_: Any) -> None:
    """Layouts, memory formats, paths: read over."""


_DCP = "torch.distributed.checkpoint.metadata"
_PLANNER = "torch.distributed.checkpoint.planner"
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
# where torch 2.2 had two of them
_OLD_METADATA = "torch.distributed._shard.sharded_tensor.metadata"
METADATA_ALLOWLIST: dict[tuple[str, str], Any] = {
    (_DCP, "Metadata"): Metadata,
    (_DCP, "TensorStorageMetadata"): TensorStorageMetadata,
    (_DCP, "BytesStorageMetadata"): BytesStorageMetadata,
    (_DCP, "MetadataIndex"): MetadataIndex,
    (_DCP, "ChunkStorageMetadata"): IgnoredObject,
    (_DCP, "TensorProperties"): IgnoredObject,
    (_DCP, "StorageMeta"): IgnoredObject,
    (_DCP, "_MEM_FORMAT_ENCODING"): _ignore,
    (_OLD_METADATA, "TensorProperties"): IgnoredObject,
    (_OLD_METADATA, "MEM_FORMAT_ENCODING"): _ignore,
    ("builtins", "getattr"): _ignore,  # how some releases of Python write a member of an enum
    (_FILESYSTEM, "_StorageInfo"): IgnoredObject,
    # plans of each rank, which Megatron keeps there
    **{(_PLANNER, name): IgnoredObject for name in ("SavePlan", "WriteItem", "TensorWriteData")},
    **{(_MEGATRON, name): IgnoredObject for name in ("MCoreSavePlan", "MCoreMetadata")},
    (_PLANNER, "WriteItemType"): _ignore,
    ("torch", "Size"): _sizes,
    ("torch.serialization", "_get_layout"): _ignore,
    ("torch", "strided"): None,
    ("pathlib", "PosixPath"): _ignore,
    ("pathlib", "WindowsPath"): _ignore,
    ("pathlib._local", "PosixPath"): _ignore,
    ("pathlib._local", "WindowsPath"): _ignore,
    ("collections", "OrderedDict"): OrderedDict,
    **{("torch", name): dtype for name, dtype in TORCH_DTYPE_NAMES.items()},
}
"""All that `.metadata` may name."""


class ArchivedStorage:
    """A tensor's bytes: a record of the archive."""

    def __init__(self, dtype: str, key: str) -> None:
        self.dtype, self.key = dtype, key


class ArchivedTensor:
    """The position of a tensor's elements in its storage."""

    def __init__(
        self, storage: ArchivedStorage, offset: int, size: Any, stride: Any, *_: Any
    ) -> None:
        self.storage, self.offset = storage, int(offset)
        self.size, self.stride = _sizes(size), _sizes(stride)

    def __setstate__(self, state: Any) -> None:
        raise UnsupportedDcpError("a tensor carries attributes of its own")


ARCHIVE_ALLOWLIST: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): ArchivedTensor,
    ("torch._utils", "_rebuild_parameter"): lambda tensor, *_: tensor,
    ("torch", "Size"): _sizes,
    ("collections", "OrderedDict"): OrderedDict,
    **{("torch", name): dtype for name, dtype in TORCH_STORAGE_DTYPES.items()},
}
"""All that a tensor's archive may name."""
VALUE_ALLOWLIST: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("_codecs", "encode"): lambda text, _: text.encode("latin1"),  # how protocol 2 writes bytes
}
"""All that an object of plain values may name."""


class AllowlistUnpickler(pickle.Unpickler):
    """An unpickler that knows a list of names, and nothing else."""

    def __init__(self, data: bytes, allowed: dict[tuple[str, str], Any], where: str) -> None:
        super().__init__(io.BytesIO(data))
        self._allowed, self._where = allowed, where

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._allowed[module, name]
        except KeyError:
            raise UnsupportedDcpError(
                f"{self._where} names {module}.{name}, which no DCP checkpoint of tensors needs"
            ) from None

    def persistent_load(self, value: Any) -> ArchivedStorage:
        if not (isinstance(value, tuple) and len(value) == 5 and value[0] == "storage"):
            raise UnsupportedDcpError(f"{self._where} refers to something that is no storage")
        return ArchivedStorage(str(value[1]), str(value[2]))

    def load_checked(self) -> Any:
        try:
            return self.load()
        except UnsupportedDcpError:
            raise
        except Exception as error:
            raise UnsupportedDcpError(
                f"{self._where} is not a pickle that DCP wrote ({type(error).__name__})"
            ) from None


class FileWindow(io.RawIOBase):
    """A range of a file as a file: archives lie one after another in a data file."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._position = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = offset + (0, self._position, self._length)[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._position)
        self._file.seek(self._start + self._position)
        data = self._file.read(left if size is None or size < 0 else min(size, left))
        self._position += len(data)
        return data


def describe_folder(folder: Path) -> dict[str, Any]:
    """Return the complete answer. Raises UnsupportedDcpError, and OSError for files that cannot be
    read."""
    found = AllowlistUnpickler(
        (folder / METADATA).read_bytes(), METADATA_ALLOWLIST, METADATA
    ).load_checked()
    if not isinstance(found, Metadata):
        raise UnsupportedDcpError(f"{METADATA} holds no description of a checkpoint")
    entries, places = found.field("state_dict_metadata"), found.field("storage_data")
    if not isinstance(entries, dict) or not isinstance(places, dict):
        raise UnsupportedDcpError(f"{METADATA} does not say where its tensors lie")
    at: dict[tuple[str, tuple[int, ...]], Any] = {}
    for index, place in places.items():
        if isinstance(index, MetadataIndex):
            at[str(index.field("fqn")), tuple(index.field("offset") or ())] = place
    files: dict[str, BinaryIO] = {}
    tensors: dict[str, Any] = {}
    others: list[str] = []
    values: dict[str, Any] = {}
    try:
        for name, entry in entries.items():
            if isinstance(entry, TensorStorageMetadata):
                tensors[str(name)] = _describe_tensor(folder, str(name), entry, at, files)
                continue
            others.append(str(name))
            try:
                values[str(name)] = _read_value(folder, str(name), at, files)
            except (UnsupportedDcpError, zipfile.BadZipFile, KeyError, ValueError, RecursionError):
                continue  # it stays unread, and the caller names it
    finally:
        for file in files.values():
            file.close()
    return {"tensors": tensors, "others": others, "values": values}


def _read_value(
    folder: Path,
    name: str,
    places: dict[tuple[str, tuple[int, ...]], Any],
    files: dict[str, BinaryIO],
) -> Any:
    """Return an object of plain values, as JSON has them.

    Raises UnsupportedDcpError, and the errors of a broken archive."""
    place = places[name, ()]
    length = int(place.field("length"))
    if length > MAX_VALUE_BYTES:
        raise UnsupportedDcpError(f"{name} is large")
    window = FileWindow(_open_file(folder, place, files), int(place.field("offset")), length)
    with zipfile.ZipFile(window) as archive:
        (pickled,) = (n for n in archive.namelist() if n.endswith("/data.pkl"))
        if archive.getinfo(pickled).file_size > MAX_VALUE_BYTES:
            raise UnsupportedDcpError(f"{name} is large")
        return _plain(_load_value(archive.read(pickled), name), name, [MAX_VALUE_ITEMS])


def _load_value(pickled: bytes, name: str) -> Any:
    return AllowlistUnpickler(pickled, VALUE_ALLOWLIST, name).load_checked()


def _plain(value: Any, name: str, left: list[int]) -> Any:
    """`value` as JSON has it; bytes are a pickle of plain values. `left` counts down its items."""
    left[0] -= 1
    if left[0] < 0:
        raise UnsupportedDcpError(f"{name} has too many items")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return _plain(_load_value(value, name), name, left)
    if isinstance(value, dict):
        return {str(key): _plain(item, name, left) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, name, left) for item in value]
    raise UnsupportedDcpError(f"{name} is no plain value")


def _open_file(folder: Path, place: Any, files: dict[str, BinaryIO]) -> BinaryIO:
    """Return the data file of `place`, opened once.

    Raises UnsupportedDcpError for a path that leaves the folder."""
    name = str(place.field("relative_path"))
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
        raise UnsupportedDcpError(f"{METADATA} names a file outside of the folder ({name!r})")
    if name not in files:
        files[name] = (folder / name).open("rb")
    return files[name]


def _describe_tensor(
    folder: Path,
    name: str,
    entry: TensorStorageMetadata,
    places: dict[tuple[str, tuple[int, ...]], Any],
    files: dict[str, BinaryIO],
) -> dict[str, Any]:
    dtype = _read_dtype(name, entry)
    chunks = []
    for chunk in entry.field("chunks") or ():
        offsets, lengths = tuple(chunk.field("offsets")), tuple(chunk.field("sizes"))
        place = places.get((name, offsets))
        if place is None:
            raise UnsupportedDcpError(
                f"{METADATA} does not say where {name} at {list(offsets)} lies"
            )
        if place.field("transform_descriptors"):
            raise UnsupportedDcpError(f"{name} is compressed or encrypted by an extension of DCP")
        chunks.append(_describe_chunk(folder, name, dtype, offsets, lengths, place, files))
    return {"dtype": dtype, "shape": list(entry.field("size")), "chunks": chunks}


def _read_dtype(name: str, entry: TensorStorageMetadata) -> str:
    properties = entry.field("properties")
    state = properties.field("state") if isinstance(properties, Placeholder) else None
    dtype = state[0] if isinstance(state, tuple) and state else None
    if dtype not in TORCH_DTYPE_NAMES.values():
        raise UnsupportedDcpError(f"{name} has a dtype that a checkpoint cannot hold")
    return str(dtype)


def _describe_chunk(
    folder: Path,
    name: str,
    dtype: str,
    offsets: tuple[int, ...],
    lengths: tuple[int, ...],
    place: Any,
    files: dict[str, BinaryIO],
) -> dict[str, Any]:
    """The bytes of a file that hold one chunk, and their order of dims."""
    file = _open_file(folder, place, files)
    file_name = str(place.field("relative_path"))
    start, length = int(place.field("offset")), int(place.field("length"))
    where = f"{name} in {file_name}"
    try:
        with zipfile.ZipFile(FileWindow(file, start, length)) as archive:
            tensor, record = _read_archive(archive, where)
    except (zipfile.BadZipFile, ValueError, OSError) as error:
        raise UnsupportedDcpError(f"{where} is not an archive that DCP wrote ({error})") from None
    if tensor.size != lengths or tensor.storage.dtype != dtype:
        raise UnsupportedDcpError(
            f"{where} is {tensor.storage.dtype} {list(tensor.size)}, {METADATA} says {dtype} "
            f"{list(lengths)}"
        )
    file.seek(start + record.header_offset)
    head = file.read(30)  # the local header: its name and extra field precede the bytes
    skip = int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
    return {
        "offsets": offsets,
        "lengths": lengths,
        "file": file_name,
        "start": start + record.header_offset + 30 + skip,
        "bytes": record.file_size,
        "first": tensor.offset,
        "strides": tensor.stride,
    }


def _read_archive(archive: zipfile.ZipFile, where: str) -> tuple[ArchivedTensor, zipfile.ZipInfo]:
    """The tensor of an archive, and the record with its bytes."""
    names = archive.namelist()
    root = next((n.removesuffix("data.pkl") for n in names if n.endswith("/data.pkl")), None)
    if root is None:
        raise ValueError("it has no data.pkl")
    order = f"{root}byteorder"
    if order in names and archive.read(order) != b"little":
        raise UnsupportedDcpError(f"{where} was written on a machine of the other byte order")
    tensor = AllowlistUnpickler(
        archive.read(f"{root}data.pkl"), ARCHIVE_ALLOWLIST, where
    ).load_checked()
    if not isinstance(tensor, ArchivedTensor) or not isinstance(tensor.storage, ArchivedStorage):
        raise UnsupportedDcpError(f"{where} is no tensor")
    try:
        record = archive.getinfo(f"{root}data/{tensor.storage.key}")
    except KeyError:
        raise UnsupportedDcpError(f"{where} has no bytes") from None
    if record.compress_type != zipfile.ZIP_STORED:
        raise UnsupportedDcpError(f"{where} is compressed")
    return tensor, record


def main() -> None:
    try:
        folder = Path(sys.argv[1])
        # Bound what this process may allocate: a pickle of ten bytes can ask for 32 GB.
        size = (folder / METADATA).stat().st_size
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = LEAST_MEMORY_BYTES + MEMORY_PER_METADATA_BYTE * size
        if hard == resource.RLIM_INFINITY or limit < hard:
            resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
        answer = describe_folder(Path(sys.argv[1]))
    except UnsupportedDcpError as error:
        answer = {"refused": str(error)}
    except OSError as error:
        answer = {"refused": f"{error.filename or METADATA}: {error.strerror}"}
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
