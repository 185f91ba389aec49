"""A model card and a summary in the order of the EU AI Act's Annex XI, from a record alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from holdfast_platform.governance.record import ModelRecord

NOT_RECORDED = "not recorded"


def model_card(record: ModelRecord, config: Mapping[str, Any]) -> str:
    """Return the card as Markdown. config: the run's configuration."""
    data, training = record.last("data") or {}, record.last("training") or {}
    model = config["model"]
    shape = ", ".join(f"{model[k]} {k}" for k in ("layers", "dim", "heads", "vocab_size"))
    lines = [
        f"# {training.get('run', NOT_RECORDED)}",
        "",
        f"From the record of {len(record.entries)} entries; its last line has the SHA-256 "
        f"`{record.head}`.",
        "",
        "## Model",
        f"- Shape: {model.get('preset') or model.get('family')}: {shape}",
        f"- Objective: {config['objective']['kind']}; optimizer: "
        f"{config['train']['optimizer']['name']}; precision: {config['train']['precision']}",
        f"- Steps: {training.get('first_step')} to {training.get('last_step')}",
        f"- Checkpoint: `{training.get('checkpoint')}` (SHA-256 "
        f"`{training.get('checkpoint_sha256')}`)",
        "",
        "## Training data",
        f"- Dataset version: `{data.get('dataset', NOT_RECORDED)}`",
        *(f"- Source {name}: {licence}" for name, licence in data.get("licences", {}).items()),
        "",
        "## Evaluation",
        *_evaluations(record),
        "",
        "## Approvals",
        *_approvals(record),
        "",
        "## Technical documentation (order of Annex XI of the EU AI Act)",
        f"1. Tasks and architecture: {shape}",
        f"2. Training process: {training.get('last_step', NOT_RECORDED)} steps, configuration "
        f"`{training.get('config_hash', NOT_RECORDED)}`",
        f"3. Data, provenance and licences: {len(data.get('licences', {}))} sources, above",
        f"4. Code: `{training.get('code') or NOT_RECORDED}`; packages: "
        f"`{training.get('packages') or NOT_RECORDED}`",
        "5. Compute and energy: see `holdfast report`; the record does not have them",
        "",
        "This summary repeats the record. It is no legal advice, and no statement of conformity.",
    ]
    return "\n".join(lines) + "\n"


def _evaluations(record: ModelRecord) -> Iterator[str]:
    found = record.all("evaluation")
    for body in found:
        said = ", ".join(f"{key} {value}" for key, value in body.items())
        yield f"- {said}"
    if not found:
        yield f"- {NOT_RECORDED}"


def _approvals(record: ModelRecord) -> Iterator[str]:
    found = [entry for entry in record.entries if entry.kind == "approval"]
    for entry in found:
        day = datetime.fromtimestamp(entry.time, UTC).date().isoformat()
        note = f": {entry.body['note']}" if entry.body.get("note") else ""
        yield f"- {day}, {entry.body['name']}{note}"
    if not found:
        yield f"- {NOT_RECORDED}"
