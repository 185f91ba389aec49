"""The devices of a node and its processes: by place on the node, not by rank in the run. How many
idle processes a node keeps."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from holdfast.config.run import RunConfig
from holdfast.core.devices import DEVICES
from holdfast.elastic.node.launch_specs import standby_count
from holdfast.elastic.node.process_manager import DevicePlaces
from holdfast.elastic.node.worker_process import STANDBY_RANK, WorkerProcess
from holdfast.elastic.protocol.worker_spec import WorkerSpec

LOG = cast(Any, SimpleNamespace(send_to=lambda path: None))
SPEC = WorkerSpec({}, None, 1, 0, 1, "", "", "", "", None, 0, "cuda", "")


def process(rank: int, device: str = "", *, prepared: bool = True) -> WorkerProcess:
    return WorkerProcess(LOG, rank, device=device, acked_command=0 if prepared else -1)


def test_ranks_of_a_second_node_get_its_devices_from_the_first_on() -> None:
    places, processes = DevicePlaces(DEVICES["cuda"], 2), list[WorkerProcess]()
    for rank in (6, 7):
        spec = places.place(replace(SPEC, rank=rank), None, processes)
        processes.append(process(rank, spec.device))
    assert [each.device for each in processes] == ["cuda:0", "cuda:1"]


def test_a_standby_takes_the_device_of_the_worker_that_it_replaces() -> None:
    places = DevicePlaces(DEVICES["cuda"], 3)
    lost, standby = process(1, "cuda:1"), process(STANDBY_RANK)
    processes = [process(0, "cuda:0"), lost, process(2, "cuda:2"), standby]
    lost.on_exited(-9)
    assert places.choose_standby([standby], processes) is standby
    assert places.place(SPEC, standby, processes).device == "cuda:1"


def test_a_process_keeps_its_device() -> None:
    places = DevicePlaces(DEVICES["cuda"], 2)
    stays = process(0, "cuda:1")
    assert places.place(SPEC, stays, [stays]).device == "cuda:1"


def test_a_standby_on_a_device_in_use_gets_no_rank() -> None:
    places = DevicePlaces(DEVICES["cuda"], 2)
    idle, works = process(STANDBY_RANK, "cuda:0"), process(0, "cuda:0")
    assert places.choose_standby([idle], [idle, works]) is None
    free = process(STANDBY_RANK, prepared=False)
    assert places.choose_standby([idle, free], [idle, free, works]) is free
    assert DevicePlaces(DEVICES["cpu"], 2).choose_standby([idle], [idle, works]) is idle


def test_a_device_that_no_living_process_holds_comes_first() -> None:
    places = DevicePlaces(DEVICES["cuda"], 2)
    idle = process(STANDBY_RANK, "cuda:0")
    assert places.place(SPEC, None, [idle]).device == "cuda:1"
    assert DevicePlaces(DEVICES["cpu"], 2).place(SPEC, None, [idle]).device == "cpu"


def test_a_standby_gets_a_device_at_once_if_there_is_one_for_each() -> None:
    places, standbys = DevicePlaces(DEVICES["cuda"], 2), list[WorkerProcess]()
    works = [process(0, "cuda:0"), process(1, "cuda:1")]
    assert places.place_standby(SPEC, 1, works).device == "cuda", "it may replace either worker"
    for _ in range(2):
        spec = places.place_standby(SPEC, 2, [*works, *standbys])
        standbys.append(process(STANDBY_RANK, spec.device))
    assert [each.device for each in standbys] == ["cuda:0", "cuda:1"]
    works[1].on_exited(-9)
    assert places.choose_standby(standbys, [*works, *standbys]) is standbys[1]
    assert DevicePlaces(DEVICES["cuda"], 1).place_standby(SPEC, 1, works).device == "cuda:0"
    assert DevicePlaces(DEVICES["cpu"], 1).place_standby(SPEC, 1, []).device == "cpu"


@pytest.mark.parametrize(
    ("device", "workers", "standbys", "kept"),
    [
        ("cpu", 1, "auto", 0),
        ("cpu", 2, "auto", 1),
        ("cuda", 1, "auto", 1),  # a new process needs seconds there
        ("cuda", 1, 0, 0),
        ("cpu", 1, 2, 2),
    ],
)
def test_standbys_by_device_and_workers(
    device: str, workers: int, standbys: Any, kept: int
) -> None:
    value = {"device": device, "layout": {"workers": workers}, "cluster": {"standbys": standbys}}
    assert standby_count(RunConfig.model_validate(value)) == kept
