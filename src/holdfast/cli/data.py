"""`holdfast data`: from text to tokens, and what became of them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.api.progress import StageProgress
from holdfast.cli.data_audit import audit_parents, audit_run
from holdfast.cli.dispatch import app as make_app
from holdfast.cli.options import RunArgument
from holdfast.config.loading.load import load_config
from holdfast.config.run import RunConfig
from holdfast.errors import ConfigError, DataError
from holdfast.launch.run.runs import open_run
from holdfast.launch.run.task_run import ask_task
from holdfast.report.formatting import format_bytes, format_count
from holdfast.show.output import print_json, print_table, say

if TYPE_CHECKING:
    from holdfast.data.prepare.prepare import MakePool
    from holdfast.data.stream.dataset import Dataset

app = make_app("Prepare, inspect, verify and audit the training data.")

RunFile = Annotated[Path, typer.Argument(help="the run file")]
Overrides = Annotated[list[str] | None, typer.Argument(help="key=value ...")]
Json = Annotated[bool, typer.Option("--json", help="print JSON")]


@app.command()
def prepare(
    run_file: RunFile,
    overrides: Overrides = None,
    on: Annotated[str, typer.Option(help="local, or ray: tokenise on a Ray cluster")] = "local",
    address: Annotated[str, typer.Option(help="of the Ray cluster; none: RAY_ADDRESS")] = "",
    json: Json = False,
) -> None:
    """Tokenise the sources of a run file.

    If it is killed half-way, the same command resumes.

    \b
    Example:
      holdfast data prepare run.yaml
      holdfast data prepare run.yaml data.processes=8
      holdfast data prepare run.yaml --on ray --address 10.0.0.1:6379
    """
    from holdfast.data.prepare.prepare import prepare_dataset as make
    from holdfast.data.stream.inspect import dataset_numbers

    pool = _pool(on, address)
    with StageProgress() as progress:
        dataset = make(
            _decoder_config(run_file, overrides, "data prepare").data,
            progress.say,
            progress.show,
            pool=pool,
        )
    if json:
        print_json(dataset_numbers(dataset))
    else:
        say(f"dataset {dataset.version} is ready in {dataset.place}")


@app.command()
def inspect(
    run_file: RunFile,
    overrides: Overrides = None,
    position: Annotated[int, typer.Option(min=0, help="which sample of the run to show")] = 0,
    json: Json = False,
) -> None:
    """Show a dataset's numbers, and one sample as the model sees it.

    \b
    Example:
      holdfast data inspect run.yaml --position 1000
    """
    from holdfast.data.stream.batch import Batches
    from holdfast.data.stream.inspect import dataset_numbers, mask_shares, render_sample

    config = _decoder_config(run_file, overrides, "data inspect")
    dataset = _prepared(config, run_file, overrides or [])
    batches = Batches(dataset, config.data, config.train, config.seed)
    found = dataset_numbers(dataset) | {"samples": mask_shares(batches)}
    if json:
        print_json(found | {"position": position, "sample": render_sample(batches, position)})
        return
    rows: list[tuple[str, str]] = [("version", dataset.version)]
    rows += [("vocabulary", f"{format_count(dataset.vocab_size)} tokens")]
    for split, counts in found["splits"].items():
        rows.append(
            (
                split,
                f"{format_count(counts['documents'])} documents, "
                f"{format_count(counts['tokens'])} tokens, "
                f"{format_bytes(counts['bytes'])}, {counts['bytes_per_token']:.2f} bytes per token",
            )
        )
    samples = found["samples"]
    rows += [
        (f"source {name}", f"{format_count(number)} samples of {samples['sequence_length']} tokens")
        for name, number in samples["samples"].items()
    ]
    rows.append(("without loss", f"{samples['masked_share']:.1%} of the targets"))
    for name, value in (dataset.baselines or {}).items():
        rows.append((f"baseline {name}", f"{value:.3f}" if isinstance(value, float) else value))
    print_table(rows)
    print(f"\nsample {position}:\n{render_sample(batches, position)}", flush=True)


@app.command()
def verify(run_file: RunFile, overrides: Overrides = None, json: Json = False) -> int:
    """Check every byte of a dataset. Exit code 1 if one differs.

    \b
    Example:
      holdfast data verify run.yaml
    """
    from holdfast.data.stream.verify import find_problems as problems_of

    given = overrides or []
    config = _decoder_config(run_file, given, "data verify")
    version, problems = "", list[str]()
    try:
        dataset = _prepared(config, run_file, given)
        version, problems = dataset.version, problems_of(dataset)
    except DataError as error:
        if not _is_prepared(config):
            raise
        problems = [str(error)]
    if json:
        print_json({"folder": config.data.folder, "problems": problems})
    elif problems:
        print("\n".join(problems), flush=True)
    else:
        say(f"dataset {version}: every byte is what was written")
    return 1 if problems else 0


@app.command()
def audit(
    run: RunArgument,
    json: Json = False,
) -> int:
    """Prove that a run used each sample exactly once.

    Every step up to the last committed one is checked against the ledger, and the ledger against
    a dataset that is verified first. Exit code 1 if a sample is missing, was used twice, or if
    other tokens were fed than its place calls for. The steps that a branch continues are checked
    in its parent, if that is still where it was.

    \b
    Example:
      holdfast data audit runs/quickstart
    """
    found = open_run(run)
    own = audit_run(found)
    results = {"": own, **audit_parents(found)}
    if json:
        numbers = own.to_json()
        if len(results) > 1:
            numbers["parents"] = {name: one.to_json() for name, one in results.items() if name}
        print_json(numbers | {"ok": all(one.ok for one in results.values())})
    else:
        child = ""
        for name, one in results.items():
            of_child = f" of {child}," if child else ""
            one.print(f"parent{of_child} {name}: " if name else "")
            child = name
    return 0 if all(one.ok for one in results.values()) else 1


def _decoder_config(run_file: Path, overrides: list[str] | None, what: str) -> RunConfig:
    """Raises ConfigError for the run file of a task, which has data of its own."""
    loaded = load_config(run_file, overrides or [])
    if loaded.config.task.name:
        loaded = loaded.with_values(ask_task(loaded)).validated()
    config = loaded.config
    if config.task.has_own_data:
        raise ConfigError(
            f"{what} is for text, and this run trains {config.task.name}, which gives its own data",
            where=f"{run_file}: task",
            remedy="train: " + shlex.join(["holdfast", "train", str(run_file), *(overrides or [])]),
        )
    return config


def _pool(on: str, address: str) -> MakePool:
    """Raises ConfigError."""
    if on == "ray":
        from holdfast.data.stages.ray_pool import RayPool

        return lambda processes: RayPool(address)
    if on != "local":
        raise ConfigError(
            f"{on} does not prepare data", where="--on", remedy="use --on local, or --on ray"
        )
    if address:
        raise ConfigError(
            "an address is for Ray alone", where="--address", remedy="add --on ray, or leave it out"
        )
    from holdfast.data.stages.task_pool import TaskPool

    return TaskPool


def _is_prepared(config: RunConfig) -> bool:
    from holdfast.data.stream.dataset_location import dataset_exists

    return dataset_exists(config.data.folder, config.data)


def _prepared(config: RunConfig, run_file: Path, overrides: Sequence[str]) -> Dataset:
    from holdfast.data.stream.dataset_location import open_dataset

    if not _is_prepared(config):
        raise DataError(
            "there is no prepared dataset",
            where=config.data.folder,
            remedy="make it: "
            + shlex.join(["holdfast", "data", "prepare", str(run_file), *overrides]),
        )
    return open_dataset(config.data.folder, config.data, ask=True)
