"""Memory of `holdfast data prepare` by the size of the corpus.

    python -m benchmarks.runtime.preparation_memory                    32 MB and 320 MB of text
    python -m benchmarks.runtime.preparation_memory --megabytes 8 80

Each corpus is one JSONL file of made English pages of some 2,000 characters. One page in ten is a
near copy of an earlier one. It is prepared with stages, near duplicates among them, in a process of
its own with one or more processes for its tasks. The memory is the peak of the sum over all these
processes, sampled every 20 ms. It is RssAnon and RssShmem of `/proc`. Pages of files do not count,
because the kernel can drop them at any time. The CPU seconds are those of all processes. The floor
is what the same processes need for a corpus of 1 MB.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from holdfast.config.sections.data import DataConfig

FLOOR_MEGABYTES = 1
LIMIT = 1.10
"""The larger corpus may take so many times the memory of the smaller one."""
SAMPLED_EVERY_S = 0.02
STAGES = [
    {"kind": "length", "min_words": 20},
    {"kind": "personal_data"},
    {"kind": "near_duplicates"},
]
CHILD = """
import sys
from holdfast.config.sections.data import DataConfig
from holdfast.data.prepare.prepare import prepare_dataset
prepare_dataset(DataConfig.model_validate_json(sys.argv[1]), say=lambda text: None)
"""


@dataclass(frozen=True)
class Measured:
    """bytes: peak of all processes; seconds: of CPU, and of the clock."""

    bytes: int
    cpu_s: float
    wall_s: float


def write_corpus(path: Path, megabytes: float, seed: int = 1) -> None:
    """Write pages of words with a skewed vocabulary."""
    rng = random.Random(seed)
    syllables = [a + b for a in "bdfgklmnprstv" for b in "aeiou"]
    vocabulary = ["".join(rng.choices(syllables, k=rng.randint(1, 4))) for _ in range(20_000)]
    weights = [1 / (rank + 5) for rank in range(len(vocabulary))]
    pool = rng.choices(vocabulary, weights, k=1 << 20)
    written, last = 0, [""]
    with path.open("w") as file:
        number = 0
        while written < megabytes * 1e6:
            start = rng.randrange(len(pool) - 400)
            words = pool[start : start + 320]
            rng.shuffle(words)
            if number % 10 == 9:
                words = [*last[:-2], f"copy{number}"]
            last, number = words, number + 1
            text = ". ".join(" ".join(words[i : i + 12]) for i in range(0, len(words), 12))
            written += len(text)
            file.write(json.dumps({"text": text}) + "\n")


def measure(config: DataConfig) -> Measured:
    """Prepare in a process, and watch it."""
    start, peak, cpu = time.perf_counter(), 0, 0.0
    child = subprocess.Popen([sys.executable, "-c", CHILD, config.model_dump_json()])
    process = psutil.Process(child.pid)
    spent: dict[int, float] = {}
    while child.poll() is None:
        total = 0
        for one in [process, *_children(process)]:
            try:
                total += _own_bytes(one.pid)
                times = one.cpu_times()
                spent[one.pid] = times.user + times.system
            except (psutil.Error, OSError, KeyError):  # it has just ended
                continue
        peak = max(peak, total)
        time.sleep(SAMPLED_EVERY_S)
    if child.returncode:
        sys.exit(f"the preparation ended with {child.returncode}")
    cpu = sum(spent.values())
    return Measured(peak, cpu, time.perf_counter() - start)


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []


def _own_bytes(pid: int) -> int:
    """Memory of a process that is no page of a file."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return 1024 * sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, nargs=2, default=(32, 320))
    parser.add_argument("--processes", type=int, default=1)
    given = parser.parse_args()
    found: list[Measured] = []
    for size in (FLOOR_MEGABYTES, *given.megabytes):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "corpus.jsonl"
            write_corpus(path, size)
            config = DataConfig.model_validate(
                {
                    "folder": f"{folder}/set",
                    "sources": [{"kind": "jsonl", "path": str(path)}],
                    "stages": STAGES,
                    "processes": given.processes,
                }
            )
            found.append(measure(config))
        one = found[-1]
        name = f"{size:g} MB" + (" (floor)" if len(found) == 1 else "")
        print(
            f"{name}: {one.bytes / 1e6:.0f} MB of memory, {one.cpu_s:.1f} CPU seconds, "
            f"{one.wall_s:.1f} s",
            flush=True,
        )
    ratio = found[2].bytes / found[1].bytes
    print(
        f"{given.megabytes[1]:g} MB take {ratio:.3f} times the memory of {given.megabytes[0]:g} MB"
    )
    return 0 if ratio <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
