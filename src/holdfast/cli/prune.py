"""`holdfast prune`: fewer weights or blocks of a trained model."""

from __future__ import annotations

from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Annotated, get_args

import typer

from holdfast.cli.dispatch import app as make_app
from holdfast.cli.options import Json, run_path
from holdfast.export.pruned import Method, PruneRequest, prune
from holdfast.show.output import print_json, say

app = make_app("Write a pruned model: weights that are zero, or fewer blocks.")
Methods = Enum("Methods", [(name, name) for name in get_args(Method)], type=str)  # type: ignore[misc]


@app.command("prune")
def prune_command(
    source: Annotated[
        Path,
        typer.Argument(
            help="folder of a model in Hugging Face form, a run, or its run file", parser=run_path
        ),
    ],
    to: Annotated[Path, typer.Option(help="folder to write; it must not exist, or be empty")],
    method: Annotated[
        Methods,
        typer.Option(
            help="magnitude: the smallest weights; wanda: those of the least effect on "
            "data; layers: the blocks that change the residual stream least"
        ),
    ],
    sparsity: Annotated[
        float | None,
        typer.Option(min=0.0, max=0.99, help="part of the weights, or of the blocks, to remove"),
    ] = None,
    pattern: Annotated[str, typer.Option(help="2:4 keeps 2 of each 4 weights of a row")] = "",
    layers: Annotated[int, typer.Option(min=0, help="blocks to remove, with layers")] = 0,
    data: Annotated[
        Path | None,
        typer.Option(help="run file or run whose prepared data is read; none: the run's own"),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="of that data, from its first step")] = 64,
    json: Json = False,
) -> None:
    """Write a pruned model as a folder that transformers loads, and `model.from` takes.

    The complete model is held in memory, in float32. Weights stay in the files as zeros, so a file
    has as many bytes as before; fewer blocks make it smaller. Train it further with
    train.keep_zeros: true.

    \b
    Example:
      holdfast prune runs/mine --method magnitude --sparsity 0.5 --to half
      holdfast prune runs/mine --method wanda --pattern 2:4 --to pairs
      holdfast prune model --method layers --layers 4 --data run.yaml --to shallow
    """
    kind: Method = method.value
    request = PruneRequest(source, to, kind, sparsity, pattern, layers, data, samples)
    found = prune(request, say)
    if json:
        print_json({**asdict(found), "folder": str(to)})
        return
    part = found.zeros / found.weights
    say(f"wrote {to}: {found.blocks} blocks, {part:.1%} of the weights in them are zero")
    if found.dropped:
        say(f"dropped blocks: {', '.join(map(str, found.dropped))}")
    if found.before is not None and found.after is not None:
        say(f"loss on {samples} samples: {found.before:.4f} before, {found.after:.4f} after")
