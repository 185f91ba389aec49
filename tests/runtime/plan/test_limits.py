"""What a process may use of its machine, with control groups of both versions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from holdfast.checkpoint.memory.arena import Arena
from holdfast.config.run import RunConfig
from holdfast.config.sections.checkpoint import CheckpointConfig
from holdfast.core.sharding.adapters import lora_parameters
from holdfast.core.sharding.parameters import count_parameters
from holdfast.core.sharding.state_table import ITEM_BYTES, local_boxes, state_table
from holdfast.doctor.checks import run_checks
from holdfast.elastic.node.launch_specs import plan_topology
from holdfast.elastic.node.mover_supervisor import make_peer_settings
from holdfast.errors import HoldfastError
from holdfast.machine import limits
from holdfast.machine.limits import available_memory, usable_cores, usable_memory
from holdfast.plan.memory.memory_use import RankContents, contents_by_rank

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


# --- what every rank holds ------------------------------------------------------------------------
SHAPE = {"preset": None, "dim": 32, "heads": 4, "kv_heads": 2, "ffn_dim": 48, "vocab_size": 64}
SIX_BLOCKS = SHAPE | {"layers": 6}


def held(precision: str = "fp32", **layout: Any) -> tuple[RunConfig, tuple[RankContents, ...]]:
    config = RunConfig.model_validate(
        {
            "data": {"sequence_length": 16},
            "model": SIX_BLOCKS | layout.pop("model", {}),
            "train": {"batch_size": 32, "microbatch_size": 2, "precision": precision},
            "layout": layout,
        }
    )
    return config, contents_by_rank(config, plan_topology(config, 1, "here"))


@pytest.mark.parametrize(
    ("precision", "zero", "whole", "cut"),
    [
        # (parameters, gradients, moments) per element that tp and pp leave, and of it per
        # element that dp_shard leaves (Rajbhandari et al. 2020, section 5)
        ("fp32", 1, (4, 4, 0), (0, 0, 8)),
        ("fp32", 2, (4, 0, 0), (4, 4, 8)),
        ("fp32", 3, (0, 0, 0), (4, 4, 8)),
        ("bf16", 1, (2, 4, 0), (4, 0, 8)),
        ("bf16", 2, (2, 0, 0), (4, 4, 8)),
        ("bf16", 3, (0, 0, 0), (4, 4, 8)),
        ("float64", 3, (0, 0, 0), (8, 8, 16)),
    ],
)
def test_bytes_by_zero(
    precision: str, zero: int, whole: tuple[int, ...], cut: tuple[int, ...]
) -> None:
    config, ranks = held(precision, workers=4, dp_shard=2, zero=zero)
    psi = count_parameters(config.model)
    expected = [w * psi + c * psi // 2 for w, c in zip(whole, cut, strict=True)]
    for each in ranks:
        assert [each.held.parameters, each.held.gradients, each.held.moments] == expected
        assert each.held.total == sum(expected)


@pytest.mark.parametrize(("precision", "bytes_each"), [("fp32", (4, 4, 8)), ("bf16", (6, 4, 8))])
def test_without_dp_shard_the_mode_does_not_matter(
    precision: str, bytes_each: tuple[int, ...]
) -> None:
    for zero in (1, 2, 3):
        config, (each,) = held(precision, workers=1, zero=zero)
        psi = count_parameters(config.model)
        found = (each.held.parameters, each.held.gradients, each.held.moments)
        assert found == tuple(psi * size for size in bytes_each)


def test_moments_are_those_of_the_state_table() -> None:
    """On any layout: what a checkpoint holds of a rank's moments, byte for byte."""
    layout = {"workers": 9, "replicas": [{"pp": 2, "tp": 2}, {"pp": 3}, {"dp_shard": 2}]}
    config, ranks = held(**layout, model={"vocab_size": 61, "tied_embeddings": True})
    topology = plan_topology(config, 1, "here")
    table = [s for s in state_table(config.model) if s.name.startswith("optimizer.")]
    for each in ranks:
        boxes = local_boxes(topology, tuple(table), each.rank)
        sizes = (b.size * ITEM_BYTES[s.dtype] for b, s in zip(boxes, table, strict=True))
        assert each.held.moments == sum(sizes)


def test_shares_of_the_model() -> None:
    _, ranks = held(workers=4, pp=2, tp=2, stages=[4, 2])
    assert [(each.at.pp, each.at.tp) for each in ranks] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [each.blocks for each in ranks] == [(0, 1, 2, 3), (0, 1, 2, 3), (4, 5), (4, 5)]
    assert [each.embedding for each in ranks] == [True, True, False, False]
    assert [each.head for each in ranks] == [False, False, True, True]
    assert [each.heads for each in ranks] == [(0, 2), (2, 2)] * 2
    assert [each.vocabulary for each in ranks] == [(0, 32), (32, 32)] * 2


def test_key_value_heads_fewer_than_tp_are_held_by_several() -> None:
    _, ranks = held(workers=4, tp=4)
    assert [each.kv_heads for each in ranks] == [(0, 1), (0, 1), (1, 1), (1, 1)]


def test_a_vocabulary_not_known_yet_counts_as_nothing() -> None:
    config, ranks = held(workers=4, tp=2, pp=2, model={"vocab_size": 0})
    for each in ranks:
        assert each.vocabulary == (0, 0)
        assert 0 < each.held.moments < 8 * count_parameters(config.model)


def test_adapters_have_the_base_on_each_rank_and_nothing_else_of_it() -> None:
    for precision, item in (("fp32", 4), ("bf16", 2)):
        config, _ = held(precision, workers=1)
        lora = config.lora.model_copy(update={"rank": 2})
        adapted = config.model_copy(update={"lora": lora})
        (rank,) = contents_by_rank(adapted, plan_topology(adapted, 1, "here"))
        trained = sum(row.size for row in lora_parameters(adapted.model, lora))
        copies = 4 if precision == "fp32" else 2 + 4
        base = item * count_parameters(config.model)
        assert rank.held.parameters == base + copies * trained
        assert (rank.held.gradients, rank.held.moments) == (4 * trained, 8 * trained)
