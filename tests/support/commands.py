"""A tiny run on disk, and ways to call `holdfast`."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import IO

import pytest

from holdfast.cli.main import main
from holdfast_lab.chaos.sample_run import SAMPLE_HEAD, write_texts

RUN_FILE = (
    SAMPLE_HEAD % ("tiny", 300, 16)
    + """\
model: {{preset: null, layers: 1, dim: 16, heads: 2, kv_heads: 1, ffn_dim: 16}}
train:
  steps: 6
  batch_size: 4
  microbatch_size: 1
  evaluate: {{every: 3, samples: 4}}
layout: {{workers: 2}}
checkpoint: {{every_steps: 3}}
"""
)


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    def succeeds(self) -> Outcome:
        """Exit code 0. Return the same."""
        assert self.code == 0, self.out + self.err
        return self

    def refuses(self, *words: str) -> None:
        """Exit code 2, one sentence, no traceback, and these words in it."""
        self.refuses_last(*words)
        assert self.err.strip().count("\n") == 0, self.err

    def refuses_last(self, *words: str, code: int = 2) -> None:
        """The same, after lines about what was done before."""
        assert self.code == code, self.err
        assert "Traceback" not in self.err
        sentence = self.err.strip().split("\n")[-1]
        for word in words:
            assert word in sentence, sentence


def write_run_file(root: Path, documents: int = 12) -> Path:
    """Texts and a run file in `root`; nothing is prepared yet."""
    write_texts(root / "texts", documents, 120)
    path = root / "run.yaml"
    path.write_text(RUN_FILE.format(root=root))
    return path


def here(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> Outcome:
    """Run a command in this process."""
    capsys.readouterr()
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return Outcome(code, captured.out, captured.err)


def within(*arguments: str | Path) -> Outcome:
    """As `here`, for whatever is no test: what a fixture prepares or looks through."""
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main([str(argument) for argument in arguments])
    return Outcome(code, out.getvalue(), err.getvalue())


def start(
    *arguments: str | Path,
    folder: Path | None = None,
    before: Sequence[str] = (),
    module: str = "holdfast.cli.main",
    environ: Mapping[str, str] | None = None,
    output: IO[bytes] | None = None,
) -> subprocess.Popen[str]:
    """Start a command, or another module, in a process, and a process group, of its own. It does
    not outlive the thread that started it, so a test run that is killed leaves no trainer behind.

    before: words of another command that runs it. environ: variables that this process has not.
    output: a file for all that it says, in place of pipes, which fill if the test reads them late.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | dict(environ or {})
    command = [*before, sys.executable, "-m", module, *map(str, arguments)]
    return subprocess.Popen(
        command,
        cwd=folder,
        text=True,
        env=environment,
        preexec_fn=end_with_starter,
        stdin=subprocess.DEVNULL,
        stdout=output or subprocess.PIPE,
        stderr=output or subprocess.PIPE,
        start_new_session=True,
    )


def end_with_starter() -> None:
    """In the child, before the command: Linux kills it when its starter ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def apart(
    *arguments: str | Path,
    folder: Path | None = None,
    deadline: float = 90,
    module: str = "holdfast.cli.main",
) -> Outcome:
    """Run a command, or another module, in a process of its own."""
    process = start(*arguments, folder=folder, module=module)
    try:
        out, err = process.communicate(timeout=deadline)
    finally:
        process.kill()
    return Outcome(process.returncode, out, err)


def secret_file(root: Path, digits: str = "5e") -> Path:
    """A file that only its owner may read, as a secret must lie."""
    path = root / f"secret-{digits}"
    path.write_text(digits * 32)
    path.chmod(0o600)
    return path


@contextmanager
def staging(root: Path) -> Iterator[str]:
    """The address of a staging machine, with the secret of `secret_file`."""
    secret = secret_file(root)
    process = start(
        *("stage", "--listen", "127.0.0.1:0", "--secret", secret, "--memory", "0.1", "--json")
    )
    assert process.stdout is not None
    yield json.loads(process.stdout.readline())["address"]
    process.terminate()
    assert process.wait(120) == 0
    process.stdout.close()


def peer_settings(address: str, *, is_durable: bool = False) -> tuple[str, ...]:
    """Of a run that saves at its end alone, with a copy of each snapshot on a staging machine.
    is_durable: snapshots are for durable saves."""
    in_memory = ("checkpoint.memory_every_steps=1", "checkpoint.slots=3")
    peer = f"checkpoint.peers=[{{name: stage, address: '{address}', stable: true}}]"
    return ("checkpoint.every_steps=0", peer, *(() if is_durable else in_memory))
