"""`holdfast export`: a folder that `transformers` or `torch.distributed.checkpoint` loads."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from holdfast.cli.dispatch import app as make_app
from holdfast.cli.options import Json, RunArgument
from holdfast.config.loading.model_from import TRANSFORMERS_TASK
from holdfast.config.sections.task import refuse_task
from holdfast.errors import ModelFolderError
from holdfast.export.dcp import write_dcp_folder
from holdfast.export.gguf import require_gguf, write_gguf
from holdfast.export.weights import untrained_begin, with_checkpoint, write_folder
from holdfast.launch.run.runs import Run, open_run, with_base
from holdfast.launch.start.regions import note_regions, refuse_copy_elsewhere
from holdfast.show.output import print_json, say

app = make_app("Write a folder that transformers or torch.distributed.checkpoint loads.")

GIGABYTE = 10**9


class Format(Enum):
    HF = "hf"
    PEFT = "peft"
    DCP = "dcp"
    GGUF = "gguf"


class Names(Enum):
    """Schemes of core/format/flat_names.py."""

    HOLDFAST = "holdfast"
    TORCHTITAN = "torchtitan"
    TORCHTITAN_0_2 = "torchtitan-0.2"
    HUGGINGFACE = "huggingface"


class Dtype(Enum):
    """Of exported weights, by torch's and Hugging Face's name."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class Quantize(Enum):
    """How weights are rounded."""

    INT8 = "int8"
    INT4 = "int4"
    INT8_INT4 = "int8-int4"
    NF4 = "nf4"


@app.command()
def export(
    run: RunArgument,
    to: Annotated[Path, typer.Option("--to", help="a new or empty folder; gguf: a new file")],
    step: Annotated[int | None, typer.Option(help="of the checkpoint; none: the newest")] = None,
    format: Annotated[
        Format,
        typer.Option(
            help="hf: safetensors as transformers has them; peft: a run's adapters; dcp: weights "
            "and optimizer state for torch.distributed.checkpoint; gguf: a file for llama.cpp"
        ),
    ] = Format.HF,
    dtype: Annotated[
        Dtype | None, typer.Option(help="of the weights (hf); none: as they are trained")
    ] = None,
    shard_size: Annotated[
        float, typer.Option(min=0.000001, help="of a file in GB (hf); a larger tensor has its own")
    ] = 5.0,
    names: Annotated[
        Names | None, typer.Option(help="of the parameters (dcp); none: holdfast")
    ] = None,
    quantize: Annotated[
        Quantize | None, typer.Option(help="round the weights of blocks (hf)")
    ] = None,
    base: Annotated[
        Path | None, typer.Option(help="folder of a lora run's frozen weights, if it has moved")
    ] = None,
    json: Json = False,
) -> None:
    """Write a run's state for other programs, a few megabytes at a time, whatever its size.

    hf is a folder for transformers: weights as safetensors, config and tokenizer. Of a run with
    lora it has the base with the adapters merged in. peft has the adapters alone, for
    PeftModel.from_pretrained, with their name and version in holdfast.json. dcp is a folder
    for torch.distributed.checkpoint: weights, AdamW's moments and step, and its settings, under
    flat names as torchtitan has them (optimizer.state.NAME.exp_avg). --names torchtitan names the
    parameters as torchtitan's Llama 3 does since 0.3 (torchtitan-0.2: as before), with the rows of
    q and k in its order.

    gguf is one file for llama.cpp, of models of Llama's shape; --dtype float16 halves it.

    --quantize rounds the weights of the blocks' linear layers, in files that transformers loads:
    int8, int4 and int8-int4 with torchao, nf4 with bitsandbytes.

    \b
    Example:
      holdfast export runs/quickstart --to model
      holdfast export runs/quickstart --to model-bf16 --dtype bfloat16
      python -c "from transformers import AutoModelForCausalLM as M; M.from_pretrained('model')"
      holdfast export runs/quickstart --to model-dcp --format dcp
      holdfast export runs/tuned --to adapter --format peft
      holdfast export runs/tuned --to tuned.gguf --format gguf
    """
    _refuse_options(format, dtype, names, quantize)
    found = open_run(run)
    refuse_copy_elsewhere(found.config.governance, str(to), "--to")
    found = with_base(found, base)
    if format is Format.DCP:
        step_done, known = _dcp(found, to, step, (names or Names.HOLDFAST).value), False
    elif format is Format.GGUF:
        step_done, known = _gguf(found, to, step, None if dtype is None else dtype.value), True
    elif format is Format.PEFT:
        from holdfast.export.adapters import write_peft_folder

        checkpoint, _ = with_checkpoint(
            found, step, lambda chosen: write_peft_folder(to, found, chosen), say
        )
        step_done, known = checkpoint.step, False
    else:
        cast = None if dtype is None else dtype.value
        size = round(shard_size * GIGABYTE)
        if quantize is None:
            step_done, known = _hf(found, to, step, cast, size)
        else:
            step_done, known = _quantized(found, to, step, cast, size, quantize)
    if to.is_dir():
        note_regions(to, found.config.governance)
    if json:
        print_json({"step": step_done, "folder": str(to), "tokenizer": known})
    else:
        say(f"wrote the state after step {step_done} to {to}")


def _refuse_options(
    format: Format, dtype: Dtype | None, names: Names | None, quantize: Quantize | None
) -> None:
    """Raises typer.BadParameter for an option of another format."""
    if format is Format.DCP and dtype is not None:
        raise typer.BadParameter("it is for hf; dcp keeps the state as it is", param_hint="--dtype")
    if format is Format.PEFT and (dtype is not None or names is not None):
        raise typer.BadParameter(
            "peft keeps the state as it is, under PEFT's names", param_hint="--dtype, --names"
        )
    if format is Format.HF and names is not None:
        raise typer.BadParameter("it is for --format dcp", param_hint="--names")
    if format is not Format.HF and quantize is not None:
        raise typer.BadParameter("it is for --format hf", param_hint="--quantize")
    if format is Format.GGUF and dtype is Dtype.BFLOAT16:
        raise typer.BadParameter("gguf has float32 or float16", param_hint="--dtype")


def _hf(found: Run, to: Path, step: int | None, dtype: str | None, shard: int) -> tuple[int, bool]:
    """-> (step, whether there was a tokenizer)"""
    tokenizer = found.dataset_files / "tokenizer.json"
    known = tokenizer if tokenizer.is_file() else None
    checkpoint, _ = with_checkpoint(
        found, step, lambda chosen: write_folder(to, found, chosen, known, dtype, shard), say
    )
    if found.config.task.has_own_data:
        return checkpoint.step, False
    if known is None:
        say(f"no tokenizer at {tokenizer}: the folder has none")
    elif (begin := untrained_begin(found.dataset_files)) is not None:
        say(
            f"the tokenizer begins each prompt with {begin}, and no document of the run does: "
            "name a new data.folder to train it"
        )
    return checkpoint.step, known is not None


def _quantized(
    found: Run, to: Path, step: int | None, dtype: str | None, shard: int, kind: Quantize
) -> tuple[int, bool]:
    """-> (step, whether there was a tokenizer). Raises UserError."""
    from holdfast.tasks.transformers.quantized_folder import quantize_folder

    if found.config.task.name not in ("", TRANSFORMERS_TASK):
        refuse_task(found.config.task, "--quantize")
    with TemporaryDirectory(dir=to.absolute().parent, prefix=f".{to.name}-") as folder:
        full = Path(folder, "full")
        done = _hf(found, full, step, dtype, shard)
        quantize_folder(full, to, kind.value, shard)
    return done


def _gguf(found: Run, to: Path, step: int | None, dtype: str | None) -> int:
    require_gguf()
    if to.exists():
        raise ModelFolderError("this is there already", where=str(to), remedy="name a new file")
    with TemporaryDirectory() as folder:
        full = Path(folder, "full")
        done, _ = _hf(found, full, step, "float32", 5 * GIGABYTE)
        write_gguf(full, to, dtype)
    return done


def _dcp(found: Run, to: Path, step: int | None, names: str) -> int:
    checkpoint, _ = with_checkpoint(
        found, step, lambda chosen: write_dcp_folder(to, found, chosen, names), say
    )
    return checkpoint.step
