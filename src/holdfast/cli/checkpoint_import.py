"""`holdfast checkpoint import`: begin a run from weights of another trainer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.options import Json, Overrides
from holdfast.config.loading.fields import as_path, value_at
from holdfast.config.sections.lora import refuse_lora
from holdfast.config.sections.run_place import is_bucket
from holdfast.config.sections.task import refuse_task
from holdfast.errors import DataError, OutOfSpaceError, RunFolderError, UserError
from holdfast.launch.run.runs import IMPORTED_FOLDER
from holdfast.report.formatting import format_bytes
from holdfast.show.output import print_json, say

if TYPE_CHECKING:
    from holdfast.checkpoint.interop.dcp_import import FlatState, ImportResult
    from holdfast.config.loading.load import LoadedConfig
    from holdfast.config.run import RunConfig
    from holdfast.core.format.manifest import Commit
    from holdfast.data.stream.dataset import Dataset
    from holdfast.machine.hardware import HardwareInfo
    from holdfast.wire.store.run_store import RunStore

COMMAND = "holdfast checkpoint import"
LORA_REMEDY = "name the base in model.from, and an adapter to begin with in lora.from"


def import_(
    run_file: Annotated[Path, typer.Argument(help="the run file of a run that has not begun")],
    source: Annotated[
        Path,
        typer.Option(
            "--from", help="folder as transformers, Trainer, DeepSpeed, Megatron or DCP writes it"
        ),
    ],
    overrides: Overrides = None,
    weights_only: Annotated[
        bool, typer.Option("--weights-only", help="leave the optimizer's state")
    ] = False,
    tokenizer_unchecked: Annotated[
        bool,
        typer.Option(
            "--tokenizer-unchecked",
            help="the folder has no tokenizer.json, and the dataset's tokenizer is the model's",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Begin a run from a folder of weights, or of another trainer.

    The folder's weights become the state after step 0; 'holdfast train' then starts from it.
    The dataset must have been tokenised with the folder's tokenizer. With model.from in the run
    file, the folder gives shape and tokenizer.

    A folder of torch.distributed.checkpoint (it has a .metadata) may name its parameters as
    Holdfast, torchtitan's Llama 3 or Hugging Face do. If AdamW's moments are in it, the run
    continues after the step that they belong to. Its metadata is a pickle: its own process reads
    it, and refuses everything but descriptions of tensors.

    Checkpoint folders of transformers' Trainer, of DeepSpeed (ZeRO 1 to 3, and universal) and of
    Megatron (torch_dist) continue in the same way. Weights, moments and step are taken, and what is
    left out is named. torch's tensors-only reader reads their pickles, and refuses anything more.

    \b
    Example:
      holdfast checkpoint import run.yaml --from outputs/checkpoint/step-1000
      holdfast checkpoint import run.yaml --from Llama-3.2-1B model.from=Llama-3.2-1B
      holdfast checkpoint import run.yaml --from trainer_output/checkpoint-500
    """
    from holdfast.api.start import SCREEN
    from holdfast.config.loading.load import load_config
    from holdfast.launch.local import resume_command
    from holdfast.launch.run.auto_layout import by_microbatch_size
    from holdfast.launch.run.holder import HolderWatch
    from holdfast.launch.run.lora_run import as_imported
    from holdfast.launch.run.run_folder import refuse_in_use, refuse_other
    from holdfast.launch.run.runs import read_resolved
    from holdfast.launch.run.task_run import ask_named
    from holdfast.launch.start.data import prepare_and_check_dataset, refuse_other_tokenizer
    from holdfast.launch.start.facts import Facts, resolve
    from holdfast.launch.start.machine import plan_for_machine
    from holdfast.launch.start.regions import refuse_other_regions
    from holdfast.machine.hardware import detect_hardware

    facts = Facts(detect_hardware())
    loaded = plan_for_machine(load_config(run_file, overrides or []), facts)
    refuse_other_regions(loaded)
    refuse_task(loaded.config.task, COMMAND, is_file=True)
    refuse_lora(loaded.config.lora, COMMAND, LORA_REMEDY)
    loaded.config.outer.refuse_one_state(
        "an import", loaded.where("outer.learners"), "name a folder of weights in model.from"
    )
    folder = require_folder(loaded)
    refuse_in_use(folder, HolderWatch(folder, say))
    size = _vocabulary_of(source, tokenizer_unchecked)  # before hours of tokenising
    dataset = prepare_and_check_dataset(loaded, SCREEN)
    refuse_other_tokenizer(source, dataset)
    loaded = _with_folder_vocabulary(loaded, dataset, source, size)
    loaded = loaded.with_values(ask_named(loaded))
    facts = replace(facts, stored=read_resolved(folder))
    loaded = loaded.with_values(as_imported())
    loaded = resolve(loaded, facts, (by_microbatch_size,)).validated()
    refuse_other(folder, loaded, dataset.version)
    row = _begin_run(loaded, facts.hardware, dataset, source, weights_only)
    if json:
        print_json(row | {"folder": str(folder)})
    else:
        imported = f"imported {format_bytes(row['bytes'])} into {folder}"
        say(f"{imported}; train it: {resume_command(loaded)}")


def require_folder(loaded: LoadedConfig) -> Path:
    """Return the run folder. Raises RunFolderError for a run in a bucket: the settings of the
    source would be on this node alone."""
    if is_bucket(place := loaded.config.run_place):
        raise RunFolderError(
            "an import needs a run folder, and folder is the address of a bucket",
            where=place.partition("?")[0],
            remedy="import into a folder with folder=<path>",
        )
    return Path(place)


def _vocabulary_of(source: Path, tokenizer_unchecked: bool) -> int:
    """Rows of the vocabulary of a Hugging Face folder, whose files are checked; 0 for a DCP folder.
    Raises DataError for one without a tokenizer, unless the user vouches for the dataset's."""

    if _is_foreign(source):
        return 0
    from holdfast.config.huggingface.folder import read_folder_model
    from holdfast.config.huggingface.weight_files import describe_unread
    from holdfast.core.format.hf_names import huggingface_map
    from holdfast.core.format.stored_weights import check_weights
    from holdfast.data.read.weight_files import refuse_not_finite

    model = read_folder_model(source)
    tensors = check_weights(source, huggingface_map(model)).values()
    refuse_not_finite(tensors)
    for line in describe_unread(source, tensors):
        say(line)
    if not (source / "tokenizer.json").is_file() and not tokenizer_unchecked:
        raise DataError(
            "there is no tokenizer.json here, so nothing shows that the dataset's tokens are those "
            "that the weights have learnt",
            where=str(source),
            remedy="put it there, or say that they are with --tokenizer-unchecked",
        )
    return model.vocab_size


def _is_foreign(source: Path) -> bool:
    """Return True for a folder of DeepSpeed, Megatron or DCP, which has no shape of its own."""
    from holdfast.checkpoint.interop.dcp import is_dcp
    from holdfast.checkpoint.interop.deepspeed import step_folder
    from holdfast.checkpoint.interop.megatron import iteration_folder

    found = step_folder(source) or iteration_folder(source)
    return found is not None or is_dcp(source)


def _with_folder_vocabulary(
    loaded: LoadedConfig, dataset: Dataset, source: Path, size: int
) -> LoadedConfig:
    """The vocabulary of the folder where the run file leaves it open, if it has a row for each
    token of the dataset."""
    from holdfast.api.start import SCREEN
    from holdfast.data.prepare.dataset_match import needed_vocabulary
    from holdfast.launch.start.data import with_vocabulary

    if not size or loaded.config.model.vocab_size not in (0, size):
        return with_vocabulary(loaded, dataset, SCREEN)
    needed = needed_vocabulary(dataset)
    if needed > size:
        raise DataError(
            f"the dataset's tokenizer makes {needed} tokens of texts, and the model knows {size}",
            where=str(source),
            remedy="name the model's own tokenizer in data.tokenizer.path, and another data.folder",
        )
    loaded = loaded.with_values({"model.vocab_size": (size, f"that of {source}")})
    return with_vocabulary(loaded, dataset, SCREEN)


def _begin_run(
    loaded: LoadedConfig, machine: HardwareInfo, dataset: Dataset, source: Path, weights_only: bool
) -> dict[str, Any]:
    """Make the run folder, with what was imported as its first checkpoint, which is described. If
    that fails, a description of the run that was not there before does not stay."""
    from holdfast.checkpoint.restore.catalog import describe_checkpoint
    from holdfast.config.loading.identity import config_hash
    from holdfast.launch.run.run_folder import remove_description, write_description
    from holdfast.launch.run.runs import read_resolved
    from holdfast.wire.store.run_location import store_of_run

    config = loaded.config
    folder = Path(config.run_folder)
    new = read_resolved(folder) is None
    write_description(folder, loaded, machine, dataset.location, dataset.version)
    store = store_of_run(folder)
    identity = {"config_hash": config_hash(config), "dataset_version": dataset.version}
    try:
        commit = _imported(store, source, config, weights_only, identity)
    except (UserError, typer.BadParameter) as error:
        if new and not isinstance(error, OutOfSpaceError):
            remove_description(folder)  # so that the remedy may change the configuration
        raise
    return describe_checkpoint(store, commit.key)


def _imported(
    store: RunStore, source: Path, config: RunConfig, weights_only: bool, identity: dict[str, str]
) -> Commit:
    """By what the folder is."""
    from holdfast.checkpoint.interop.hf_trainer import OPTIMIZER_FILE, is_hf_trainer
    from holdfast.checkpoint.interop.huggingface import import_huggingface

    is_trainer = is_hf_trainer(source) and (source / OPTIMIZER_FILE).is_file()
    is_foreign = _is_foreign(source)
    if is_foreign or (is_trainer and not weights_only):
        return _import_foreign(store, source, config, weights_only, identity)
    if weights_only and not is_trainer:
        raise typer.BadParameter(
            "a Hugging Face folder has only those", param_hint="--weights-only"
        )
    commit = import_huggingface(
        store,
        source,
        config.model,
        config.train.precision,
        optimizer=config.train.optimizer,
        **identity,
    )
    from holdfast.config.huggingface.folder import keep_settings

    has_tokenizer = (source / "tokenizer.json").is_file()  # which is the dataset's
    keep_settings(source, Path(config.run_folder) / IMPORTED_FOLDER, has_tokenizer)
    return commit


def _commit_flat(
    store: RunStore,
    state: FlatState,
    source: Path,
    config: RunConfig,
    weights_only: bool,
    identity: dict[str, str],
) -> ImportResult:
    """Commit a state under flat names as the first one of the run."""
    from holdfast.checkpoint.interop.dcp_import import import_flat
    from holdfast.launch.run.branch_config import batch_schedule

    train = config.train
    return import_flat(
        store,
        state,
        source,
        config.model,
        train.precision,
        position_of_step=batch_schedule(train).position,
        weights_only=weights_only,
        optimizer=train.optimizer,
        **identity,
    )


def _import_foreign(
    store: RunStore, source: Path, config: RunConfig, weights_only: bool, identity: dict[str, str]
) -> Commit:
    """A checkpoint of transformers' Trainer, of DeepSpeed or of DCP."""
    from holdfast.checkpoint.interop.dcp import is_dcp
    from holdfast.checkpoint.interop.deepspeed import read_deepspeed, step_folder
    from holdfast.checkpoint.interop.hf_trainer import read_hf_trainer
    from holdfast.checkpoint.interop.megatron import iteration_folder, read_megatron
    from holdfast.checkpoint.interop.torchtitan import group_names, read_dcp
    from holdfast.core.lr_schedule import learning_rate
    from holdfast.launch.run.branch_config import batch_schedule

    train = config.train
    if iteration_folder(source) is not None:
        found = read_megatron(source, config.model, weights_only=weights_only)
    elif is_dcp(source):
        found = read_dcp(source, config.model, train.optimizer, weights_only=weights_only)
    else:
        read = read_deepspeed if step_folder(source) is not None else read_hf_trainer
        found = read(source, weights_only=weights_only)
    imported = _commit_flat(store, found.state, source, config, weights_only, identity)
    step = imported.commit.step
    what = "weights and AdamW's moments" if imported.has_moments else "weights"
    names = f", named as {imported.naming_scheme} names them" if is_dcp(source) else ""
    say(f"found {what} of {found.trainer} after step {step}{names}")
    if found.position:
        position = batch_schedule(train).position(step + 1) if step else 0
        said = f"{found.position}, in an order of its own"
        say(f"data: {said}; the run continues at sample {position:,} of its order")
    values = {key: value_at(config, as_path(key)) for key in found.settings}
    for key, theirs in found.settings.items() if imported.has_moments else ():
        if values[key] != (tuple(theirs) if isinstance(theirs, list) else theirs):
            say(f"{key} is {values[key]} in the run file, and {theirs} in the folder")
    if found.rate is not None and imported.has_moments and not train.schedule.is_function:
        rate = learning_rate(train, step + 1)
        if abs(rate - found.rate) > 1e-9 * max(rate, found.rate):
            say(
                f"step {step + 1} has the rate {rate:.6g} by train.schedule, and {found.rate:.6g} "
                "by the folder's scheduler"
            )
    for line in found.differences if imported.has_moments else ():
        say(line)
    for line in (*found.left_out, *group_names(imported.unused_names)):
        say(f"not used: {line}")
    return imported.commit
