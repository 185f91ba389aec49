"""Calls of `holdfast` for the sites, the start and the central training."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

STARTS = 5  # of a training that is lost, before a site gives up


def holdfast(*words: str | Path, log: Path) -> int:
    """Run a command of Holdfast; its output goes to `log`. Return the exit code."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        command = [sys.executable, "-P", "-m", "holdfast.cli.main", *map(str, words)]
        return subprocess.call(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL)


def train(run_file: Path, folder: Path, **keys: Any) -> int:
    """Train a run to its end and export its model; return how often the training was lost.

    A training that is killed is started again, and continues from its checkpoint. The model lies
    in `folder`/model."""
    given = {"folder": str(folder / "run"), **{k.replace("__", "."): v for k, v in keys.items()}}
    words = [
        f"{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in given.items()
    ]
    log = folder / "log"
    lost = 0
    while code := holdfast("train", run_file, *words, log=log):
        lost += 1
        if code in (2, 4) or lost == STARTS:
            raise SystemExit(f"the training ended with exit code {code}; see {log}")
    if not (folder / "model").exists() and holdfast(
        "export", folder / "run", "--to", folder / "model", log=log
    ):
        raise SystemExit(f"the model cannot be exported; see {log}")
    return lost
