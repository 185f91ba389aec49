"""A run of ours that is torn down and rebuilt in its own processes, again and again.

A "step" of the bench is one rebuild with a floor before it. The floor is one memcpy of this rank's
state into existing memory, and one bare gloo group among the same processes. Ranks shift by one
each time. So sharded state has to travel, and no replica of several ranks can stay as it is.
"""

from __future__ import annotations

import itertools
import re
import time
from typing import Any, cast

import torch
import torch.distributed as dist

from benchmarks.peers.ours import CPU, engine_of, run_config, train
from benchmarks.peers.work import Bench, Work
from holdfast.data.stream.batch import Batches, ValidationSet
from holdfast.layout import Layout, place_layout
from holdfast.parallel.comm.transport import PeerGroup, exchange
from holdfast.training.engine.build import make_session
from holdfast.training.engine.engine import StepEngine
from holdfast.training.recover.recover import GenerationEntry

SECONDS = 120.0
PHASES = ("abort", "control", "agree", "plan", "build", "move")
FIELDS = {"dp": "dp_replicate", "dpshard": "dp_shard", "pp": "pp", "tp": "tp"}


class NoData:
    """What a session asks of `Batches` when nothing is computed."""

    def validation(self, samples: int) -> ValidationSet:
        """None."""
        return ValidationSet([], 0, 1.0)


def layout_of(name: str, work: Work) -> Layout:
    """`dp2_tp2` and the like, with equal stages."""
    found = re.findall(r"(dpshard|dp|pp|tp)(\d+)", name)
    degrees: dict[str, Any] = {FIELDS[axis]: int(n) for axis, n in found}
    pp = degrees.get("pp", 1)
    return Layout(**degrees, stages=work.stages(pp) if pp > 1 else ())


def run(bench: Bench, layouts: str) -> None:
    """layouts: `tp2`, or two of them, `tp2>dpshard2`, that take turns."""
    work, world = bench.work, bench.world
    wanted = [layout_of(name, work) for name in layouts.split(">")]
    configs = [run_config(work, world, layout) for layout in wanted]
    store = dist.FileStore(bench.meeting, world)
    engine = engine_of(bench, configs[0], wanted[0], store)
    train(engine, work, 1)
    session = make_session(configs[0], engine, cast(Batches, NoData()), CPU)
    del engine  # the session's is the only reference: what is left behind is freed
    came_from = [(rank - 1) % world for rank in range(world)]
    together = PeerGroup(store, "together", bench.rank, world, seconds=SECONDS)
    bench.ready()
    for generation in itertools.count(2):
        exchange(together, torch.tensor([generation]), [1] * world, 1)
        notes, group = floor(session.engine, store, f"floor{generation}", bench)
        exchange(together, torch.tensor([generation]), [1] * world, 1)  # all have joined
        group.close()
        index, rank = (generation - 1) % len(wanted), (bench.rank + generation - 1) % world
        topology = place_layout(wanted[index], generation, ("local",) * world)
        session.config = configs[index]
        wall, cpu = time.perf_counter(), time.process_time()
        where = topology, rank, store, CPU, session.groups.topology, came_from
        found = GenerationEntry(session.config, *where, seconds=SECONDS).recover(session, 1)
        notes["rebuild"] = time.perf_counter() - wall
        notes["rebuild_cpu"] = time.process_time() - cpu
        notes |= {phase: found.phases.get(phase, 0.0) for phase in PHASES}
        if found.kept_replica:
            raise RuntimeError("nothing was rebuilt: a replica of one rank stays as it is")
        session = found.session
        del found
        bench.done(None, notes)


def floor(
    engine: StepEngine, store: dist.Store, name: str, bench: Bench
) -> tuple[dict[str, float], PeerGroup]:
    """Seconds of one memcpy of the state, and of a bare gloo group; and the group."""
    sources = [local.tensor for local in engine.state()]
    targets = [torch.zeros_like(source) for source in sources]
    begun = time.perf_counter()
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)
    copied = time.perf_counter()
    peers = PeerGroup(store, name, bench.rank, bench.world, seconds=SECONDS)
    joined = time.perf_counter()
    notes = {"memcpy": copied - begun, "join": joined - copied, "bytes": state_bytes(engine)}
    return notes, peers


def state_bytes(engine: StepEngine) -> int:
    """Of this rank's share."""
    return sum(local.tensor.nbytes for local in engine.state())
