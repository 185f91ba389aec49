"""Does a training loop wait for shards that come from a distant bucket?

    python -m benchmarks.runtime.remote_data                 20 ms a step, 20 MB/s, 100 ms a request
    python -m benchmarks.runtime.remote_data --step-ms 5 --mb-per-second 5

A loop takes steps of a fixed time and asks `Loader` for the next batch, as training does. Its data
lie in a folder, in a cache that has every shard, and at a slow address with an empty cache. The
address answers each request after a delay and at a bandwidth that all requests share. The table
says how long the loop waited: for the first batch, and for all later ones as a share of the time.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.runtime.data import config
from holdfast.config.sections.data import DataConfig
from holdfast.config.sections.train import TrainConfig
from holdfast.data.prepare.prepare import prepare_dataset
from holdfast.data.stream.batch import Batches
from holdfast.data.stream.dataset import Dataset
from holdfast.data.stream.loader import Loader
from holdfast.data.stream.node_cache import NodeCache
from holdfast.wire.store.run_store import FolderStore


class SlowStore(FolderStore):
    """A folder that answers as a distant bucket does."""

    def __init__(self, folder: Path, delay_s: float, bytes_per_second: float) -> None:
        super().__init__(folder)
        self._delay_s, self._bytes_per_second = delay_s, bytes_per_second
        self._line = threading.Lock()

    def read_into(self, key: str, start: int, out: memoryview) -> None:
        time.sleep(self._delay_s)
        with self._line:
            time.sleep(len(out) / self._bytes_per_second)
        super().read_into(key, start, out)


@dataclass(frozen=True)
class Waits:
    """Seconds until the first batch; share of the time after it that the loop waited."""

    first_s: float
    share: float


def measure(dataset: Dataset, arguments: argparse.Namespace) -> Waits:
    data = DataConfig.model_validate({"sequence_length": 256})
    train = TrainConfig.model_validate(
        {"batch_size": arguments.batch_size, "microbatch_size": 2, "steps": arguments.steps}
    )
    batches = Batches(dataset, data, train, seed=1)
    plan = range(batches.microbatches(1))
    with Loader(batches, lambda step: plan, last_step=arguments.steps) as loader:
        next(loader)
        first, begun = loader.waited_s, time.perf_counter()
        for _ in loader:
            time.sleep(arguments.step_ms / 1000)
        return Waits(first, (loader.waited_s - first) / (time.perf_counter() - begun))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--step-ms", type=float, default=20)
    parser.add_argument("--mb-per-second", type=float, default=20)
    parser.add_argument("--delay-ms", type=float, default=100)
    parser.add_argument("--shard-tokens", type=int, default=65536)
    arguments = parser.parse_args()
    table = Table("data", "first batch", "waited after it")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        given = config(work / "set", 2).model_copy(update={"shard_tokens": arguments.shard_tokens})
        local = prepare_dataset(given, say=lambda text: None)
        store = SlowStore(work / "set", arguments.delay_ms / 1e3, arguments.mb_per_second * 1e6)

        def remote(cache: Path) -> Dataset:
            target = cache / local.version
            target.mkdir(parents=True, exist_ok=True)
            for name in ("manifest.json", "sources.json", "tokenizer.json"):
                shutil.copy(work / "set" / name, target / name)
            node = NodeCache(store, "slow://", "slow://", target, 10**12)
            return Dataset.open(target, node)

        shutil.copytree(work / "set", work / "full" / local.version)
        places = {
            "folder": local,
            "address, full cache": remote(work / "full"),
            "address, empty cache": remote(work / "empty"),
        }
        for name, dataset in places.items():
            found = measure(dataset, arguments)
            table.add_row(name, f"{found.first_s:.2f} s", f"{found.share:.1%}")
        size = sum(file.bytes for file in local.files()) / 1e6
        table.title = f"{size:.1f} MB in {len(local.shards())} shards"
    Console(width=None if sys.stdout.isatty() else 100).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
