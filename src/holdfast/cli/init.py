"""`holdfast init`: a run file to start from."""

from __future__ import annotations

import json
import os
import shlex
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.cli.dispatch import app as make_app
from holdfast.cli.first_sizes import EPOCHS, FULL_STEPS, FirstSizes, first_sizes
from holdfast.cli.moving_in import add_data, read_job
from holdfast.cli.options import refuse_beside
from holdfast.config.huggingface.folder import read_folder_model, read_json_object
from holdfast.config.loading.model_from import yaml_word
from holdfast.config.loading.yaml_tree import parse_scalar
from holdfast.config.sections.data import SourceConfig
from holdfast.data.read.chat_templates import folder_templates
from holdfast.data.read.raw_rows import raw_rows
from holdfast.errors import ConfigError, UserError
from holdfast.show.output import say

TEMPLATE = """\
# A Holdfast run. Train it with: holdfast train {name}
# Every key, its default and its meaning: holdfast config schema --markdown
name: {stem}
seed: 1
device: auto               # cuda where there is a GPU, otherwise cpu

data:
  folder: datasets/{dataset}
{data}
model:
{model}
train:
{length}
{batch}{rate}
layout: auto               # see it with: holdfast plan {name}
checkpoint: {{every_steps: 50}}
"""

BATCH = """\
  batch_size: {batch:<12} # samples of a step, over all workers together
  microbatch_size: {microbatch:<7} # the unit of work that is dealt to workers
"""
STDLIB = """\
  sources:                 # real text that every machine with Python has
    - kind: python-stdlib  # or text, jsonl, parquet, huggingface, with a path
"""
TOKENIZER = "  tokenizer: {vocab_size: 4096}\n"
PRESET = "  preset: tiny             # 1 M parameters; llama3.2-1b, qwen3-0.6b, ... see the docs\n"
RATE = "  optimizer: {learning_rate: 1e-5}\n"
LOW_RATE = "  optimizer: {learning_rate: 1e-6}\n"
OBJECTIVES = {
    "preference": "objective: {kind: dpo}     # or ipo, simpo, orpo, reward\n",
    "unpaired_preference": "objective: {kind: kto}\n",
}
WARMUP = "  schedule: {{warmup_steps: {}}}\n"
ROWS = {
    "chosen": "preference",
    "label": "unpaired_preference",
    "messages": "messages",
    "conversations": "sharegpt",
    "instruction": "instruction",
    "prompt": "prompt",
}
"""Column of chat data -> word of `rows`."""

TRAINER_STATE = "trainer_state.json"
TABLES = (".xls", ".xlsx", ".ods", ".feather", ".avro")
"""Endings of tables that no source reads. As texts, their cells would be trained in their order."""
COLUMNS = {".csv": "csv", ".tsv": "csv", ".arrow": "arrow"}
"""Endings of tables with a column of texts, and their kinds."""

KINDS = {".jsonl": "jsonl", ".json": "jsonl", ".parquet": "parquet", **COLUMNS}

app = make_app("Write a run file to start from.")


@app.command()
def init(
    path: Annotated[Path, typer.Argument(help="where to write it")] = Path("run.yaml"),
    data: Annotated[
        Path | None, typer.Option(help="texts to train on: a folder, a text file, jsonl or parquet")
    ] = None,
    from_: Annotated[
        Path | None,
        typer.Option(
            "--from",
            help="a model in Hugging Face form, another trainer's checkpoint, or YAML of axolotl "
            "or LLaMA-Factory",
        ),
    ] = None,
    chat: Annotated[
        Path | None, typer.Option(help="rows of chat data to tune the model of --from with")
    ] = None,
    preferences: Annotated[
        Path | None, typer.Option(help="pairs or rated answers to tune the model of --from with")
    ] = None,
) -> None:
    """Write a commented run file of 27 lines or less. Never overwrites.

    YAML of axolotl and LLaMA-Factory, and checkpoints of Megatron and torchtitan, become longer
    ones. Each key is translated, has no effect, or stands as left out in a comment.

    \b
    Example:
      holdfast init            writes run.yaml
      holdfast init big.yaml   writes big.yaml, with the run's name 'big'
      holdfast init own.yaml --data texts
      holdfast init tuned.yaml --from Llama-3.2-1B-Instruct --chat chat.jsonl
      holdfast init better.yaml --from tuned-model --preferences pairs.jsonl
      holdfast init moved.yaml --from trainer_output/checkpoint-500 --data texts
      holdfast init tuned.yaml --from axolotl.yaml
    """
    refuse_beside("--preferences", {"--chat": chat} if preferences else {})
    rows, rate = preferences or chat, LOW_RATE if preferences else RATE
    # YAML reads 2026 as a number, so such a name is quoted.
    name = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in path.stem)
    name = name.lstrip("._-") or "run"
    notes: list[str] = []
    job = read_job(from_) if from_ is not None and not rows else None
    if job is not None and from_ is not None:
        add_data(job, name, describe_source(data, is_chat=False) if data else None)
        text = job.run_file(name, from_.name)
        kinds = f"{len(job.translated)} keys translated, {len(job.harmless)} without an effect"
        notes.append(f"{kinds}, {len(job.left_out)} left out; the file names these")
        if from_.is_dir():
            notes.append(_resume_note(path, from_))
    else:
        sizes = _sizes(rows or data, from_, is_rows=bool(rows))
        warmup = sizes.warmup(is_rows=bool(rows))
        train = {
            "length": _length(sizes, is_rows=bool(rows)),
            "batch": BATCH.format(batch=sizes.batch, microbatch=sizes.microbatch),
            "rate": ("" if warmup is None else WARMUP.format(warmup)) + (rate if from_ else ""),
        }
        if from_ is not None and not rows and (from_ / TRAINER_STATE).is_file():
            train, notes = _moved_in(from_)
            notes.append(_resume_note(path, from_))
        elif sizes.note:
            notes.append(sizes.note)
        text = TEMPLATE.format(
            name=path,
            stem=name if parse_scalar(name) == name else f'"{name}"',
            dataset=name if data or from_ or rows else "python-stdlib",
            data=_data(data, from_, rows, "--preferences" if preferences else "--chat", sizes),
            model=_model(from_, preferences),
            **train,
        )
    _write_new(path, text)
    say(f"wrote {path}; train it with: holdfast train {shlex.quote(str(path))}")
    for note in notes:
        say(note)


def _write_new(path: Path, text: str) -> None:
    """Write a file that is not there yet. Raises UserError."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        other = path.with_name(f"{path.stem}-2.yaml")
        raise UserError(
            "there is something here already, and init never overwrites",
            where=str(path),
            remedy=f"choose another name: holdfast init {shlex.quote(str(other))}",
        ) from None
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            "there is no such folder",
            where=str(path.parent),
            remedy=f"make it first: mkdir -p {shlex.quote(str(path.parent))}",
        ) from None


def _resume_note(path: Path, source: Path) -> str:
    resume = shlex.join(["holdfast", "checkpoint", "import", str(path), "--from", str(source)])
    return f"import its state before you train: {resume}"


def _moved_in(folder: Path) -> tuple[dict[str, str], list[str]]:
    """The lines of `train:` for a checkpoint of transformers' Trainer, and what is left out. Raises
    CheckpointError."""
    from holdfast.checkpoint.interop import hf_trainer

    about = read_json_object(folder / TRAINER_STATE)
    settings: dict[str, Any] = {}
    if (folder / hf_trainer.OPTIMIZER_FILE).is_file():
        group = hf_trainer.first_group(folder)
        settings = hf_trainer.optimizer_settings(group)
    schedule = hf_trainer.schedule_settings(folder)
    optimizer = {key.rpartition(".")[2]: value for key, value in settings.items()}
    size = int(about.get("train_batch_size") or 16)
    lines = f"  optimizer: {yaml_word(optimizer)}\n" if optimizer else ""
    notes = [
        "left out: max_grad_norm, precision and data of training_args.bin, a pickle that is not "
        "read; say them in train.optimizer.clip_norm, train.precision and data.sources",
        f"train.batch_size {size} is that of one process and one pass there: multiply it by its "
        "processes and gradient_accumulation_steps",
    ]
    if schedule is not None:
        lines += f"  schedule: {yaml_word(schedule)}\n"
    else:
        notes.append("left out: the schedule, whose logged rates fit none of train.schedule.kind")
    batch = f"  batch_size: {size}\n  microbatch_size: {1 if size % 2 else 2}\n"
    return {
        "length": f"  steps: {int(about.get('max_steps') or 1000)}",
        "batch": batch,
        "rate": lines,
    }, notes


def _model(model: Path | None, preferences: Path | None) -> str:
    """The lines of `model:`, and those of `objective:` if there is one. Raises ConfigError."""
    lines = f"  from: {yaml_word(os.path.abspath(model))}\n" if model else PRESET
    if preferences is None:
        return lines
    if (rows := rows_word(preferences)) not in OBJECTIVES:
        raise ConfigError(
            "the first row has neither 'chosen' nor 'label'",
            where=str(preferences),
            remedy="use --chat for chats without a preference, or mend the row",
        )
    return lines + "\n" + OBJECTIVES[rows]


def _sizes(file: Path | None, model: Path | None, *, is_rows: bool) -> FirstSizes:
    """The sizes of a run on this file. Raises ConfigError and ModelFolderError."""
    length = 2048 if is_rows else 256
    if model is not None:
        length = min(length, read_folder_model(model).max_position)
    if file is None:
        return FirstSizes(length)
    source = describe_source(file, is_rows)
    config = SourceConfig(kind=source["kind"], path=str(file)).at(source["path"])
    return first_sizes(config, length, is_rows=is_rows)


def _length(sizes: FirstSizes, *, is_rows: bool) -> str:
    """The line of `train:` that says how long the run is."""
    if is_rows or sizes.epochs:
        epochs = EPOCHS if is_rows else sizes.epochs
        return f"  epochs: {epochs:<16} # passes over the {'rows' if is_rows else 'texts'}"
    return f"  steps: {FULL_STEPS}"


def _data(
    data: Path | None, model: Path | None, chat: Path | None, option: str, sizes: FirstSizes
) -> str:
    """The lines of `data:` after its folder. option: which names rows of chat data. Raises
    ConfigError and ModelFolderError."""
    lines = "" if model is not None else TOKENIZER
    lines += f"  sequence_length: {sizes.length}\n"
    if chat is not None:
        refuse_beside(option, {"--data": data})
        if model is None:
            raise ConfigError(
                "rows of chat data need the tokenizer and the template of a model",
                where=option,
                remedy="add --from FOLDER",
            )
        lines += "  attention: document      # a token sees its own row only\n"
        if not folder_templates(model):
            lines += (
                "  chat: {template: alpaca} # the folder has none; this one fits each tokenizer\n"
            )
    file = chat or data
    if file is None:
        return STDLIB + lines
    source = describe_source(file, chat is not None)
    if chat is not None:
        rows = rows_word(chat)
        if option == "--chat" and rows in OBJECTIVES:
            raise ConfigError(
                "the first row has a preference, which needs an objective",
                where=str(chat),
                remedy="give the file as --preferences, not as --chat",
            )
        source["rows"] = rows
    return f"  sources:\n    - {yaml_word(source)}\n{lines}"


def describe_source(file: Path, is_chat: bool) -> dict[str, Any]:
    """The source of a file of texts, or of rows of chat data. Raises ConfigError."""
    if not file.exists():
        raise ConfigError("there is no such file", where=str(file), remedy="name your data")
    if file.suffix.lower() in (*TABLES, *(COLUMNS if is_chat else ())):
        remedy = "write it as .jsonl, with one object a line, or as .parquet"
        raise ConfigError(
            f"{file.suffix} is a table that is not read", where=str(file), remedy=remedy
        )
    kind = _kind(file)
    if file.is_dir():
        kinds = {_kind(each) for each in islice(file.rglob("*"), 1000) if each.is_file()}
        kinds -= {""} if is_chat else set()
        kind = kinds.pop() if len(kinds) == 1 else ""
    usual = "jsonl" if is_chat else "text"
    return {"kind": kind or usual, "path": os.path.abspath(file)}


def _kind(file: Path) -> str:
    """The kind of a file with rows, packed or not; "" for any other."""
    packed = file.suffix.lower() in (".gz", ".zst")
    return KINDS.get((file.with_suffix("") if packed else file).suffix.lower(), "")


def rows_word(chat: Path) -> str:
    """The word of `rows` for a file, by its first row. Raises ConfigError and DataError."""
    source = describe_source(chat, is_chat=True)
    config = SourceConfig(kind=source["kind"], path=str(chat)).at(source["path"])
    row = json.loads(next(raw_rows(config), "null"))
    columns = list(row) if isinstance(row, dict) else []
    if word := next((word for column, word in ROWS.items() if column in columns), ""):
        return word
    raise ConfigError(
        f"the first row has {', '.join(map(str, columns)) or 'no columns'}, and none of "
        f"{', '.join(ROWS)}",
        where=str(chat),
        remedy="give texts as --data, or rename the column (docs/guide/fine-tuning.md)",
    )
