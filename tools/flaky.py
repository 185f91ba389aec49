"""Run tests again, to tell a flaky test from a broken one.

python tools/flaky.py retry PYTEST-ARGUMENTS     run the tests, then what failed once more, alone
python tools/flaky.py repeat N PYTEST-ARGUMENTS  run the tests N times while all cores are busy

`retry` exits with 0 if everything that failed passed alone. It names these tests in its last lines.
It runs nothing again after a crash, an error of the collection, an interruption, or many failures.
`repeat` prints how often each test failed, and exits with 1 if one failed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

MAX_RETRIED = 20  # tests; more failures than that are no matter of chance
BUSY_LOOP = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"


@dataclass(frozen=True)
class Outcome:
    """How one process of pytest ended."""

    exit_code: int  # of pytest; that of the process if it died
    is_complete: bool  # False after a crash of a process or an error of the collection
    passed: frozenset[str]  # node ids
    failed: frozenset[str]  # node ids; also of tests whose fixtures failed


class Recorder:
    """A plugin of pytest that notes which tests passed and failed."""

    def __init__(self) -> None:
        self.passed: set[str] = set()
        self.failed: set[str] = set()
        self.is_complete = True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.add(report.nodeid)
        elif report.when == "call" and report.passed:
            self.passed.add(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.is_complete = False

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """Note that a worker of pytest-xdist has ended; without an error, it was finished."""
        if error is not None:
            self.is_complete = False


def record(path: Path, arguments: list[str]) -> int:
    """Run pytest in this process and write what its tests did to a file. Return its exit code."""
    recorder = Recorder()
    code = int(pytest.main(arguments, plugins=[recorder]))
    values = {"passed": sorted(recorder.passed), "failed": sorted(recorder.failed)}
    path.write_text(json.dumps({"is_complete": recorder.is_complete, **values}))
    return code


def run_pytest(arguments: list[str]) -> Outcome:
    """Run pytest in a process of its own, which may crash."""
    with TemporaryDirectory(prefix="holdfast-flaky-") as folder:
        path = Path(folder) / "outcome.json"
        child = subprocess.Popen([sys.executable, __file__, "record", str(path), *arguments])
        # A terminal sends Ctrl-C to both processes: pytest ends its tests, and then this one ends.
        signal.signal(signal.SIGINT, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: child.terminate())
        code = child.wait()
        if not path.exists():
            return Outcome(code or 1, False, frozenset(), frozenset())
        value = json.loads(path.read_text())
    passed, failed = frozenset(value["passed"]), frozenset(value["failed"])
    return Outcome(code, value["is_complete"], passed - failed, failed)


def retry(arguments: list[str]) -> int:
    """Run the tests, then those that failed once more. Return the exit code."""
    first = run_pytest(arguments)
    is_failed = first.exit_code == pytest.ExitCode.TESTS_FAILED and first.failed
    if not is_failed or not first.is_complete:
        return first.exit_code
    if len(first.failed) > MAX_RETRIED:
        print(f"{len(first.failed)} tests failed; up to {MAX_RETRIED} would be run once more")
        return first.exit_code
    print(f"\n{len(first.failed)} failed; once more, alone:", flush=True)
    second = run_pytest(sorted(first.failed))
    if second.exit_code or not second.is_complete or second.passed != first.failed:
        _print_tests("failed twice", first.failed - second.passed)
        _print_tests("flaky (failed, then passed alone)", second.passed)
        return second.exit_code or first.exit_code
    _print_tests("flaky (failed, then passed alone)", second.passed)
    return 0


def repeat(times: int, arguments: list[str]) -> int:
    """Run the tests several times next to a busy loop on each core. Return the exit code."""
    failures = Counter[str]()
    with _busy_cores():
        for number in range(1, times + 1):
            outcome = run_pytest(arguments)
            print(f"run {number} of {times}: {len(outcome.failed)} failed", flush=True)
            failures.update(outcome.failed)
            if not outcome.is_complete or outcome.exit_code not in (0, 1):
                return outcome.exit_code or 1
    print(f"{len(failures)} tests failed in {times} runs next to busy loops")
    for name, count in failures.most_common():
        print(f"{count:4} of {times}  {name}")
    return 1 if failures else 0


@contextmanager
def _busy_cores() -> Iterator[None]:
    """Keep every core busy. A loop ends with this process, however that ends."""
    command = [sys.executable, "-c", BUSY_LOOP]
    loops = [subprocess.Popen(command) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def _print_tests(title: str, names: frozenset[str]) -> None:
    if names:
        print(f"\n{title}:\n" + "\n".join(f"  {name}" for name in sorted(names)), flush=True)


def main(arguments: list[str]) -> int:
    match arguments:
        case ["retry", *rest]:
            return retry(rest)
        case ["repeat", times, *rest] if rest:
            return repeat(int(times), rest)
        case ["record", path, *rest]:
            return record(Path(path), rest)
    print(__doc__)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
