"""`holdfast generate`: what the model has learnt to say."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.call import app as make_app
from holdfast.cli.output import print_json, say
from holdfast.cli.runs import open_run
from holdfast.errors import DataError

app = make_app("Sample text from a trained run.")


@app.command()
def generate(
    run: Annotated[Path, typer.Argument(help="run folder, or the run file it was started with")],
    prompt: Annotated[str, typer.Argument(help="text to continue")],
    tokens: Annotated[int, typer.Option(min=1, help="how many tokens to add at most")] = 120,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token")] = 0.8,
    top_p: Annotated[float, typer.Option(help="nucleus sampling; 1: no limit")] = 0.95,
    seed: Annotated[int, typer.Option(help="the same seed gives the same text")] = 0,
    step: Annotated[int | None, typer.Option(help="of the checkpoint; none: the newest")] = None,
    json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Continue a prompt with the newest whole checkpoint of a run.

    \b
    Example:
      holdfast generate runs/quickstart "def read_lines("
      holdfast generate run.yaml "import os" --tokens 60 --temperature 0
    """
    from holdfast.cli.weights import choose, load_decoder

    found = open_run(run)
    checkpoint = choose(found, step)
    tokenizer = _tokenizer(found.dataset_folder)
    model = load_decoder(found, checkpoint)

    import torch

    from holdfast.model.generate import generate as sample

    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    text = sample(model, torch.tensor([ids], dtype=torch.long).reshape(1, -1), tokens,
                  temperature=temperature, top_p=top_p, seed=seed)  # fmt: skip
    added = tokenizer.decode(text[0, len(ids) :].tolist(), skip_special_tokens=False)
    if json:
        print_json({"step": checkpoint.step, "prompt": prompt, "text": added})
    else:
        say(f"(checkpoint of step {checkpoint.step})")
        print(prompt + added, flush=True)


def _tokenizer(dataset: Path):  # type: ignore[no-untyped-def]
    from tokenizers import Tokenizer

    path = dataset / "tokenizer.json"
    if not path.is_file():
        raise DataError("the run's tokenizer is not there", where=str(path),
                        remedy="prepare the dataset again: holdfast data prepare RUN.yaml",
                        )  # fmt: skip
    return Tokenizer.from_file(str(path))
