"""Several workers on a device, before a start: places, memory, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from holdfast.cli.join import _own
from holdfast.config.loading.load import load_config
from holdfast.core.devices import DEVICES, run_device_kind
from holdfast.core.transports import NodeLinks
from holdfast.elastic.node.process_manager import DevicePlaces
from holdfast.errors import ConfigError, RunFolderError
from holdfast.launch.node.devices import default_places, refuse_devices
from holdfast.launch.run.auto_layout import by_microbatch_size
from holdfast.machine.accelerators import Accelerator
from holdfast.machine.hardware import detect_hardware
from holdfast.plan.auto.machines import here
from tests.runtime.elastic.node.test_device_places import SPEC, process

GIB = 2**30
RUN = """
data: {sources: [{kind: text, path: texts}], sequence_length: 1024}
model: {preset: small, vocab_size: 32000}
device: cuda
"""


def loaded(tmp_path: Path, *changes: str) -> Any:
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    (tmp_path / "texts").mkdir(exist_ok=True)
    return load_config(path, changes)


def machine(cards: int = 1) -> Any:
    found = tuple(Accelerator(i, "NVIDIA H100 80GB HBM3", 80 * GIB) for i in range(cards))
    return replace(detect_hardware(), accelerators=found, torch_computes_on="CUDA 13.0")


def test_workers_fill_the_devices_and_a_replacement_gets_the_free_half(tmp_path: Path) -> None:
    config = loaded(tmp_path, "cluster.workers_per_device=2").config
    assert default_places(config, machine(2))[0] == 4
    places, processes = DevicePlaces(run_device_kind(config), 4), list[Any]()
    for rank in range(4):
        spec = places.place(replace(SPEC, rank=rank), None, processes)
        processes.append(process(rank, spec.device))
    assert sorted(each.device for each in processes) == ["cuda:0", "cuda:0", "cuda:1", "cuda:1"]
    standby = process(-1, processes[0].device)
    assert places.choose_standby([standby], [*processes, standby]) is None
    processes[0].on_exited(-9)
    assert places.choose_standby([standby], [*processes, standby]) is standby


def test_a_device_divides_its_memory_and_its_speed(tmp_path: Path) -> None:
    sizes, kinds = [], []
    for changes in (("layout.workers=1",), ("cluster.workers_per_device=2", "layout.workers=2")):
        each = loaded(tmp_path, "train.microbatch_size=auto", "train.batch_size=4096", *changes)
        facts = cast(Any, type("Facts", (), {"hardware": machine(), "stored_config": {}})())
        sizes.append(by_microbatch_size(each, facts)["train.microbatch_size"][0])
        made = here(each.config, machine(), NodeLinks(), None)
        kinds.append(made.cluster.pools[0].device_type(made.devices))
        assert made.cluster.size == each.config.cluster.workers_per_device
    assert sizes[1] <= sizes[0] // 2
    assert kinds[1].found_bytes == kinds[0].found_bytes / 2
    assert kinds[1].peak("bf16") == kinds[0].peak("bf16") / 2


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            ["cluster.backend=nccl", "cluster.workers_per_device=2"],
            "backend nccl refuses two ranks",
        ),
        (["cluster.backend=xccl"], "cluster.backend xccl is not for device cuda"),
        (["device=cpu", "cluster.backend=nccl"], "whose library is gloo"),
        (["layout.workers=2"], "has 1 accelerators"),
        (["layout.workers=3", "cluster.workers_per_device=2"], "1 accelerators with 2 workers"),
        (["device=mps", "cluster.workers_per_device=2"], "a run on mps has one worker"),
    ],
)
def test_what_does_not_go_together_is_refused(
    tmp_path: Path, changes: list[str], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        refuse_devices(loaded(tmp_path, *changes), machine())
    assert "use " in str(caught.value)


def test_two_workers_on_a_card_exchange_over_gloo(tmp_path: Path) -> None:
    shared = loaded(tmp_path, "cluster.workers_per_device=2", "layout.workers=2")
    refuse_devices(shared, machine())
    assert run_device_kind(shared.config).backends == ("gloo",)
    alone = loaded(tmp_path, "cluster.backend=gloo").config
    assert run_device_kind(alone).is_staged
    assert run_device_kind(loaded(tmp_path, "device=cpu").config) == DEVICES["cpu"]


def test_a_node_that_joins_cannot_exchange_in_another_way() -> None:
    assert _own(["cluster.places=2"])
    with pytest.raises(RunFolderError, match="workers_per_device belongs to the run"):
        _own(["cluster.workers_per_device=2"])
