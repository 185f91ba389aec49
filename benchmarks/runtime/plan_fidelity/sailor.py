"""Sailor's public measurements as the planner takes them: models, profiles, plans and their truth.

Its files: `llm_info.json` (sizes of layers by model and tp), `profiles_tmp.json` (seconds by model,
device, microbatch, tp, layer), `gh200/MODEL/N*/plan_config_*.json` (one measured plan each).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.runtime.plan_fidelity.measured_times import MeasuredTimes, profile_of
from holdfast.errors import DataError
from holdfast.plan.cost.choice import Choice, ReplicaChoice
from holdfast.plan.cost.workload import Layer, StateBytes, Workload

FOLDER = Path(os.environ.get("HOLDFAST_DATA", "data")) / "measured" / "sailor"
DEVICE = "GH200-96"
SEQUENCE = 2048
_MODELS = MappingProxyType({"OPT-350": "OPT-350", "GPT-NEO": "GPT-Neo-2.7"})
_WIDTHS = MappingProxyType({"OPT-350": 1024, "GPT-NEO": 2560})

STATE = StateBytes(weights=4, gradients=4, optimizer=12)
"""Everything is in fp32. The optimizer has two moments, and temporary tensors in its update."""

DOUBTFUL: Mapping[str, str] = MappingProxyType(
    {
        "GPT-NEO N4_D4": "step = all-reduce, and it lists 26 layers of 34: another model's run",
        "OPT-350 N4_D4": "the all-reduce of GPT-NEO N4_D4 to the last digit",
        "GPT-NEO N2_D1": "one microbatch in all: a latency",
        "OPT-350 N1_D1_M4_G1": "one microbatch in all, and bound by launches",
        "OPT-350 N1_D1_M4_G32": "bound by launches",
    }
)
"""Plans whose step time is doubtful, and why."""

DOUBTFUL_MEMORY: Mapping[str, str] = MappingProxyType(
    {
        "GPT-NEO N4_D4": "another model's run",
        "GPT-NEO N8_D2": "28.5 GB, where the same stages take 37.3 to 37.5 GB in three other plans",
    }
)


@dataclass(frozen=True)
class Plan:
    """One measured plan. stages: numbers of layers. step_s: with `reduce_s` of all-reduce."""

    name: str
    model: str
    nodes: int
    replicas: int
    stages: tuple[int, ...]
    tp: int
    microbatch: int
    batch: int
    step_s: float
    reduce_s: float
    peak_bytes: float

    @property
    def microbatches(self) -> int:
        """Of one replica."""
        return self.batch // self.microbatch // self.replicas

    @property
    def layers(self) -> int:
        return sum(self.stages)

    @property
    def choice(self) -> Choice:
        """The layout. 1F1B, as Sailor runs it; with fewer microbatches than stages its order is
        that of GPipe."""
        pp = len(self.stages)
        blocks = list(self.stages)
        blocks[0] -= 1
        blocks[-1] -= 1
        stages = tuple(blocks) if pp > 1 else ()
        group = ReplicaChoice(
            self.replicas, pp, 1, 1, self.tp, stages, (DEVICE,), self.microbatches
        )
        schedule = "1f1b" if self.microbatches >= pp else "gpipe"
        return Choice((group,), self.microbatch, schedule, sequence_parallel=False)


@dataclass(frozen=True)
class Sailor:
    """The folder's content."""

    plans: tuple[Plan, ...]
    sizes: Mapping[str, Any]
    profiles: Mapping[str, Any]

    def workload(self, plan: Plan) -> Workload:
        """The model with as many layers as the plan lists, the head last."""
        by_tp = self.sizes[_MODELS[plan.model]]
        numbers = sorted(map(int, by_tp["1"]))
        kept = [*numbers[: plan.layers - 1], numbers[-1]]
        kinds = ["embedding", *["block"] * (len(kept) - 2), "head"]
        layers = [
            _layer(kind, _WIDTHS[plan.model], by_tp["1"][str(n)], by_tp["4"][str(n)])
            for kind, n in zip(kinds, kept, strict=True)
        ]
        return Workload(
            plan.model, tuple(layers), SEQUENCE, plan.batch, "fp32", 4.0, STATE, vocabulary=0
        )

    def times(self, plan: Plan, workload: Workload) -> MeasuredTimes:
        """The profile, with as many layers as the plan lists."""
        every = self.profiles[_MODELS[plan.model]]["GH-96"]
        number = len(workload.layers)
        times = {
            microbatch: {tp: _first(by_layer, number) for tp, by_layer in by_tp.items()}
            for microbatch, by_tp in every.items()
        }
        data = {"device": DEVICE, "sequence": SEQUENCE, "layers": number, "times": times}
        return profile_of(data, workload, "profiles_tmp.json")


def read_sailor(folder: Path = FOLDER) -> Sailor:
    """Raises DataError where the files are not."""
    plans = sorted(folder.glob("gh200/*/*/plan_config_*.json"))
    if not plans:
        raise DataError(
            "the measured plans are not there",
            where=str(folder),
            remedy="give the folder with --folder, or its data in HOLDFAST_DATA",
        )
    return Sailor(
        tuple(map(_plan, plans)),
        json.loads((folder / "llm_info.json").read_text("utf-8")),
        json.loads((folder / "profiles_tmp.json").read_text("utf-8")),
    )


def _plan(path: Path) -> Plan:
    data = json.loads(path.read_text("utf-8"))
    (pipeline,) = data["pipeline_list"]
    model = path.parts[-3]
    return Plan(
        f"{model} {path.stem.removeprefix('plan_config_')}",
        model,
        int(data["N"]),
        int(pipeline["dp"][0]),
        tuple(map(len, pipeline["layers_per_stage"])),
        int(pipeline["tmp_per_stage"][0][0][1]),
        int(data["mbs"]),
        int(data["gbs"]),
        float(data["real"]),
        float(data["red_grads"]),
        float(data["max_mem"]),
    )


def _layer(kind: str, width: int, one: Mapping[str, int], four: Mapping[str, int]) -> Layer:
    """A layer from its sizes with tp 1 and 4: a part that tp cuts, and a part that it does not."""
    cut, uncut = _parts(one["params_floats"], four["params_floats"])
    cut_kept, kept = _parts(one["act_mem_bytes"], four["act_mem_bytes"])
    return Layer(
        kind,
        width,
        table_parameters=round(cut),
        whole_parameters=round(uncut),
        whole_kept=kept / 4 / SEQUENCE,
        cut_kept=cut_kept / 4 / SEQUENCE,
    )


def _parts(one: float, four: float) -> tuple[float, float]:
    """(c, w) of one = c + w and four = c / 4 + w."""
    cut = max(0.0, (one - four) * 4 / 3)
    return cut, one - cut


def _first(by_layer: Mapping[str, Sequence[float]], number: int) -> dict[str, Sequence[float]]:
    """The first layers and the head, renumbered."""
    head = by_layer[str(max(map(int, by_layer)))]
    return {**{str(n): by_layer[str(n)] for n in range(number - 1)}, str(number - 1): head}
