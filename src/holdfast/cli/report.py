"""`holdfast report`: one page about a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.cli.call import app as make_app
from holdfast.cli.output import print_json, say
from holdfast.cli.runs import Run, open_run, read_environment, trainer_answers
from holdfast.errors import DataError

app = make_app("Write one HTML page about a run.")


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="run folder, or the run file it was started with")],
    output: Annotated[
        Path | None, typer.Option(help="where to write the page; none: report.html in the folder")
    ] = None,
    sample: Annotated[
        list[str] | None, typer.Option(help="text for the model to continue; may be repeated")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print the numbers as JSON instead")] = False,
) -> None:
    """Write loss, throughput, where the time went and every incident of a run as one HTML page.

    It can be made at any time, also while the run goes on, and loads nothing from anywhere. With
    --sample, what the newest whole checkpoint makes of a prompt stands on the page too.

    \b
    Example:
      holdfast report runs/quickstart
      holdfast report run.yaml --output page.html --sample "import os" --sample "def f("
    """
    from holdfast.report import history, page
    from holdfast.report.summary import summary

    found = open_run(run)
    story = history.read(found.store)
    if story.state == "running" and trainer_answers(found.folder) is False:
        story = story.interrupted()
    counts, device = baselines_of(found), device_of(found)
    samples = samples_of(found, sample) if sample else []
    if json:
        numbers = summary(story, found.resolved, baselines=counts, device=device)
        print_json(numbers | {"samples": samples})
        return
    path = output or found.folder / "report.html"
    texts = [one["prompt"] + one["text"] for one in samples]
    page.write(story, found.resolved, path, baselines=counts, samples=texts, device=device)
    say(f"wrote {path}")


def samples_of(run: Run, prompts: list[str]) -> list[dict[str, Any]]:
    """What the newest whole checkpoint makes of each prompt."""
    from holdfast.cli.weights import Sampling, continuations, with_checkpoint

    checkpoint, texts = with_checkpoint(
        run, None, lambda chosen: continuations(run, chosen, prompts, Sampling())
    )
    return [
        {"step": checkpoint.step, "prompt": prompt, "text": text}
        for prompt, text in zip(prompts, texts, strict=True)
    ]


def baselines_of(run: Run) -> dict[str, float] | None:
    """Bits per byte of unigram and bigram counts on the very tokens that the run's validation
    looks at; None, with a word about it, where the run's dataset is not there any more."""
    from holdfast.data.batch import Batches
    from holdfast.data.dataset import Dataset

    config = run.config
    try:
        dataset = Dataset.open(run.dataset_folder)
        if dataset.version != run.dataset_version:
            say(f"no counts beside the curve: {run.dataset_folder} holds another dataset now")
            return None
        batches = Batches(dataset, config.data, config.train, config.seed)
    except DataError as error:
        say(f"no counts beside the curve: {error}")
        return None
    return batches.validation_baselines(config.train.evaluate.samples)


def device_of(run: Run) -> str | None:
    """Name of the accelerator that the run used, None on a CPU."""
    if run.config.device != "cuda":
        return None
    devices: list[dict[str, Any]] = (
        read_environment(run.folder).get("hardware", {}).get("accelerators", [])
    )
    return devices[0]["name"] if devices else None
