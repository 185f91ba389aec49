"""`holdfast profile`: record what a running job does in its next steps."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from holdfast.cli.dispatch import app as make_app
from holdfast.cli.options import Json, RunArgument
from holdfast.config.sections.train import MAX_PROFILED_STEPS
from holdfast.launch.run.bucket_run import require_secret
from holdfast.launch.run.profiling import profile_run
from holdfast.launch.run.runs import open_run
from holdfast.show.output import print_json, say

app = make_app("Record what a running job does in its next steps.")


@app.command()
def profile(
    run: RunArgument,
    steps: Annotated[int, typer.Option(min=1, max=MAX_PROFILED_STEPS, help="how many")] = 3,
    rank: Annotated[
        list[int] | None, typer.Option(min=0, help="may be repeated; left out: rank 0")
    ] = None,
    timeout: Annotated[float, typer.Option(help="seconds to wait for the files")] = 600.0,
    json: Json = False,
) -> int:
    """Have torch's profiler record the next steps of a run that is at work.

    Each rank writes a Chrome trace for Perfetto or speedscope on its own node, in the folder
    profiles of the run folder. The run's curve does not change. train.profile does the same for
    steps that are known before. Exit code 1 if a rank could not write its file.

    \b
    Example:
      holdfast profile runs/quickstart --steps 3 --rank 0 --rank 1
    """
    found = open_run(run)
    require_secret(found.folder)
    ranks = tuple(dict.fromkeys(rank or (0,)))
    done = profile_run(found, steps, ranks, timeout)
    if json:
        print_json([asdict(event) for event in done])
    else:
        for event in done:
            what = f"rank {event.rank}, steps {event.first} to {event.step}"
            say(f"{what}: {event.problem or event.path}")
    return 1 if any(event.problem for event in done) else 0
