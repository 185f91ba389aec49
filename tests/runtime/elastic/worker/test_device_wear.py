"""Groups leave device memory behind, until another process takes the place."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from holdfast.elastic.worker.device_wear import DeviceWear
from holdfast.parallel.comm import devices

GIB = 2**30
CARD = torch.device("cuda:0")


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Bytes of a card of 80 GiB: all that is used, and what torch has of it."""
    found = {"all": 10 * GIB, "torch": 9 * GIB}
    module = SimpleNamespace(
        mem_get_info=lambda device: (80 * GIB - found["all"], 80 * GIB),
        memory_reserved=lambda device: found["torch"],
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    return found


def test_growth_next_to_the_tensors_wears_a_process(used: dict[str, int]) -> None:
    wear = DeviceWear()
    wear.read_memory(CARD)
    used.update({"all": 40 * GIB, "torch": 38 * GIB})  # the model has grown, and a group's 1 GiB
    wear.read_memory(CARD)
    assert devices.memory_outside_torch(CARD) == 2 * GIB
    assert not wear.is_worn(CARD, 0)
    used["all"] = int(43.5 * GIB)
    wear.read_memory(CARD)
    assert wear.is_worn(CARD, 0)
    assert not wear.is_worn(CARD, 1), "the ranks are not replaced at once"


def test_so_does_a_number_of_generations(used: dict[str, int]) -> None:
    wear = DeviceWear()
    wear.regroups = 32
    assert wear.is_worn(CARD, 0)
    assert not wear.is_worn(CARD, 1)
    wear.regroups = 36
    assert wear.is_worn(CARD, 1)
    assert not wear.is_worn(torch.device("cpu"), 0)


def test_a_cpus_memory_is_not_read() -> None:
    DeviceWear().read_memory(torch.device("cpu"))
