"""What a process may use of its machine, with control groups of both versions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from holdfast.checkpoint.memory.arena import Arena
from holdfast.config.sections.checkpoint import CheckpointConfig
from holdfast.doctor.checks import run_checks
from holdfast.elastic.node.mover_supervisor import make_peer_settings
from holdfast.errors import HoldfastError
from holdfast.machine import limits
from holdfast.machine.limits import available_memory, usable_cores, usable_memory

GIB = 2**30
TOTAL, AVAILABLE = 64 * GIB, 48 * GIB
MEMINFO = {
    "MemTotal": TOTAL,
    "MemFree": 8 * GIB,
    "MemAvailable": AVAILABLE,
    "Buffers": GIB,
    "Cached": 39 * GIB,
    "Active": GIB,
    "Inactive": GIB,
    "Shmem": 0,
    "Slab": 0,
}
NONE_V1 = 2**63 - 4096
"""Version 1 writes this where there is no limit."""


class FakeMachine:
    """A folder that stands for `/`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.put("proc/meminfo", "\n".join(f"{k}: {v // 1024} kB" for k, v in MEMINFO.items()))

    def put(self, name: str, text: object) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")

    def belongs_to(self, *groups: str) -> None:
        self.put("proc/self/cgroup", "\n".join(groups))

    def found(self) -> tuple[int, int, int]:
        return usable_cores(), usable_memory(), available_memory()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeMachine:
    monkeypatch.setattr(limits, "_ROOT", tmp_path)
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path / "proc"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    return FakeMachine(tmp_path)


def test_without_control_groups_the_machine_counts(machine: FakeMachine) -> None:
    assert machine.found() == (16, TOTAL, AVAILABLE)
    machine.belongs_to("4:memory:/a/b", "3:cpu,cpuacct:/a", "0::/c")  # and no such folder
    assert machine.found() == (16, TOTAL, AVAILABLE)


def test_version_2(machine: FakeMachine) -> None:
    machine.belongs_to("0::/")
    machine.put("sys/fs/cgroup/cpu.max", "150000 100000")
    machine.put("sys/fs/cgroup/memory.max", 8 * GIB)
    machine.put("sys/fs/cgroup/memory.current", 3 * GIB)
    assert machine.found() == (2, 8 * GIB, 5 * GIB)
    machine.put("sys/fs/cgroup/cpu.max", "max 100000")
    machine.put("sys/fs/cgroup/memory.max", "max")
    assert machine.found() == (16, TOTAL, AVAILABLE)


def test_version_1(machine: FakeMachine) -> None:
    machine.belongs_to("7:cpuacct:/x", "4:memory:/job", "3:cpu,cpuacct:/job", "1:name=systemd:/y")
    machine.put("sys/fs/cgroup/cpu/job/cpu.cfs_quota_us", 300000)
    machine.put("sys/fs/cgroup/cpu/job/cpu.cfs_period_us", 100000)
    machine.put("sys/fs/cgroup/memory/job/memory.limit_in_bytes", 8 * GIB)
    machine.put("sys/fs/cgroup/memory/job/memory.usage_in_bytes", 3 * GIB)
    assert machine.found() == (3, 8 * GIB, 5 * GIB)
    machine.put("sys/fs/cgroup/cpu/job/cpu.cfs_quota_us", -1)
    machine.put("sys/fs/cgroup/memory/job/memory.limit_in_bytes", NONE_V1)
    assert machine.found() == (16, TOTAL, AVAILABLE)


@pytest.mark.parametrize("tightest", ["", "a", "a/b"])
def test_the_tightest_group_above_counts(machine: FakeMachine, tightest: str) -> None:
    machine.belongs_to("0::/a/b")
    for group in ("", "a", "a/b"):
        folder = f"sys/fs/cgroup/{group}"
        machine.put(f"{folder}/cpu.max", f"{4 if group == tightest else 9}00000 100000")
        machine.put(f"{folder}/memory.max", (4 if group == tightest else 9) * GIB)
        machine.put(f"{folder}/memory.current", GIB)
    machine.put("sys/fs/cgroup/other/memory.max", 1)
    assert machine.found() == (4, 4 * GIB, 3 * GIB)


def test_both_versions_at_once(machine: FakeMachine) -> None:
    machine.belongs_to("4:memory:/a/b", "0::/c")
    machine.put("sys/fs/cgroup/c/cpu.max", "500000 100000")
    machine.put("sys/fs/cgroup/memory/a/memory.limit_in_bytes", 5000)
    machine.put("sys/fs/cgroup/memory/a/memory.usage_in_bytes", 1000)
    assert machine.found() == (5, 5000, 4000)
    machine.put("sys/fs/cgroup/c/memory.max", 7)
    machine.put("sys/fs/cgroup/c/memory.current", 5)
    assert machine.found() == (5, 7, 2)


def test_a_container_may_see_its_own_group_as_the_topmost(machine: FakeMachine) -> None:
    machine.belongs_to("4:memory:/docker/0123", "0::/../elsewhere")
    machine.put("sys/fs/cgroup/memory/memory.limit_in_bytes", 6 * GIB)
    machine.put("sys/fs/cgroup/memory/memory.usage_in_bytes", GIB)
    machine.put("sys/fs/cgroup/cpu.max", "200000 100000")
    assert machine.found() == (2, 6 * GIB, 5 * GIB)


@pytest.mark.parametrize(
    ("line", "names", "stat"),
    [
        (
            "0::/",
            ("memory.max", "memory.current"),
            "anon 9\nfile 99\ninactive_file {inactive}\nactive_file {active}",
        ),
        (
            "4:memory:/",
            ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
            "inactive_file 1\nactive_file 1\n"
            "total_inactive_file {inactive}\ntotal_active_file {active}",
        ),
    ],
)
def test_page_cache_that_can_go_is_available(
    machine: FakeMachine, line: str, names: tuple[str, str], stat: str
) -> None:
    machine.belongs_to(line)
    for name, size in zip(names, (8 * GIB, 7 * GIB), strict=True):
        machine.put(f"sys/fs/cgroup/{name}", size)
    assert available_memory() == GIB
    where = Path("sys/fs/cgroup", names[0]).parent / "memory.stat"
    machine.put(str(where), stat.format(inactive=3 * GIB, active=GIB))
    assert available_memory() == 5 * GIB
    machine.put(str(where), stat.format(inactive=70 * GIB, active=GIB))
    assert available_memory() == 8 * GIB, "never more than the limit"


def test_a_group_beyond_its_limit_has_nothing_left(machine: FakeMachine) -> None:
    machine.belongs_to("0::/")
    machine.put("sys/fs/cgroup/memory.max", GIB)
    machine.put("sys/fs/cgroup/memory.current", 2 * GIB)
    assert available_memory() == 0


def test_agent_mover_and_doctor_agree(machine: FakeMachine) -> None:
    machine.belongs_to("0::/pod/container")
    machine.put("sys/fs/cgroup/pod/cpu.max", "250000 100000")
    machine.put("sys/fs/cgroup/pod/memory.max", 8 * GIB)
    machine.put("sys/fs/cgroup/pod/memory.current", 7 * GIB)
    machine.put("sys/fs/cgroup/pod/memory.stat", f"inactive_file {3 * GIB}")
    doctor = {check.name: check.found for check in run_checks(machine.root)}
    assert doctor["cores"] == "3 usable"
    assert doctor["memory"] == "8.0 GiB"
    agent = make_peer_settings(CheckpointConfig(), "node")
    assert agent is not None
    assert agent.room == 2 * GIB, "half of what is available"
    with pytest.raises(HoldfastError, match=rf"no memory .*: {4 * GIB} are available"):
        Arena.create("mover", 1, 4 * GIB)


def test_cores_are_those_this_process_may_use() -> None:
    one = min(os.sched_getaffinity(0))
    code = "from holdfast.machine.limits import usable_cores; print(usable_cores())"
    done = subprocess.run(
        ["taskset", "-c", str(one), sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.strip() == "1"
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)


def test_this_machine() -> None:
    assert usable_memory() > 2**28
    assert 0 < available_memory() <= usable_memory()
