"""`holdfast data show | list | versions | diff | croissant`: stages and versions of a dataset."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import pairwise
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.cli.options import Json, Overrides, RunFile, run_path
from holdfast.cli.run_parents import describe_steps, texts_of, with_parents
from holdfast.config.loading.load import load_config
from holdfast.config.sections.data import DataConfig
from holdfast.data.prepare.stage_samples import SourceSample, StageSample, sample_sources
from holdfast.data.stream.croissant import describe_croissant
from holdfast.data.stream.dataset import Dataset
from holdfast.data.stream.dataset_location import open_dataset
from holdfast.data.stream.document_reads import DocumentPlace, find_reads
from holdfast.data.stream.lineage_events import dataset_event, run_events
from holdfast.data.stream.versions import (
    causes_in,
    compare_documents,
    compare_recipes,
    find_datasets,
    find_named,
    find_versions,
)
from holdfast.errors import ConfigError, DataError
from holdfast.launch.run.runs import open_run
from holdfast.report.formatting import format_count
from holdfast.show.output import print_json, print_line, print_table, write_text
from holdfast.wire.journal import read_journal

NAMED_DOCUMENTS = 20
"""Documents of a difference that are named without --json."""

DatasetArgument = Annotated[
    str, typer.Argument(metavar="DATASET", help="folder or address of a prepared dataset")
]


def show(
    run_file: RunFile,
    overrides: Overrides = None,
    documents: Annotated[int, typer.Option(min=1, help="of each source, at most")] = 1000,
    examples: Annotated[int, typer.Option(min=0, help="of each stage and source")] = 2,
    json: Json = False,
) -> None:
    """Show what data.stages does to a sample, before and after.

    A table of quality and one of bias follow, by source. Nothing is prepared. Items of personal
    data are shown as their kind.

    \b
    Example:
      holdfast data show run.yaml --documents 500 --examples 4
    """
    config = load_config(run_file, overrides or []).config
    if config.has_own_data or config.data.has_chat:
        raise ConfigError(
            "data show is for texts, and this run has no sources of texts",
            where=f"{run_file}: data.sources",
            remedy="look at its rows: holdfast data inspect",
        )
    samples = sample_sources(config.data, documents, examples)
    if json:
        print_json({"sources": [asdict(sample) for sample in samples]})
        return
    for sample in samples:
        print(
            f"{sample.name}: {sample.documents:,} documents in the sample, "
            f"{sample.left_out:,} left out"
        )
        for stage in sample.stages:
            _print_stage(stage)
    print("\nQuality, by source:")
    print_table(list(_quality_rows(samples)), _QUALITY)
    print("\nMentions of groups, and how many of these documents are left out:")
    print_table(list(_group_rows(samples)), ("group", *(sample.name for sample in samples)))


def _print_stage(stage: StageSample) -> None:
    parts = []
    for verb, counts in (("left out", stage.left_out), ("changed", stage.changed)):
        if counts:
            rules = ", ".join(f"{rule} {n:,}" for rule, n in sorted(counts.items()))
            parts.append(f"{verb} {sum(counts.values()):,}: {rules}")
    print(
        f"  stage {stage.stage} ({stage.kind}): {stage.met:,} documents, "
        f"{'; '.join(parts) or 'nothing left out or changed'}"
    )
    if stage.scores:
        ordered = sorted(stage.scores)
        low, middle, high = (f"{ordered[len(ordered) * i // 10]:.4g}" for i in (1, 5, 9))
        print(f"    scores: a tenth below {low}, half below {middle}, a tenth above {high}")
    for example in stage.examples:
        score = "" if example.score is None else f" {example.score:.4g}"
        print(f"    {example.document} {example.rule}{score}")
        for word, text in (("before", example.before), ("after", example.after)):
            if text:
                print(f"      {word}: {' '.join(text.split())}")


_QUALITY = (
    *("source", "documents", "median words", "repeated", "gopher", "c4", "fineweb"),
    *("personal items", "languages"),
)


def _quality_rows(samples: Sequence[SourceSample]) -> Iterator[tuple[str, ...]]:
    for sample in samples:
        languages = "py3langid is not installed"
        if sample.languages is not None:
            shares = (f"{c} {_share(n, sample)}" for c, n in sample.languages.items())
            languages = ", ".join(shares)
        yield (
            sample.name,
            f"{sample.documents:,}",
            f"{sample.median_words:,.0f}",
            _share(sample.repeated, sample),
            *(_share(n, sample) for n in sample.heuristics.values()),
            f"{sample.personal_items:,}",
            languages,
        )


def _group_rows(samples: Sequence[SourceSample]) -> Iterator[tuple[str, ...]]:
    yield ("any document", *(f"{s.documents:,}, left out {_share(s.left_out, s)}" for s in samples))
    for index, group in enumerate(samples[0].groups):
        cells = []
        for sample in samples:
            of = sample.groups[index]
            out = f", left out {of.left_out / of.documents:.1%}" if of.documents else ""
            cells.append(f"{_share(of.documents, sample)}{out}")
        yield (group.group, *cells)


def _share(count: int, sample: SourceSample) -> str:
    return f"{count / max(sample.documents, 1):.1%}"


def list_(
    folder: Annotated[Path, typer.Argument(help="folder that datasets lie in")] = Path("datasets"),
    json: Json = False,
) -> None:
    """List the datasets in a folder, and below it.

    \b
    Example:
      holdfast data list datasets
    """
    rows: list[dict[str, Any]] = []
    for path, found in find_datasets(folder):
        if isinstance(found, DataError):
            rows.append({"folder": str(path), "problem": str(found)})
            continue
        rows.append(_describe(found) | {"folder": str(path)})
    if json:
        print_json({"datasets": rows})
        return
    if not rows:
        raise DataError(
            "no dataset lies there", where=str(folder), remedy="run holdfast data prepare"
        )
    print_table([_row(row) for row in rows], _LISTED)


_LISTED = ("folder", "version", "documents", "tokens", "sources", "stages")


def _describe(dataset: Dataset) -> dict[str, Any]:
    counts = [dataset.counts(split) for split in dataset.splits]
    return {
        "folder": dataset.place,
        "version": dataset.version,
        "documents": sum(count["documents"] for count in counts),
        "tokens": sum(count["tokens"] for count in counts),
        "sources": list(dataset.source_names),
        "stages": [stage["kind"] for stage in dataset.manifest["settings"].get("stages", ())],
    }


def _row(row: dict[str, Any]) -> tuple[str, ...]:
    if "problem" in row:
        return (row["folder"], "-", "-", "-", "-", row["problem"])
    return (
        row["folder"],
        row["version"],
        f"{row['documents']:,}",
        format_count(row["tokens"]),
        ", ".join(row["sources"]),
        ", ".join(row["stages"]) or "none",
    )


def versions(dataset: DatasetArgument, json: Json = False) -> None:
    """List the versions of a dataset, with reasons.

    A reason says why a version differs from the one before. The versions are the datasets next to
    it whose sources have the same names.

    \b
    Example:
      holdfast data versions datasets/web
    """
    found = find_versions(_open(dataset))
    reasons: list[list[str]] = [[]]
    for before, after in pairwise(found):
        reasons.append([one.describe() for one in compare_recipes(before, after)])
    rows = [_describe(one) for one in found]
    if json:
        print_json({"versions": [r | {"differs": w} for r, w in zip(rows, reasons, strict=True)]})
        return
    for row, why in zip(rows, reasons, strict=True):
        documents, tokens = f"{row['documents']:,}", format_count(row["tokens"])
        print(f"{row['version']}  {row['folder']}  {documents} documents, {tokens} tokens")
        for line in why:
            print(f"  {line}")


def diff(
    before: DatasetArgument,
    after: DatasetArgument,
    run: Annotated[
        list[Path] | None,
        typer.Option(
            help="a run that may have read what is left out; may be repeated", parser=run_path
        ),
    ] = None,
    json: Json = False,
) -> int:
    """Say why two datasets differ.

    The documents that only one of them has are named, too, by the xxh3-128 of their texts as the
    stages leave them. With --run the steps of runs that read documents of BEFORE which AFTER does
    not have are named. Exit code 1 if the versions differ.

    \b
    Example:
      holdfast data diff datasets/web datasets/web2 --run runs/first --run runs/second
    """
    old, new = _open(before), _open(after)
    reasons = compare_recipes(old, new)
    documents = compare_documents(old, new)
    gone, added = documents.only_before, documents.only_after
    causes = causes_in(new, set(gone))
    touched = {place: reads for one in run or () for place, reads in _touched(one, set(gone))}
    if json:
        print_json(
            {
                "versions": [old.version, new.version],
                "reasons": [asdict(one) for one in reasons],
                "only_before": _named(old, gone, causes),
                "only_after": _named(new, added, {}),
                "runs": touched,
            }
        )
        return int(old.version != new.version)
    same = "the same version" if old.version == new.version else "different versions"
    print(f"{same}: {old.version} and {new.version}")
    for one in reasons:
        print(f"  {one.describe()}")
    for head, rows in (
        (f"only in {old.place}", _named(old, gone, causes)),
        (f"only in {new.place}", _named(new, added, {})),
    ):
        print(f"{head}: {len(rows):,} documents")
        for row in rows[:NAMED_DOCUMENTS]:
            cause = f", left out by {row['cause']}" if "cause" in row else ""
            print(f"  {row['document']} ({row['source']}{cause})")
        if len(rows) > NAMED_DOCUMENTS:
            print(f"  and {len(rows) - NAMED_DOCUMENTS:,} more: see --json")
    for place, reads in touched.items():
        steps = describe_steps(reads["steps"])
        what = (
            f"steps {steps} read {reads['documents']:,} of them" if steps else "read none of them"
        )
        print(f"run {place}: {what}")
    return int(old.version != new.version)


def _named(
    dataset: Dataset, found: dict[str, list[DocumentPlace]], causes: dict[str, dict[str, Any]]
) -> list[dict[str, Any]]:
    rows = []
    for name, places in sorted(found.items()):
        row = {"document": name, "source": dataset.source_names[places[0].source]}
        if name in causes:
            entry = causes[name]
            stage = (
                f"stage {entry['stage']} ({entry['kind']})" if "stage" in entry else entry["kind"]
            )
            row["cause"] = stage
        rows.append(row)
    return rows


def _touched(run: Path, names: set[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a run, and those that it continues, each with the steps that read any of some documents
    of its dataset."""
    for place, opened, last in with_parents(open_run(run)):
        dataset, batches = texts_of(opened)
        named = find_named(dataset, names)
        places = [one for found in named.values() for one in found]
        records = list(read_journal(opened.store))
        read = [n for n, found in named.items() if find_reads(records, batches, found).steps]
        steps = [
            step for step in find_reads(records, batches, places).steps if step <= (last or step)
        ]
        yield place, {"dataset": dataset.version, "documents": len(read), "steps": steps}


def _open(location: str) -> Dataset:
    return open_dataset(location, DataConfig(), ask=True)


def croissant(
    dataset: DatasetArgument,
    to: Annotated[Path | None, typer.Option(help="file; none: croissant.json next to it")] = None,
    name: Annotated[str, typer.Option(help="none: that of its folder")] = "",
    license: Annotated[str, typer.Option(help="SPDX name or address of its licence")] = "",
    url: Annotated[str, typer.Option(help="where the dataset is published")] = "",
) -> None:
    """Describe a dataset in Croissant 1.0.

    Each of its files is read for its sha256. The file is no part of the version.

    \b
    Example:
      holdfast data croissant datasets/web --license CC-BY-4.0 --url https://example.com/web
    """
    found = _open(dataset)
    if to is None and found.cache is not None:
        raise ConfigError(
            "a dataset with an address has no folder for the file",
            where="--to",
            remedy="name a file: --to croissant.json",
        )
    named = name or found.place.rstrip("/").rpartition("/")[2]
    text = dumps(describe_croissant(found, named, license, url), indent=2) + "\n"
    write_text(to or found.folder / "croissant.json", text)


def lineage(
    dataset: DatasetArgument,
    run: Annotated[
        list[Path] | None,
        typer.Option(help="a run on this version; may be repeated", parser=run_path),
    ] = None,
) -> None:
    """Print the lineage of a dataset as events of OpenLineage.

    One JSON object a line: the preparation, and of each run its start and its checkpoints.

    \b
    Example:
      holdfast data lineage datasets/web --run runs/first
    """
    found = _open(dataset)
    events = [dataset_event(found)]
    for path in run or ():
        opened = open_run(path)
        version = "none"
        if not (opened.is_simulated or opened.config.has_own_data):
            version = open_dataset(opened.dataset_location, opened.config.data).version
        if version != found.version:
            raise DataError(
                f"the run trained on another version ({version})",
                where=opened.place,
                remedy=f"name a run on {found.version}",
            )
        run_id = str(opened.resolved.get("run_id", opened.place))
        events += run_events(found, run_id, opened.place, read_journal(opened.store))
    for event in events:
        print_line(event)
