"""A trained decoder out of a run's checkpoint, for the commands that use one.

This is the only part of the command line that works with tensors; it imports the rooms that
import torch inside its functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from holdfast.checkpoint.restore.catalog import list_commits
from holdfast.checkpoint.restore.read_ahead import ReadAhead
from holdfast.checkpoint.restore.reader import Checkpoint
from holdfast.checkpoint.restore.verify import find_newest_verified, verify
from holdfast.config.loading.model_from import TRANSFORMERS_TASKS
from holdfast.core.sharding.boxes import Box
from holdfast.core.sharding.run_table import run_parameters
from holdfast.data.read.chat_templates import TEMPLATE_FILE
from holdfast.data.read.vocabulary import (
    Vocabulary,
    describe_tokenizer,
    find_begin,
    load_tokenizer,
    read_neighbours,
)
from holdfast.data.stream.dataset import exists, read_manifest
from holdfast.errors import CheckpointError, ConfigError, HoldfastError
from holdfast.launch.run.runs import IMPORTED_FOLDER, Run
from holdfast.wire.store.run_store import MissingKeyError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from holdfast.model.decoder import Decoder

Used = TypeVar("Used")
MAX_READ_ATTEMPTS = 5  # to read a checkpoint before the continuing run removes it

# what parameters are stored as (core/sharding/state_table.py)
_NUMPY = {"F32": "<f4", "F64": "<f8"}


def with_checkpoint(
    run: Run, step: int | None, use: Callable[[Checkpoint], Used], say: Callable[[str], None]
) -> tuple[Checkpoint, Used]:
    """Call `use` with the checkpoint of `step`, or the newest intact one; return both.

    A run that continues removes checkpoints, and may remove this one while it is read. Then the
    next newest is used. If the caller named the step, CheckpointError is raised instead.
    """
    import_module("holdfast.model.decoder")  # torch: seconds in which a chosen one could go
    for _ in range(MAX_READ_ATTEMPTS):
        there = list_commits(run.store)
        try:
            checkpoint = choose_checkpoint(run, step, say)
            return checkpoint, use(checkpoint)
        except (MissingKeyError, CheckpointError) as error:
            asked_for = step is not None and isinstance(error, CheckpointError)
            if asked_for or list_commits(run.store) == there:
                raise CheckpointError(str(error)) from error
            say("the run continued and removed the checkpoint while it was read; trying the newest")
    raise CheckpointError(
        "the run removes its checkpoints faster than they can be read",
        where=str(run.folder),
        remedy="wait for its end, or start it again with checkpoint.keep_last above 3",
    )


def choose_checkpoint(run: Run, step: int | None, say: Callable[[str], None]) -> Checkpoint:
    """Return the checkpoint of `step`, or the newest intact one; `say` each one skipped."""

    def passed_over(key: str, reason: str) -> None:
        say(f"skipped {key}: {reason}")

    if step is None:
        newest = find_newest_verified(run.store, passed_over)
        if newest is None:
            raise CheckpointError(
                "this run has no checkpoint yet", where=str(run.folder), remedy="train it first"
            )
        return newest
    there: list[int] = []
    for key in list_commits(run.store):
        try:
            checkpoint = Checkpoint.open(run.store, key)
        except HoldfastError as error:
            passed_over(key, str(error))
            continue
        there.append(checkpoint.step)
        if checkpoint.step == step:
            problems = verify(run.store, key, first_only=True)
            if not problems:
                return checkpoint
            passed_over(key, problems[0])
    steps = ", ".join(map(str, sorted(set(there)))) or "none"
    raise CheckpointError(
        f"there is no whole checkpoint of step {step}",
        where=str(run.folder),
        remedy=f"there are: {steps}",
    )


class TensorParts(Protocol):
    """A model's parameters by name, in full or in part."""

    @property
    def names(self) -> tuple[str, ...]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def whole(self, name: str) -> Any: ...
    def dtype(self, name: str) -> Any: ...
    def box(self, name: str, offsets: Sequence[int], lengths: Sequence[int]) -> Any: ...


class CheckpointWeights:
    """A checkpoint's parameters by name, in full or in part, read on request; nothing is kept."""

    def __init__(self, run: Run, checkpoint: Checkpoint):
        self._checkpoint = checkpoint
        names = [spec.name for spec in checkpoint.tensors if spec.name.startswith("model.")]
        self._ahead = ReadAhead(checkpoint, names)
        self._shapes = {p.name: p.shape for p in run_parameters(run.config)}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._shapes[name])

    def whole(self, name: str) -> Any:
        shape = self.shape(name)
        return self.box(name, (0,) * len(shape), shape)

    def dtype(self, name: str) -> Any:
        import torch

        return {"F32": torch.float32, "F64": torch.float64}[self._stored(name)]

    def box(self, name: str, offsets: Sequence[int], lengths: Sequence[int]) -> Any:
        import numpy as np
        import torch

        array = np.empty(tuple(lengths), _NUMPY[self._stored(name)])
        box = Box(f"model.{name}", tuple(offsets), tuple(lengths))
        self._ahead.read(box, array.reshape(-1).data)
        return torch.from_numpy(array)

    def _stored(self, name: str) -> str:
        return self._checkpoint.spec(f"model.{name}").dtype


def load_decoder(run: Run, checkpoint: Checkpoint) -> Decoder:
    """The decoder on the CPU, with the checkpoint's weights (adapters are merged in)."""
    import torch

    from holdfast.export.adapters import run_weights
    from holdfast.model.decoder import Decoder

    if not run.config.model.has_language_head:
        raise ConfigError(
            "a reward model writes no text",
            where="objective.kind",
            remedy="export it with holdfast export, and open it as "
            "AutoModelForSequenceClassification",
        )
    weights = run_weights(run, checkpoint)
    with torch.device("meta"):
        model = Decoder(run.config.model)
    state = {name: weights.whole(name) for name in weights.names}
    model.load_state_dict(state, strict=True, assign=True)
    return model.eval()


def folder_decoder(folder: Path) -> Decoder:
    """The decoder on the CPU in float32, with the weights of a folder in Hugging Face form."""
    import torch

    from holdfast.model.decoder import Decoder
    from holdfast.model.huggingface import import_folder

    config, tensors = import_folder(folder)
    with torch.device("meta"):
        model = Decoder(config)
    state = {name: value.float() for name, value in tensors.items()}
    model.load_state_dict(state, strict=True, assign=True)
    return model.eval()


def dataset_tokens(folder: Path, tokenizer: Tokenizer) -> Vocabulary:
    """The tokens around each document, as the dataset in `folder` has them. If its manifest is
    lost, as its tokenizer has them."""
    path = folder / "tokenizer.json"
    if not exists(folder):
        return describe_tokenizer(tokenizer, path)
    entry = read_manifest(folder)["tokenizer"]
    return Vocabulary(entry["vocab_size"], entry["end"], entry["end_token"], entry.get("begin"))


def untrained_begin(folder: Path) -> str | None:
    """The token with which the dataset's tokenizer begins prompts, if no document begins with it.
    Datasets are so that were prepared before documents did."""
    path = folder / "tokenizer.json"
    tokenizer = load_tokenizer(path)
    begin = find_begin(tokenizer, read_neighbours(path))
    known = dataset_tokens(folder, tokenizer)
    if begin is None or begin in (known.begin_id, known.end_id):
        return None
    return str(tokenizer.id_to_token(begin))


def write_folder(
    to: Path,
    run: Run,
    checkpoint: Checkpoint,
    tokenizer: Path | None,
    dtype: str | None,
    shard_bytes: int,
) -> None:
    """Export in Hugging Face's form; `dtype` by torch's name, None: as the state has it."""
    import torch

    from holdfast.export.adapters import run_weights
    from holdfast.model.huggingface import export_folder

    template = run.dataset_files / TEMPLATE_FILE
    chat_template = template if tokenizer is not None and template.is_file() else None
    cast = None if dtype is None else getattr(torch, dtype)
    weights = run_weights(run, checkpoint)
    if run.config.task.name in TRANSFORMERS_TASKS:
        from holdfast.tasks.transformers.huggingface_export import export_folder_model

        export_folder_model(
            to,
            run.config.task,
            weights.names,
            weights.whole,
            dtype=cast,
            shard_bytes=shard_bytes,
            tokenizer=tokenizer,
            chat_template=chat_template,
        )
        return
    if run.config.task.name:
        from holdfast.tasks.task.task_export import export_task

        export_task(to, run.config.task, weights, dtype=cast, shard_bytes=shard_bytes)
        return
    tokens = None
    if tokenizer is not None:
        tokens = dataset_tokens(run.dataset_files, load_tokenizer(tokenizer))
    export_folder(
        to,
        run.config.model,
        weights,
        tokenizer,
        dtype=cast,
        shard_bytes=shard_bytes,
        end_token=None if tokens is None else tokens.end_token,
        imported=settings_folder(run),
        chat_template=chat_template,
    )


def settings_folder(run: Run) -> Path:
    """Return the folder with the settings of the weights that the run began with."""
    kept = run.folder / IMPORTED_FOLDER  # a run in a bucket has it on its first node
    named = run.config.lora.base or ("" if kept.is_dir() else run.config.model.weights)
    return Path(named) if named else kept
