"""Time of `holdfast --help`, compared with an interpreter that does nothing.

    python benchmarks/runtime/help.py

The bound is 0.4 s; interleaved runs, medians of CPU and wall seconds.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from statistics import median

ROUNDS = 21
COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "holdfast --help": ["-m", "holdfast.cli.main", "--help"],
    "holdfast train --help": ["-m", "holdfast.cli.main", "train", "--help"],
    "holdfast config show": ["-m", "holdfast.cli.main", "config", "show"],
}


def once(arguments: list[str]) -> tuple[float, float]:
    """(wall, CPU) seconds of one child."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
    wall = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return wall, cpu


def main() -> int:
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
    for _ in range(ROUNDS):
        for name, arguments in COMMANDS.items():
            times[name].append(once(arguments))
    print(f"{'command':<24}{'wall s':>9}{'CPU s':>9}{'CPU / bare python':>20}")
    bare = median(cpu for _, cpu in times["python -c pass"])
    for name, found in times.items():
        wall, cpu = median(w for w, _ in found), median(c for _, c in found)
        print(f"{name:<24}{wall:>9.3f}{cpu:>9.3f}{cpu / bare:>20.1f}")
    return 0 if median(w for w, _ in times["holdfast --help"]) < 0.4 else 1


if __name__ == "__main__":
    sys.exit(main())
