"""`holdfast export`: a folder that `transformers` loads."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.call import app as make_app
from holdfast.cli.output import print_json, say
from holdfast.cli.runs import open_run

app = make_app("Write a folder that transformers loads.")


class Dtype(Enum):
    """Of exported weights, by torch's and Hugging Face's name."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="run folder, or the run file it was started with")],
    to: Annotated[Path, typer.Option("--to", help="a new or empty folder")],
    step: Annotated[int | None, typer.Option(help="of the checkpoint; none: the newest")] = None,
    dtype: Annotated[
        Dtype | None, typer.Option(help="of the weights; none: as they are trained")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Write weights, config and tokenizer of a run as safetensors, in Hugging Face's form.

    \b
    Example:
      holdfast export runs/quickstart --to model
      holdfast export runs/quickstart --to model-bf16 --dtype bfloat16
      python -c "from transformers import AutoModelForCausalLM as M; M.from_pretrained('model')"
    """
    from holdfast.cli.weights import with_checkpoint, write_folder

    found = open_run(run)
    tokenizer = found.dataset_folder / "tokenizer.json"
    known = tokenizer if tokenizer.is_file() else None
    cast = None if dtype is None else dtype.value
    checkpoint, _ = with_checkpoint(
        found, step, lambda chosen: write_folder(to, found, chosen, known, cast)
    )
    if known is None:
        say(f"no tokenizer at {tokenizer}: the folder has none")
    if json:
        print_json({"step": checkpoint.step, "folder": str(to), "tokenizer": known is not None})
    else:
        say(f"wrote the state after step {checkpoint.step} to {to}")
