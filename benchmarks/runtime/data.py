"""The data path against its floors: tokenising, loading, index arithmetic.

    python -m benchmarks.runtime.data                          all three, on all cores
    python -m benchmarks.runtime.data --tokens-per-second N
        of the quickstart model (else: measured here)
    python -m benchmarks.runtime.data --cores 1 --rounds 15

Tokenising: the tokenise stage of `holdfast data prepare` against the `tokenizers` library's own
`encode_batch_fast`. The stage reads documents, checks them against the scan, encodes, packs and
writes them, up to the end of the processes. The library has its documents in memory, and as many
threads as we use processes. Both take turns, in an order that alternates. The ratio is the
library's time over ours within a round, its median with a bootstrap interval.

Loading: samples of the quickstart's shape out of `Loader`, hashed and as tensors, on one thread
next to the training loop. They are compared with the tokens a second that the quickstart model
trains at here.

Index arithmetic: positions, sources and samples of one random step, 1,000 of them, among 10^12
samples against among 10^6.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.runtime.paired import estimate
from holdfast.config.sections.data import DataConfig
from holdfast.config.sections.model import ModelConfig
from holdfast.config.sections.train import TrainConfig
from holdfast.core.data.sample_order import BatchSchedule, SampleOrder
from holdfast.data.prepare.prepare import prepare_dataset
from holdfast.data.stream.batch import Batches
from holdfast.data.stream.dataset import Dataset

VOCAB = 1024

PEER = """
import json, os, sys, time
from pathlib import Path
from holdfast.data.read.vocabulary import load_tokenizer
from xxhash import xxh3_128
from holdfast.config.sections.data import SourceConfig
from holdfast.data.read.sources import plan_source, read_unit
units = plan_source(SourceConfig(), 0, 0).units
texts = [t for u in units for t in read_unit(u, 1 << 24, xxh3_128()) if t.strip()]
tokenizer = load_tokenizer(Path(sys.argv[1]))
wall, cpu = time.perf_counter(), time.process_time()
encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
print(json.dumps([time.perf_counter() - wall, time.process_time() - cpu]))
"""


@dataclass(frozen=True)
class Row:
    """One line of the table; `value` must reach `floor`, or stay under it where `below`."""

    what: str
    wall: str
    cpu: str
    value: float
    floor: float
    below: bool = False

    @property
    def passes(self) -> bool:
        return self.value <= self.floor if self.below else self.value >= self.floor


def config(folder: Path, cores: int) -> DataConfig:
    tokenizer = {"vocab_size": VOCAB, "sample_bytes": 2_000_000}
    return DataConfig.model_validate(
        {"folder": str(folder), "tokenizer": tokenizer, "processes": cores}
    )


def time_ours(folder: Path, tokenizer: Path, cores: int) -> tuple[float, float]:
    """Wall and CPU seconds of the tokenise stage, up to the end of its processes."""
    spent: dict[str, tuple[float, float]] = {}

    def now() -> tuple[float, float]:
        # of ended children; the living are added
        cpu = sum(
            usage.ru_utime + usage.ru_stime
            for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        )
        living = [child.cpu_times() for child in psutil.Process().children()]
        return time.perf_counter(), cpu + sum(times.user + times.system for times in living)

    def progress(what: str, done: int, total: int) -> None:
        if what == "tokenising" and done == 0:
            spent["begin"] = now()

    def say(text: str) -> None:
        if text == "writing shards":
            spent["end"] = now()

    given = config(folder, cores).model_copy(update={"tokenizer": _given(tokenizer)})
    prepare_dataset(given, say=say, progress=progress)
    shutil.rmtree(folder)
    (begin, end) = spent["begin"], spent["end"]
    return end[0] - begin[0], end[1] - begin[1]


def _given(path: Path) -> Any:
    return DataConfig().tokenizer.model_copy(update={"path": str(path)})


def time_library(tokenizer: Path, cores: int) -> tuple[float, float]:
    environment = os.environ | {"RAYON_NUM_THREADS": str(cores), "TOKENIZERS_PARALLELISM": "true"}
    done = subprocess.run(
        [sys.executable, "-c", PEER, str(tokenizer)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    wall, cpu = json.loads(done.stdout)
    return wall, cpu


def tokenising(work: Path, tokenizer: Path, cores: int, rounds: int, size: int) -> list[Row]:
    walls, cpus, ours, library = [], [], [], []
    for i in range(rounds):
        turns: dict[str, Callable[[], tuple[float, float]]] = {
            "ours": lambda: time_ours(work / "again", tokenizer, cores),
            "library": lambda: time_library(tokenizer, cores),
        }
        names = ["ours", "library"] if i % 2 else ["library", "ours"]
        found = {name: turns[name]() for name in names}
        ours.append(found["ours"])
        library.append(found["library"])
        walls.append(found["library"][0] / found["ours"][0])
        cpus.append(found["library"][1] / found["ours"][1])

    def seconds(which: int) -> str:
        mine, theirs = (statistics.median(t[which] for t in x) for x in (ours, library))
        return f"{mine:.2f} s / {theirs:.2f} s ({size / mine / 1e6:.1f} MB/s)"

    return [
        Row(
            f"tokenise, wall, {cores} cores: library / ours {estimate(walls)}",
            seconds(0),
            "",
            statistics.median(walls),
            0.9,
        ),
        Row(
            f"tokenise, CPU, {cores} cores: library / ours {estimate(cpus)}",
            "",
            seconds(1),
            statistics.median(cpus),
            0.9,
        ),
    ]


def model_tokens_per_second(vocab: int, length: int, batch: int, steps: int = 12) -> float:
    """The quickstart model in the plainest loop: forward, backward, AdamW, one thread."""
    import torch

    from holdfast.model.decoder import Decoder
    from holdfast.model.init import initialise

    torch.set_num_threads(1)
    shape = ModelConfig.model_validate({"preset": "tiny", "vocab_size": vocab})
    with torch.device("meta"):
        model = Decoder(shape)
    model = model.to_empty(device="cpu")
    initialise(model, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    tokens = torch.randint(vocab, (batch, length + 1))
    times = []
    for _ in range(steps):
        begun = time.perf_counter()
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(
            logits.reshape(-1, vocab).float(), tokens[:, 1:].reshape(-1)
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - begun)
    return batch * length / statistics.median(times[2:])


def loading(dataset: Dataset, length: int, batch: int, model: float) -> Row:
    from holdfast.data.stream.loader import Loader

    data = DataConfig.model_validate({"sequence_length": length})
    train = TrainConfig.model_validate({"batch_size": batch, "microbatch_size": 2})
    batches = Batches(dataset, data, train, seed=1)
    steps = 1500
    wall, cpu = time.perf_counter(), time.process_time()
    with Loader(batches, lambda step: range(batches.microbatches(step)), last_step=steps) as loader:
        for _ in loader:
            pass
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    tokens = steps * batch * length
    return Row(
        f"load S={length}: tokens/s over the model's {model:,.0f} tokens/s",
        f"{tokens / wall:,.0f}/s",
        f"{tokens / cpu:,.0f}/CPU-s",
        tokens / wall / model,
        50.0,
    )


def index_arithmetic(batch: int, draws: int = 1000) -> Row:
    schedule = BatchSchedule(batch, [(100, 2 * batch), (1000, 4 * batch)])
    orders = {size: SampleOrder(1, [size], [1.0]) for size in (10**6, 10**12)}
    rng = random.Random(1)
    walls: dict[int, list[float]] = {size: [] for size in orders}
    cpus: dict[int, list[float]] = {size: [] for size in orders}
    for _ in range(draws):
        for size, order in orders.items():
            step = rng.randrange(1, size // (4 * batch))
            cpu, wall = time.process_time(), time.perf_counter()
            order.places(schedule.position(step), schedule.position(step + 1))
            walls[size].append(time.perf_counter() - wall)
            cpus[size].append(time.process_time() - cpu)
    wall_medians = {size: statistics.median(t) * 1e6 for size, t in walls.items()}
    cpu_medians = {size: statistics.median(t) * 1e6 for size, t in cpus.items()}
    return Row(
        "index arithmetic of a step: 10^12 over 10^6 samples",
        f"{wall_medians[10**12]:.0f} us / {wall_medians[10**6]:.0f} us",
        f"{cpu_medians[10**12]:.0f} us / {cpu_medians[10**6]:.0f} us",
        wall_medians[10**12] / wall_medians[10**6],
        1.5,
        below=True,
    )


def show(rows: list[Row]) -> None:
    table = Table(title="Data: ours against the floors")
    for column in ("what", "wall", "CPU", "value", "floor", ""):
        table.add_column(column, overflow="fold")
    for row in rows:
        sign = "<=" if row.below else ">="
        table.add_row(
            row.what,
            row.wall,
            row.cpu,
            f"{row.value:.3f}",
            f"{sign} {row.floor}",
            "passes" if row.passes else "MISSES",
        )
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens-per-second", type=float, help="of the quickstart model")
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=16)
    arguments = parser.parse_args()
    length, batch = arguments.sequence_length, arguments.batch_size
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        dataset = prepare_dataset(config(work / "set", arguments.cores))
        size = sum(dataset.counts(split)["bytes"] for split in dataset.splits)
        rows = tokenising(work, dataset.tokenizer_path, arguments.cores, arguments.rounds, size)
        model = arguments.tokens_per_second or model_tokens_per_second(VOCAB, length, batch)
        rows.append(loading(dataset, length, batch, model))
        rows.append(index_arithmetic(batch))
    show(rows)
    return 0 if all(row.passes for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
