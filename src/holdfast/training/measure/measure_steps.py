"""Times steps of the engine on small models (`plan/probing/probes.py`), for `holdfast calibrate`.

A probe alone runs in every process at the same time, because the workers of a run share caches and
memory. A probe of two ranks trains in its layout.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import torch

from holdfast.core.seeds import key_seed
from holdfast.parallel.axes.process_groups import connect
from holdfast.parallel.axes.replica_groups import ConnectSettings
from holdfast.parallel.torch_compat import file_store
from holdfast.plan.hardware.fit import Sample
from holdfast.plan.probing.probes import Probe, probes_for
from holdfast.training.engine.build import build_engine
from holdfast.training.engine.engine import StepEngine
from holdfast.training.measure.equal_steps import RandomTokens

_SECONDS = 60.0
"""Bound of a wait for the other rank."""

_FEWEST, _MOST = 4, 60
"""Steps of a probe that are timed."""


def measure_steps(
    share_s: float, quantile: float, device: torch.device, rank: int, ranks: int, folder: Path
) -> Iterator[Sample]:
    """Time a step of each probe that so many ranks can run.

    Args:
        share_s: seconds of a probe with its engine's start, about.
        quantile: of a step's times, the one that counts.
        folder: where the ranks meet.
    """
    meeting = file_store(folder / "probes", ranks)
    for number, probe in enumerate(probes_for(ranks, device.type == "cpu")):
        alone = probe.ranks == 1
        started = time.monotonic()
        name = f"probe{number}.{rank}" if alone else f"probe{number}"
        engine = _engine(probe, device, 0 if alone else rank, folder / name)
        for step in (1, 2):  # the first one makes what all need
            begin = time.perf_counter()
            _train(engine, probe, step)
            first_s = time.perf_counter() - begin
        if rank == 0:
            left_s = share_s - (time.monotonic() - started)
            count = min(_MOST, max(_FEWEST, int(left_s / first_s)))
            meeting.set(f"steps{number}", str(count))
        found = []
        for step in range(3, 3 + int(meeting.get(f"steps{number}"))):
            begin = time.perf_counter()
            _train(engine, probe, step)
            found.append(time.perf_counter() - begin)
        engine.close()
        yield Sample("step", sorted(found)[int(quantile * len(found))], name=probe.name)


def _engine(probe: Probe, device: torch.device, rank: int, meeting: Path) -> StepEngine:
    config = probe.config(device.type)
    store = file_store(meeting, probe.ranks)
    groups = connect(
        ConnectSettings(store, device, seconds=_SECONDS, ep=config.layout.ep),
        probe.topology(),
        rank,
    )
    engine = build_engine(config, groups, device)
    engine.initialise(config.seed)
    return engine


def _train(engine: StepEngine, probe: Probe, step: int) -> None:
    """One step on tokens of a seed."""
    shards = engine.groups.degree("dp_shard")
    size = probe.samples // shards if shards > 1 else probe.samples
    batches = []
    for leaf in engine.begin(step):
        generator = torch.Generator().manual_seed(key_seed(7, "probe", step, leaf))
        whole = torch.randint(
            0, probe.vocabulary, (probe.samples, probe.tokens + 1), generator=generator
        )
        own = whole[engine.groups.coordinate.dp_shard * size :][:size]
        inputs, targets = own[:, :-1].contiguous(), own[:, 1:].contiguous()
        tokens = targets.numel()
        batches.append(
            RandomTokens(inputs.to(engine.device), targets.to(engine.device), None, tokens)
        )
    engine.compute(batches)
    engine.apply(engine.reduce())
    if engine.device.type != "cpu":
        torch.accelerator.synchronize(engine.device)
