"""A controller and its hosts: real processes of `holdfast host`, programs that really run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.errors import UserError
from holdfast.wire.secret import Secret
from holdfast_platform.pods.controller import Controller, GangFailedError, Word
from tests.support.commands import start, within
from tests.support.ranks import wait_until

LONG_S = 120.0


class Pods:
    """A controller, and hosts as processes."""

    def __init__(self, folder: Path, controller: Controller, secret: Path) -> None:
        self.folder, self.controller, self.secret = folder, controller, secret
        self.processes: dict[str, subprocess.Popen[str]] = {}

    def start(self, group: str, *names: str) -> None:
        for name in names:
            self.processes[name] = start(
                *("host", self.controller.address, "--group", group, "--name", name),
                *("--secret", self.secret),
            )
        wait_until(lambda: set(names) <= set(self.controller.hosts().get(group, ())), LONG_S)


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    secret = tmp_path / "secret"
    with Controller(secret_file=secret, lost_after_s=5.0) as controller:
        found = Pods(tmp_path, controller, secret)
        yield found
        controller.close()
        for process in found.processes.values():
            process.communicate(timeout=LONG_S)


def python(code: str, *words: Word) -> list[Word]:
    return [sys.executable, "-c", code, *words]


MEET = """
import pathlib, sys, time
folder, rank, size = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
folder.mkdir(exist_ok=True)
(folder / rank).touch()
while len(list(folder.iterdir())) < size:
    time.sleep(0.01)
print("met", rank)
"""
"""Waits for all ranks of its gang, as a collective does."""


def test_uneven_groups_run_gangs_that_wait_for_each_other_inside(pods: Pods) -> None:
    """Gangs over one and over both groups, submitted at once and in an order that would get stuck
    if each host chose for itself."""
    pods.start("big", "b0", "b1", "b2")
    pods.start("small", "s0")
    needs = [{"big": 3}, {"big": 1, "small": 1}, {"big": 2}, {"small": 1}, {"big": 3, "small": 1}]
    futures = [
        pods.controller.submit(
            python(MEET, str(pods.folder / f"meet{i}"), "{rank}", "{size}"), on=on
        )
        for i, on in enumerate(needs * 2)
        if not (pods.folder / f"meet{i}").exists()
    ]
    for future, on in zip(futures, needs * 2, strict=True):
        results = future.result(LONG_S)
        assert [each.exit_code for each in results] == [0] * sum(on.values())
        assert [each.output for each in results] == [f"met {i}\n" for i in range(len(results))]


def test_a_future_is_a_word_of_the_next_program(pods: Pods) -> None:
    pods.start("big", "b0")
    pods.start("small", "s0")
    first = pods.controller.submit(python("print(6 * 7)"), on={"big": 1})
    code = "import sys; print(int(sys.argv[1]) + 1)"
    second = pods.controller.submit(python(code, first), on={"small": 1})
    assert second.result(LONG_S)[0].output == "43\n"
    assert second.text == "43"


def test_a_program_that_fails_fails_what_waits_for_it(pods: Pods) -> None:
    pods.start("big", "b0")
    bad = pods.controller.submit(python("import sys; print('no disk'); sys.exit(3)"), on={"big": 1})
    next_one = pods.controller.submit(python("print(1)"), on={"big": 1}, after=[bad])
    free = pods.controller.submit(python("print(1)"), on={"big": 1})
    missing = pods.controller.submit(["/no/such/program"], on={"big": 1})
    with pytest.raises(GangFailedError, match=r"exit code 3 on b0: no disk"):
        bad.result(LONG_S)
    with pytest.raises(GangFailedError, match="gang 0 failed"):
        next_one.result(LONG_S)
    with pytest.raises(GangFailedError, match="exit code 127"):
        missing.result(LONG_S)
    assert free.result(LONG_S)[0].output == "1\n"


def test_a_killed_host_fails_its_gang_and_one_that_may_runs_again_elsewhere(pods: Pods) -> None:
    pods.start("big", "b0", "b1", "b2")
    folder = pods.folder / "again"
    code = (
        "import pathlib, sys, time\n"
        f"first = pathlib.Path({str(folder)!r} + sys.argv[1])\n"
        "if not first.exists():\n"
        "    first.write_text(sys.argv[2]); time.sleep(600)\n"
        "print('done')\n"
    )
    once = pods.controller.submit(python(code, "once", "{host}"), on={"big": 1})
    twice = pods.controller.submit(python(code, "twice", "{host}"), on={"big": 1}, retries=1)
    paths = [Path(f"{folder}{name}") for name in ("once", "twice")]
    wait_until(lambda: all(path.exists() and path.read_text() for path in paths), LONG_S)
    for path in paths:
        os.kill(pods.processes[path.read_text()].pid, signal.SIGKILL)
    with pytest.raises(GangFailedError, match="was lost"):
        once.result(LONG_S)
    assert twice.result(LONG_S)[0].output == "done\n"


def test_a_cancelled_program_is_ended_and_its_host_is_free_again(pods: Pods) -> None:
    pods.start("big", "b0")
    begun = pods.folder / "begun"
    code = f"import pathlib, time; pathlib.Path({str(begun)!r}).touch(); time.sleep(600)"
    long = pods.controller.submit(python(code), on={"big": 1})
    wait_until(begun.exists, LONG_S)
    pods.controller.cancel(long)
    with pytest.raises(GangFailedError, match="cancelled"):
        long.result(LONG_S)
    assert pods.controller.submit(python("print(2)"), on={"big": 1}).result(LONG_S)


def test_hosts_leave_with_the_controller_and_a_stranger_is_refused(pods: Pods) -> None:
    pods.start("big", "b0")
    stranger = pods.folder / "stranger"
    stranger.write_text(Secret(b"x" * 32).hex())
    stranger.chmod(0o600)
    words = ("host", pods.controller.address, "--group", "big", "--name", "x", "--secret", stranger)
    refused = within(*words)
    assert refused.code == 2
    assert "cannot be asked" in refused.err
    assert pods.controller.hosts() == {"big": ("b0",)}
    pods.controller.close()
    assert pods.processes["b0"].wait(LONG_S) == 0


def test_a_gang_without_hosts_is_refused(pods: Pods) -> None:
    with pytest.raises(UserError, match="needs hosts"):
        pods.controller.submit(["true"], on={})
