"""`holdfast init`: a run file to start from."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.dispatch import app as make_app
from holdfast.config.loading.yaml_tree import parse_scalar
from holdfast.errors import UserError
from holdfast.show.output import say

TEMPLATE = """\
# A Holdfast run. Train it with: holdfast train {name}
# Every key, its default and its meaning: holdfast config schema --markdown
name: {stem}
seed: 1
device: auto               # cuda where there is a GPU, otherwise cpu

data:
  folder: datasets/python-stdlib
  sources:                 # real text that every machine with Python has
    - kind: python-stdlib  # or text, jsonl, parquet, huggingface, with a path
  tokenizer: {{vocab_size: 4096}}
  sequence_length: 256

model:
  preset: tiny             # 1 M parameters; llama3.2-1b, qwen3-0.6b, ... see the docs

train:
  steps: 1000
  batch_size: 16           # samples of a step, over all workers together
  microbatch_size: 2       # the unit of work that is dealt to workers

layout: auto               # see it with: holdfast plan {name}
checkpoint: {{every_steps: 50}}
"""

app = make_app("Write a run file to start from.")


@app.command()
def init(
    path: Annotated[Path, typer.Argument(help="where to write it")] = Path("run.yaml"),
) -> None:
    """Write a commented run file of 25 lines or less. Never overwrites.

    \b
    Example:
      holdfast init            writes run.yaml
      holdfast init big.yaml   writes big.yaml, with the run's name 'big'
    """
    # YAML reads 2026 as a number, so such a name is quoted.
    name = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in path.stem)
    name = name.lstrip("._-") or "run"
    text = TEMPLATE.format(name=path, stem=name if parse_scalar(name) == name else f'"{name}"')
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
    say(f"wrote {path}; train it with: holdfast train {shlex.quote(str(path))}")
