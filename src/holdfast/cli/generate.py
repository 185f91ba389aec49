"""`holdfast generate`: what the model has learnt to say."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.dispatch import app as make_app
from holdfast.cli.options import Json, RunArgument
from holdfast.export.weights import Sampling, continuations, with_checkpoint
from holdfast.launch.run.runs import open_run, with_base
from holdfast.show.output import print_json, say

app = make_app("Sample text from a trained run.")


@app.command()
def generate(
    run: RunArgument,
    prompt: Annotated[str, typer.Argument(help="text to continue")],
    tokens: Annotated[int, typer.Option(min=1, help="how many tokens to add at most")] = 120,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token")] = 0.8,
    top_p: Annotated[float, typer.Option(help="nucleus sampling; 1: no limit")] = 0.95,
    seed: Annotated[int, typer.Option(help="the same seed gives the same text")] = 0,
    step: Annotated[int | None, typer.Option(help="of the checkpoint; none: the newest")] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="the prompt is a user's message; print the reply")
    ] = False,
    base: Annotated[
        Path | None, typer.Option(help="folder of a lora run's frozen weights, if it has moved")
    ] = None,
    json: Json = False,
) -> None:
    """Continue a prompt with the newest intact checkpoint of a run, until the text ends.

    \b
    Example:
      holdfast generate runs/quickstart "def read_lines("
      holdfast generate run.yaml "import os" --tokens 60 --temperature 0
      holdfast generate runs/tuned "Which colour is the sky?" --chat
    """

    found = with_base(open_run(run), base)
    how = Sampling(tokens, temperature, top_p, seed)
    checkpoint, (added,) = with_checkpoint(
        found, step, lambda chosen: continuations(found, chosen, [prompt], how, chat), say
    )
    if json:
        print_json({"step": checkpoint.step, "prompt": prompt, "text": added})
    else:
        say(f"(checkpoint of step {checkpoint.step})")
        print(added if chat else prompt + added, flush=True)
