"""Records of runs and reference tables as JSON. Pure."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from holdfast.core.json_parsing import parse_json
from holdfast.errors import DataError
from holdfast_lab.score.record import Commit, ReferenceTable, RunRecord


def format_record(record: RunRecord) -> str:
    return json.dumps(asdict(record))


def parse_record(text: str, source: str) -> RunRecord:
    """Raises DataError."""
    try:
        row: Any = parse_json(text)
        commits = tuple(
            Commit(**{**c, "samples": tuple((a, b) for a, b in c["samples"])})
            for c in row["commits"]
        )
        pairs = tuple((float(at), int(count)) for at, count in row["capacity"])
        lists = {"commits": commits, "capacity": pairs, "faults": tuple(row["faults"])}
        return RunRecord(**{**row, **lists})
    except (ValueError, KeyError, TypeError):
        raise DataError(
            "this is no record of a run", where=source, remedy="remove it, and run the score again"
        ) from None


def format_reference(table: ReferenceTable) -> str:
    return json.dumps({"tokens_per_s": {str(n): rate for n, rate in table.rates.items()}}, indent=1)


def parse_reference(text: str, source: str) -> ReferenceTable:
    """A table {"tokens_per_s": {"1": 12.0, ...}}. Raises DataError."""
    try:
        row: Any = parse_json(text)
        rates = {int(n): float(rate) for n, rate in row["tokens_per_s"].items()}
        if not rates or min(rates.values()) <= 0:
            raise ValueError(rates)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DataError(
            "this is no table of throughputs",
            where=source,
            remedy='write {"tokens_per_s": {"1": 12.0, "2": 24.0}}, by nodes',
        ) from None
    return ReferenceTable(rates)
