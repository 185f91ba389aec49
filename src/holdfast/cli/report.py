"""`holdfast report`: one page about a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.cli.call import app as make_app
from holdfast.cli.output import print_json, say
from holdfast.cli.runs import Run, open_run, read_environment

app = make_app("Write one HTML page about a run.")


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="run folder, or the run file it was started with")],
    output: Annotated[
        Path | None, typer.Option(help="where to write the page; none: report.html in the folder")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print the numbers as JSON instead")] = False,
) -> None:
    """Write loss, throughput, where the time went and every incident of a run as one HTML page.

    It can be made at any time, also while the run goes on, and loads nothing from anywhere.

    \b
    Example:
      holdfast report runs/quickstart
      holdfast report run.yaml --output page.html
    """
    from holdfast.report import history, page
    from holdfast.report.summary import summary

    found = open_run(run)
    story = history.read(found.store)
    device = device_of(found)
    if json:
        print_json(summary(story, found.resolved, baselines=baselines_of(found), device=device))
        return
    path = output or found.folder / "report.html"
    page.write(story, found.resolved, path, baselines=baselines_of(found), device=device)
    say(f"wrote {path}")


def baselines_of(run: Run) -> dict[str, float] | None:
    """Bits per byte of unigram and bigram counts on the very tokens that the run's validation
    looks at, where the dataset is still there."""
    from holdfast.data.batch import Batches
    from holdfast.data.dataset import Dataset, exists

    if not exists(run.dataset_folder):
        return None
    config = run.config
    batches = Batches(Dataset.open(run.dataset_folder), config.data, config.train, config.seed)
    return batches.validation_baselines(config.train.evaluate.samples)


def device_of(run: Run) -> str | None:
    """Name of the accelerator that the run used, None on a CPU."""
    if run.config.device != "cuda":
        return None
    devices: list[dict[str, Any]] = (
        read_environment(run.folder).get("hardware", {}).get("accelerators", [])
    )
    return devices[0]["name"] if devices else None
