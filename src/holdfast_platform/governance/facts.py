"""What a run folder says of its model: the bodies of a record's entries, and their check."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from holdfast.checkpoint.restore.inspect import NEWEST_PATH, find_commit_key
from holdfast.checkpoint.restore.reader import Checkpoint
from holdfast.config.loading.identity import config_hash
from holdfast.core.data.data_ledger import LedgerEntry, drop_redundant_stand_ins
from holdfast.core.data.lineage import split_effective
from holdfast.data.stream.dataset_location import open_dataset
from holdfast.errors import ConfigError, DataError
from holdfast.events import BatchFed, Evaluated, Record, RunBranched, StepDone
from holdfast.export.stitched import origin_of
from holdfast.export.weights import settings_folder
from holdfast.launch.run.runs import Run, read_environment
from holdfast.wire.journal import read_journal
from holdfast.wire.store.run_store import MissingKeyError
from holdfast_platform.governance.attestation import find_evidence_problems
from holdfast_platform.governance.record import ModelRecord, changed_names, file_hashes
from holdfast_platform.governance.statement import find_statement_problems

MAX_DIGESTS = 4096
"""Digests of steps in an entry; of a longer run each covers several steps."""


def data_body(run: Run, licences: Mapping[str, str]) -> dict[str, Any]:
    """Return the dataset's identity, and the licence of each source. Raises ConfigError for a
    source without one."""
    names = source_names(run)
    strange, missing = set(licences) - set(names), set(names) - set(licences)
    if strange or missing:
        name = sorted(strange or missing)[0]
        what = "is no source of the dataset" if strange else "has no licence"
        raise ConfigError(
            f"source {name} {what}",
            where="--licence",
            remedy=f"give one for each of: {', '.join(names)}, as --licence {names[0]}=CC-BY-4.0",
        )
    return {"dataset": run.dataset_version, "licences": dict(sorted(licences.items()))}


def source_names(run: Run, dataset: str | None = None) -> tuple[str, ...]:
    """Return the sources of a run's dataset. dataset: where it is now; None: where it was. Raises
    DataError for another dataset."""
    if run.config.has_own_data:
        return (run.config.task.name or "rollout",)
    found = open_dataset(dataset or run.dataset_location, run.config.data)
    if found.version != run.dataset_version:
        raise DataError(
            f"this is the dataset {found.version}, and the run has {run.dataset_version}",
            where=dataset or run.dataset_location,
            remedy="name the run's own with --data",
        )
    return found.source_names


def training_body(run: Run) -> dict[str, Any]:
    """Return steps, ledger, code, configuration and checkpoint of a run, and the models that its
    first weights were stitched of."""
    records, _ = split_effective(read_journal(run.store))
    done = sorted({r.event.step for r in records if isinstance(r.event, StepDone)})
    if not done:
        raise ConfigError(
            "the run has done no step", where=run.place, remedy="train it, then record it"
        )
    key = find_commit_key(run.store, NEWEST_PATH)
    checkpoint = Checkpoint.open(run.store, key).commit
    first = 1 + max((r.event.step for r in records if isinstance(r.event, RunBranched)), default=0)
    last = checkpoint.step
    block = -(-max(1, last - first + 1) // MAX_DIGESTS)
    environment = read_environment(run.folder)
    return {
        "run": run.config.name,
        "run_id": str(run.resolved.get("run_id", "")),
        "config_hash": config_hash(run.config),
        "first_step": first,
        "last_step": last,
        "steps_a_digest": block,
        "digests": ledger_digests(records, first, last, block),
        "checkpoint": key,
        "checkpoint_sha256": hashlib.sha256(run.store.get(key)).hexdigest(),
        "code": environment.get("git"),
        "packages": environment.get("packages"),
        **origin_of(settings_folder(run)),
    }


def ledger_digests(records: Iterable[Record], first: int, last: int, block: int) -> list[str]:
    """Return a digest of each `block` steps: what each range of samples was fed, and the loss. A
    step without any is "" if it stands alone."""
    entries: dict[int, list[LedgerEntry]] = {}
    losses: dict[int, float] = {}
    for record in records:
        event = record.event
        if isinstance(event, BatchFed):
            found = [LedgerEntry.from_json(event.step, event.rank, e) for e in event.entries]
            entries.setdefault(event.step, []).extend(found)
        elif isinstance(event, StepDone):
            losses[event.step] = event.loss
    out = []
    for start in range(first, last + 1, block):
        digest, is_complete = hashlib.sha256(), True
        for step in range(start, min(start + block, last + 1)):
            is_complete &= step in entries and step in losses
            rows = drop_redundant_stand_ins(entries.get(step, []))
            told = sorted((e.start, e.stop, e.hash, e.skip_reason) for e in rows)
            digest.update(json.dumps([step, losses.get(step), told]).encode())
        out.append(digest.hexdigest()[:16] if is_complete else "")
    return out


def evaluation_body(run: Run, file: Path | None) -> dict[str, Any] | None:
    """Return the newest validation of a run, with the results of a file; None for neither."""
    records, _ = split_effective(read_journal(run.store))
    events = [r.event for r in records if isinstance(r.event, Evaluated)]
    found: dict[str, Any] = {}
    if events:
        found = {"step": events[-1].step, "validation_loss": events[-1].loss}
    if file is not None:
        try:
            found["results"] = json.loads(file.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"this is no readable JSON ({error})",
                where=str(file),
                remedy="name a file that an evaluation wrote",
            ) from None
    return found or None


def find_problems(run: Run, record: ModelRecord, dataset: str | None = None) -> Iterator[str]:
    """Yield what of a record does not agree with the run and with the exports. If its chain is
    broken, nothing else is compared. dataset: where the data is now; None: where it was."""
    if record.problems:
        yield from record.problems
        return
    try:
        yield from _body_problems(run, record, dataset)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        yield f"an entry is not what 'holdfast audit record' writes: {error!r}"


def _body_problems(run: Run, record: ModelRecord, dataset: str | None) -> Iterator[str]:
    data, training = record.last("data"), record.last("training")
    if data is None or training is None:
        missing = "data" if data is None else "training"
        yield f"the record has no entry of {missing}"
        return
    if data["dataset"] != run.dataset_version:
        yield f"dataset: the record has {data['dataset']}, and the run {run.dataset_version}"
    for name in sorted(set(source_names(run, dataset)) - set(data["licences"])):
        yield f"licence: source {name} has none in the record"
    yield from _training_problems(run, training)
    yield from find_evidence_problems(run.folder, record)
    yield from find_statement_problems(run.folder, record)
    for export in record.all("export"):
        folder = Path(str(export["folder"]))
        if not folder.is_dir():
            yield f"export: {folder} is not here"
            continue
        for name in changed_names(export["files"], file_hashes(folder)):
            yield f"export: {folder / name} is not the recorded file"


def _training_problems(run: Run, recorded: Mapping[str, Any]) -> Iterator[str]:
    records, _ = split_effective(read_journal(run.store))
    first, last = int(recorded["first_step"]), int(recorded["last_step"])
    block = int(recorded["steps_a_digest"])
    here = ledger_digests(records, first, last, block)
    if len(recorded["digests"]) != len(here):
        yield (
            f"steps: the record has {len(recorded['digests'])} digests for the steps {first} to "
            f"{last}, and {len(here)} are due"
        )
    for number, (there, now) in enumerate(zip(recorded["digests"], here, strict=False)):
        step = first + number * block
        where = f"step {step}" if block == 1 else f"steps {step} to {step + block - 1}"
        if not there:
            yield f"{where}: the record was made without it"
        elif not now:
            yield f"{where}: missing in the journal"
        elif there != now:
            yield f"{where}: the journal is not what was recorded"
    if recorded["config_hash"] != config_hash(run.config):
        yield "configuration: resolved.json is not what was recorded"
    try:
        sha256 = hashlib.sha256(run.store.get(str(recorded["checkpoint"]))).hexdigest()
    except MissingKeyError:
        sha256 = ""
    if sha256 != recorded["checkpoint_sha256"]:
        what = "is not what was recorded" if sha256 else "is not here"
        yield f"checkpoint: {recorded['checkpoint']} {what}"
