"""A measured profile of layers in place of times from shapes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.runtime.plan_fidelity.measured_times import MeasuredTimes, load_profile

from holdfast.config.run import RunConfig
from holdfast.core.devices import DEVICES
from holdfast.errors import DataError
from holdfast.layout import Layout, place_layout
from holdfast.plan.cost.choice import Choice, ReplicaChoice
from holdfast.plan.cost.evaluate import Evaluator, Problem, StepCost
from holdfast.plan.cost.group_links import group_links
from holdfast.plan.cost.layer_times import Part
from holdfast.plan.cost.workload import Layer, PassTimes, Workload
from holdfast.plan.hardware.cluster import Cluster, NodePool
from holdfast.plan.hardware.devices import GIB, load_devices
from holdfast.plan.hardware.link import Link
from holdfast.plan.placing.interface import NodePlaces
from holdfast.plan.placing.topology_cost import Fleet, TopologyCost

LINK = Link(1e-5, 1e9)
CLUSTER = Cluster((NodePool("gh", 4, 4, "GH200-96", LINK, LINK),))
WORKLOAD = Workload(
    "toy",
    (
        Layer("embedding", 8, table_parameters=64),
        *(Layer("block", 8, whole_parameters=100),) * 4,
        Layer("head", 8, table_parameters=64),
    ),
    sequence=128,
    batch=16,
)


def profile(**other: Any) -> dict[str, Any]:
    """Of microbatches of 1 and 4 samples; a block takes 1 and 2 s for one sample."""
    layers = {
        samples: {
            "0": [0.1 * seconds, 0.0, 0.5],
            **{str(n): [seconds, 2 * seconds, 0.25] for n in range(1, 5)},
            "5": [0.2 * seconds, 0.4 * seconds, 0.5],
        }
        for samples, seconds in (("1", 1.0), ("4", 2.5))
    }
    times = {samples: {"1": by_layer, "4": by_layer} for samples, by_layer in layers.items()}
    return {"device": "GH200-96", "sequence": 128, "layers": 6, "times": times, **other}


def load(folder: Path, content: Any) -> MeasuredTimes:
    path = folder / "profile.json"
    path.write_text(json.dumps(content))
    return load_profile(path, WORKLOAD)


def block_times(times: MeasuredTimes, part: Part, device: str = "GH200-96") -> PassTimes:
    group = ReplicaChoice(1, 1, 1, 1, 1, (), ("gh",), 1)
    links = group_links(CLUSTER, group, 0, 1)
    return times.of(WORKLOAD.layers[1], part, load_devices()[device], links)


def test_times_between_two_microbatches_are_interpolated(tmp_path: Path) -> None:
    times = load(tmp_path, profile())
    assert block_times(times, Part(128, 128)).forward == pytest.approx(1.0)
    assert block_times(times, Part(2 * 128, 128)).forward == pytest.approx(1.5)
    assert block_times(times, Part(4 * 128, 128)).backward == pytest.approx(5.0)


def test_full_recomputation_repeats_the_forward(tmp_path: Path) -> None:
    found = block_times(load(tmp_path, profile()), Part(128, 128, recompute="full"))
    assert found.again == found.forward


def test_layers_that_are_alike_have_the_mean_of_their_times(tmp_path: Path) -> None:
    content = profile()
    content["times"]["1"]["1"]["1"] = [1.4, 2.0, 0.25]
    assert block_times(load(tmp_path, content), Part(128, 128)).forward == pytest.approx(1.1)


def test_the_evaluator_takes_a_profile(tmp_path: Path) -> None:
    problem = Problem(
        WORKLOAD, CLUSTER, load_devices(), load(tmp_path, profile()), hides_gradients=False
    )
    group = ReplicaChoice(2, 1, 1, 1, 4, (), ("gh",), 8)
    cost = Evaluator(problem).cost(Choice((group,), 1, sequence_parallel=False))
    passes = 8 * (4 * 3.0 + 0.1 + 0.6)
    assert cost.parts["update"] == pytest.approx(4 * 0.25 + 1.0)
    assert cost.step_s == pytest.approx(passes + 2.0 + cost.parts["gradients"])
    assert cost.parts["gradients"] > 0


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (Part(128, 128, tp=2), "no times with tp=2, only tp=1, 4; measure tp=2"),
        (Part(128, 128, cp=2), "no times with cp"),
        (Part(128, 128, ep=2), "no times with ep"),
        (Part(128, 128, recompute="selective"), "no times with selective recompute"),
        (Part(8 * 128, 128), "no times of a microbatch of 8 samples, only from 1 to 4"),
        (Part(64, 128), "no times of a microbatch of 0.5 samples, only from 1 to 4"),
    ],
)
def test_what_a_profile_does_not_hold_is_refused(tmp_path: Path, part: Part, message: str) -> None:
    times = load(tmp_path, profile())
    with pytest.raises(DataError, match=r"profile\.json: it has ") as refused:
        block_times(times, part)
    assert message in str(refused.value)
    assert "or leave the profile away" in str(refused.value)


def test_another_device_is_refused(tmp_path: Path) -> None:
    times = load(tmp_path, profile())
    with pytest.raises(DataError, match="no times of A100-80, only of GH200-96"):
        block_times(times, Part(128, 128), "A100-80")


def broken(at: str, value: Any) -> dict[str, Any]:
    """A profile with one of its rows replaced."""
    content = profile()
    row = content["times"]["4"]["1"]
    if value is None:
        del row[at]
    else:
        row[at] = value
    return content


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "it is no profile of layers"),
        ({"device": "GH200-96"}, "it is no profile of layers"),
        (profile(layers=5), "it has 5 layers, and the model has 6"),
        (profile(sequence=64), "it has 64 tokens of a sample, and the model has 128"),
        (broken("2", None), "times.4.1.2 is missing"),
        (broken("2", [1.0]), "times.4.1.2 is not three numbers"),
        (broken("2", [1.0, "x", 0]), "times.4.1.2 is not three numbers"),
        (broken("2", [1.0, -1, 0]), "times.4.1.2 has a negative time"),
    ],
)
def test_a_file_that_does_not_serve_is_refused(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(DataError, match=r"profile\.json: ") as refused:
        load(tmp_path, content)
    assert message in str(refused.value)
    assert "give a profile of this model in the form" in str(refused.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        load_profile(tmp_path / "absent.json", WORKLOAD)
    (tmp_path / "text.json").write_text("{")
    with pytest.raises(DataError, match="is not JSON"):
        load_profile(tmp_path / "text.json", WORKLOAD)


# --- what a run file says changes its cost --------------------------------------------------------
COSTS_LINK = Link(1e-4, 1e9)


def cost(device: str, layout: Layout, ranks: int, value: dict[str, Any]) -> StepCost:
    config = RunConfig.model_validate(value)
    pool = NodePool("here", 1, ranks, device, COSTS_LINK, COSTS_LINK)
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
