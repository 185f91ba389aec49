"""A run of ours that is torn down and rebuilt in its own processes, again and again.

A "step" of the bench is one rebuild with a floor before it: one memcpy of this rank's state into
memory that is there, and one bare gloo group among the same processes. Ranks move on by one each
time, so that sharded state has to travel. The phases are timed from outside, around the functions
that `train/adopt.py` calls.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.peers.ours import run_config, train
from benchmarks.peers.work import Bench, Work
from holdfast.layout import Layout, place
from holdfast.parallel.groups import connect
from holdfast.parallel.transport import Peers, exchange
from holdfast.train import adopt
from holdfast.train.build import build_engine
from holdfast.train.engine import StepEngine

SECONDS = 120.0
PHASES = {"transfers": "plan", "connect": "connect", "build_engine": "build", "move": "move"}
FIELDS = {"dp": "dp_replicate", "dpshard": "dp_shard", "pp": "pp", "tp": "tp"}


def layout_of(name: str, work: Work) -> Layout:
    """`dp2_tp2` and the like, with equal stages."""
    degrees = {FIELDS[axis]: int(n) for axis, n in re.findall(r"(dpshard|dp|pp|tp)(\d+)", name)}
    pp = degrees.get("pp", 1)
    return Layout(**degrees, stages=work.stages(pp) if pp > 1 else ())


def run(bench: Bench, layouts: str) -> None:
    """layouts: `tp2`, or two of them, `tp2>dpshard2`, that take turns."""
    work, world = bench.work, bench.world
    wanted = [layout_of(name, work) for name in layouts.split(">")]
    configs = [run_config(work, world, layout) for layout in wanted]
    store = dist.FileStore(bench.meeting, world)
    device = torch.device("cpu")
    groups = connect(place(wanted[0], 1, ("local",) * world), bench.rank, store, device)
    running = [build_engine(configs[0], groups, device)]  # the one reference to the engine
    running[0].initialise(work.seed)
    train(running[0], work, 1)
    came_from = [(rank - 1) % world for rank in range(world)]
    together = Peers(store, "together", bench.rank, world, seconds=SECONDS)
    bench.ready()
    for generation in itertools.count(2):
        exchange(together, torch.tensor([generation]), [1] * world, 1)
        notes, group = floor(running[0], store, f"floor{generation}", bench)
        exchange(together, torch.tensor([generation]), [1] * world, 1)  # all have joined
        group.close()
        index, rank = (generation - 1) % len(wanted), (bench.rank + generation - 1) % world
        topology = place(wanted[index], generation, ("local",) * world)
        wall, cpu = time.perf_counter(), time.process_time()
        kept = adopt.keep(running.pop(), 1)
        closed = time.perf_counter()
        with phases(notes):
            made = adopt.adopt_engine(
                kept, configs[index], topology, rank, store, device, came_from, seconds=SECONDS
            )
        running.append(made)
        del made
        notes |= {"close": closed - wall, "rebuild": time.perf_counter() - wall}
        bench.done(None, notes | {"rebuild_cpu": time.process_time() - cpu})


def floor(
    engine: StepEngine, store: dist.Store, name: str, bench: Bench
) -> tuple[dict[str, float], Peers]:
    """Seconds of one memcpy of the state, and of a bare gloo group; and the group."""
    sources = [local.tensor for local in engine.state()]
    targets = [torch.zeros_like(source) for source in sources]
    begun = time.perf_counter()
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)
    copied = time.perf_counter()
    peers = Peers(store, name, bench.rank, bench.world, seconds=SECONDS)
    joined = time.perf_counter()
    size = sum(source.numel() * source.element_size() for source in sources)
    return {"memcpy": copied - begun, "join": joined - copied, "bytes": size}, peers


@contextmanager
def phases(notes: dict[str, float]) -> Iterator[None]:
    """Note how long each function takes that `adopt_engine` calls."""
    plain = {name: getattr(adopt, name) for name in PHASES}
    for name, function in plain.items():
        setattr(adopt, name, timed(function, PHASES[name], notes))
    try:
        yield
    finally:
        for name, function in plain.items():
            setattr(adopt, name, function)


def timed(function: Callable[..., Any], name: str, notes: dict[str, float]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        begun = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            notes[name] = time.perf_counter() - begun

    return call
