"""`holdfast data`: from text to tokens, and what became of them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.api.progress import StageProgress
from holdfast.checkpoint.restore.catalog import list_commits, step_of
from holdfast.cli import data_versions
from holdfast.cli.dispatch import app as make_app
from holdfast.cli.options import Json, Overrides, RunArgument, RunFile, run_path
from holdfast.cli.run_parents import describe_steps, open_parent, texts_of, with_parents
from holdfast.cli.table import parts_of
from holdfast.config.loading.load import load_config
from holdfast.config.run import RunConfig
from holdfast.config.sections.data import DataConfig
from holdfast.data.order.audit import AuditProblem, AuditResult, audit_records, branch_event
from holdfast.data.prepare.prepare import MakePool
from holdfast.data.prepare.prepare import prepare_dataset as make
from holdfast.data.stages.task_pool import TaskPool
from holdfast.data.stream.batch import Batches
from holdfast.data.stream.coverage import describe_long_rows
from holdfast.data.stream.dataset import Dataset
from holdfast.data.stream.dataset_location import dataset_exists, is_address, open_dataset
from holdfast.data.stream.document_reads import (
    document_hash,
    find_document,
    find_media,
    find_reads,
    read_document,
)
from holdfast.data.stream.inspect import dataset_numbers, mask_shares, render_sample
from holdfast.data.stream.verify import find_problems as problems_of
from holdfast.errors import ConfigError, DataError, RunFolderError
from holdfast.launch.run.runs import Run, open_run
from holdfast.launch.run.task_run import ask_task
from holdfast.launch.start.regions import refuse_other_regions
from holdfast.report.formatting import format_bytes, format_count
from holdfast.show.output import print_json, print_table, say
from holdfast.wire.journal import JournalContents, read_contents, read_journal
from holdfast.wire.term import newest_term

app = make_app("Prepare, inspect, verify and audit the training data.")


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
    pool, config = _pool(on, address), _decoder_config(run_file, overrides, "data prepare")
    far = [s.path for s in config.data.sources if s.path and is_address(s.path)]
    if on == "ray" and far:
        raise ConfigError(
            f"the source {far[0].partition('?')[0]} would be fetched to this machine alone",
            where="--on ray",
            remedy="use --on local, or name a folder that the machines of the cluster share",
        )
    with StageProgress() as progress:
        dataset = make(config.data, progress.say, progress.show, pool=pool, mend=True)
    try:
        lines = describe_long_rows(dataset, config.data, config.step_train, config.seed)
    except DataError as error:  # the dataset is prepared; a training refuses it
        lines = [str(error)]
    for line in lines:
        say(line)
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
    config = _decoder_config(run_file, overrides, "data inspect")
    dataset = _prepared(config, run_file, overrides or [])
    batches = Batches(dataset, config.data, config.step_train, config.seed)
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
def teach(run_file: RunFile, overrides: Overrides = None, json: Json = False) -> None:
    """Store a teacher's likeliest tokens next to a dataset.

    For objective.kind distill. If it is killed half-way, the same command resumes. The complete
    teacher is held in memory.

    \b
    Example:
      holdfast data teach student.yaml
    """
    from holdfast.export.teacher import store_teacher

    given = overrides or []
    loaded = load_config(run_file, given)
    dataset = _prepared(_decoder_config(run_file, given, "data teach"), run_file, given)

    def show(done: int, count: int) -> None:
        if not json:
            say(f"teacher: {done} of {count} pieces")

    place, digest = store_teacher(loaded, dataset, show)
    if json:
        print_json({"folder": place, "digest": digest})
    else:
        say(f"the teacher's tokens are stored: {place}")


@app.command()
def audit(run: RunArgument, json: Json = False) -> int:
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


@app.command(name="who-read")
def who_read(
    document: Annotated[Path, typer.Argument(help="file with one document")],
    runs: Annotated[list[Path], typer.Argument(help="run folders or buckets", parser=run_path)],
    json: Json = False,
) -> int:
    """Name the steps of runs that read a document.

    The document is found in each run's dataset, and its samples in the run's ledger. The steps that
    a branch continues are those of its parent. Exit code 1 if no run read it.

    \b
    Example:
      holdfast data who-read letter.txt runs/quickstart runs/second
    """
    name, found = "", dict[str, dict[str, Any]]()
    for run in runs:
        for place, opened, last in with_parents(open_run(run)):
            name, found[place] = _reads_of(opened, document, last)
    if json:
        print_json({"document": name, "runs": found})
    else:
        print(f"document {name}")
        for place, reads in found.items():
            print(f"{place}: {_describe_reads(reads)}", flush=True)
    return 0 if any(reads["steps"] for reads in found.values()) else 1


def _reads_of(run: Run, path: Path, last: int) -> tuple[str, dict[str, Any]]:
    """Return the name of a document, of an image or a recording that of its file, and its reads.
    Raises DataError for a run whose data are no texts."""
    dataset, batches = texts_of(run)
    if batches.has_features:
        name, places = path.name, find_media(dataset, path)
    else:
        text = read_document(path, DataConfig().max_document_bytes)
        name, places = document_hash(text), find_document(dataset, text)
    reads = find_reads(read_journal(run.store), batches, places)
    names = sorted({f"{dataset.source_names[p.source]} ({p.split})" for p in places})
    kept, lost = (
        [step for step in steps if step <= (last or step)] for steps in (reads.steps, reads.lost)
    )
    return name, {"dataset": dataset.version, "sources": names, "steps": kept, "lost_steps": lost}


def _describe_reads(reads: dict[str, Any]) -> str:
    if not reads["sources"]:
        return f"the document is not in the dataset {reads['dataset']}"
    where = f"in {', '.join(reads['sources'])} of the dataset {reads['dataset']}"
    lost = (
        f"; work of steps {describe_steps(reads['lost_steps'])} was lost"
        if reads["lost_steps"]
        else ""
    )
    if not reads["steps"]:
        return f"no step read it, {where}{lost}"
    return f"read by steps {describe_steps(reads['steps'])}, {where}{lost}"


def _decoder_config(run_file: Path, overrides: list[str] | None, what: str) -> RunConfig:
    """Raises ConfigError for the run file of a task, which has data of its own."""
    loaded = load_config(run_file, overrides or [])
    refuse_other_regions(loaded)
    if loaded.config.task.name:
        loaded = loaded.with_values(ask_task(loaded)).validated()
    config = loaded.config
    if config.has_own_data:
        whose = f"trains {config.task.name}, which gives its own data"
        if config.rollout.is_on:
            whose = "generates its data from prompts"
        raise ConfigError(
            f"{what} is for text, and this run {whose}",
            where=f"{run_file}: {'rollout' if config.rollout.is_on else 'task'}",
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

    return TaskPool


def _is_prepared(config: RunConfig) -> bool:
    return dataset_exists(config.data.folder, config.data)


def _prepared(config: RunConfig, run_file: Path, overrides: Sequence[str]) -> Dataset:
    if not _is_prepared(config):
        raise DataError(
            "there is no prepared dataset",
            where=config.data.folder,
            remedy="make it: "
            + shlex.join(["holdfast", "data", "prepare", str(run_file), *overrides]),
        )
    return open_dataset(config.data.folder, config.data, ask=True)


@dataclass(frozen=True)
class RunAudit:
    """The audit of one run; result: None for a parent that is not where it was."""

    result: AuditResult | None
    journal: JournalContents | None = None
    missing: str = ""  # why there is no result

    @property
    def ok(self) -> bool:
        return self.result is None or self.result.ok

    def to_json(self) -> dict[str, Any]:
        if self.result is None or self.journal is None:
            return {"missing": self.missing}
        numbers = asdict(replace(self.result, groups=None))
        del numbers["groups"]
        if (found := self.result.groups) is not None:
            numbers["completions"] = {"trained": found.trained, "filtered": found.filtered}
        if not self.result.unreadable:
            del numbers["unreadable"]
        if self.result.first_step == 1:
            del numbers["first_step"]
        if not self.result.imported_step:
            del numbers["imported_step"]
        return numbers | {"ok": self.result.ok, "sentence": self.result.describe()}

    def print(self, head: str) -> None:
        if self.result is None or self.journal is None:
            print(f"{head}{self.missing}", flush=True)
            return
        print(f"{head}{self.result.describe()}")
        for problem in self.result.problems:
            print(f"  {problem.message}")
        if self.journal.unreadable:
            print(f"  ({self.journal.unreadable_sentence()})")
        if self.result.superseded:
            number = self.result.superseded
            print(f"  ({number} ledger records are of work that was lost and redone)")


def audit_run(found: Run, last_step: int | None = None) -> RunAudit:
    """Audit a run's own steps, up to `last_step` or its last committed one. Raises RunFolderError
    for a simulated run."""
    from holdfast.tasks.choose import open_audited

    if found.is_simulated:
        raise RunFolderError(
            "this run was simulated, so no sample was used",
            where=found.place,
            remedy="name a run that was trained",
        )
    config, journal = found.config, read_contents(found.store)
    batches, file_problems = open_audited(config, found.dataset_location)
    result = audit_records(journal.records, batches, last_step)
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
    return RunAudit(result, journal)


def audit_parents(found: Run) -> dict[str, RunAudit]:
    """Audit the runs that a branch continues, each up to the step that was branched from. The key
    is the run's folder; the nearest parent comes first."""
    audits: dict[str, RunAudit] = {}
    run: Run | None = found
    while run is not None and (event := branch_event(read_journal(run.store))) is not None:
        run = open_parent(event)
        if event.step == 0:
            break  # the parent had dealt nothing yet
        if run is None:
            missing = (
                f"it dealt the samples of the steps up to {event.step}, and is no longer in "
                f"{event.folder}: these steps are not checked"
            )
            audits[event.folder] = RunAudit(None, missing=missing)
        else:
            audits[event.folder] = audit_run(run, event.step)
    return audits


app.command()(data_versions.show)
app.command("list")(data_versions.list_)
app.command()(data_versions.versions)
app.command()(data_versions.diff)
app.command()(data_versions.croissant)
app.command()(data_versions.lineage)
for part in parts_of("data"):
    name = part.name.replace("-", "_")
    app.command(part.name)(getattr(import_module(part.module), name))
