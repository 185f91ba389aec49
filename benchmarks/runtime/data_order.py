"""The order of data when the number of workers changes: rows lost and repeated, next to peers.

    python -m benchmarks.runtime.data_order
    python -m benchmarks.runtime.data_order --constant

8, 3, 5 and 7 workers read one pass in turn. Each of the first three numbers of workers reads
`--steps` steps. Then the state is saved, and the next number of workers resumes from it, with the
calls that the peer's documentation names for that. The last one reads to the end of the pass. A row
that no worker read is lost, and one that was read again is repeated. "Three sources" is the mixture
of the peer, with weights in proportion to the sizes; a peer without one is left out there.

Each worker of a peer takes four rows a step, so its global batch changes with the number of
workers. With `--constant` the global batch is 840 rows, which all numbers of workers divide, and
each number but the last reads one step. lancedb demands a number of splits that they all divide:
840, too. All workers run in this process, one after another. Of mosaicml-streaming the table of
samples is read, which it makes for all workers at once. Holdfast packs rows of chats into samples,
several a sample. Its global batch is constant, and its microbatches are dealt to the workers. With
three sources its weights change twice.

A peer that is not installed is left out, and a line says so. Needs lancedb, pylance, litdata,
mosaicml-streaming and grain.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import types
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.support.chat import conversation, tokenizer_folder, write_rows
from tests.support.corpus import batches, data_config, make

from holdfast.core.sharding.reduction_tree import deal

WORLDS = (8, 3, 5, 7)
SPLITS = 840  # the least that all of WORLDS divide
PARTS = (5, 3, 2)  # sizes of three sources, in tenths
Rows = Iterator[Any]


@dataclass(frozen=True)
class Given:
    """steps: of each number of workers but the last. is_constant: the global batch is SPLITS rows,
    otherwise each worker takes four rows a step."""

    steps: int
    is_constant: bool

    def batch(self, workers: int) -> int:
        """Rows of a worker in a step."""
        return SPLITS // workers if self.is_constant else 4


def sizes_of(rows: int, sources: int) -> list[int]:
    """The rows of each source."""
    if sources == 1:
        return [rows]
    first = [rows * part // 10 for part in PARTS[1:]]
    return [rows - sum(first), *first]


def holdfast_rows(folder: Path, rows: int, sources: int, given: Given) -> Rows:
    found = []
    for number, size in enumerate(sizes_of(rows, sources)):
        made = [{"messages": conversation(100_000 * number + i)} for i in range(size)]
        path = write_rows(folder / f"{number}.jsonl", made)
        source = {"kind": "jsonl", "path": str(path), "rows": "messages", "name": f"s{number}"}
        found.append(source | {"weight": size, "at_end": "leave"})
    mix = [
        {"from_step": 2, "weights": {"s1": 1, "s0": 2, "s2": 1}},
        {"from_step": 4, "weights": {"s1": 3}},
    ]
    config = data_config(
        folder / "dataset",
        *found,
        tokenizer={"path": str(tokenizer_folder(folder / "tokenizer"))},
        attention="document",
        sequence_length=150,
        validation_fraction=0,
        deduplicate=False,
        mix=mix if sources > 1 else [],
    )
    dataset = make(config)
    sizes = {"batch_size": 16, "microbatch_size": 1}
    step, length = 1, batches(dataset, config, **sizes).order.length
    for part, workers in enumerate(WORLDS):
        each = [batches(dataset, config, **sizes) for _ in range(workers)]
        last = 10**9 if part + 1 == len(WORLDS) else step + max(1, given.steps // 8)
        while step < last and each[0].schedule.position(step) < length:
            for worker, shares in enumerate(deal(sizes["batch_size"], workers)):
                for index in shares:
                    start, stop = each[worker].positions(step, index)
                    if start < length:
                        yield from _packed_rows(each[worker], start, min(stop, length))
            step += 1


def _packed_rows(made: Any, start: int, stop: int) -> Rows:
    for source, _, sample in zip(*made.order.places(start, stop), strict=True):
        for row in made.packed[source].sample(int(sample)).starts.tolist():
            yield int(source), row


def lancedb_rows(folder: Path, rows: int, sources: int, given: Given) -> Rows:
    import lancedb
    from lancedb.streaming import StreamingDataset

    if sources > 1:
        raise NotImplementedError
    table = lancedb.connect(folder).create_table("rows", [{"row": i} for i in range(rows)])
    state = None
    for part, workers in enumerate(WORLDS):
        each = [
            StreamingDataset(
                table,
                num_splits=SPLITS,
                rank=rank,
                world_size=workers,
                read_batch_size=4,
                io_queue_depth=1,
                transform_parallelism=1,
            )
            for rank in range(workers)
        ]
        # A step is a cycle over all splits: the boundary at which its state is exact.
        cycles = 1 if part + 1 < len(WORLDS) else 10**9
        for dataset in each:
            if state is not None:
                dataset.load_state_dict(state)
            limit = cycles * SPLITS // workers
            read = iter(dataset)
            for _, row in zip(range(limit), read, strict=False):
                yield row["row"]
            read.close()
        state = StreamingDataset.merge_state_dicts([dataset.state_dict() for dataset in each])


def litdata_rows(folder: Path, rows: int, sources: int, given: Given) -> Rows:
    from litdata import CombinedStreamingDataset, StreamingDataLoader, StreamingDataset
    from litdata.streaming.writer import BinaryWriter

    names = []
    for number, size in enumerate(sizes_of(rows, sources)):
        name = folder / f"litdata{number}"
        writer = BinaryWriter(str(name), chunk_size=100)
        for index in range(size):
            writer[index] = [number, index]
        writer.done()
        writer.merge()
        names.append(str(name))
    states: list[Any] = []
    for part, workers in enumerate(WORLDS):
        os.environ["WORLD_SIZE"] = str(workers)
        next_states = []
        for rank in range(workers):
            os.environ["GLOBAL_RANK"] = str(rank)
            parts: Any = [StreamingDataset(name, shuffle=True, seed=1) for name in names]
            dataset = parts[0] if sources == 1 else CombinedStreamingDataset(parts, seed=1)
            loader = StreamingDataLoader(dataset, batch_size=given.batch(workers), num_workers=0)
            if states:
                loader.load_state_dict(states[0])
            # At most twice the rows: a mixture that was resumed with another number may not end.
            limit = given.steps if part + 1 < len(WORLDS) else 2 * rows // given.batch(workers)
            for _, batch in zip(range(limit), loader, strict=False):
                yield from zip(*(each.tolist() for each in batch), strict=True)
            next_states.append(loader.state_dict())
        states = next_states


def streaming_rows(folder: Path, rows: int, sources: int, given: Given) -> Rows:
    if find_spec("torchvision") is None:  # its data sets of pictures alone need that
        sys.modules["streaming.vision"] = types.ModuleType("streaming.vision")
    from streaming import MDSWriter, Stream, StreamingDataset
    from streaming.base.batching import generate_work
    from streaming.base.world import World

    streams = []
    for number, size in enumerate(sizes_of(rows, sources)):
        name = str(folder / f"mds{number}")
        with MDSWriter(out=name, columns={"row": "int"}, size_limit=1 << 12) as writer:
            for index in range(size):
                writer.write({"row": index})
        streams.append(Stream(local=name))
    dataset = StreamingDataset(
        streams=streams,
        shuffle=True,
        shuffle_block_size=1 << 14,
        batch_size=1,
        num_canonical_nodes=1,
    )
    done = 0
    for part, workers in enumerate(WORLDS):
        dataset.batch_size = given.batch(workers)
        work = generate_work("random", dataset, World(1, workers, 1, 0), 0, done)
        limit = given.steps if part + 1 < len(WORLDS) else work.shape[3]
        chosen = work[0, :, 0, :limit].reshape(-1)
        yield from chosen[chosen >= 0].tolist()
        done += limit * workers * given.batch(workers)


def grain_rows(folder: Path, rows: int, sources: int, given: Given) -> Rows:
    from grain._src.core.sharding import ShardOptions
    from grain.experimental import ElasticIterator
    from grain.python import MapDataset

    sizes = sizes_of(rows, sources)
    state: Any = None
    for part, workers in enumerate(WORLDS):
        for rank in range(workers):
            parts = [
                MapDataset.source([(number, i) for i in range(size)]).shuffle(seed=1)
                for number, size in enumerate(sizes)
            ]
            total = sum(sizes)
            mixed = parts[0]
            if sources > 1:
                mixed = MapDataset.mix(parts, weights=[size / total for size in sizes])
            shard = ShardOptions(shard_index=rank, shard_count=workers)
            read = iter(ElasticIterator(mixed, workers * given.batch(workers), shard))
            if state is not None:
                read.set_state(state)
            limit = given.steps if part + 1 < len(WORLDS) else 10**9
            for _, batch in zip(range(limit), read, strict=False):
                yield from zip(*(each.tolist() for each in batch), strict=True)
            last = read.get_state()
        state = last


READERS: dict[str, Callable[[Path, int, int, Given], Rows]] = {
    "holdfast": holdfast_rows,
    "lancedb": lancedb_rows,
    "litdata": litdata_rows,
    "mosaicml-streaming": streaming_rows,
    "grain": grain_rows,
}


def count(name: str, rows: int, sources: int, given: Given) -> str:
    with tempfile.TemporaryDirectory() as folder:
        try:
            read = Counter(READERS[name](Path(folder), rows, sources, given))
        except NotImplementedError:
            return "has no mixture"
        except Exception as error:  # whatever a peer raises is its answer
            return f"refuses: {type(error).__name__}: {str(error).splitlines()[0][:150]}"
    repeated = sum(read.values()) - len(read)
    return f"{rows - len(read):,} lost, {repeated:,} repeated"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rows", type=int, default=4003)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--constant", action="store_true", help="a constant global batch of 840")
    parser.add_argument("--sources", type=int, choices=(1, 3), action="append")
    parser.add_argument("--only", choices=READERS, action="append")
    given = parser.parse_args()
    setting = Given(1 if given.constant else given.steps, given.constant)
    worlds = ", ".join(map(str, WORLDS))
    print(f"{given.rows:,} rows, one pass, {worlds} workers in turn")
    for name in given.only or READERS:
        try:
            label = f"{name} {version(name)}"
        except PackageNotFoundError:
            print(f"{name} is not installed, so it is left out")
            continue
        for sources in given.sources or (1, 3):
            what = "one source" if sources == 1 else "three sources"
            found = count(name, given.rows, sources, setting)
            print(f"{label}, {what}: {found}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
