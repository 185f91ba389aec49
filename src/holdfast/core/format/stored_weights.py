"""Names and shapes of a folder's weights, compared with what a model and its adapters need."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.config.huggingface.folder import FETCH_AGAIN
from holdfast.config.huggingface.weight_files import (
    ADAPTER,
    READABLE,
    StoredTensor,
    read_adapter_weights,
    read_weights,
)
from holdfast.core.format.hf_names import NameMap
from holdfast.core.sharding.adapters import DOWN, UP, adapted_layers, linear_layers
from holdfast.errors import ModelFolderError, nearest_of

if TYPE_CHECKING:
    from holdfast.config.sections.lora import LoraConfig
    from holdfast.config.sections.model import ModelConfig

PREFIX = "base_model.model."
_WRAPPERS = re.compile(r"(?<![^.])(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")
"""What torch puts into names of a compiled or wrapped module."""


def check_weights(folder: Path, names: NameMap, remedy: str = "") -> dict[str, StoredTensor]:
    """Return a folder's tensors by their names: all of the map in their shapes, and nothing else
    with numbers in it. remedy: if there are no weights. Raises ModelFolderError."""
    found, known = read_weights(folder, remedy), names.to_ours()

    def wrong(name: str, what: str, remedy: str = FETCH_AGAIN) -> ModelFolderError:
        return ModelFolderError(f"tensor {name} {what}", where=str(folder), remedy=remedy)

    for entry in names.stored_entries:
        if entry.theirs not in found:
            near = _instead(entry.theirs, found.keys() - known)
            raise wrong(entry.theirs, f"is missing{near}")
        stored = found[entry.theirs]
        _refuse_dtype(stored)
        if stored.shape != entry.shape:
            shapes = f"{list(stored.shape)} but config.json says {list(entry.shape)}"
            raise wrong(entry.theirs, f"has shape {shapes}")
    for theirs in found:
        # Old exports carry the rotary frequencies; they follow from the config.
        if theirs not in known and not theirs.endswith("rotary_emb.inv_freq"):
            remedy = "name a folder of one of the families in docs/guide/models.md"
            raise wrong(theirs, "belongs to no part of the decoder", remedy)
    return found


@dataclass(frozen=True)
class AdapterPart:
    """Where a row of the run's adapters lies in an adapter folder."""

    stored: StoredTensor
    rows: slice
    columns: slice


def check_adapter(folder: Path, model: ModelConfig, lora: LoraConfig) -> dict[str, AdapterPart]:
    """Return an adapter's parts by our names. Names of a compiled or wrapped module, of a
    distributed one, and with the adapter's own name count as PEFT's. A layer that is several of
    ours has the rows of all A, and all B as blocks of a diagonal, as an export writes them.

    Raises ModelFolderError for a folder that does not hold exactly the adapters of the run file."""
    there: dict[str, StoredTensor] = {}
    for stored in read_adapter_weights(folder).values():
        name = plain_name(stored.name)
        if name in there:
            raise ModelFolderError(
                f"{there[name].name} and {stored.name} are one tensor by two names",
                where=str(stored.file),
                remedy="save one adapter in the folder",
            )
        there[name] = stored
    places = _places(model, lora)
    wanted: dict[str, tuple[int, ...]] = {}
    for name, rows, columns in places.values():
        most = wanted.get(name, (0, 0))
        wanted[name] = max(most[0], rows.stop), max(most[1], columns.stop)
    unknown = sorted(there.keys() - wanted.keys())
    problems = [
        *(f"{name} is missing{_instead(name, unknown)}" for name in wanted if name not in there),
        *(f"{there[name].name} belongs to no layer with an adapter" for name in unknown),
        *(
            f"{there[name].name} has shape {list(there[name].shape)}, and the base's layer and "
            f"lora.rank give it {list(shape)}"
            for name, shape in wanted.items()
            if name in there and there[name].shape != shape
        ),
    ]
    if problems:
        more = f" ({len(problems) - 1} more like it)" if len(problems) > 1 else ""
        fused = len(places) > len(wanted)
        if fused:
            more += ", where a layer of PEFT is several of Holdfast's, with a rank each"
        raise ModelFolderError(
            f"tensor {problems[0]}{more}",
            where=str(folder / ADAPTER),
            remedy="merge the adapter with PEFT, and name the result in model.from"
            if fused
            else "name the base that the adapter was trained on in model.from",
        )
    for stored in there.values():
        _refuse_dtype(stored)
    return {ours: AdapterPart(there[name], *cut) for ours, (name, *cut) in places.items()}


def _places(model: ModelConfig, lora: LoraConfig) -> dict[str, tuple[str, slice, slice]]:
    """Our parameter name -> PEFT's tensor, with the rows and columns in it, of every row."""
    layers, adapted = linear_layers(model), adapted_layers(model, lora)
    outputs, parts = dict[str, int](), dict[str, int]()  # of each of their layers, so far
    found: dict[str, tuple[str, slice, slice]] = {}
    for ours, (theirs, shape) in layers.items():
        first = outputs.get(theirs, 0)
        outputs[theirs] = first + shape[0]
        if ours not in adapted:
            continue
        rank = slice(parts.get(theirs, 0), parts.get(theirs, 0) + lora.rank)
        parts[theirs] = rank.stop
        name = f"{PREFIX}{theirs}"
        found[f"{ours}.{DOWN}"] = (f"{name}.{DOWN}.weight", rank, slice(0, shape[1]))
        rows = slice(first, outputs[theirs])
        found[f"{ours}.{UP}"] = (f"{name}.{UP}.weight", rows, rank)
    return found


def plain_name(name: str) -> str:
    """A name of an adapter's tensor as `PeftModel.save_pretrained` writes it."""
    name = _WRAPPERS.sub("", name).removeprefix("module.").removeprefix(PREFIX)
    name = name.removeprefix("module.")
    return PREFIX + re.sub(rf"\.({DOWN}|{UP})\.[^.]+\.weight$", r".\1.weight", name)


def _instead(missing: str, there: Collection[str]) -> str:
    """What the folder has in the place of a missing name."""
    near = next((name for name in sorted(there) if name.endswith(missing)), None)
    near = near or nearest_of(missing, there, 0.6)
    return f", and {near} is there, which has no place" if near else ""


def _refuse_dtype(stored: StoredTensor) -> None:
    if stored.dtype not in READABLE:
        raise ModelFolderError(
            f"tensor {stored.name} is of dtype {stored.dtype}, which is not among "
            f"{', '.join(READABLE)}",
            where=str(stored.file.parent),
            remedy="convert the weights to bfloat16 or float32",
        )
