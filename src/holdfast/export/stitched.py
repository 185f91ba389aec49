"""One model out of several that were trained apart, as a folder in Hugging Face form.

average  each weight is the mean of the models' (a model soup: Wortsman et al., 2022)
experts  the feed-forward of each model becomes an expert, and a router with initial weights chooses
         among them. All other weights are means (branch-train-mix: Sukhbaatar et al., 2024)
parts    the first model, with the tensors of a pattern out of another one

Tensors are read in blocks, so a few megabytes are held whatever the size of the models. The folder
has `stitched.json`, which says what its weights were made of. A run that begins with the folder
keeps this file, and so do its exports.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from holdfast.checkpoint.restore.reader import Checkpoint
from holdfast.config.huggingface.convert import find_architecture, shape_differences
from holdfast.config.huggingface.folder import STITCHED, read_json_object
from holdfast.config.sections.governance import GovernanceConfig
from holdfast.config.sections.model import ExpertsConfig, ModelConfig
from holdfast.core.sharding.parameters import decoder_parameters
from holdfast.data.read.weight_files import weights_checksum
from holdfast.errors import CheckpointError, ConfigError
from holdfast.export.adapters import run_weights
from holdfast.export.sources import ModelSource, open_source
from holdfast.export.weights import choose_checkpoint
from holdfast.launch.start.regions import note_regions, refuse_copy_elsewhere
from holdfast.wire.store.run_store import MissingKeyError

if TYPE_CHECKING:
    from holdfast.model.huggingface_files import TensorReader

Method = Literal["average", "experts", "parts"]
FORMAT = 1  # of stitched.json
BALANCE_LOSS = 0.01  # of the router, as in section 3.2 of Sukhbaatar et al.


@dataclass(frozen=True)
class StitchRequest:
    """What is put together, and how."""

    sources: tuple[str, ...]  # run or folder, with @STEP after a run for an older checkpoint
    to: Path  # new folder
    method: Method
    weights: tuple[float, ...]  # of each source in a mean; none: equal ones
    takes: tuple[str, ...]  # parts: PATTERN=SOURCE
    top_k: int  # experts: of each token
    seed: int  # experts: of the router's initial weights


@dataclass(frozen=True)
class Stitched:
    """What came of it."""

    parameters: int
    taken: dict[str, list[str]]  # parts: names of the tensors out of each source but the first
    left: dict[str, int]  # parts: tensors of a source that differ from the first's and stay there


@dataclass(frozen=True)
class _Model:
    """A model that is opened. about: what stitched.json says of it."""

    name: str
    source: ModelSource
    weights: TensorReader
    about: dict[str, Any]


def stitch(request: StitchRequest, say: Callable[[str], None]) -> Stitched:
    """Write the folder. Raises UserError."""
    takes = _parse_takes(request)
    _refuse_weights(request)
    names = request.sources
    if request.method == "parts":
        names = tuple(dict.fromkeys([*names, *(name for _, name in takes)]))
    if len(names) < 2:
        raise ConfigError(
            f"{names[0]} alone cannot be stitched to anything",
            where="command line",
            remedy="name two models or more",
        )
    try:
        models = [_open(name, say) for name in names]
        _refuse_unlike(models)
        regions = _common_regions(models, request.to)
        shape, reader, taken = _result(request, models, takes)
        left = {model.name: _count_left(models[0], model, taken) for model in models[1:] if taken}
        _write(request, models, shape, reader, taken, regions)
    except MissingKeyError as error:
        raise CheckpointError(
            f"a run removed the checkpoint while it was read ({error})",
            remedy="name a step that the run keeps, as RUN@STEP, or stitch when the run has ended",
        ) from None
    return Stitched(sum(row.size for row in decoder_parameters(shape)), taken, left)


def _open(name: str, say: Callable[[str], None]) -> _Model:
    """Open a run at its newest intact checkpoint or at the named one, or a folder."""
    from holdfast.model.huggingface import import_folder

    text, at, step = name.rpartition("@")
    has_step = bool(at) and step.isdecimal() and not Path(name).exists()
    path = Path(text if has_step else name)
    source = open_source(path, "stitching")
    run = source.run
    if run is None:
        if has_step:
            raise ConfigError(
                f"{path} is the folder of a model, which has no steps",
                where=name,
                remedy=f"name it as {path}",
            )
        _, tensors = import_folder(path)
        about: dict[str, Any] = {"folder": str(path), "weights_checksum": weights_checksum(path)}
        return _Model(name, source, tensors, about | origin_of(path))
    checkpoint = choose_checkpoint(run, int(step) if has_step else None, say)
    key = checkpoint.commit.key
    about = {
        "run": run.config.name,
        "run_id": str(run.resolved.get("run_id", "")),
        "folder": str(path),
        "step": checkpoint.step,
        "checkpoint": key,
        "checkpoint_sha256": hashlib.sha256(run.store.get(key)).hexdigest(),
    }
    return _Model(name, source, _weights(source, checkpoint), about | origin_of(source.settings))


def _weights(source: ModelSource, checkpoint: Checkpoint) -> TensorReader:
    assert source.run is not None, "a folder has no checkpoint"
    return run_weights(source.run, checkpoint)


def origin_of(folder: Path) -> dict[str, Any]:
    """Return what a model began with, by the settings in a folder; {} if that was not stitched."""
    path = folder / STITCHED
    return {"began_with": read_json_object(path)} if path.is_file() else {}


# --- what is refused ----------------------------------------------------------------------------
def _parse_takes(request: StitchRequest) -> list[tuple[str, str]]:
    """-> (pattern, source). Raises ConfigError for options that do not fit each other."""
    if (request.method == "parts") != bool(request.takes):
        needs = "needs --take" if request.method == "parts" else "takes no --take"
        raise ConfigError(
            f"--into {request.method} {needs}",
            where="command line",
            remedy="use --into parts --take 'layers.*.ffn.*=RUN'",
        )
    if request.method == "parts" and len(request.sources) != 1:
        raise ConfigError(
            f"--into parts begins with one model, and {len(request.sources)} are named",
            where="command line",
            remedy="name the rest in --take PATTERN=RUN",
        )
    found = []
    for take in request.takes:
        pattern, equals, name = take.partition("=")
        if not (pattern and equals and name):
            raise ConfigError(
                f"--take {take} is no PATTERN=RUN",
                where="command line",
                remedy="use --take 'layers.*.ffn.*=RUN'",
            )
        found.append((pattern, name))
    return found


def _refuse_weights(request: StitchRequest) -> None:
    """Raises ConfigError for weights of a mean that make none."""
    weights = request.weights
    if not weights:
        return
    what = ""
    if request.method == "parts":
        what = "--into parts takes no --weights"
    elif len(weights) != len(request.sources):
        what = f"--weights has {len(weights)} numbers for {len(request.sources)} models"
    elif not (min(weights) >= 0 and 0 < sum(weights) < math.inf):
        what = "--weights must be 0 or more, and one of them above 0"
    if what:
        remedy = "use " + ",".join("1" for _ in request.sources)
        remedy = "leave --weights out" if request.method == "parts" else remedy
        raise ConfigError(what, where="command line", remedy=remedy)


def _refuse_unlike(models: Sequence[_Model]) -> None:
    """Raises ConfigError for models whose tensors or tokens do not mean the same."""
    first = models[0]
    for other in models[1:]:
        differences = shape_differences(first.source.model, other.source.model)
        multiples = [model.source.model.vocab_multiple for model in (first, other)]
        if multiples[0] != multiples[1]:
            differences["vocab_multiple"] = (multiples[0], multiples[1])
        if differences:
            key, (one, two) = next(iter(differences.items()))
            raise ConfigError(
                f"{first.name} has model.{key} {one}, and {other.name} has {two}",
                where="command line",
                remedy="name runs of one shape, such as branches of one run",
            )
        if _tokens(first) != _tokens(other):
            raise ConfigError(
                f"{first.name} and {other.name} have different tokenizers",
                where="command line",
                remedy="name runs whose data was prepared with the same tokenizer",
            )


def _tokens(model: _Model) -> bytes:
    path = model.source.tokenizer
    return b"" if path is None else hashlib.sha256(path.read_bytes()).digest()


def _common_regions(models: Sequence[_Model], to: Path) -> GovernanceConfig:
    """Return the regions in which all models may lie. Raises ConfigError if there is none, or if
    this machine lies elsewhere."""
    common: GovernanceConfig | None = None
    for model in models:
        refuse_copy_elsewhere(model.source.governance, str(to), "--to")
        if not (own := model.source.governance.regions):
            continue
        regions = own if common is None else tuple(r for r in own if r in common.regions)
        if not regions:
            raise ConfigError(
                f"no region is allowed by all of the models, and {model.name} allows "
                f"{', '.join(own)}",
                where="governance.regions",
                remedy="leave one of the models out",
            )
        common = GovernanceConfig(regions=tuple(regions))
    return common or GovernanceConfig()


# --- the tensors --------------------------------------------------------------------------------
def _result(
    request: StitchRequest, models: Sequence[_Model], takes: Sequence[tuple[str, str]]
) -> tuple[ModelConfig, TensorReader, dict[str, list[str]]]:
    """-> (shape, tensors, names of the tensors out of each model). Raises ConfigError."""
    from holdfast.model.stitching import Mean, Mixture, Parts

    shape = models[0].source.model
    if request.method == "parts":
        chosen = _chosen(shape, models, takes)
        taken = {
            model.name: [name for name, at in chosen.items() if at == number]
            for number, model in enumerate(models)
            if number
        }
        of = {name: models[number].weights for name, number in chosen.items()}
        return shape, Parts(of), taken
    weights = request.weights or tuple(1.0 for _ in models)
    mean = Mean([model.weights for model in models], weights)
    if request.method == "average":
        return shape, mean, {}
    mixed = _mixed_shape(shape, request)
    rows = {row.name: row for row in decoder_parameters(mixed)}
    return mixed, Mixture([model.weights for model in models], mean, rows, request.seed), {}


def _mixed_shape(shape: ModelConfig, request: StitchRequest) -> ModelConfig:
    """The shape of the mixture. Raises ConfigError if there can be none."""
    count = len(request.sources)
    if shape.experts is not None:
        raise ConfigError(
            f"{request.sources[0]} has experts already",
            where="command line",
            remedy="use --into average",
        )
    if not 1 <= request.top_k <= count:
        raise ConfigError(
            f"{request.top_k} of {count} experts cannot compute a token",
            where="--top-k",
            remedy=f"use 1 to {count}",
        )
    experts = ExpertsConfig(count=count, top_k=request.top_k, balance_loss=BALANCE_LOSS)
    mixed = shape.model_copy(update={"experts": experts, "preset": None})
    if find_architecture(mixed) is None:
        raise ConfigError(
            f"no architecture of Hugging Face is a {shape.family} with experts",
            where="command line",
            remedy="use --into average, or models of the families llama, mistral or qwen3",
        )
    return mixed


def _chosen(
    shape: ModelConfig, models: Sequence[_Model], takes: Sequence[tuple[str, str]]
) -> dict[str, int]:
    """Name of a tensor -> number of its model. Raises ConfigError."""
    numbers = {model.name: number for number, model in enumerate(models)}
    names = [row.name for row in decoder_parameters(shape)]
    chosen: dict[str, int] = {}
    for pattern, name in takes:
        matched = [tensor for tensor in names if fnmatchcase(tensor, pattern)]
        if not matched:
            raise ConfigError(
                f"--take {pattern}={name}: no tensor has such a name",
                where="command line",
                remedy=f"tensors are called {names[0]}, {names[1]} and so on",
            )
        for tensor in matched:
            if chosen.setdefault(tensor, numbers[name]) != numbers[name]:
                raise ConfigError(
                    f"{tensor} is to be taken from {models[chosen[tensor]].name} and from {name}",
                    where="command line",
                    remedy="use patterns that do not overlap",
                )
    return {tensor: chosen.get(tensor, 0) for tensor in names}


def _count_left(first: _Model, other: _Model, taken: dict[str, list[str]]) -> int:
    """Tensors that are not taken from a model though its numbers differ from the first's."""
    from holdfast.model.stitching import count_unlike

    rows = decoder_parameters(first.source.model)
    rest = (row for row in rows if row.name not in taken[other.name])
    return count_unlike(first.weights, other.weights, rest)


# --- the folder ---------------------------------------------------------------------------------
def _write(
    request: StitchRequest,
    models: Sequence[_Model],
    shape: ModelConfig,
    reader: TensorReader,
    taken: dict[str, list[str]],
    regions: GovernanceConfig,
) -> None:
    from holdfast.model.huggingface import export_folder

    def finish(folder: Path) -> None:
        about = _provenance(request, models, taken) | {"weights_checksum": weights_checksum(folder)}
        (folder / STITCHED).write_text(json.dumps(about, indent=2) + "\n", "utf-8")
        note_regions(folder, regions)

    first = models[0].source
    export_folder(
        request.to,
        shape,
        reader,
        first.tokenizer,
        end_token=first.end_token,
        imported=first.settings,
        finish=finish,
    )


def _provenance(
    request: StitchRequest, models: Sequence[_Model], taken: dict[str, list[str]]
) -> dict[str, Any]:
    """What stitched.json says."""

    def rows() -> Iterator[dict[str, Any]]:
        weights = request.weights or tuple(1.0 for _ in models)
        for number, model in enumerate(models):
            part: dict[str, Any] = {"tensors": taken.get(model.name, "rest")}
            if request.method != "parts":
                part = {"weight": weights[number] / sum(weights)}
            if request.method == "experts":
                part["expert"] = number
            yield model.about | part

    router = {"top_k": request.top_k, "router_seed": request.seed}
    return {
        "version": FORMAT,
        "method": request.method,
        **(router if request.method == "experts" else {}),
        "sources": list(rows()),
    }
