"""`holdfast stitch`: one model out of several that were trained apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Annotated, get_args

import typer

from holdfast.cli.dispatch import app as make_app
from holdfast.cli.options import Json
from holdfast.errors import ConfigError
from holdfast.export.stitched import Method, StitchRequest, stitch
from holdfast.show.output import print_json, say

app = make_app("Put models that were trained apart together into one.")
Methods = Enum("Methods", [(name, name) for name in get_args(Method)], type=str)  # type: ignore[misc]


@app.command("stitch")
def stitch_command(
    sources: Annotated[
        list[str],
        typer.Argument(
            help="runs, or folders of models in Hugging Face form; RUN@STEP takes an older "
            "checkpoint than the newest"
        ),
    ],
    to: Annotated[Path, typer.Option(help="folder to write; it must not exist, or be empty")],
    into: Annotated[
        Methods,
        typer.Option(
            help="average: the mean of all weights; experts: each model's feed-forward becomes an "
            "expert; parts: the first model, with tensors of more"
        ),
    ],
    weights: Annotated[
        str, typer.Option(help="of each model in means, such as 2,1,1; none: equal ones")
    ] = "",
    take: Annotated[
        list[str] | None,
        typer.Option(help="parts: PATTERN=RUN, the tensors that come from another run"),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help="experts: those that compute each token; none: 2")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="experts: of the router's initial weights; none: 0")
    ] = None,
    json: Json = False,
) -> None:
    """Write one model out of several, as a folder that transformers loads, and `model.from` takes.

    The models have one shape and one tokenizer. Means help models with a common start: branches of
    one run with another data.mix each, or runs with one model.from. Models from different initial
    weights have no useful mean.

    average: weights are means. experts: a mixture of experts (branch-train-mix). Its router has
    initial weights, so train it further with model.from. parts: of models that were trained with
    different parts of them unchanged. The command says how many tensors of another run differ
    from the first's and are not taken. Tensors have the names of 'holdfast checkpoint show RUN'
    without 'model.'.

    The folder's stitched.json names the runs, their steps and the hashes of their checkpoints. A
    run that begins with the folder keeps it.

    \b
    Example:
      holdfast stitch runs/code runs/prose --into average --weights 2,1 --to soup
      holdfast stitch runs/code runs/prose runs/base@400 --into experts --to mixture
      holdfast train run.yaml model.from=mixture
      holdfast stitch runs/base --into parts --take 'layers.*.ffn.*=runs/code' --to both
    """
    method: Method = into.value
    _refuse_without_router(method, {"--top-k": top_k, "--seed": seed})
    request = StitchRequest(
        tuple(sources),
        to,
        method,
        _numbers(weights),
        tuple(take or ()),
        2 if top_k is None else top_k,
        seed or 0,
    )
    found = stitch(request, say)
    if json:
        print_json({**asdict(found), "folder": str(to)})
        return
    say(f"wrote {to}: {found.parameters:,} parameters")
    for name, left in found.left.items():
        say(f"{name}: {len(found.taken[name])} tensors taken")
        if left:
            say(
                f"{name}: {left} other tensors differ from those of {sources[0]} and stay there; "
                "name them with --take if they belong to what was trained"
            )


def _refuse_without_router(method: Method, given: Mapping[str, int | None]) -> None:
    """Raises ConfigError for options of a router where none is made."""
    for option, number in given.items():
        if number is not None and method != "experts":
            raise ConfigError(
                f"{option} {number} has no effect with --into {method}",
                where="command line",
                remedy=f"leave it out, or use --into experts {option} {number}",
            )


def _numbers(text: str) -> tuple[float, ...]:
    """Raises ConfigError for a text that is no list of numbers."""
    try:
        return tuple(float(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise ConfigError(
            f"--weights {text} is no list of numbers",
            where="command line",
            remedy="use numbers with commas between them, such as 2,1,1",
        ) from None
