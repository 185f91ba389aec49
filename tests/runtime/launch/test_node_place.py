"""A node finds its rack and zone in the environment, and the run file's words come first."""

from __future__ import annotations

import json
import os
import platform
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from holdfast.checkpoint.save.single_writer import TensorSource, write_single
from holdfast.config.loading.identity import config_hash, earlier_hash
from holdfast.config.loading.load import LoadedConfig, load_config, resolve_config
from holdfast.config.run import RunConfig
from holdfast.errors import ConfigError, RunFolderError
from holdfast.launch.node.addresses import device_of, find_address, plan_addresses, source_address
from holdfast.launch.node.fleet import Fleet
from holdfast.launch.node.node_place import PLACE_VARIABLE, ZONE_VARIABLE, by_place
from holdfast.launch.run import run_folder
from holdfast.launch.run.holder import HolderWatch
from holdfast.launch.run.run_folder import refuse_alone, refuse_unlike_node, run_hash
from holdfast.launch.start.facts import Facts
from holdfast.machine.hardware import detect_hardware
from holdfast.wire.store.run_store import FolderStore
from holdfast.wire.term import create_term
from tests.support.ranks import wait_until


def loaded(*overrides: str) -> LoadedConfig:
    return load_config(None, [f"folder={Path.cwd()}/none", *overrides])


def with_place(before: LoadedConfig, environ: Mapping[str, str]) -> LoadedConfig:
    return before.with_values(by_place(before, Facts(detect_hardware(), environ)))


def rack_and_zone(found: LoadedConfig) -> tuple[str, str]:
    machine = found.config.checkpoint.machine
    return machine.rack, machine.zone


SLURM = {
    "SLURM_TOPOLOGY_ADDR": "spine.leaf0.n1",
    "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node",
}


def test_slurm_names_the_switch_and_the_owner_the_rest() -> None:
    assert rack_and_zone(with_place(loaded(), SLURM)) == ("leaf0", "")
    told = SLURM | {PLACE_VARIABLE: "zone=us-east-1a, power=p2"}
    assert rack_and_zone(with_place(loaded(), told)) == ("leaf0", "us-east-1a")
    assert with_place(loaded(), told).config.checkpoint.machine.power == "p2"
    assert rack_and_zone(with_place(loaded(), {ZONE_VARIABLE: "z"})) == ("", "z")
    assert rack_and_zone(with_place(loaded(), {ZONE_VARIABLE: ""})) == ("", "")


def test_the_run_file_comes_before_the_environment() -> None:
    found = with_place(loaded("checkpoint.machine.rack=mine"), SLURM)
    assert rack_and_zone(found) == ("mine", "")


def test_a_site_is_the_zone_of_its_nodes() -> None:
    sites = "cluster.sites=[{name: paris, nodes: [p*], mbit_s: 100}, {name: rome, mbit_s: 50}]"
    assert rack_and_zone(with_place(loaded(sites, "cluster.node=p7"), {})) == ("", "paris")
    assert rack_and_zone(with_place(loaded(sites, "cluster.node=r1"), {})) == ("", "")
    told = {PLACE_VARIABLE: "zone=eu-west-3a"}
    assert rack_and_zone(with_place(loaded(sites, "cluster.node=p7"), told)) == ("", "eu-west-3a")


def test_a_slurm_without_switches_names_no_rack() -> None:
    flat = {"SLURM_TOPOLOGY_ADDR": "n1", "SLURM_TOPOLOGY_ADDR_PATTERN": "node"}
    before = loaded()
    assert with_place(before, flat) is before


@pytest.mark.parametrize("text", ["rck=1", "rack=", "rack", "name=x"])
def test_words_that_name_no_place_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="names no place") as refused:
        with_place(loaded(), {PLACE_VARIABLE: text})
    assert refused.value.where == PLACE_VARIABLE


# --- which processes of a node are found, so that a fault hits the one that it names --------------
TEMPLATE = "import os, time\nos.fork() and os.fork()\ntime.sleep(600)"
AGENT = f"""\
import ctypes, subprocess, sys, time
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # whoever loses his parent becomes a child of this one
command = [sys.executable, "-c", {TEMPLATE!r}, "holdfast.elastic.worker.fork_server"]
subprocess.Popen(command, start_new_session=True)
time.sleep(600)
"""


def test_workers_are_found_also_when_their_template_has_just_ended(tmp_path: Path) -> None:
    """It is a zombie until the agent looks, and they are the agent's own children."""
    fleet = Fleet(tmp_path, [sys.executable, "-c", AGENT], [])
    try:
        fleet.start("a")
        wait_until(lambda: len(fleet.worker_pids("a")) == 2, what="two workers")
        template, workers = fleet.child_pid("a", "template"), fleet.worker_pids("a")
        assert template is not None
        assert template not in workers
        os.kill(template, signal.SIGKILL)
        wait_until(lambda: fleet.child_pid("a", "template") is None, what="the fork server's end")
        assert Path(f"/proc/{template}").exists(), "as a zombie"
        assert sorted(fleet.worker_pids("a")) == sorted(workers)
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: fleet.worker_pids("a") == [], what="their end")
    finally:
        for pid in reversed(fleet.process_tree("a")):
            os.kill(pid, signal.SIGKILL)
        fleet.kill_all()


# --- which address a node listens on where the run file leaves it to the machine ------------------
def config(folder: Path, *overrides: str) -> RunConfig:
    return resolve_config(None, "test", [f"folder={folder}", *overrides]).config


def test_a_run_of_one_node_listens_on_loopback_only(tmp_path: Path) -> None:
    planned, own = plan_addresses(config(tmp_path), FolderStore(tmp_path))
    assert (own.host, planned.cluster.interface) == ("127.0.0.1", "127.0.0.1")
    assert (planned.cluster.gloo_interface, planned.checkpoint.peer_interface) == (
        "lo",
        "127.0.0.1",
    )


def test_a_node_takes_the_address_on_the_route_to_the_leader(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    create_term(store, 1, "127.0.0.1:4000", "one")  # on this machine: the route is loopback
    planned, own = plan_addresses(config(tmp_path, "cluster.node=two"), store)
    assert own.host == planned.cluster.interface == planned.checkpoint.peer_interface == "127.0.0.1"
    assert own.reason == "the route to node one"
    assert planned.cluster.gloo_interface == device_of("127.0.0.1")


def test_a_leader_on_another_machines_loopback_is_no_route_and_is_refused(tmp_path: Path) -> None:
    """It lives: its journal grows. (Another machine's own loopback leads nowhere but there.)"""
    store = FolderStore(tmp_path)
    term = {"term": 1, "node": "one", "machine": "elsewhere", "boot": "b", "pid": 7}
    store.create("terms/0000000001.json", json.dumps(term | {"address": "127.0.0.1:4"}).encode())
    assert find_address(store, tmp_path).reason != "the route to node one"
    stopping = threading.Event()

    def live() -> None:
        while not stopping.wait(0.05):
            store.append("terms/0000000001-alive", b".")

    holder = threading.Thread(target=live)
    holder.start()
    try:
        with pytest.raises(RunFolderError, match=r"127\.0\.0\.1:4, which only its own machine"):
            refuse_alone(tmp_path, HolderWatch(tmp_path, quiet_s=60.0))
    finally:
        stopping.set()
        holder.join()


def test_a_first_node_takes_an_address_of_this_machine(tmp_path: Path) -> None:
    own = find_address(FolderStore(tmp_path), tmp_path)
    assert own.host in [a.address for known in psutil.net_if_addrs().values() for a in known]
    assert own.device in psutil.net_if_addrs()
    others = [name for name in psutil.net_if_addrs() if name != device_of("127.0.0.1")]
    up = [name for name in others if psutil.net_if_stats()[name].isup]
    assert own.host != "127.0.0.1" or not any(source_address("198.51.100.1") for _ in up)


def test_the_devices_of_the_run_file_decide(tmp_path: Path) -> None:
    loopback = device_of("127.0.0.1")
    asked = config(tmp_path, "cluster.node=one", f"cluster.gloo_interface={loopback}")
    planned, own = plan_addresses(asked, FolderStore(tmp_path))
    assert (planned.cluster.interface, own.device) == ("127.0.0.1", loopback)
    with pytest.raises(RunFolderError, match=r"cluster\.gloo_interface.*no network device wan7"):
        plan_addresses(
            config(tmp_path, "cluster.node=one", "cluster.gloo_interface=wan7"),
            FolderStore(tmp_path),
        )


@pytest.mark.parametrize("host", ["0.0.0.0", "'::'"])
def test_every_address_is_none_that_others_can_connect_to(tmp_path: Path, host: str) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.interface.*use auto, or one address"):
        config(tmp_path, f"cluster.interface={host}")


def test_a_peer_elsewhere_is_told_an_address_that_it_reaches(tmp_path: Path) -> None:
    route = source_address("198.51.100.1")
    peers = "checkpoint.peers=[{name: far, address: '198.51.100.1:7600'}]"
    planned, _ = plan_addresses(config(tmp_path, peers), FolderStore(tmp_path))
    assert planned.cluster.interface == "127.0.0.1", platform.node()
    assert planned.checkpoint.peer_interface == (route or "127.0.0.1")


# --- a second node whose run file differs ---------------------------------------------------------
RUN = "folder: r\ndevice: cpu\ndata: {folder: d}\nlayout: {workers: 2}\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder in which nodes are at work."""
    stored = {"config": resolve_config(RUN, "run.yaml", []).config.model_dump(mode="json")}
    (tmp_path / "resolved.json").write_text(json.dumps(stored))
    monkeypatch.setattr(run_folder, "read_resolved", lambda folder: stored)
    return tmp_path


class Watch(HolderWatch):
    """A watch that has its verdict."""

    def __init__(self, folder: Path, verdict: bool | None = True) -> None:
        super().__init__(folder)
        self._verdict = verdict

    def look(self) -> bool | None:
        return self._verdict


def test_both_values_are_named(folder: Path) -> None:
    other = resolve_config(RUN, "run.yaml", ["layout.reduction=fast"])
    with pytest.raises(
        RunFolderError, match=r"layout\.reduction is 'fast' here and 'tree' on the nodes at work"
    ) as found:
        refuse_unlike_node(folder, other, Watch(folder))
    assert found.value.exit_code == 2


def test_a_nodes_own_keys_may_differ(folder: Path) -> None:
    refuse_unlike_node(folder, resolve_config(RUN, "run.yaml", ["cluster.node=b"]), Watch(folder))


@pytest.mark.parametrize("verdict", [False, None])
def test_a_run_without_a_trainer_may_continue_otherwise(folder: Path, verdict: bool | None) -> None:
    other = resolve_config(RUN, "run.yaml", ["layout.reduction=fast"])
    refuse_unlike_node(folder, other, Watch(folder, verdict))


# --- the identity of a run of which only a bucket is left -----------------------------------------
def config_with(bucket: Path, kind: str = "constant") -> RunConfig:
    settings = (f"train.schedule.kind={kind}", f"checkpoint.bucket=file://{bucket}")
    return resolve_config(None, "run.yaml", settings).config


def test_a_bucket_of_an_older_version_gives_its_run_the_identity(tmp_path: Path) -> None:
    bucket, new = tmp_path / "bucket", tmp_path / "new"
    bucket.mkdir()
    config = config_with(bucket)
    assert run_hash(new, config) == config_hash(config), "an empty bucket"
    tensor = TensorSource("a", "F32", (1,), [bytes(4)])
    identity = earlier_hash(config)
    assert identity is not None
    write_single(FolderStore(bucket), 0, 5, [tensor], {}, config_hash=identity)
    assert run_hash(new, config) == identity
    other = config.model_copy(update={"train": config.train.model_copy(update={"steps": 7})})
    assert run_hash(new, other) == config_hash(other), "no run of this bucket"
    cosine = config_with(bucket, "cosine")
    assert run_hash(new, cosine) == config_hash(cosine)
