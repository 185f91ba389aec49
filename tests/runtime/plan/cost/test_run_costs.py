"""What a run file says changes its cost: compiled blocks, the axis cp, and when shards sum."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.config.run import RunConfig
from holdfast.core.devices import DEVICES
from holdfast.layout import Layout, place_layout
from holdfast.plan.cost.evaluate import StepCost
from holdfast.plan.hardware.cluster import NodePool
from holdfast.plan.hardware.devices import GIB, load_devices
from holdfast.plan.hardware.link import Link
from holdfast.plan.placing.interface import NodePlaces
from holdfast.plan.placing.topology_cost import Fleet, TopologyCost

LINK = Link(1e-4, 1e9)


def cost(device: str, layout: Layout, ranks: int, value: dict[str, Any]) -> StepCost:
    config = RunConfig.model_validate(value)
    pool = NodePool("here", 1, ranks, device, LINK, LINK)
    costs = TopologyCost(config, Fleet(load_devices(), pool), [NodePlaces("here", ranks)])
    return costs.cost(place_layout(layout, 1, ("here",) * ranks))


@pytest.mark.parametrize(
    ("samples", "compiled", "measured_gib"),
    [(2, True, 41.8), (4, True, 46.55), (8, True, 60.67), (4, False, 52.02)],
)
def test_peaks_of_one_h100_are_near(samples: int, compiled: bool, measured_gib: float) -> None:
    """Measured by `python -m benchmarks.runtime.gpu --only plan`, without what the allocator
    loses."""
    value = {
        "device": next(name for name, kind in DEVICES.items() if not kind.is_host),
        "model": {"preset": "llama3.2-1b", "vocab_size": 128256},
        "data": {"sequence_length": 4096},
        "train": {
            "batch_size": 16,
            "microbatch_size": samples,
            "precision": "bf16",
            "compile": compiled,
        },
    }
    found = cost("H100-80", Layout(), 1, value).peak_bytes / GIB
    assert measured_gib < found < 1.07 * measured_gib


def small(**layout: Any) -> dict[str, Any]:
    return {
        "device": "cpu",
        "model": {"preset": "tiny", "vocab_size": 512},
        "data": {"sequence_length": 64},
        "layout": {"workers": 2} | layout,
        "train": {"batch_size": 8, "microbatch_size": 2},
    }


def test_ranks_of_cp_sum_their_gradients() -> None:
    found = cost("cpu", Layout(cp=2), 2, small(cp=2))
    replicas = cost("cpu", Layout(dp_replicate=2), 2, small())
    assert found.parts["gradients"] == pytest.approx(replicas.parts["gradients"])


def test_zero_2_sums_after_each_microbatch_or_once() -> None:
    layout = Layout(dp_shard=2)
    each = cost("cpu", layout, 2, small(dp_shard=2, zero=2))
    once = cost("cpu", layout, 2, small(dp_shard=2, zero=2, zero2_reduce="step"))
    assert each.parts["gradients"] == pytest.approx(4 * once.parts["gradients"])
