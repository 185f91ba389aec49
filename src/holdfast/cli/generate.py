"""`holdfast generate`: what the model has learnt to say."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast.cli.dispatch import app as make_app
from holdfast.cli.options import (
    CheckpointStep,
    Json,
    LoraBase,
    RunArgument,
    Temperature,
    TopP,
    refuse_beside,
)
from holdfast.config.huggingface.folder import describe_unread_settings
from holdfast.export.texts import Sampling, is_model_folder, open_texts
from holdfast.show.output import print_json, say

app = make_app("Sample text from a trained run.")


@app.command()
def generate(
    run: RunArgument,
    prompt: Annotated[str, typer.Argument(help="text to continue")],
    tokens: Annotated[int, typer.Option(min=1, help="how many tokens to add at most")] = 120,
    temperature: Temperature = 0.8,
    top_p: TopP = 0.95,
    seed: Annotated[int, typer.Option(help="the same seed gives the same text")] = 0,
    step: CheckpointStep = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="the prompt is a user's message; print the reply")
    ] = False,
    base: LoraBase = None,
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
    if is_model_folder(run):
        refuse_beside("the folder of a model", {"--step": step is not None, "--base": base})
    opened = open_texts(run, step, base, say)
    if chat:
        added = opened.texts.reply([{"role": "user", "content": prompt}], how)
    else:
        added = opened.texts.continue_text(prompt, how)
    if unread := describe_unread_settings(opened.settings):
        say(unread)
    if json:
        print_json({**opened.about, "prompt": prompt, "text": added})
    else:
        say(f"({opened.source})")
        print(added if chat else prompt + added, flush=True)
