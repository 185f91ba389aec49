"""Signs the folder of a record with model-signing, and checks it: by its own command line.

model-signing is an extra (`pip install 'holdfast[sign]'`), and may lie in another environment: then
HOLDFAST_MODEL_SIGNING names its program.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from holdfast.errors import UserError
from holdfast_platform.governance.record import FOLDER, SIGNATURE

VARIABLE = "HOLDFAST_MODEL_SIGNING"
_TIMEOUT_S = 120.0


def find_program(environment: Mapping[str, str]) -> str:
    """Return the program of model-signing. Raises UserError if there is none."""
    beside = Path(sys.executable).with_name("model_signing")
    named = environment.get(VARIABLE) or shutil.which("model_signing")
    found = named or (str(beside) if beside.is_file() else "")
    if not found or not shutil.which(found):
        raise UserError(
            "model-signing is not installed",
            where=VARIABLE if environment.get(VARIABLE) else "--key",
            remedy=f"pip install 'holdfast[sign]', or name its program in {VARIABLE}",
        )
    return found


def sign(folder: Path, key: Path) -> Path:
    """Sign the record of a run folder with a private key. Raises UserError."""
    signature = folder / SIGNATURE
    words = ["--signature", str(signature), "--private_key", str(key)]
    if problem := _run("sign", folder, words):
        raise UserError(
            f"model-signing did not sign the record: {problem}",
            where=str(key),
            remedy="name a private key, elliptic, in PEM form (docs/guide/governance.md)",
        )
    return signature


def find_signature_problem(folder: Path, key: Path) -> str:
    """Check the signature with a public key; return what is wrong, or ""."""
    signature = folder / SIGNATURE
    if not signature.is_file():
        return f"{SIGNATURE} is missing"
    words = ["--signature", str(signature), "--public_key", str(key)]
    return _run("verify", folder, words)


def _run(verb: str, folder: Path, words: list[str]) -> str:
    program = find_program(os.environ)
    try:
        done = subprocess.run(
            [program, verb, "key", *words, str(folder / FOLDER)],
            capture_output=True,
            text=True,
            check=False,
            timeout=_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return f"it did not answer for {_TIMEOUT_S:g} s"
    if done.returncode == 0:
        return ""
    lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
    return lines[-1].partition(": [")[0].strip() if lines else f"exit code {done.returncode}"
