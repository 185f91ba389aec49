"""Remedies of messages about a preparation on Ray. A fake Ray stands for a cluster."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from re import Match

import pytest

from holdfast.cli import data
from holdfast.data.prepare.prepare import prepare_dataset
from holdfast.data.read.sources import Unit
from holdfast.data.stages import ray_pool
from holdfast.data.stages.ray_pool import RayPool
from holdfast.data.stages.ray_tasks import perform_rows, versions
from holdfast.data.stages.task_pool import error_from_json
from tests.runtime.cli.remedies.lab import Case, Lab, case, fixed
from tests.support.corpus import data_config, text_folder, text_source
from tests.support.fake_ray import write_fake_ray

P, T, C = "data/stages/ray_pool.py: ", "data/stages/ray_tasks.py: ", "cli/data.py: "
ADDRESS = r"name the address that ray start --head prints: --address HOST:PORT"


def begin(fault: str = "", address: str = "auto", seconds: float = 60) -> Callable[[Lab], None]:
    def start(lab: Lab) -> None:
        text_folder(lab.folder / "in", files=2, words=20)
        write_fake_ray(lab.folder / "packages")
        lab.settings.update(fault=fault, address=address, seconds=seconds)

    return start


def prepare(lab: Lab) -> None:
    config = data_config(lab.folder / "out", text_source(lab.folder / "in"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", lab.path("packages"))
        patch.setenv("FAKE_RAY", lab.settings["fault"])
        patch.setattr(ray_pool, "CONNECT_TIMEOUT_S", lab.settings["seconds"])
        pool = RayPool(lab.settings["address"])
        prepare_dataset(config, lambda text: None, pool=lambda processes: pool)


def begin_worker(lab: Lab) -> None:
    text_folder(lab.folder / "shared", files=1, words=20)
    lab.settings["versions"] = versions()


def perform(lab: Lab) -> None:
    """What a worker does on a machine of the cluster; the error is raised on the user's."""
    unit = Unit(0, 0, "text", ((lab.path("in/000.txt"), 0, 0),))
    task = {"do": "scan", "unit": unit.to_json(), "limit": 10**6, "out": "out"}
    rows = {"number": [0], "task": [json.dumps(task)], "lots": [b""]}
    done = perform_rows(rows, None, lab.settings["versions"])
    if done["error"][0]:
        raise error_from_json(json.loads(done["error"][0]))


def share(lab: Lab, found: Match[str]) -> None:
    shutil.copytree(lab.folder / "shared", lab.folder / "in")


def begin_versions(lab: Lab) -> None:
    begin_worker(lab)
    share(lab, Match)  # type: ignore[arg-type]
    lab.settings["versions"] = versions() | {"tokenizers": "0.1"}


def begin_command(**more: str) -> Callable[[Lab], None]:
    def start(lab: Lab) -> None:
        text_folder(lab.folder / "in", files=2, words=20)
        run = f"data: {{folder: out, sources: [{{kind: text, path: {lab.path('in')}}}]}}\n"
        lab.write("run.yaml", run)
        lab.settings["more"] = more

    return start


def prepare_command(lab: Lab) -> None:
    data.prepare(lab.folder / "run.yaml", **lab.settings["more"])


CASES: list[Case] = [
    case(
        P + "Ray or its data library cannot be imported here (…)",
        begin("absent"),
        prepare,
        r"install it with: pip install 'holdfast\[ray\]'",
        fixed(fault=""),
    ),
    case(
        P + "no Ray cluster can be used at … (…)",
        begin(address="127.0.0.1:1"),
        prepare,
        ADDRESS,
        fixed(address="auto"),
    ),
    case(
        P + "the Ray cluster at … does not answer within … s",
        begin("silent", seconds=0.01),
        prepare,
        ADDRESS,
        fixed(fault="", seconds=60),
    ),
    case(
        T + "the machine … of the Ray cluster has no …",
        begin_worker,
        perform,
        r"put the sources on a disk that all its machines share",
        share,
    ),
    case(
        T + "the machine … of the Ray cluster has …, and this one has other versions",
        begin_versions,
        perform,
        r"install there: python \S+, holdfast \S+, tokenizers \S+",
        lambda lab, found: lab.settings.update(versions=versions()),
    ),
    case(
        C + "… does not prepare data",
        begin_command(on="dask"),
        prepare_command,
        r"use --on local, or --on ray",
        fixed(more={"on": "local"}),
    ),
    case(
        C + "an address is for Ray alone",
        begin_command(address="10.0.0.1:6379"),
        prepare_command,
        r"add --on ray, or leave it out",
        fixed(more={}),
    ),
]
