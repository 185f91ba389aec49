"""Which address a node listens on where the run file leaves it to the machine."""

from __future__ import annotations

import json
import platform
import threading
from pathlib import Path

import psutil
import pytest

from holdfast.config.loading.load import resolve_config
from holdfast.config.run import RunConfig
from holdfast.errors import ConfigError, RunFolderError
from holdfast.launch.node.addresses import device_of, find_address, plan_addresses, source_address
from holdfast.launch.run.holder import HolderWatch
from holdfast.launch.run.run_folder import refuse_alone
from holdfast.wire.store.run_store import FolderStore
from holdfast.wire.term import create_term


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
