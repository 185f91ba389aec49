"""`holdfast audit`: recompute steps of a run, and keep the signed record of its model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.api.progress import StageProgress
from holdfast.api.replay import replay_steps
from holdfast.cli.dispatch import app as make_app
from holdfast.cli.options import Json, RunArgument, refuse_beside
from holdfast.cli.read_errors import explain_read_errors
from holdfast.errors import ConfigError, RunFolderError
from holdfast.launch.run.runs import Run, open_run
from holdfast.show.output import print_json, print_table, say

if TYPE_CHECKING:
    from holdfast_platform.governance.record import ModelRecord

app = make_app("Recompute steps of a run, and keep the signed record of its model.")
DataFolder = Annotated[
    Path | None, typer.Option("--data", help="folder of the prepared data, if it has moved")
]


@app.command()
def replay(
    run: RunArgument,
    step: Annotated[
        list[int] | None, typer.Option("--step", min=1, help="step; may be repeated")
    ] = None,
    round_: Annotated[
        list[int] | None,
        typer.Option("--round", min=1, help="round of learners (outer); may be repeated"),
    ] = None,
    data: DataFolder = None,
    within: Annotated[
        float | None,
        typer.Option(help="bound of the relative distance where bits need not be equal", min=0.0),
    ] = None,
    json: Json = False,
) -> int:
    """Compute steps of a run again, and compare them with its record.

    A pass begins from the newest checkpoint before a step, or from initial weights. It computes up
    to the next recorded weights: a digest of train.digest_every, a checkpoint, or a round of
    learners. A round of outer.mode free is computed from its ledger. On the way the command
    compares the ledger, loss, norm and rate of each step. On like processors all bits must be
    equal. Elsewhere the distance is printed, and a bound judges it. Exit code 1 if something
    differs; the first difference names its step.

    \b
    Example:
      holdfast audit replay runs/quickstart --step 137
      holdfast audit replay copied/quickstart --data copied/dataset --step 12 --step 40
      holdfast audit replay runs/learners --round 7
    """
    found = open_run(run)
    if not (steps := [*(step or ()), *(round_ or ())]):
        raise ConfigError(
            "no step is named",
            where="--step",
            remedy="name a step with --step, or a round with --round",
        )
    if round_ and not found.config.outer.is_on:
        raise ConfigError(
            "this run has no rounds, because outer.learners is 0",
            where="--round",
            remedy="name a step with --step",
        )
    with explain_read_errors(found.place), StageProgress() as progress:
        where = None if data is None else str(data)
        result = replay_steps(found, steps, dataset=where, bound=within, on_progress=progress.show)
    if json:
        print_json(result.to_json())
        return 0 if result.ok else 1
    print_table(
        [
            (s.step, f"{s.start} to {s.end}", s.compared_with, s.recorded[:16], s.replayed[:16])
            for s in result.steps
        ],
        head=("step", "computed", "compared with", "recorded", "computed here"),
    )
    print(f"\n{result.describe()}")
    for problem in result.problems:
        print(f"  {problem.kind}: {problem.message}")
    for note in result.notes:
        print(f"  ({note})")
    for reason in result.unlike:
        print(f"  (bits need not be equal: {reason})")
    return 0 if result.ok else 1


@app.command()
def record(
    run: RunArgument,
    licence: Annotated[
        list[str] | None,
        typer.Option("--licence", help="SOURCE=LICENCE of the training data; may be repeated"),
    ] = None,
    evaluation: Annotated[
        Path | None, typer.Option(help="JSON file with results of an evaluation")
    ] = None,
    approve: Annotated[str, typer.Option("--approve", help="name of who approves the model")] = "",
    note: Annotated[str, typer.Option(help="a sentence about the approval")] = "",
    export: Annotated[Path | None, typer.Option(help="folder of an export of the model")] = None,
    attest: Annotated[
        str, typer.Option(help="command that gets the record's hash and prints evidence for it")
    ] = "",
    key: Annotated[
        Path | None, typer.Option("--key", help="private key (PEM): sign the record with it")
    ] = None,
    json: Json = False,
) -> None:
    """Add to the record of a run's model, and sign it.

    Each call records the training as it is now: steps, a digest of each step's ledger and loss,
    configuration, code, checkpoint, and the newest validation. The first call needs a licence for
    each source of the data. A line of the record is only added, and has the hash of the line
    before it. An in-toto statement of the record is written next to it.

    \b
    Example:
      holdfast audit record runs/quickstart --licence python-stdlib=PSF-2.0 --key key.pem
      holdfast audit record runs/quickstart --approve "A. Person" --export model --key key.pem
      holdfast audit record runs/quickstart --attest "python quote.py"
    """
    from holdfast_platform.governance.attestation import attest as add_evidence
    from holdfast_platform.governance.attestation import by_command
    from holdfast_platform.governance.record import append, read_record, record_path
    from holdfast_platform.governance.signing import find_program, sign
    from holdfast_platform.governance.statement import (
        STATEMENT,
        find_statement_problems,
        write_statement,
    )

    found = open_run(run)
    refuse_beside("no --approve", {"--note": note if not approve else ""})
    if key is not None:  # before a line is added
        find_program(os.environ)
        if not key.is_file():
            raise ConfigError("there is no such key", where=str(key), remedy="name a key's file")
    before = read_record(found.folder)
    approval = {"name": approve, "note": note} if approve else None
    bodies = _bodies(found, before, _licences(licence or []), evaluation, approval, export)
    entries = [append(found.folder, kind, body) for kind, body in bodies.items()]
    try:
        if attest:
            entries.append(add_evidence(found.folder, by_command(attest)))
    finally:
        is_missing = not record_path(found.folder).with_name(STATEMENT).exists()
        record = read_record(found.folder)
        if entries or is_missing or any(find_statement_problems(found.folder, record)):
            write_statement(found.folder)
    if key is not None:
        sign(found.folder, key)
    numbers = {"record": str(record_path(found.folder)), "added": [e.kind for e in entries]}
    if json:
        print_json(numbers | {"signed": key is not None})
        return
    said = ", ".join(e.kind for e in entries) or "nothing new"
    say(f"{numbers['record']}: {said}{'; signed' if key else ''}")


def _bodies(
    run: Run,
    before: ModelRecord,
    licences: Mapping[str, str],
    evaluation: Path | None,
    approval: Mapping[str, str] | None,
    export: Path | None,
) -> dict[str, Mapping[str, Any]]:
    """Return by kind what the record `before` does not have yet. Raises UserError."""
    from holdfast_platform.governance import facts
    from holdfast_platform.governance.record import file_hashes

    bodies: dict[str, Mapping[str, Any]] = {}
    with explain_read_errors(run.place):
        if licences or before.last("data") is None:
            bodies["data"] = facts.data_body(run, licences)
        bodies["training"] = facts.training_body(run)
        if (results := facts.evaluation_body(run, evaluation)) is not None:
            bodies["evaluation"] = results
    if approval is not None:
        bodies["approval"] = approval
    if export is not None:
        if not export.is_dir():
            raise ConfigError(
                "there is no such folder", where=str(export), remedy="name an export's folder"
            )
        bodies["export"] = {"folder": str(export.resolve()), "files": file_hashes(export)}
    return {kind: body for kind, body in bodies.items() if before.last(kind) != body}


def _licences(given: list[str]) -> dict[str, str]:
    found = {}
    for text in given:
        name, equal, licence = text.partition("=")
        if not (name and equal and licence):
            raise ConfigError(
                f"{text!r} is not SOURCE=LICENCE",
                where="--licence",
                remedy="write the name of a source, =, and its licence",
            )
        found[name] = licence
    return found


@app.command()
def verify(
    run: RunArgument,
    key: Annotated[
        Path | None, typer.Option("--key", help="public key (PEM): check the signature with it")
    ] = None,
    data: DataFolder = None,
    json: Json = False,
) -> int:
    """Check the record of a model against its run, and its signature. Exit code 1 for a problem.

    It names a changed line, a source without a licence, and a step that is missing or was changed.
    It names a checkpoint and a file of an export that are not the recorded ones.

    \b
    Example:
      holdfast audit verify runs/quickstart --key key.pub.pem
      holdfast audit verify copied/quickstart --data copied/dataset
    """
    from holdfast_platform.governance.facts import find_problems
    from holdfast_platform.governance.record import read_record, record_path
    from holdfast_platform.governance.signing import find_signature_problem

    found = open_run(run)
    record = read_record(found.folder)
    if not record.entries and not record.problems:
        raise RunFolderError(
            "this run has no record",
            where=found.place,
            remedy="make one: holdfast audit record RUN",
        )
    if found.config.has_own_data:
        refuse_beside("a run whose task has its own data", {"--data": data})
    with explain_read_errors(found.place):
        problems = list(find_problems(found, record, None if data is None else str(data)))
    if key is not None and (problem := find_signature_problem(found.folder, key)):
        problems.insert(0, f"signature: {problem}")
    if json:
        print_json({"entries": len(record.entries), "head": record.head, "problems": problems})
    elif problems:
        print("\n".join(problems), flush=True)
    else:
        signed = "its signature and all it says" if key else "all it says"
        say(f"{record_path(found.folder)}: {len(record.entries)} entries, {signed} agree")
    return 1 if problems else 0


@app.command()
def card(
    run: RunArgument,
    to: Annotated[Path, typer.Option("--to", help="Markdown file; must not exist")],
) -> None:
    """Write a model card from the record, with a legal summary.

    The summary has the order of the EU AI Act's Annex XI.

    \b
    Example:
      holdfast audit card runs/quickstart --to MODEL_CARD.md
    """
    from holdfast_platform.governance.card import model_card
    from holdfast_platform.governance.record import read_record

    found = open_run(run)
    read = read_record(found.folder)
    if read.problems or not read.entries:
        raise RunFolderError(
            read.problems[0] if read.problems else "this run has no record",
            where=found.place,
            remedy="see: holdfast audit verify RUN",
        )
    try:
        with to.open("x", encoding="utf-8") as file:
            file.write(model_card(read, found.config.model_dump(mode="json")))
    except OSError as error:
        raise ConfigError(
            f"it cannot be written ({error.strerror})", where=str(to), remedy="name another file"
        ) from None
    say(f"wrote {to}")
