"""A pruned model: from a folder or a run, into a folder in Hugging Face form."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from holdfast.config.loading.load import load_config
from holdfast.config.run import RunConfig
from holdfast.config.sections.model import ModelConfig
from holdfast.data.stream.batch import Batches
from holdfast.data.stream.dataset_location import open_dataset
from holdfast.errors import ConfigError
from holdfast.export.sources import ModelSource, open_source
from holdfast.export.weights import folder_decoder, load_decoder, with_checkpoint
from holdfast.launch.run.runs import open_run
from holdfast.launch.start.regions import note_regions, refuse_copy_elsewhere

if TYPE_CHECKING:
    from holdfast.model.decoder import Decoder
    from holdfast.training.compress.pruning import Sample, Sparsity

Method = Literal["magnitude", "wanda", "layers"]
_BATCH = 8  # samples of a pass


@dataclass(frozen=True)
class PruneRequest:
    """What is pruned, and how."""

    source: Path  # folder in Hugging Face form, run folder, or run file
    to: Path  # new folder
    method: Method
    sparsity: float | None  # part of the weights, or of the blocks; None: by pattern or layers
    pattern: str  # such as 2:4; "": none
    layers: int  # blocks to drop; 0: by sparsity
    data: Path | None  # run file or run whose data calibrates; None: the run's own
    samples: int  # of calibration


@dataclass(frozen=True)
class Pruned:
    """What came of it."""

    zeros: int  # weights in blocks that are zero
    weights: int  # of matrices in blocks
    blocks: int  # that are left
    dropped: tuple[int, ...]  # numbers of blocks, from 0
    before: float | None  # nats a token on the samples; None: there were none
    after: float | None


def prune(request: PruneRequest, say: Callable[[str], None]) -> Pruned:
    """Write the pruned model. Raises UserError."""
    how = _sparsity(request)
    source = open_source(request.source, "pruning")
    refuse_copy_elsewhere(source.governance, str(request.to), "--to")
    config = _data_of(request, source)
    if config is None and request.method != "magnitude":
        raise ConfigError(
            f"--method {request.method} needs data, and {request.source} is the folder of a model",
            where="--data",
            remedy="name a run file whose dataset is prepared",
        )
    from holdfast.model.huggingface import export_folder
    from holdfast.training.compress import pruning

    model, decoder = source.model, _decoder_of(source, request.source, say)
    samples = [] if config is None else _samples(config, request.samples, model)
    before = pruning.mean_loss(decoder, samples) if samples else None
    dropped: tuple[int, ...] = ()
    state: Mapping[str, Any]
    if request.method == "layers":
        dropped = _least_blocks(request, model, pruning.influences(decoder, samples))
        model, state = pruning.without_blocks(model, decoder.state_dict(), dropped)
        decoder = pruning.decoder_of(model, state)
    else:
        pruning.refuse_sparsity(model, decoder, how)
        if request.method == "wanda":
            pruning.prune_by_wanda(decoder, samples, how)
        else:
            pruning.prune_by_magnitude(decoder, how)
        state = decoder.state_dict()
    after = pruning.mean_loss(decoder, samples) if samples else None
    export_folder(
        request.to,
        model,
        state,
        source.tokenizer,
        end_token=source.end_token,
        imported=source.settings,
    )
    note_regions(request.to, source.governance)
    matrices = [layer.weight for layer in pruning.prunable_layers(decoder.layers).values()]
    zeros = sum(int((matrix == 0).sum()) for matrix in matrices)
    total = sum(matrix.numel() for matrix in matrices)
    return Pruned(zeros, total, model.layers, dropped, before, after)


def _sparsity(request: PruneRequest) -> Sparsity:
    """Raises ConfigError for options that do not fit each other."""
    from holdfast.training.compress.pruning import Sparsity

    given = {
        "--sparsity": request.sparsity is not None,
        "--pattern": bool(request.pattern),
        "--layers": request.layers > 0,
    }
    takes = ("--sparsity", "--layers" if request.method == "layers" else "--pattern")
    named = [option for option, is_given in given.items() if is_given]
    if len(named) != 1 or named[0] not in takes:
        raise ConfigError(
            f"--method {request.method} takes one of {' and '.join(takes)}, and has "
            f"{' and '.join(named) or 'none'}",
            where="command line",
            remedy=f"give one of {' and '.join(takes)}",
        )
    if not request.pattern:
        return Sparsity(request.sparsity or 0.0)
    found = re.fullmatch(r"([1-9]\d?):([1-9]\d?)", request.pattern)
    if found is None or int(found[1]) >= int(found[2]):
        raise ConfigError(
            f"--pattern {request.pattern} is no N:M with N below M",
            where="command line",
            remedy="use 2:4, which keeps 2 of each 4 weights",
        )
    keep, of_each = int(found[1]), int(found[2])
    return Sparsity(1 - keep / of_each, keep, of_each)


def _decoder_of(source: ModelSource, path: Path, say: Callable[[str], None]) -> Decoder:
    """Raises UserError."""
    run = source.run
    if run is None:
        return folder_decoder(path)
    return with_checkpoint(run, None, lambda chosen: load_decoder(run, chosen), say)[1].float()


def _data_of(request: PruneRequest, source: ModelSource) -> RunConfig | None:
    """The configuration whose data calibrates. Raises UserError."""
    if request.data is not None:
        if request.data.is_file():
            return load_config(request.data).config
        return open_run(request.data).config
    return None if source.run is None else source.run.config


def _samples(config: RunConfig, count: int, model: ModelConfig) -> list[Sample]:
    """The first training samples of a run. Raises UserError."""
    from holdfast.training.compress.pruning import Sample

    dataset = open_dataset(config.data.folder, config.data)
    if dataset.vocab_size > model.vocab_size:
        raise ConfigError(
            f"the dataset has {dataset.vocab_size} token ids, and the model knows "
            f"{model.vocab_size}",
            where="--data",
            remedy="name data that was prepared with the model's own tokenizer",
        )
    size = gcd(count, _BATCH)
    sizes = {"batch_size": count, "microbatch_size": size, "batch_warmup": ()}
    train = config.train.model_copy(update=sizes)
    batches = Batches(dataset, config.data, train, config.seed)
    count = batches.microbatches(1)
    return [Sample.of(batches.microbatch(1, index)) for index in range(count)]


def _least_blocks(
    request: PruneRequest, model: ModelConfig, influences: list[float]
) -> tuple[int, ...]:
    """Raises ConfigError if no block would be left."""
    count = request.layers or round((request.sparsity or 0.0) * model.layers)
    if not 0 < count < model.layers:
        raise ConfigError(
            f"{count} of {model.layers} blocks cannot be dropped",
            where="command line",
            remedy=f"drop 1 to {model.layers - 1} blocks",
        )
    order = sorted(range(model.layers), key=lambda number: influences[number])
    return tuple(sorted(order[:count]))
