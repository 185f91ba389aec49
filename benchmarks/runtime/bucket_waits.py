"""How long do workers of a node wait for batches whose shards come from a bucket?

    python -m benchmarks.runtime.bucket_waits                    four workers, 200 steps of 100 ms
    python -m benchmarks.runtime.bucket_waits --step-ms 20

The bucket is a server of S3 on this machine (moto, a process of its own). The workers are
processes of one node: they share one cache, which is empty at the start. A worker takes steps of a
fixed time and asks `Loader` for its share of the next batch, as training does. Before the first
one it sleeps `--build-s`, in which a run builds its model. The shards of the first steps are
fetched meanwhile. By default it is what four workers of a run took on two cores, from opening the
data to the loader. Their model had two layers of width 128; a larger one takes longer.

The table has the seconds until the first batch, and the share of the time after it that each
worker waited. Then comes how many of these seconds lie before step EARLY_STEPS, in which most
shards are read for the first time. The share of a run whose cache is full comes next to it.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from tests.support import s3

from benchmarks.runtime.data import config
from holdfast.config.sections.data import DataConfig
from holdfast.config.sections.train import TrainConfig
from holdfast.core.sharding.reduction_tree import deal
from holdfast.data.prepare.prepare import prepare_dataset
from holdfast.data.stream.batch import Batches
from holdfast.data.stream.dataset_location import open_dataset
from holdfast.data.stream.loader import Loader

WORKERS = 4
BATCH = 8  # samples of a step, two of each worker
EARLY_STEPS = 20


def wait_of(
    data: DataConfig, steps: int, step_s: float, build_s: float, rank: int
) -> tuple[float, float, float]:
    """Seconds until the first batch of a worker; share of the time after it that it waited; part of
    this wait before step EARLY_STEPS."""
    train = TrainConfig.model_validate({"batch_size": BATCH, "microbatch_size": 1, "steps": steps})
    batches = Batches(open_dataset(data.folder, data), data, train, seed=1)
    plan = deal(BATCH, WORKERS)[rank]
    batches.fetch_ahead(1)
    time.sleep(build_s)
    with Loader(batches, lambda step: plan, last_step=steps) as loader:
        next(loader)
        first, begun = loader.waited_s, time.perf_counter()
        early = 0.0
        for batch in loader:
            if batch.step <= EARLY_STEPS:
                early = loader.waited_s - first
            time.sleep(step_s)
        waited = loader.waited_s - first
        return first, waited / (time.perf_counter() - begun), early / max(waited, 1e-9)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--step-ms", type=float, default=100)
    parser.add_argument("--build-s", type=float, default=0.4)
    parser.add_argument("--shard-tokens", type=int, default=65536)
    given = parser.parse_args()
    os.environ |= s3.CREDENTIALS
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        data = config(work, 2).model_copy(
            update={
                "folder": s3.location(s3.server()),
                "cache": str(work / "first"),
                "shard_tokens": given.shard_tokens,
            }
        )
        dataset = prepare_dataset(data, say=lambda text: None)
        size = sum(file.bytes for file in dataset.files()) / 1e6
        print(f"{size:.1f} MB in {len(dataset.shards())} shards, {WORKERS} workers, ", end="")
        print(f"{given.steps} steps of {given.step_ms:g} ms, {given.build_s:g} s before")
        data = data.model_copy(update={"cache": str(work / "second")})
        with ProcessPoolExecutor(WORKERS, get_context("spawn")) as pool:
            list(pool.map(time.sleep, [1] * WORKERS))  # they have imported what they need
            for what in ("empty cache", "full cache"):
                task = partial(wait_of, data, given.steps, given.step_ms / 1e3, given.build_s)
                found = list(pool.map(task, range(WORKERS)))
                first = max(first for first, _, _ in found)
                shares = ", ".join(f"{share:.2%}" for _, share, _ in found)
                early = min(early for _, _, early in found)
                print(
                    f"{what}: first batch after {first:.2f} s, then waited {shares}; of that "
                    f"{early:.0%} or more before step {EARLY_STEPS}",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
