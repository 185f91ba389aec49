"""The device table: what the rest of the code asks instead of a device's name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

import holdfast
from holdfast.config.run import RunConfig
from holdfast.core.device_progress import GroupProgress, find_late_devices
from holdfast.core.devices import DEVICES, device_kind, is_accelerator

SOURCES = Path(holdfast.__file__).parent
TABLE_FILES = {"core/devices.py", "config/run.py", "machine/accelerators.py", "machine/hardware.py"}
HERE = {
    "launch/node/devices.py": "what torch was built for",
    "config/loading/explain.py": "what a person may have meant by another word",
    "doctor/checks.py": "names of packages, whose versions are compared",
    "machine/installed_versions.py": "the same",
    "launch/owners/kubernetes/pod.py": "which cards a pod asks Kubernetes for",
}


def test_the_run_file_offers_the_kinds_of_the_table() -> None:
    kind = RunConfig.model_fields["device"].annotation
    offered = set(get_args(kind))
    assert offered == {"auto", *DEVICES}


def test_no_other_file_asks_for_an_accelerator_by_name() -> None:
    name = re.compile(r"""["'](cuda|nccl|xpu|xccl|mps)["']""")
    found = {
        str(path.relative_to(SOURCES))
        for path in SOURCES.rglob("*.py")
        if name.search(path.read_text("utf-8"))
    }
    assert found - TABLE_FILES - set(HERE) <= {
        "parallel/comm/devices.py",
        "parallel/torch_compat.py",
    }


def test_a_device_is_named_with_its_index_where_a_process_chooses_one() -> None:
    assert [DEVICES[name].device(2) for name in ("cpu", "cuda", "xpu", "mps")] == [
        *("cpu", "cuda:2", "xpu:2", "mps")
    ]
    assert device_kind("cuda:1") is device_kind("cuda") is DEVICES["cuda"]
    assert [is_accelerator(name) for name in ("auto", "cpu", "cuda")] == [False, False, True]


@pytest.mark.parametrize("name", ["tpu", "xla"])
def test_a_tpu_is_refused_with_one_sentence(name: str) -> None:
    with pytest.raises(ValueError, match="does not train on TPUs"):
        RunConfig.model_validate({"device": name})


def test_no_setting_lets_the_backend_end_a_process() -> None:
    settings = DEVICES["cuda"].settings
    for variable in (
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "TORCH_NCCL_ENABLE_MONITORING",
        "TORCH_NCCL_DUMP_ON_TIMEOUT",
        "TORCH_NCCL_RETHROW_CUDA_ERRORS",
        "NCCL_NVLS_ENABLE",
    ):
        assert settings[variable] == "0"
    assert not DEVICES["cpu"].settings


# --- the device that the rest waits for, by counts of exchanges -----------------------------------
def at(group: str, reached: int, done: int) -> GroupProgress:
    return GroupProgress(group, 9, reached, done)


def test_a_device_that_waits_in_another_exchange_is_not_late() -> None:
    """Rank 2 waits for rank 1 in a group of two, so it does not come to that of all."""
    found = find_late_devices(
        {
            0: [at("all", 4, 3)],
            1: [at("all", 3, 3), at("two", 5, 5)],
            2: [at("all", 3, 3), at("two", 6, 5)],
        }
    )
    assert found == {1: at("all", 3, 3)}


def test_nothing_is_known_of_ranks_that_tell_nothing_or_the_same() -> None:
    assert find_late_devices({}) == find_late_devices({0: [], 1: []}) == {}
    assert find_late_devices({0: [at("all", 4, 3)], 1: [at("all", 4, 3)]}) == {}
    assert find_late_devices({0: [at("one", 4, 3)], 1: [at("other", 2, 2)]}) == {}


def test_counts_travel_as_rows() -> None:
    rows = [at("all", 4, 3).to_json()]
    assert tuple(map(GroupProgress.from_json, rows)) == (at("all", 4, 3),)
