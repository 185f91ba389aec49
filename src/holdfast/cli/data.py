"""`holdfast data`: from text to tokens, and what became of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.dispatch import app as make_app
from holdfast.cli.output import print_json, print_table, say
from holdfast.cli.progress import StageProgress
from holdfast.config.load import load_config
from holdfast.config.run import RunConfig
from holdfast.errors import DataError
from holdfast.launch.runs import open_run
from holdfast.report.formatting import format_bytes, format_count

app = make_app("Prepare, inspect, verify and audit the training data.")

RunFile = Annotated[Path, typer.Argument(help="the run file")]
Overrides = Annotated[list[str] | None, typer.Argument(help="key=value ...")]
Json = Annotated[bool, typer.Option("--json", help="print JSON")]


@app.command()
def prepare(run_file: RunFile, overrides: Overrides = None, json: Json = False) -> None:
    """Tokenise the sources of a run file.

    If it is killed half-way, the same command resumes.

    \b
    Example:
      holdfast data prepare run.yaml
      holdfast data prepare run.yaml data.processes=8
    """
    from holdfast.data.inspect import dataset_numbers
    from holdfast.data.prepare import prepare_dataset as make

    with StageProgress() as progress:
        dataset = make(
            load_config(run_file, overrides or []).config.data, progress.say, progress.show
        )
    if json:
        print_json(dataset_numbers(dataset))
    else:
        say(f"dataset {dataset.version} is ready in {dataset.folder}")


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
    from holdfast.data.batch import Batches
    from holdfast.data.dataset import Dataset
    from holdfast.data.inspect import dataset_numbers, mask_shares, render_sample

    config = load_config(run_file, overrides or []).config
    dataset = Dataset.open(_prepared_folder(config))
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
    from holdfast.data.dataset import Dataset
    from holdfast.data.verify import find_problems as problems_of

    folder = _prepared_folder(load_config(run_file, overrides or []).config)
    problems = problems_of(folder)
    if json:
        print_json({"folder": str(folder), "problems": problems})
    elif problems:
        print("\n".join(problems), flush=True)
    else:
        say(f"dataset {Dataset.open(folder).version}: every byte is what was written")
    return 1 if problems else 0


@app.command()
def audit(
    run: Annotated[Path, typer.Argument(help="run folder, or the run file it was started with")],
    json: Json = False,
) -> int:
    """Prove that a run used each sample exactly once.

    Every step up to the last committed one is checked against the ledger, and the ledger against
    a dataset that is verified first. Exit code 1 if a sample is missing, was used twice, or if
    other tokens were fed than its place calls for.

    \b
    Example:
      holdfast data audit runs/quickstart
    """
    from dataclasses import asdict

    from holdfast.checkpoint.restore.catalog import list_commits, step_of
    from holdfast.data.audit import AuditProblem
    from holdfast.data.audit import audit_records as audit_journal
    from holdfast.tasks.choose import open_audited
    from holdfast.wire.journal import read_contents
    from holdfast.wire.term import newest_term

    found = open_run(run)
    config, journal = found.config, read_contents(found.store)
    batches, file_problems = open_audited(config, found.dataset_folder)
    result = audit_journal(journal.records, batches)
    result.unreadable = len(journal.unreadable)
    commits = list_commits(found.store)
    if commits and not result.last_step and newest_term(found.store)[0]:  # a copy has no journal
        result.problems.append(
            AuditProblem(
                "missing",
                0,
                0,
                f"the journal tells of no committed step, though there is a checkpoint of step "
                f"{step_of(commits[0])}: what was fed cannot be known",
            )
        )
    # Tokens that were fed from a changed shard would agree with that shard.
    result.problems += [AuditProblem("dataset", 0, 0, text) for text in file_problems]
    if json:
        numbers = asdict(result)
        if not result.unreadable:
            del numbers["unreadable"]
        print_json(numbers | {"ok": result.ok, "sentence": result.describe()})
    else:
        print(result.describe())
        for problem in result.problems:
            print(f"  {problem.message}")
        if journal.unreadable:
            print(f"  ({journal.unreadable_sentence()})")
        if result.superseded:
            print(f"  ({result.superseded} ledger records are of work that was lost and redone)")
    return 0 if result.ok else 1


def _prepared_folder(config: RunConfig) -> Path:
    from holdfast.data.dataset import exists

    folder = Path(config.data.folder)
    if not exists(folder):
        raise DataError(
            "there is no prepared dataset",
            where=str(folder),
            remedy="make it: holdfast data prepare RUN.yaml",
        )
    return folder
