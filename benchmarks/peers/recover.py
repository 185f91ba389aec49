"""A run of ours that enters one generation after another with nothing lost.

A "step" of the bench is `recover` into the same topology under a new generation, between two steps
of training. The floor, one bare gloo group among the same processes, comes before it. Replicas are
complete, so everything inside them stays. So this is the cost of each loss of another replica,
without the kernel's own teardown of the dead process.
"""

from __future__ import annotations

import itertools
import time
from typing import cast

import torch
import torch.distributed as dist

from benchmarks.peers.ours import CPU, engine_of, run_config, train
from benchmarks.peers.rebuild import SECONDS, NoData, layout_of, state_bytes
from benchmarks.peers.work import Bench
from holdfast.data.stream.batch import Batches
from holdfast.layout import place_layout
from holdfast.parallel.comm.transport import PeerGroup, exchange
from holdfast.training.engine.build import make_session
from holdfast.training.recover.recover import GenerationEntry


def run(bench: Bench, layouts: str) -> None:
    """layouts: one, such as `dp4`."""
    work, world, rank = bench.work, bench.world, bench.rank
    layout = layout_of(layouts, work)
    config, store = run_config(work, world, layout), dist.FileStore(bench.meeting, world)
    engine = engine_of(bench, config, layout, store)
    session = make_session(config, engine, cast(Batches, NoData()), CPU)
    size = float(state_bytes(engine))
    together = PeerGroup(store, "together", rank, world, seconds=SECONDS)
    bench.ready()
    for generation in itertools.count(2):
        train(engine, work, generation - 1)
        exchange(together, torch.tensor([generation]), [1] * world, 1)
        begun = time.perf_counter()
        group = PeerGroup(store, f"floor{generation}", rank, world, seconds=SECONDS)
        joined = time.perf_counter()
        exchange(together, torch.tensor([generation]), [1] * world, 1)  # all have joined
        group.close()
        wall, cpu = time.perf_counter(), time.process_time()
        topology = place_layout(layout, generation, ("local",) * world)
        where = topology, rank, store, CPU, session.groups.topology, list(range(world))
        found = GenerationEntry(config, *where, seconds=SECONDS).recover(session, generation - 1)
        seconds = time.perf_counter() - wall
        if not found.kept_replica:
            raise RuntimeError("the inside of a replica was not kept")
        notes = {"join": joined - begun, "recover": seconds, "bytes": size}
        notes["recover_cpu"] = time.process_time() - cpu
        for phase in ("control", "agree", "groups"):
            notes[phase] = found.phases.get(phase, 0.0)
        bench.done(None, notes)
