"""Files of `torch.save`, read by torch's tensors-only unpickler, and tensors by flat names.

`torch.load(weights_only=True)` knows tensors, numbers, texts and containers, and refuses any other
name of a pickle. A reader may name further classes: each gets a stand-in that does nothing. So no
code of a file, and of no other library, is run.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from holdfast.checkpoint.interop.dcp import READ_BLOCK_BYTES, cast_bits
from holdfast.checkpoint.interop.dcp_metadata import TORCH_DTYPE_NAMES
from holdfast.core.sharding.state_table import ITEM_BYTES
from holdfast.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

_BITS = {8: "<u8", 4: "<u4", 2: "<u2", 1: "u1"}
_REFUSED = re.compile(r"GLOBAL ([\w.]+)")


class StandIn:
    """In place of another library's object: takes what it is given, and does nothing."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


class Fields:
    """In place of a namespace: its attributes, in `values`."""

    values: Mapping[str, Any]

    def __setstate__(self, state: Any) -> None:
        self.values = state if isinstance(state, dict) else {}


def load_tensors(path: Path, stand_ins: Sequence[str] = (), namespaces: Sequence[str] = ()) -> Any:
    """Return what a file of `torch.save` holds, mapped from the disk.

    stand_ins: full names of classes whose objects are of no use here. namespaces: of classes whose
    attributes are. Raises CheckpointError for a
    file that holds anything else than tensors and plain values."""
    import torch

    names: list[Any] = [(StandIn, name) for name in stand_ins]
    names += [(Fields, name) for name in namespaces]
    try:
        with torch.serialization.safe_globals(names):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, OSError, ValueError, EOFError) as error:
        found = _REFUSED.search(str(error))
        what = f"it names {found[1]}, which is no tensor" if found else "it is not complete"
        if isinstance(error, FileNotFoundError):
            what = "it is missing"
        raise CheckpointError(
            f"this file of torch.save is not read: {what}",
            where=str(path),
            remedy="save the checkpoint again, or import the weights alone with --weights-only",
        ) from None


@dataclass(frozen=True, slots=True)
class TorchTensor:
    """A tensor of a flat state; `dp_rank`s and files are behind it."""

    value: Tensor

    @property
    def dtype(self) -> str:
        return TORCH_DTYPE_NAMES[str(self.value.dtype).removeprefix("torch.")]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape)


@dataclass
class TorchState:
    """Tensors by flat names, as `dcp_import.import_flat` takes them."""

    tensors: dict[str, TorchTensor] = field(default_factory=dict)
    non_tensors: tuple[str, ...] = ()

    def add(self, tensors: Mapping[str, Tensor], prefix: str = "", suffix: str = "") -> None:
        for name, value in tensors.items():
            self.tensors[f"{prefix}{name}{suffix}"] = TorchTensor(value)

    def add_moments(self, name: str, moments: Mapping[str, Tensor]) -> None:
        """Add the optimizer's state of one parameter: moments, and its step count."""
        self.add(moments, f"optimizer.state.{name}.")

    def iterate_rows(self, name: str, dtype: str, unit: int = 1) -> Iterator[Any]:
        """As `DcpFolder.iterate_rows`."""
        import torch

        tensor = self.tensors[name]
        item = ITEM_BYTES[tensor.dtype]
        value = tensor.value.detach()
        rows = value.reshape(1) if not value.shape else value
        row = max(1, rows[:1].numel()) * item
        count = max(1, READ_BLOCK_BYTES // (row * unit)) * unit
        for first in range(0, rows.shape[0], count):
            block = rows[first : first + count].contiguous()
            bits = block.view(torch.uint8).numpy().view(_BITS[item])
            found = cast_bits(bits.reshape(block.shape), tensor.dtype, dtype)
            yield np.ascontiguousarray(found)


def refuse_unknown(keys: Sequence[str], known: frozenset[str], what: str, where: Path) -> None:
    """Raises CheckpointError for optimizer state that an import would lose."""
    if strange := sorted(set(keys) - known):
        raise CheckpointError(
            f"{what} holds {strange[0]}, which AdamW of a run does not have",
            where=str(where),
            remedy="import the weights alone, with --weights-only",
        )
