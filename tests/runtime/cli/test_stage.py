"""`holdfast stage`: what it refuses, what it says, and how it ends."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.wire.secret import Secret

SECRET = Secret(bytes(range(32)))


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "holdfast.cli.main", "stage", *arguments]


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text(SECRET.hex())
    path.chmod(0o600)
    return path


@pytest.mark.parametrize(
    ("listen", "memory", "sentence"),
    [
        ("here", "1", "holdfast: --listen: 'here' is not an address; use host:port"),
        ("127.0.0.1:0", "0", "holdfast: --memory: 0 GB keep nothing; use"),
        (
            "127.0.0.1:0",
            "1e9",
            "holdfast: --memory: 1e+09 GB are more than this machine has free; use",
        ),
        ("192.0.2.1:7600", "0.01", "holdfast: --listen: cannot listen on 192.0.2.1:7600"),
    ],
)
def test_what_is_refused(secret: Path, listen: str, memory: str, sentence: str) -> None:
    done = subprocess.run(
        command("--listen", listen, "--secret", str(secret), "--memory", memory),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(sentence)
    assert done.stderr.count("\n") == 1


def test_a_secret_that_others_can_read_is_refused(secret: Path) -> None:
    secret.chmod(0o644)
    done = subprocess.run(
        command("--listen", "127.0.0.1:0", "--secret", str(secret), "--memory", "0.01"),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 2
    assert "other users of this machine can read the run's secret" in done.stderr
    assert SECRET.hex() not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_in_order(secret: Path, number: signal.Signals) -> None:
    with subprocess.Popen(
        command("--listen", "127.0.0.1:0", "--secret", str(secret), "--memory", "0.01"),
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("keeping snapshots at 127.0.0.1:")
        process.send_signal(number)
        assert process.wait(120) == 0
        assert process.stderr.read() == ""
