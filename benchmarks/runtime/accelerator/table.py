"""A table of rows, and one file that a person can send back.

Each row is a process with a time limit. A row that fails says its error in one line, and the other
rows still run; the file has its traceback. The file is written after every row.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.runtime.accelerator.settings import RowResult, Settings
from holdfast.machine.hardware import detect_hardware

ROOT = Path(__file__).resolve().parents[3]
_TOGETHER = 3  # rows at a time that measure no speed
_ERROR_CHARACTERS = 12_000  # of what a failed row printed


@dataclass(frozen=True)
class Row:
    """seconds: its limit. together: rows of one name run side by side, because no speed is measured
    there. on_cpu: it says something there too. needs: a row that must run before it."""

    name: str
    seconds: float
    together: str = ""
    on_cpu: bool = True
    needs: str = ""


@dataclass(frozen=True)
class Suite:
    """module: run with `python -m`. perform: does the work of a row, in a process of its own.
    is_for_several: it needs two devices, and takes all."""

    module: str
    about: str
    rows: tuple[Row, ...]
    perform: Callable[[str, Settings], RowResult]
    is_for_several: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(row.name for row in self.rows)

    def wanted(self, device: str, only: Sequence[str], skip: Sequence[str]) -> list[Row]:
        """The rows to run, in order, with those that they need."""
        names = {name for name in only or self.names if name not in skip}
        for row in reversed(self.rows):
            if row.name in names and row.needs:
                names.add(row.needs)
        return [r for r in self.rows if r.name in names and (device != "cpu" or r.on_cpu)]

    def run_row(self, row: Row, settings: Settings) -> dict[str, Any]:
        """A row in a process group of its own, which does not outlive its limit."""
        scratch = settings.scratch
        result, log = scratch / f"{row.name}.result", scratch / f"{row.name}.output"
        command = [sys.executable, "-m", self.module, "--row", row.name]
        command += ["--device", settings.device, "--workers", str(settings.workers)]
        command += ["--scratch", str(scratch), "--result", str(result)]
        command += ["--quick"] * settings.quick
        # Rows side by side would slow each other down by a factor with a thread per core each.
        threads = {"OMP_NUM_THREADS": "2"} if row.together else {}
        begun = time.monotonic()
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=os.environ | threads,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            is_late = False
            try:
                process.wait(row.seconds)
            except subprocess.TimeoutExpired:
                is_late = True
            _end_group(process)
        told: dict[str, Any] = {"row": row.name, "seconds": round(time.monotonic() - begun, 1)}
        if not is_late and process.returncode == 0 and result.exists():
            return {**told, **json.loads(result.read_text())}
        said = log.read_text(errors="replace")[-_ERROR_CHARACTERS:]
        last = next((x for x in reversed(said.splitlines()) if x.strip()), "it said nothing")
        why = f"not ended after {row.seconds:.0f} s" if is_late else last.strip()
        return told | {"passed": False, "line": f"failed: {why}", "error": said}

    def main(self) -> int:
        """The command. Exit code 1 if a row failed, 2 where the machine has not what it needs."""
        parser = self._parser()
        given = parser.parse_args()
        if given.row is not None:
            settings = Settings(given.device, given.quick, given.scratch, given.workers)
            found = self.perform(given.row, settings)
            told = {"passed": found.passed, "line": found.line, "figures": dict(found.figures)}
            given.result.write_text(json.dumps(told))
            return 0
        devices = len(detect_hardware().accelerators)
        device, quick = given.device or ("cuda" if devices else "cpu"), given.quick
        if not given.device and not devices and not self.is_for_several:
            print("no card: on the CPU, at tiny sizes")
            quick = True
        needed = 2 if self.is_for_several else 1
        if device != "cpu" and devices < max(needed, given.workers):
            print(
                f"there are {devices} accelerators here, and {max(needed, given.workers)} are "
                "needed; with --device cpu --quick the command runs"
            )
            return 2
        workers = given.workers or (devices if device != "cpu" else 4) * self.is_for_several or 1
        wanted = self.wanted(device, given.only or (), given.skip)
        with tempfile.TemporaryDirectory(prefix="holdfast-gpu-") as scratch:
            settings = Settings(device, quick, Path(scratch), workers)
            return self._run_table(wanted, settings, given.out, given.seconds)

    def _parser(self) -> argparse.ArgumentParser:
        name = self.module.rpartition(".")[2]
        parser = argparse.ArgumentParser(description=self.about)
        one = parser.add_argument
        one("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
        one("--quick", action="store_true", help="tiny sizes, to see that it runs")
        one("--only", action="append", choices=self.names, help="a row; may be repeated")
        one("--skip", action="append", choices=self.names, default=[])
        one("--out", type=Path, default=Path(f"{name}.json"), help="the file to send")
        one("--seconds", type=float, default=600.0, help="begin no row after that")
        workers = "default: all devices" if self.is_for_several else argparse.SUPPRESS
        one("--workers", type=int, default=0, help=workers)
        one("--row", choices=self.names, help=argparse.SUPPRESS)
        one("--scratch", type=Path, help=argparse.SUPPRESS)
        one("--result", type=Path, help=argparse.SUPPRESS)
        return parser

    def _run_table(self, rows: Sequence[Row], settings: Settings, out: Path, limit_s: float) -> int:
        """Run the rows, print each as it ends, and write the file after each; the exit code."""
        begun, told = time.monotonic(), list[dict[str, Any]]()
        stored: dict[str, Any] = {
            "begun": datetime.now(UTC).isoformat(timespec="seconds"),
            "device": settings.device,
            "workers": settings.workers,
            "quick": settings.quick,
            "rows": told,
        }
        print(f"{'row':26}{'s':>6}  result", flush=True)
        for group in in_groups(rows):
            if time.monotonic() - begun > limit_s:
                late = {"passed": False, "line": "not begun: no time"}
                told += [{"row": row.name} | late for row in group]
                continue
            jobs = 1 if settings.quick else min(_TOGETHER, len(group))
            with ThreadPoolExecutor(jobs) as pool:
                for one in pool.map(lambda row: self.run_row(row, settings), group):
                    told.append(one)
                    mark = "" if one["passed"] else "FAILED  "
                    print(f"{one['row']:26}{one['seconds']:6.1f}  {mark}{one['line']}", flush=True)
                    out.write_text(json.dumps(stored, indent=1) + "\n")
        failed = [one["row"] for one in told if not one["passed"]]
        stored["seconds"] = round(time.monotonic() - begun, 1)
        out.write_text(json.dumps(stored, indent=1) + "\n")
        print(f"{stored['seconds']:.0f} s; the file to send: {out}")
        if failed:
            print(f"failed: {', '.join(failed)}")
        return int(bool(failed))


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End a row and what it started: its runs get the time to take their workers down."""
    for number, seconds in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def in_groups(rows: Sequence[Row]) -> list[list[Row]]:
    """Neighbours that may run side by side."""
    groups: list[list[Row]] = []
    for row in rows:
        if groups and row.together and groups[-1][0].together == row.together:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups
