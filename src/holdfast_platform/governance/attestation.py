"""A hook for attestation: a program or a function gets a hash, and returns evidence.

The hash is that of the record's last line, so it covers the record up to there. The evidence is a
file next to the record, and an entry has its SHA-256. What the evidence proves is for its own tools
to judge: such as a quote of a TPM over the hash. No TPM was tried.
"""

from __future__ import annotations

import hashlib
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

from holdfast.errors import UserError
from holdfast_platform.governance.record import Entry, ModelRecord, append, read_record, record_path

Attest = Callable[[str], bytes]
"""Gets a SHA-256 in hexadecimal digits, and returns evidence."""
KIND, MAX_EVIDENCE_BYTES, TIMEOUT_S = "attestation", 2**20, 120.0


def attest(folder: Path, ask: Attest) -> Entry:
    """Add evidence for the record of a run folder. Raises UserError for evidence that is empty or
    too large."""
    digest = read_record(folder).head
    evidence = ask(digest)
    if not 0 < len(evidence) <= MAX_EVIDENCE_BYTES:
        raise UserError(
            f"the evidence has {len(evidence)} bytes",
            where="--attest",
            remedy=f"print evidence of 1 to {MAX_EVIDENCE_BYTES} bytes",
        )
    sha256 = hashlib.sha256(evidence).hexdigest()
    name = f"evidence-{sha256[:16]}"
    record_path(folder).with_name(name).write_bytes(evidence)
    return append(folder, KIND, {"digest": digest, "evidence": name, "sha256": sha256})


def by_command(command: str) -> Attest:
    """Return what asks a command. The hash is its last argument, and it prints the evidence. The
    result raises UserError if the command fails."""

    def ask(digest: str) -> bytes:
        try:
            words = [*shlex.split(command), digest]
            done = subprocess.run(words, capture_output=True, check=False, timeout=TIMEOUT_S)
            problem = f"ended with exit code {done.returncode}" if done.returncode else ""
        except subprocess.TimeoutExpired:
            problem = f"did not end within {TIMEOUT_S:g} s"
        except (OSError, ValueError) as error:
            problem = f"cannot start ({error})"
        if problem:
            raise UserError(
                f"the command {command!r} {problem}",
                where="--attest",
                remedy="name a program that prints evidence for the hash in its last argument",
            )
        return done.stdout

    return ask


def find_evidence_problems(folder: Path, record: ModelRecord) -> Iterator[str]:
    """Yield what is wrong with the evidence of a record."""
    for entry in record.entries:
        if entry.kind != KIND:
            continue
        if entry.body["digest"] != entry.previous:
            yield f"attestation: the evidence of line {entry.number} is for another hash"
        name = Path(str(entry.body["evidence"])).name
        path = record_path(folder).with_name(name)
        if not path.is_file():
            yield f"attestation: {name} is not here"
        elif hashlib.sha256(path.read_bytes()).hexdigest() != entry.body["sha256"]:
            yield f"attestation: {name} is not the recorded evidence"
