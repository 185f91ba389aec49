"""`holdfast stage`: what it refuses, what it says, and how it ends."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.commands import apart, secret_file, start


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
def test_what_is_refused(tmp_path: Path, listen: str, memory: str, sentence: str) -> None:
    secret = secret_file(tmp_path)
    apart("stage", "--listen", listen, "--secret", secret, "--memory", memory).refuses(sentence)


def test_a_secret_that_others_can_read_is_refused(tmp_path: Path) -> None:
    secret = secret_file(tmp_path)
    secret.chmod(0o644)
    done = apart("stage", "--listen", "127.0.0.1:0", "--secret", secret, "--memory", "0.01")
    done.refuses("other users of this machine can read the run's secret")
    assert secret.read_text() not in done.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_in_order(tmp_path: Path, number: signal.Signals) -> None:
    secret = secret_file(tmp_path)
    with start(
        "stage", "--listen", "127.0.0.1:0", "--secret", secret, "--memory", "0.01"
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("keeping snapshots at 127.0.0.1:")
        process.send_signal(number)
        assert process.wait(120) == 0
        assert process.stderr.read() == ""
