"""What it costs to sum gradients over replicas by collectives instead of messages, on gloo.

Each replica is a process with one thread. The gradient is 33 MB of fp32 in buckets of 6.6 MB. No
backward pass runs, so nothing overlaps: the figures are the exchange alone. Three ways take turns
in the same processes: `layout.exchange: direct`, `gathered`, and the backend's own all-reduce
(`reduction: fast`), which has other bits. The floor is one memcpy of the gradient in each process
of the same run. CPU time is that of a process with all its threads; both times are medians over
rounds of the slowest replica.

    python -m benchmarks.runtime.gathered               2, 3 and 4 replicas, and uneven shares
    python -m benchmarks.runtime.gathered --quick       a small gradient, few rounds: does it run?
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from holdfast.core.sharding.reduction_tree import Shares, deal
from holdfast.parallel.comm.transport import PeerGroup, exchange
from holdfast.parallel.gradients.buckets import FlatLayout
from holdfast.parallel.gradients.cell_team import CellTeam
from holdfast.parallel.gradients.reducer import Reducer

BUCKETS = 5
CASES: dict[str, Shares] = {
    "2 replicas": deal(2, 2),
    "3 replicas": deal(3, 3),
    "3 replicas, 2-2-1": deal(5, 3),
    "4 replicas": deal(4, 4),
    "2 replicas, 2-1": deal(3, 2),
}
WAYS = ("direct", "gathered", "all-reduce")


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """(wall, CPU) milliseconds of a call, with all threads of the process."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return (time.perf_counter() - wall) * 1e3, (time.process_time() - cpu) * 1e3


def step(reducer: Reducer, rank: int, shares: Shares) -> None:
    """One sum: the gradients of all leaves are there already."""
    leaves = sum(map(len, shares))
    reducer.begin(leaves, shares)
    for leaf in sorted(shares[rank]):
        reducer.slot(reducer.start_leaf(leaf))
        for index in range(len(reducer.layout.buckets)):
            reducer.bucket_done(index)
    reducer.finish()
    assert isinstance(reducer.peers, PeerGroup)
    exchange(reducer.peers, torch.zeros(1, dtype=torch.int64), [1] * len(shares), tag=1)
    reducer.peers.forget_sends()


def replica(rank: int, shares: Shares, elements: int, rounds: int, folder: str) -> None:
    """One replica of a case: every way by turns; its times go into a file."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", len(shares))
    layout = FlatLayout.build([[(elements // BUCKETS,)]] * BUCKETS)
    reducers = {}
    for way in WAYS:
        peers = PeerGroup(store, way, rank, len(shares), seconds=120)
        team = CellTeam.of_replicas(peers, "gathered" if way == "gathered" else "direct")
        cpu = torch.device("cpu")
        fast = way == "all-reduce"
        reducers[way] = Reducer(layout, team, dtype=torch.float32, device=cpu, fast=fast)
    copy = torch.empty(layout.size)
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in (*WAYS, "memcpy")}
    for turn in range(rounds + 2):
        for way, reducer in reducers.items():
            found = timed(lambda reducer=reducer: step(reducer, rank, shares))  # type: ignore[misc]
            floor = timed(lambda reducer=reducer: copy.copy_(reducer.gradient))  # type: ignore[misc]
            if turn >= 2:  # buffers and connections are made before
                times[way].append(found)
                times["memcpy"].append(floor)
    Path(folder, f"{rank}.json").write_text(json.dumps(times))


def measure(shares: Shares, elements: int, rounds: int) -> dict[str, tuple[float, float]]:
    """(wall, CPU) milliseconds of each way: the median round of the slowest replica."""
    with tempfile.TemporaryDirectory() as folder:
        arguments: Any = (shares, elements, rounds, folder)
        processes.spawn(replica, arguments, nprocs=len(shares))  # type: ignore[no-untyped-call]
        answers = [json.loads(Path(folder, f"{r}.json").read_text()) for r in range(len(shares))]
    found = {}
    for way in (*WAYS, "memcpy"):
        walls = [max(w for w, _ in turn) for turn in zip(*(a[way] for a in answers), strict=True)]
        cpus = [max(c for _, c in turn) for turn in zip(*(a[way] for a in answers), strict=True)]
        found[way] = statistics.median(walls), statistics.median(cpus)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small gradient, few rounds")
    quick = parser.parse_args().quick
    elements, rounds = (80_000, 2) if quick else (8_250_000, 20)
    print(f"{elements * 4 / 1e6:.1f} MB of gradient, ms a replica: wall (CPU)")
    print(f"{'case':20}{'memcpy':>14}" + "".join(f"{way:>18}" for way in WAYS) + "   CPU ratio")
    for name, shares in CASES.items():
        found = measure(shares, elements, rounds)
        cells = [f"{wall:.1f} ({cpu:.1f})" for wall, cpu in (found[way] for way in WAYS)]
        floor = f"{found['memcpy'][0]:.1f} ({found['memcpy'][1]:.1f})"
        ratio = found["gathered"][1] / found["direct"][1]
        print(f"{name:20}{floor:>14}" + "".join(f"{cell:>18}" for cell in cells) + f"{ratio:12.2f}")


if __name__ == "__main__":
    main()
