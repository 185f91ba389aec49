"""Gradients travel while the backward pass goes on, and the trace shows it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from holdfast.parallel.axes.process_groups import connect
from holdfast.parallel.axes.replica_groups import ConnectSettings
from holdfast.parallel.comm.trace import COMPUTE, REDUCE, SpanRecorder
from holdfast.training.engine.build import build_engine
from tests.support.layouts import case, config_of, one_step, topology_of
from tests.support.ranks import RankContext, rank_values, wait_until
from tests.support.tiny_training import CPU


def _traced(rank: RankContext, name: str) -> list[list[Any]]:
    """In the last microbatch the backward of the first block waits until a bucket of a later one
    has been summed over the replicas: it would wait in vain if sums came after the backward."""
    of = case(name)
    config = config_of(of.changes)
    recorder = SpanRecorder()
    groups = connect(
        ConnectSettings(rank.store(), CPU, seconds=60, recorder=recorder),
        topology_of(of, config),
        rank.rank,
    )
    made = build_engine(config, groups, CPU)
    made.initialise(config.seed)
    last = made.plan.share(1)[-1]
    begun: list[int] = []

    def wait(*_: Any) -> None:
        begun.append(1)
        if len(begun) == len(made.plan.share(1)):
            wait_until(lambda: any(s.track == REDUCE for s in recorder.spans), what="a sum")

    block: torch.nn.Module = made.objective.get_submodule("decoder.layers.0")
    block.register_full_backward_pre_hook(wait)
    one_step(made, 1)
    assert begun
    assert made.plan.share(1)[-1] == last
    made.close()
    return [[s.track, s.name, s.start, s.stop] for s in recorder.spans]


@pytest.mark.parametrize("name", ["dp2", "dp2-shard2"])
def test_buckets_are_summed_while_the_backward_goes_on(name: str) -> None:
    for spans in rank_values(_traced, case(name).world_size, {"name": name}):
        backward = [s for s in spans if s[0] == COMPUTE and s[1].startswith("B")][-1]
        sums = [s for s in spans if s[0] == REDUCE]
        assert backward[2] < sums[0][2] < sums[0][3] < backward[3]
