"""Remedies of messages about what a machine has: packages, credentials, accelerators, places.

A package is hidden from the import, and then shown again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from math import inf
from re import Match
from types import ModuleType
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import ipc, parquet

from holdfast.checkpoint.mover.messages import RestorePoint
from holdfast.checkpoint.restore.catalog import list_commits, step_of
from holdfast.cli.train import plan_for_machine
from holdfast.config.loading.load import load_config
from holdfast.config.sections.layout import LayoutConfig
from holdfast.core.devices import device_kind
from holdfast.core.transports import SlowTransport
from holdfast.data.read.columnar_sources import _open_huggingface
from holdfast.elastic.coordinator.generation_planner import _refuse_empty_branch
from holdfast.elastic.worker.transport_watch import TransportWatch
from holdfast.layout import Layout, Topology, place_layout
from holdfast.machine.accelerators import Accelerator
from holdfast.machine.hardware import HardwareInfo
from holdfast.plan.placing.interface import NodePlaces
from holdfast.plan.placing.planner import plan_layout
from holdfast.plan.placing.replica_shapes import AllowedShapes
from holdfast.plan.placing.searched import SearchedPlanner
from holdfast.plan.placing.topology_cost import TopologyCost
from holdfast.report.trackers.registry import require_tracker
from holdfast.training.memory.float8 import apply_float8
from holdfast.wire.store.location import open_store
from holdfast.wire.store.run_store import FolderStore
from tests.runtime.cli.remedies.lab import Case, Lab, Mend, case, fixed
from tests.runtime.cli.remedies.of_checkpoints import branch_at
from tests.runtime.cli.remedies.of_datasets import begin_chat, prepare_chat
from tests.runtime.cli.remedies.of_others import values
from tests.runtime.cli.remedies.of_runs import begin_run
from tests.runtime.cli.remedies.of_sources import TEXT, read
from tests.runtime.cli.remedies.of_stores import environment, probe
from tests.runtime.plan.test_planner import made
from tests.runtime.plan.test_searched_planner import fleet_of
from tests.support import s3
from tests.support.chat import CHATML


# --- packages -------------------------------------------------------------------------------
@contextmanager
def packages(lab: Lab) -> Iterator[None]:
    """Inside, the packages of the lab's `hidden` are not installed."""
    with pytest.MonkeyPatch.context() as patch:
        for name, found in lab.settings["packages"].items():
            if found is not sys:
                patch.setitem(sys.modules, name, found)
        yield


def stand_in(name: str, **members: Any) -> ModuleType:
    """A package that is not installed here."""
    module: Any = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None, origin=__file__)
    vars(module).update(members)
    found: ModuleType = module
    return found


def package(
    site: str,
    name: str,
    begin: Callable[[Lab], object],
    attempt: Any,
    remedy: str,
    shown: Any = sys,
) -> Case:
    """A package that is missing, and installed as the remedy says. shown: what is imported then;
    `sys`: the package that is here."""

    def start(lab: Lab) -> None:
        begin(lab)
        lab.settings["packages"] = {name: None}

    def try_it(lab: Lab) -> None:
        given = Lab(lab.folder, lab.trained, dict(lab.settings))
        with packages(lab):
            given.settings.pop("packages")
            attempt(given)

    return case(site, start, try_it, remedy, fixed(packages={name: shown}))


@dataclass(frozen=True)
class Recipe:
    """What torchao's configuration is asked for."""

    emulate: bool = False

    @staticmethod
    def from_recipe_name(name: str) -> Recipe:
        return Recipe()


def load_dataset(name: str, subset: str | None, split: str) -> list[str]:
    """What `datasets` does, which knows one set."""
    if (name, subset) != ("mine", "part"):
        raise ValueError(f"Unknown set {name}")
    return [split]


DATASETS = stand_in("datasets", load_dataset=load_dataset)


def load_set(lab: Lab) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if "shown" in lab.settings:
            patch.setitem(sys.modules, "datasets", lab.settings["shown"])
        assert _open_huggingface(lab.settings["set"], "train", "x") == ["train"]


def begin_file(kind: str, name: str) -> Callable[[Lab], None]:
    def begin(lab: Lab) -> None:
        path = lab.write(name, "")
        table = pa.table({"text": [TEXT]})
        if kind == "parquet":
            parquet.write_table(table, path)
        elif kind == "huggingface":
            with ipc.new_file(str(path), table.schema) as writer:
                writer.write_table(table)
            path = path.parent
        else:
            with pa.output_stream(str(path), compression="zstd") as stream:
                stream.write((json.dumps({"text": TEXT}) + "\n").encode())
        lab.settings.update(kind=kind, path=str(path))

    return begin


def track(lab: Lab) -> None:
    require_tracker("wandb")


def open_bucket(lab: Lab) -> None:
    with environment(lab):
        open_store("s3://runs/a?endpoint=https://127.0.0.1:1")


# --- credentials ----------------------------------------------------------------------------
def begin_without_credentials(lab: Lab) -> None:
    """The metadata service of a cloud, which is asked for them, cannot be reached."""
    nowhere = {"HTTP_PROXY": "http://127.0.0.1:1", "NO_PROXY": "127.0.0.1"}
    lab.settings.update(location=s3.location(s3.server(), retries=0), environment=nowhere)


# --- machines -------------------------------------------------------------------------------
def plan_on_old_device(lab: Lab) -> None:
    """On a machine with an older device, as its driver tells it."""
    tool = lab.write("tools/nvidia-smi", "#!/bin/sh\necho 'H100, 8.0'\n")
    tool.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(tool.parent), prepend=":")
        plan(lab)


def plan(lab: Lab) -> None:
    """On a machine with two accelerators."""
    settings = dict(lab.settings)
    build, kind = settings.pop("torch_computes_on", ""), settings.pop("kind", "cuda")
    names = settings.pop("names", ("H100", "H100"))
    two = tuple(Accelerator(at, name, 80 << 30, kind) for at, name in enumerate(names))
    machine = HardwareInfo("a", "Linux", 8, 64 << 30, 32 << 30, two, build)
    words = [f"{key}={value}" for key, value in settings.items()]
    plan_for_machine(load_config(None, words), machine)


def plan_places(lab: Lab) -> None:
    """What the leader does with the nodes that are there."""
    layout = {"workers": 0, **lab.settings["layout"]}
    config = made(lab.settings.get("microbatches", 8), layout)
    nodes = [NodePlaces(f"node{number}", 1) for number in range(lab.settings["nodes"])]
    if "device_bytes" in lab.settings:
        fleet = fleet_of(memory=lab.settings["device_bytes"])
        SearchedPlanner(fleet, limit_s=inf)(config, nodes, 1)
        return
    plan_layout(config, nodes, 1, memory=lab.settings.get("memory"))


def peak_alone() -> float:
    """Bytes that a device needs to hold all."""
    config, node = made(8, {"workers": 0}), [NodePlaces("node0", 1)]
    topology = plan_layout(config, node, 1).topology
    return TopologyCost(config, fleet_of(), node).cost(topology).peak_bytes


def bytes_of(**layout: int) -> int:
    """Bytes of one of the workers of a replica."""
    shapes = AllowedShapes(made(8, layout))
    return shapes.needed_bytes(shapes.configured[0])


def places(site: str, remedy: str, mend: Mend, nodes: int = 1, **given: Any) -> Case:
    start = values(nodes=nodes, **{"layout": {}, **given})
    return case(f"plan/placing/{site}", start, plan_places, remedy, mend)


def wait_for_nodes(lab: Lab, found: Match[str]) -> None:
    lab.settings["nodes"] += int((found.groups() or (1,))[0])


def begin_empty_branch(lab: Lab) -> None:
    begin_run(lab)
    branch_at(lab, "new")
    lab.settings["at"] = "new"
    for path in (lab.folder / "new/commits").iterdir():
        path.unlink()


def begin_generation(lab: Lab) -> None:
    """With the newest state that the mover finds in the branch."""
    commits = list_commits(FolderStore(lab.folder / lab.settings["at"]))
    key = commits[0] if commits else None
    newest = RestorePoint(key, step_of(key) if key else 0, 1, {}, ())
    _refuse_empty_branch(newest, str(lab.folder / "run"))


def branch_again(lab: Lab, found: Match[str]) -> None:
    branch_at(lab, "again")
    lab.settings["at"] = "again"


COLUMNS, PLANNER = "data/read/columnar_sources.py: ", "planner.py: "
DATA = r"pip install 'holdfast\[data\]'"


class OverTcp(TransportWatch):
    """A backend that says that it uses TCP."""

    def find_slow(self, topology: Topology) -> SlowTransport:
        return SlowTransport("data between nodes goes over TCP", "unset NCCL_NET=Socket")


def connect_over_tcp(lab: Lab) -> None:
    layout = LayoutConfig(allow_tcp=lab.settings["allow_tcp"])
    topology = place_layout(Layout(), 1, ("node",))
    OverTcp(device_kind("cpu")).refuse_slow(topology, layout)


CASES: list[Case] = [
    package(
        "data/read/chat_render.py: chat templates need jinja2 … or newer, and …",
        "jinja2",
        begin_chat(CHATML + "{# not compiled before #}"),
        prepare_chat,
        r"pip install 'holdfast\[chat\]'",
    ),
    package(
        COLUMNS + "a Hugging Face source needs the datasets package",
        "datasets",
        values(set="mine:part"),
        load_set,
        r"pip install 'holdfast\[hf\]', or name a folder of its files",
        DATASETS,
    ),
    case(
        COLUMNS + "…, split …, cannot be loaded: …",
        values(set="mine/part", shown=DATASETS),
        load_set,
        r"name a dataset as name or name:subset",
        fixed(set="mine:part"),
    ),
    package(
        COLUMNS + "reading Arrow needs pyarrow",
        "pyarrow",
        begin_file("huggingface", "set/train-0.arrow"),
        read,
        DATA,
    ),
    package(
        COLUMNS + "reading Parquet needs pyarrow",
        "pyarrow",
        begin_file("parquet", "in/a.parquet"),
        read,
        DATA,
    ),
    package(
        "data/read/containers.py: reading .zst needs pyarrow",
        "pyarrow",
        begin_file("jsonl", "in/a.jsonl.zst"),
        read,
        DATA,
    ),
    package(
        "report/trackers/registry.py: the tracker … needs …, which is not installed",
        "wandb",
        values(),
        track,
        r"pip install 'holdfast\[wandb\]'",
        stand_in("wandb"),
    ),
    package(
        "wire/store/location.py: this needs the package …",
        "obstore",
        values(),
        open_bucket,
        r"install it with: pip install 'holdfast\[bucket\]'",
    ),
    case(
        "wire/store/bucket_errors.py: no credentials were found",
        begin_without_credentials,
        probe,
        r"set them in the environment \(AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY for S3\), or "
        r"name a file of them with \?credentials=<path>",
        fixed(environment=s3.CREDENTIALS),
    ),
    case(
        "launch/node/devices.py: … is here, but torch was built for the CPU alone",
        values(device="cuda", torch_computes_on="CPU"),
        plan,
        r"install a torch that was built for it, or use device=(cpu)",
        lambda lab, found: lab.settings.update(device=found[1]),
    ),
    case(
        "launch/node/devices.py: … is here, but torch was built for the CPU alone",
        values(device="cuda", torch_computes_on="CPU"),
        plan,
        r"install a torch that was built for it, or use device=cpu",
        fixed(torch_computes_on="CUDA 13.0"),
    ),
    case(
        "launch/node/devices.py: device … needs a torch for …, and this one is for …",
        values(device="xpu", torch_computes_on="CUDA 13.0", kind="xpu"),
        plan,
        r"install another torch, or use device=(cpu)",
        lambda lab, found: lab.settings.update(device=found[1]),
    ),
    case(
        "launch/node/devices.py: device … needs a torch for …, and this one is for …",
        values(device="xpu", torch_computes_on="CUDA 13.0", kind="xpu"),
        plan,
        r"install another torch, or use device=cpu",
        fixed(torch_computes_on="XPU 20250101"),
    ),
    case(
        "launch/node/devices.py: train.precision fp8 needs an NVIDIA device of compute "
        "capability 8.9 or more, and device is …",
        lambda lab: lab.settings.update({"device": "cpu", "train.precision": "fp8"}),
        plan,
        r"use train\.precision=(bf16)",
        lambda lab, found: lab.settings.update({"train.precision": found[1]}),
    ),
    case(
        "launch/node/devices.py: train.precision fp8 needs compute capability …, and … has …",
        lambda lab: lab.settings.update({"device": "cuda", "train.precision": "fp8"}),
        plan_on_old_device,
        r"use train\.precision=(bf16)",
        lambda lab, found: lab.settings.update({"train.precision": found[1]}),
    ),
    package(
        "launch/node/devices.py: train.precision fp8 needs the package torchao, which is not "
        "installed",
        "torchao",
        lambda lab: lab.settings.update({"device": "cuda", "train.precision": "fp8"}),
        plan,
        r"install it with pip install 'holdfast\[fp8\]', or use train\.precision=bf16",
        stand_in("torchao"),
    ),
    package(
        "training/memory/float8.py: train.precision fp8 needs the package torchao, and the "
        "import ended: …",
        "torchao.float8",
        values(),
        lambda lab: apply_float8([], is_emulated=True),
        r"install it on this node with pip install 'holdfast\[fp8\]'",
        stand_in("torchao.float8", Float8LinearConfig=Recipe, convert_to_float8_training=None),
    ),
    case(
        "launch/node/devices.py: the workers' devices differ (…), so they give unlike bits",
        lambda lab: lab.settings.update(
            {"device": "cuda", "layout.workers": 2, "names": ("H100", "A100")}
        ),
        plan,
        r"choose like ones by CUDA_VISIBLE_DEVICES, or use (train\.deterministic)=(false)",
        lambda lab, found: lab.settings.update({found[1]: found[2]}),
    ),
    case(
        "launch/node/devices.py: layout.workers is …, but a run on … has one worker",
        lambda lab: lab.settings.update({"device": "mps", "layout.workers": 2, "kind": "mps"}),
        plan,
        r"use (1), or device=cpu",
        lambda lab, found: lab.settings.update({"layout.workers": found[1]}),
    ),
    case(
        "elastic/worker/transport_watch.py: (refuse_slow)",
        values(allow_tcp=False),
        connect_over_tcp,
        r"unset NCCL_NET=Socket, or use layout\.allow_tcp=(true)",
        fixed(allow_tcp=True),
    ),
    case(
        "elastic/coordinator/generation_planner.py: this run continues …, and no checkpoint is "
        "left",
        begin_empty_branch,
        begin_generation,
        r"make another branch: holdfast branch RUN --at STEP --to NEW",
        branch_again,
    ),
    places(PLANNER + "there is no place for a worker", r"wait for a node", wait_for_nodes, 0),
    places(
        PLANNER + "a step has … microbatches, and a pipeline under … needs more",
        r"use layout\.schedule=(gpipe)",
        lambda lab, found: lab.settings.update(layout={"pp": 4, "schedule": found[1]}),
        4,
        layout={"pp": 4},
        microbatches=2,
        memory=bytes_of(pp=4),
    ),
    places(
        PLANNER + "the smallest replica… needs … workers, there are places for …",
        r"wait for (\d+) more, or allow more memory",
        wait_for_nodes,
        layout={"dp_shard": 4},
        memory=bytes_of(dp_shard=2),
    ),
    places(
        "searched.py: no layout of … workers fits: the nearest lacks … GB on a device",
        r"wait for more nodes, or use train\.recompute=full",
        fixed(nodes=4),
        device_bytes=0.8 * peak_alone(),
    ),
    places(
        "replica_shapes.py: one of the … workers of a replica holds … bytes of parameters, "
        "gradients and moments, but … are allowed",
        r"raise dp_shard, tp or pp, or allow more memory",
        fixed(layout={"dp_shard": 2}),
        2,
        memory=bytes_of(dp_shard=2),
    ),
]
