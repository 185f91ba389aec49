"""`holdfast data mix-search`: finds the weights of a run's sources with many small runs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.options import Json, Overrides, RunFile
from holdfast.show.output import print_json, print_table, say
from holdfast_platform.search.mix_fit import LEAST_RUNS


def mix_search(
    run_file: RunFile,
    overrides: Overrides = None,
    trials: Annotated[
        int, typer.Option(min=LEAST_RUNS, help="runs that the regression is fitted on")
    ] = 32,
    check: Annotated[int, typer.Option(min=0, help="more runs, which it has to predict")] = 8,
    jobs: Annotated[int, typer.Option(min=1, help="runs side by side")] = 1,
    max_passes: Annotated[
        float | None,
        typer.Option(min=0.01, help="over a source in the run, at most; none: no limit"),
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(help="of all runs; none: searches/NAME-mix")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="of the random mixtures")] = 0,
    show: Annotated[bool, typer.Option("--show", help="run nothing, show the trials")] = False,
    json: Json = False,
) -> int:
    """Find weights of data.sources with many small runs.

    Each trial is a run of the run file with a random mixture. A regression predicts the loss of any
    mixture from these (RegMix, Liu et al. 2024). The mixture with the least predicted loss is
    trained as well. The best one is printed as a section data.mix for the run file.

    Use key=value to make the trials small: a tenth of the steps, a small model.
    train.evaluate.sources names the sources whose validation text counts. If the command is killed,
    the same command resumes. 32 trials are enough for four sources; use more for more sources.

    \b
    Example:
      holdfast data mix-search run.yaml train.steps=300 model.layers=2 model.dim=64 \\
          train.evaluate.sources=[docs] --jobs 2
      holdfast data mix-search run.yaml train.steps=300 --max-passes 4 > mix.yaml
    """
    from holdfast_platform.search.mix import MIX, MixRunner, make_search

    search = make_search(run_file, overrides or [], folder, trials, check, jobs, max_passes, seed)
    runner = MixRunner(search, say)
    if show:
        rows = [
            (t.number, t.state.value, t.starts, t.value, *t.parameters[MIX][0]["weights"].values())
            for t in runner.trials()
        ]
        print_table(rows, ("trial", "state", "starts", "loss", *search.names))
        return 0
    if code := runner.run():
        return code
    found = runner.found()
    if json:
        print_json(asdict(found))
    else:
        print(found.section, end="", flush=True)
    return 0
