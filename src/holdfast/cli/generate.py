"""`holdfast generate`: what the model has learnt to say."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.dispatch import app as make_app
from holdfast.cli.options import Json, RunArgument, refuse_beside
from holdfast.config.huggingface.folder import CONFIG, describe_unread_settings
from holdfast.export.weights import (
    Sampling,
    continuations,
    folder_continuation,
    settings_folder,
    with_checkpoint,
)
from holdfast.launch.run.runs import RESOLVED_FILE, open_run, with_base
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

    In the place of the run, the folder of a model in Hugging Face form gives its weights.

    \b
    Example:
      holdfast generate runs/quickstart "def read_lines("
      holdfast generate run.yaml "import os" --tokens 60 --temperature 0
      holdfast generate runs/tuned "Which colour is the sky?" --chat
      holdfast generate exported-model "import os"
    """
    how = Sampling(tokens, temperature, top_p, seed)
    about: dict[str, int | str]
    if (run / CONFIG).is_file() and not (run / RESOLVED_FILE).exists():
        refuse_beside("the folder of a model", {"--step": step is not None, "--base": base})
        about, settings, source = {"folder": str(run)}, run, f"weights of {run}"
        added = folder_continuation(run, prompt, how, chat)
    else:
        found = with_base(open_run(run), base)
        checkpoint, texts = with_checkpoint(
            found, step, lambda chosen: continuations(found, chosen, [prompt], how, chat), say
        )
        added = texts[0]
        about, settings = {"step": checkpoint.step}, settings_folder(found)
        source = f"checkpoint of step {checkpoint.step}"
    if unread := describe_unread_settings(settings):
        say(unread)
    if json:
        print_json({**about, "prompt": prompt, "text": added})
    else:
        say(f"({source})")
        print(added if chat else prompt + added, flush=True)
