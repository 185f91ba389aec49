"""What Holdfast does on one accelerator, in one table and one file that a person can send back.

    python -m benchmarks.gpu                         every row; at most ten minutes on a card
    python -m benchmarks.gpu --only bits             one row; may be given several times
    python -m benchmarks.gpu --device cpu --quick    tiny sizes: does it run?
    HOLDFAST_GPU_PROFILE=FOLDER python -m benchmarks.gpu --only 1b-mb4    its kernels too, as a text

Correctness comes first, then speed. Each row is a process with a time limit. A row that fails says
its error in one line, and the other rows still run; the file has its traceback. The file is written
after every row. Exit code 1 if a row failed. `docs/accelerators.md` says what the rows mean, and
what ran.
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

from holdfast.plan.hardware import detect_hardware

ROOT = Path(__file__).resolve().parent.parent
_TOGETHER = 3  # rows at a time that measure no speed
_ERROR_CHARACTERS = 12_000  # of what a failed row printed


@dataclass(frozen=True)
class Row:
    """work: "module:function" under `benchmarks.accelerator`, with an argument after a second
    colon. seconds: its limit. together: rows of one name run side by side, because no speed is
    measured there. on_cpu: it says something there too."""

    name: str
    work: str
    seconds: float
    together: str = ""
    on_cpu: bool = True


ROWS = (
    Row("environment", "floors:environment", 60),
    Row("doctor", "runs:doctor", 60),
    Row("data", "runs:data", 60),
    Row("bits", "correct:bits", 240, "correct"),
    Row("parity", "correct:parity", 240, "correct"),
    Row("non-finite", "correct:non_finite", 60, "correct"),
    Row("runs-fp32", "runs:same_bits:fp32", 240, "correct"),
    Row("runs-bf16-compiled", "runs:same_bits:bf16", 240, "correct", on_cpu=False),
    Row("runs-own-code", "runs:own_code", 240, "correct", on_cpu=False),
    Row("start", "floors:start", 60),
    Row("floors", "floors:floors", 60),
    Row("capture", "floors:capture", 90),
    Row("1b-mb4", "shape:0", 150),
    Row("1b-mb4-not-deterministic", "shape:1", 120, on_cpu=False),
    Row("1b-mb4-eager", "shape:2", 120, on_cpu=False),
    Row("1b-mb2", "shape:3", 120, on_cpu=False),
    Row("1b-mb8", "shape:4", 120, on_cpu=False),
    Row("train-1b", "runs:train_1b", 300, on_cpu=False),
)
NAMES = tuple(row.name for row in ROWS)


def perform(row: Row, device: str, quick: bool, scratch: Path, result: Path) -> None:
    """Do a row's work, in its own process, and write what it found."""
    from benchmarks.accelerator import correct, floors, runs, shape
    from benchmarks.accelerator.work import RowResult, Settings

    settings = Settings(device, quick, scratch)
    module, _, argument = row.work.partition(":")
    ways = ("killed", "noticed") if quick else ("killed", "standby", "stopped", "noticed", "lost")
    works: dict[str, Callable[[], RowResult]] = {
        "floors:environment": lambda: floors.environment(settings),
        "floors:start": lambda: floors.start(settings),
        "floors:floors": lambda: floors.floors(settings),
        "floors:capture": lambda: floors.capture(settings),
        "correct:bits": lambda: correct.bits(settings),
        "correct:parity": lambda: correct.parity(settings),
        "correct:non_finite": lambda: correct.non_finite(settings),
        "runs:doctor": lambda: runs.doctor(settings),
        "runs:data": lambda: runs.data(settings),
        "runs:train_1b": lambda: runs.train_1b(settings),
        "runs:same_bits:fp32": lambda: runs.same_bits(settings, "fp32", ways),
        "runs:own_code": lambda: runs.own_code(settings),
        "runs:same_bits:bf16": lambda: runs.same_bits(
            settings, "bf16", precision="bf16", compile=True
        ),
    }
    if module == "shape":
        found = shape.train_shape(settings, shape.VARIANTS[int(argument)])
    else:
        found = works[row.work]()
    told = {"passed": found.passed, "line": found.line, "figures": dict(found.figures)}
    result.write_text(json.dumps(told))


def run_row(row: Row, device: str, quick: bool, scratch: Path) -> dict[str, Any]:
    """A row in a process group of its own, which does not outlive its limit."""
    result, log = scratch / f"{row.name}.result", scratch / f"{row.name}.output"
    command = [sys.executable, "-m", "benchmarks.gpu", "--row", row.name, "--device", device]
    command += ["--scratch", str(scratch), "--result", str(result), *["--quick"] * quick]
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
        return told | json.loads(result.read_text())
    said = log.read_text(errors="replace")[-_ERROR_CHARACTERS:]
    last = next((line for line in reversed(said.splitlines()) if line.strip()), "it said nothing")
    why = f"not ended after {row.seconds:.0f} s" if is_late else last.strip()
    return told | {"passed": False, "line": f"failed: {why}", "error": said}


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


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--only", action="append", choices=NAMES, help="a row; may be repeated")
    parser.add_argument("--skip", action="append", choices=NAMES, default=[])
    parser.add_argument("--out", type=Path, default=Path("gpu.json"), help="the file to send")
    parser.add_argument("--seconds", type=float, default=600.0, help="begin no row after that")
    parser.add_argument("--row", choices=NAMES, help=argparse.SUPPRESS)
    parser.add_argument("--scratch", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.row is not None:
        row = ROWS[NAMES.index(given.row)]
        perform(row, given.device, given.quick, given.scratch, given.result)
        return 0
    found = detect_hardware().accelerators
    device = given.device or ("cuda" if found else "cpu")
    if device == "cuda" and not found:
        print("there is no accelerator here; with --device cpu --quick the command runs")
        return 2
    wanted = [row for row in ROWS if device != "cpu" or row.on_cpu]
    wanted = [row for row in wanted if row.name in (given.only or NAMES)]
    wanted = [row for row in wanted if row.name not in given.skip]
    if any(row.work.startswith("runs:") for row in wanted):  # they need it
        data = ROWS[NAMES.index("data")]
        wanted = wanted if data in wanted else [data, *wanted]
    with tempfile.TemporaryDirectory(prefix="holdfast-gpu-") as scratch:
        return run_table(wanted, device, given, Path(scratch))


def run_table(rows: Sequence[Row], device: str, given: argparse.Namespace, scratch: Path) -> int:
    """Run the rows, print each as it ends, and write the file after each; the exit code."""
    begun, told = time.monotonic(), list[dict[str, Any]]()
    stored: dict[str, Any] = {
        "begun": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device,
        "quick": given.quick,
        "rows": told,
    }
    print(f"{'row':26}{'s':>6}  result", flush=True)
    for group in in_groups(rows):
        if time.monotonic() - begun > given.seconds:
            told += [{"row": r.name, "passed": False, "line": "not begun: no time"} for r in group]
            continue
        jobs = 1 if given.quick else min(_TOGETHER, len(group))
        with ThreadPoolExecutor(jobs) as pool:
            for one in pool.map(lambda row: run_row(row, device, given.quick, scratch), group):
                told.append(one)
                mark = "" if one["passed"] else "FAILED  "
                print(f"{one['row']:26}{one['seconds']:6.1f}  {mark}{one['line']}", flush=True)
                given.out.write_text(json.dumps(stored, indent=1) + "\n")
    failed = [one["row"] for one in told if not one["passed"]]
    stored["seconds"] = round(time.monotonic() - begun, 1)
    given.out.write_text(json.dumps(stored, indent=1) + "\n")
    print(f"{stored['seconds']:.0f} s; the file to send: {given.out}")
    if failed:
        print(f"failed: {', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
