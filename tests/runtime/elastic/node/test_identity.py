"""What of a machine decides the bits that it computes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.config.loading.load import resolve_config
from holdfast.elastic.coordinator.run_controller import JoinGate
from holdfast.elastic.node.identity import (
    code_digest,
    find_identity,
    processor_identity,
    torch_build,
)
from holdfast.elastic.protocol.coordinator_messages import AgentFacts, JoinRequest
from holdfast.machine.accelerators import Accelerator
from holdfast.machine.hardware import detect_hardware
from holdfast.policy.membership.node_identity import NodeIdentity
from holdfast.policy.membership.state import NodeStage
from tests.support.ranks import RankContext, ranks

RUN = "folder: r\ndevice: cpu\ndata: {folder: d}\nlayout: {workers: 2}\n"


def _identity(*overrides: str) -> NodeIdentity:
    return find_identity(resolve_config(RUN, "run.yaml", list(overrides)).config, "beef", {})


def _request(name: str, identity: NodeIdentity) -> JoinRequest:
    return JoinRequest(name, "m", 1, AgentFacts(identity=identity), 0, NodeStage.IDLE)


def test_the_code_counts_wherever_it_is_installed(tmp_path: Path) -> None:
    for root in ("one", "two"):
        (tmp_path / root / "room").mkdir(parents=True)
        (tmp_path / root / "room" / "a.py").write_text("x = 1\n")
    one, two = (code_digest(tmp_path / root) for root in ("one", "two"))
    assert one == two
    (tmp_path / "two" / "room" / "a.py").write_text("x = 2\n")
    assert code_digest(tmp_path / "two") != one


def test_vector_units_and_presets(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    flags = "model name : x\nflags\t\t: fpu avx2 fma sse4_2 avx512f hypervisor\n"
    info.write_text(f"vendor_id\t: AuthenticAMD\n{flags}")
    found = processor_identity({"MKL_CBWR": "SSE4_2", "HOME": "/root"}, info)
    units = {"vector units": "avx2 avx512f fma sse4_2", "vendor": "AuthenticAMD"}
    assert found == units | {"MKL_CBWR": "SSE4_2"}
    info.write_text(f"vendor_id\t: GenuineIntel\n{flags}")
    assert processor_identity({}, info) == units | {"vendor": "GenuineIntel"}
    assert processor_identity({}, tmp_path / "none") == {"vector units": "unknown"}


def test_torch_is_known_by_its_build_without_an_import() -> None:
    from importlib.metadata import version

    assert torch_build().startswith(f"{version('torch')} (build ")


def test_the_devices_of_a_run_count(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = (Accelerator(0, "NVIDIA A100", 40 << 30), Accelerator(0, "GPU", 8 << 30, "xpu"))
    machine = replace(detect_hardware(), accelerators=cards)
    monkeypatch.setattr("holdfast.elastic.node.identity.detect_hardware", lambda: machine)
    assert _identity("device=cuda").processor["devices"] == "NVIDIA A100"
    assert "devices" not in _identity().processor


@pytest.mark.parametrize(
    "override",
    ["layout.reduction=fast", "train.evaluate.every=7", "cluster.check_every_steps=1", "seed=5"],
)
def test_a_key_that_has_to_be_alike_is_refused_when_a_node_joins(override: str) -> None:
    key = override.partition("=")[0]
    said: list[str] = []
    gate = JoinGate("a", "warn", _identity, said.append)
    refusal = gate.refuse(_request("b", _identity(override)))
    assert refusal.startswith(f"{key} is {override.partition('=')[2]} on b and ")
    assert gate.refuse(_request("b", _identity(override))) == refusal
    assert said == [f"b may not join: {refusal}"]  # once


@pytest.mark.parametrize(
    "override",
    [
        "cluster.node=b",
        "cluster.places=1",
        "layout.workers=4",
        "cluster.metrics_port=9100",
        "checkpoint.keep_last=9",
        "data.processes=3",
    ],
)
def test_what_is_a_nodes_own_may_differ(override: str) -> None:
    gate = JoinGate("a", "require", _identity, pytest.fail)
    assert gate.refuse(_request("b", _identity(override))) == ""


def test_a_coordinator_admits_itself_and_older_agents() -> None:
    gate = JoinGate("a", "require", NodeIdentity, pytest.fail)
    other = NodeIdentity("x", "y", {}, {"vector units": "none"}, "z")
    assert gate.refuse(_request("a", other)) == ""
    assert gate.refuse(JoinRequest("b", "m", 1, AgentFacts(), 0, NodeStage.IDLE)) == ""


@ranks(2)
def test_the_reference_computation_gives_the_same_bits_in_every_process(rank: RankContext) -> None:
    from holdfast.elastic.worker.fork_server import compute_in_child, reference_checksum

    assert compute_in_child() == reference_checksum() != ""
    assert compute_in_child(lambda: str(1 // 0)) == ""
