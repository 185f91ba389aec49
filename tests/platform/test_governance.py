"""The record of a model: what is changed in it, or in its run, is named."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast_platform.governance.attestation import attest
from holdfast_platform.governance.record import SIGNATURE, read_record, record_path
from tests.platform.test_replay import change_events
from tests.runtime.cli.conftest import Trained, trained
from tests.support.commands import within

__all__ = ["trained"]
QUOTE = shlex.quote("import sys; print('evidence for', sys.argv[1])")


@pytest.fixture
def recorded(trained: Trained, tmp_path: Path) -> Path:
    """A copied run with a record of data, training, evaluation, approval and export."""
    run, export = tmp_path / "run", tmp_path / "export"
    shutil.copytree(trained.folder, run)
    export.mkdir()
    (export / "model.safetensors").write_bytes(b"weights")
    words = ("--licence", "text=CC0-1.0", "--approve", "Ann", "--export", export, "--json")
    done = within("audit", "record", run, *words, "--attest", f"{sys.executable} -c {QUOTE}")
    kinds = ["data", "training", "evaluation", "approval", "export", "attestation"]
    assert json.loads(done.succeeds().out)["added"] == kinds
    assert json.loads(within("audit", "record", run, "--json").succeeds().out)["added"] == []
    return run


def flip_a_byte(run: Path) -> None:
    data = bytearray(record_path(run).read_bytes())
    place = data.index(b"first_step") + 3
    data[place] ^= 1
    record_path(run).write_bytes(data)


def remove_a_line(run: Path) -> None:
    lines = record_path(run).read_bytes().splitlines(keepends=True)
    record_path(run).write_bytes(b"".join(lines[:1] + lines[2:]))


def rewrite(run: Path, change: Callable[[list[dict[str, Any]]], None]) -> None:
    """A forger who mends the chain too."""
    entries = [json.loads(line) for line in record_path(run).read_text().splitlines()]
    change(entries)
    previous, lines = "0" * 64, []
    for entry in entries:
        entry["previous"] = previous
        line = json.dumps(entry, sort_keys=True, separators=(",", ":"))
        previous = hashlib.sha256(line.encode()).hexdigest()
        lines.append(line)
    record_path(run).write_text("\n".join(lines) + "\n")


def drop_a_licence(run: Path) -> None:
    rewrite(run, lambda entries: entries[0]["body"]["licences"].clear())


def drop_a_digest(run: Path) -> None:
    rewrite(run, lambda entries: entries[1]["body"]["digests"].pop())


def lose_a_step(run: Path) -> None:
    for path in (run / "journal").glob("*/*.jsonl"):
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(s for s in lines if '"step_done"' not in s or '"step":4,' not in s))


def edit_a_loss(run: Path) -> None:
    change_events(run, "step_done", 5, lambda event: event.update(loss=1.0))


def change_the_export(run: Path) -> None:
    (run.parent / "export" / "model.safetensors").write_bytes(b"other weights")


def evidence_of(run: Path) -> Path:
    (path,) = (run / "record").glob("evidence-*")
    return path


def change_the_evidence(run: Path) -> None:
    evidence_of(run).write_bytes(b"other evidence")


def lose_the_evidence(run: Path) -> None:
    evidence_of(run).unlink()


def attest_to_another_hash(run: Path) -> None:
    rewrite(run, lambda entries: entries[5]["body"].update(digest="0" * 64))


def change_the_statement(run: Path) -> None:
    path = run / "record/statement.json"
    path.write_text(path.read_text().replace("CC0-1.0", "MIT"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (flip_a_byte, "line 3 does not follow line 2: one was changed"),
        (remove_a_line, "line 2 has the number 3: a line is missing"),
        (drop_a_licence, "licence: source text has none in the record"),
        (drop_a_digest, "the record has 5 digests for the steps 1 to 6, and 6 are due"),
        (lose_a_step, "step 4: missing in the journal"),
        (edit_a_loss, "step 5: the journal is not what was recorded"),
        (change_the_export, "model.safetensors is not the recorded file"),
        (change_the_evidence, "is not the recorded evidence"),
        (lose_the_evidence, "is not here"),
        (attest_to_another_hash, "the evidence of line 6 is for another hash"),
        (change_the_statement, "statement.json does not say what the record says"),
    ],
)
def test_each_change_is_named(recorded: Path, change: Callable[[Path], None], said: str) -> None:
    within("audit", "verify", recorded).succeeds()
    change(recorded)
    done = within("audit", "verify", recorded)
    assert done.code == 1, done.err
    assert said in done.out


def test_a_source_without_a_licence_and_a_broken_record_are_refused(
    trained: Trained, recorded: Path, tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(trained.folder, bare)
    within("audit", "record", bare).refuses("source text has no licence")
    within("audit", "record", bare, "--licence", "x=MIT").refuses("x is no source")
    within("audit", "verify", bare).refuses("this run has no record")
    card = tmp_path / "card.md"
    within("audit", "card", recorded, "--to", card).succeeds()
    assert "- Source text: CC0-1.0" in card.read_text()
    remove_a_line(recorded)
    within("audit", "record", recorded, "--approve", "B").refuses("a line is missing")


def test_data_that_has_moved_is_named(recorded: Path, trained: Trained, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(trained.root / "dataset", data)
    path = recorded / "resolved.json"
    path.write_text(path.read_text().replace(str(trained.root / "dataset"), str(tmp_path / "gone")))
    assert within("audit", "verify", recorded).code == 2
    found = within("audit", "verify", recorded, "--data", data)
    assert "dataset" not in found.out + found.err
    within("audit", "verify", recorded, "--data", tmp_path / "none").refuses_last("none")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("no-such-program", "cannot start"),
        ("false", "ended with exit code 1"),
        ("true", "has 0 bytes"),
        ("'", "cannot start"),
    ],
)
def test_a_hook_that_gives_no_evidence_is_refused(recorded: Path, command: str, said: str) -> None:
    before = record_path(recorded).read_bytes()
    within("audit", "record", recorded, "--attest", command).refuses(said)
    assert record_path(recorded).read_bytes() == before
    within("audit", "record", recorded, "--approve", "Bo", "--attest", command).refuses(said)
    within("audit", "verify", recorded).succeeds()


def test_a_function_attests_to_the_hash_of_the_record(recorded: Path) -> None:
    head = read_record(recorded).head
    entry = attest(recorded, lambda digest: digest[::-1].encode())
    assert (entry.previous, entry.body["digest"]) == (head, head)
    evidence = recorded / "record" / entry.body["evidence"]
    assert evidence.read_text() == head[::-1]


ACCEPTS = """
import json, sys
from google.protobuf import json_format
from in_toto_attestation.predicates.provenance.v1.provenance_pb2 import Provenance
from in_toto_attestation.v1 import statement_pb2
from in_toto_attestation.v1.statement import Statement
text = open(sys.argv[1]).read()
Statement.copy_from_pb(json_format.Parse(text, statement_pb2.Statement())).validate()
found = json_format.ParseDict(json.loads(text)["predicate"], Provenance())
print(found.build_definition.resolved_dependencies[0].annotations["licences"]["text"])
"""


@pytest.mark.slow
def test_the_real_library_accepts_the_statement(recorded: Path) -> None:
    """HOLDFAST_IN_TOTO_PYTHON names an interpreter that has in-toto-attestation."""
    if (python := os.environ.get("HOLDFAST_IN_TOTO_PYTHON")) is None:
        pytest.skip("HOLDFAST_IN_TOTO_PYTHON names no interpreter with in-toto-attestation")
    path = recorded / "record/statement.json"
    words = [python, "-c", ACCEPTS, str(path)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "CC0-1.0\n"), done.stderr
    subjects = {each["name"] for each in json.loads(path.read_text())["subject"]}
    assert {"record/record.jsonl", "export/model.safetensors"} <= subjects
    path.write_text(path.read_text().replace("in-toto.io/Statement/v1", "in-toto.io/Statement/v9"))
    done = subprocess.run(words, capture_output=True, text=True)
    assert "Wrong statement type" in done.stderr


def test_signing_without_its_library_is_refused(
    recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_MODEL_SIGNING", "no-such-program")
    done = within("audit", "record", recorded, "--key", "key.pem")
    done.refuses_last("model-signing is not installed")


@pytest.mark.slow
def test_model_signing_itself_accepts_the_record_and_refuses_a_flipped_byte(
    recorded: Path, tmp_path: Path
) -> None:
    program = os.environ.get("HOLDFAST_MODEL_SIGNING") or shutil.which("model_signing")
    if not program:
        pytest.skip("model-signing is not installed (HOLDFAST_MODEL_SIGNING names its program)")
    key, public = tmp_path / "key.pem", tmp_path / "key.pub"
    make = ["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", key]
    subprocess.run(make, check=True)
    subprocess.run(
        ["openssl", "ec", "-in", key, "-pubout", "-out", public], check=True, capture_output=True
    )
    within("audit", "record", recorded, "--approve", "Bea", "--key", key).succeeds()
    within("audit", "verify", recorded, "--key", public).succeeds()
    theirs = [program, "verify", "key", "--signature", str(recorded / SIGNATURE)]
    theirs += ["--public_key", str(public), str(recorded / "record")]
    assert subprocess.run(theirs, capture_output=True).returncode == 0
    data = bytearray(record_path(recorded).read_bytes())
    data[-20] ^= 1  # in the last line, which no line follows
    record_path(recorded).write_bytes(data)
    assert subprocess.run(theirs, capture_output=True).returncode != 0
    done = within("audit", "verify", recorded, "--key", public)
    assert done.code == 1
    assert "signature: " in done.out
