"""The record as an in-toto statement, with the predicate of SLSA provenance.

    record/statement.json    written after each entry, and signed with the record

It follows https://in-toto.io/Statement/v1 and https://slsa.dev/provenance/v1. Subjects are the
record itself, the newest checkpoint and the files of exports.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from holdfast.wire.store.publish import replace_file
from holdfast_platform.governance.record import FILE, FOLDER, ModelRecord, read_record, record_path

STATEMENT = "statement.json"


def statement_of(folder: Path, record: ModelRecord) -> dict[str, Any]:
    """Return the statement for the record of a run folder."""
    data, training = record.last("data") or {}, record.last("training") or {}
    files = {f"{FOLDER}/{FILE}": hashlib.sha256(record_path(folder).read_bytes()).hexdigest()}
    files[str(training["checkpoint"])] = str(training["checkpoint_sha256"])
    for export in record.all("export"):
        base = Path(str(export["folder"])).name
        files |= {f"{base}/{name}": sha256 for name, sha256 in export["files"].items()}
    evidence = {each["evidence"]: each["sha256"] for each in record.all("attestation")}
    dataset = {
        "name": "dataset",
        "uri": f"urn:holdfast:dataset:{data.get('dataset')}",
        "annotations": {"licences": dict(data.get("licences", {}))},
    }
    outside = ("run", "config_hash", "first_step", "last_step")
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": _descriptors(files),
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": "urn:holdfast:training:1",
                "externalParameters": {key: training[key] for key in outside},
                "internalParameters": {key: training.get(key) for key in ("code", "packages")},
                "resolvedDependencies": [dataset],
            },
            "runDetails": {
                "builder": {"id": "urn:holdfast"},
                "metadata": {"invocationId": str(training.get("run_id", ""))},
                "byproducts": _descriptors(evidence),
            },
        },
    }


def _descriptors(files: dict[str, str]) -> list[dict[str, Any]]:
    return [{"name": name, "digest": {"sha256": sha256}} for name, sha256 in files.items()]


def write_statement(folder: Path) -> None:
    """Write the statement next to the record."""
    text = json.dumps(statement_of(folder, read_record(folder)), indent=1)
    replace_file(record_path(folder).with_name(STATEMENT), text + "\n")


def find_statement_problems(folder: Path, record: ModelRecord) -> Iterator[str]:
    """Yield a sentence if the statement is not that of the record. Older records have none."""
    path = record_path(folder).with_name(STATEMENT)
    try:
        is_same = json.loads(path.read_bytes()) == statement_of(folder, record)
    except FileNotFoundError:
        return
    except ValueError:
        is_same = False
    if not is_same:
        yield f"statement: {STATEMENT} does not say what the record says"
