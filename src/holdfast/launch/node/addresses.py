"""The addresses at which this node listens, where the run file leaves them to the machine (`auto`).

A run of one node listens on loopback: nothing else has to reach it. A node that other nodes may
join listens on one address of this machine that they reach, the first of these that there is:

1. the source address of the route to the node that leads the run;
2. the same to the server of the run folder's file system, if it is a network file system;
3. the same to the default gateway;
4. an address of a network device that is up.

Without any of these (a machine without a network) it is loopback, and no other machine can join.
No packet is sent to find the address: the kernel looks up the route when a UDP socket connects.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from holdfast.config.run import RunConfig
from holdfast.config.sections.cluster import AUTO, LOOPBACK_DEVICE, ClusterConfig
from holdfast.config.sections.peers import is_loopback
from holdfast.errors import ConfigError, RunFolderError
from holdfast.wire.store.location import find_endpoint
from holdfast.wire.store.run_location import bucket_of_run
from holdfast.wire.store.run_store import RunStore
from holdfast.wire.term import is_host_of, newest_term, this_host

LOOPBACK = "127.0.0.1"
ANY_PUBLIC_HOSTS = ("198.51.100.1", "2001:db8::1")
"""Addresses reserved for documentation (RFC 5737, RFC 3849): only the default route leads there."""
UNUSED_PORT = 9
NETWORK_FILE_SYSTEMS = ("nfs", "nfs4", "ceph", "lustre", "cifs", "smb3", "glusterfs")


@dataclass(frozen=True)
class NodeAddress:
    """host: an address of this machine. device: the network device that has it. reason: why this
    one was chosen, for people."""

    host: str
    device: str
    reason: str


def plan_addresses(config: RunConfig, store: RunStore) -> tuple[RunConfig, NodeAddress]:
    """Fill in the addresses that the run file leaves to this machine.

    Returns the configuration, and the address that this node's agent listens on.
    Raises RunFolderError if the run file names a network device that has no address.
    """
    cluster, checkpoint = config.cluster, config.checkpoint
    if cluster.interface != AUTO:
        device = device_of(cluster.interface) or LOOPBACK_DEVICE
        own = NodeAddress(cluster.interface, device, "cluster.interface names it")
    elif not cluster.node:
        own = NodeAddress(LOOPBACK, LOOPBACK_DEVICE, "the run has one node")
    elif cluster.gloo_interface != AUTO:
        own = _address_of_device(cluster.gloo_interface)
    else:
        own = find_address(store, Path(config.run_folder))
    hosts = (_host(peer.address) for peer in checkpoint.peers)
    routes = (source_address(host) for host in hosts if not is_loopback(host))
    planned_cluster = {
        "interface": own.host,
        "gloo_interface": _unless_auto(cluster.gloo_interface, own.device),
    }
    to_peer = next((route for route in routes if route), None) if is_loopback(own.host) else None
    planned_checkpoint = {
        "peer_interface": _unless_auto(checkpoint.peer_interface, to_peer or own.host)
    }
    sections = {
        "cluster": cluster.model_copy(update=planned_cluster),
        "checkpoint": checkpoint.model_copy(update=planned_checkpoint),
    }
    return config.model_copy(update=sections), own


def refuse_foreign_address(cluster: ClusterConfig) -> None:
    """Raises ConfigError if a key names no network device or address of this machine."""
    devices = psutil.net_if_addrs()
    own = {
        _plain(known.address): f"{_plain(known.address)} ({device})"
        for device, addresses in devices.items()
        for known in addresses
        if known.family in (socket.AF_INET, socket.AF_INET6)
    }
    host, device = cluster.interface, cluster.gloo_interface
    key, value, choices = "cluster.gloo_interface", device, sorted(devices)
    if device in (AUTO, *devices):
        if host in (AUTO, *own) or is_loopback(host):
            return
        with suppress(OSError):
            found = {str(each[4][0]) for each in socket.getaddrinfo(host, None)}
            if found & {*own, "0.0.0.0", "::"} or any(map(is_loopback, found)):
                return
        key, value, choices = "cluster.interface", host, list(own.values())
    what = "network device" if key == "cluster.gloo_interface" else "address"
    raise ConfigError(
        f"this machine has no {what} {value}",
        where=key,
        remedy=f"use auto, or one of {', '.join(choices)}",
    )


def uses_tls(config: RunConfig) -> bool:
    """Return True if the processes of a run speak TLS. config: with its addresses planned."""
    cluster, checkpoint = config.cluster, config.checkpoint
    if cluster.tls != AUTO:
        return bool(cluster.tls)
    peers = [_host(peer.address) for peer in checkpoint.peers]
    return not all(map(is_loopback, [cluster.host, checkpoint.peer_host, *peers]))


def find_address(store: RunStore, run_folder: Path) -> NodeAddress:
    """Return the address of this machine that the other nodes of a run reach most likely."""
    for target, reason in _targets(store, run_folder):
        host = source_address(target)
        if host is not None and (device := device_of(host)):
            return NodeAddress(host, device, reason)
    for device, host in _addresses_of_devices():
        return NodeAddress(host, device, f"the first network device that is up is {device}")
    return NodeAddress(
        LOOPBACK, device_of(LOOPBACK), "this machine has no network, so no other one can join"
    )


def source_address(target: str) -> str | None:
    """Return this machine's address on the route to a host; None without a route to it."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            target, UNUSED_PORT, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind) as asking:
            asking.connect(address)
            return str(asking.getsockname()[0])
    except OSError:
        return None


def device_of(host: str) -> str:
    """Return the network device that has this address; "" if none has it."""
    for device, addresses in psutil.net_if_addrs().items():
        if any(_plain(known.address) == _plain(host) for known in addresses):
            return device
    return ""


def is_loopback_elsewhere(holder: dict[str, Any]) -> bool:
    """Return True if a term's holder listens where only processes of another host reach it."""
    host = _host(str(holder.get("address", "")))
    return is_loopback(host) and not is_host_of(this_host(), holder)


def _host(address: str) -> str:
    """Return the host of "host:port" or "[host]:port"; "" for another text."""
    return address.rpartition(":")[0].strip("[]")


def _targets(store: RunStore, run_folder: Path) -> Iterator[tuple[str, str]]:
    """Yield hosts on whose route other nodes are, with the reason."""
    holder: dict[str, Any] | None = newest_term(store)[1]
    if holder is not None and not is_loopback_elsewhere(holder):
        yield _host(str(holder.get("address", ""))), f"the route to node {holder.get('node')}"
    if server := _endpoint_host(run_folder) or _file_server(run_folder):
        yield server, f"the route to {server}, which serves the run store"
    for host in ANY_PUBLIC_HOSTS:
        yield host, "the default route"


def _endpoint_host(folder: Path) -> str:
    """Return the host of the endpoint of the run's bucket; "" for a cloud's own, or a folder."""
    address = bucket_of_run(folder)
    return (urlsplit(find_endpoint(address)).hostname or "") if address else ""


def _file_server(folder: Path) -> str | None:
    """Return the host that serves a folder's file system; None for a local file system."""
    path = os.path.realpath(folder)
    mounts = [
        mount
        for mount in psutil.disk_partitions(all=True)
        if path == mount.mountpoint or path.startswith(mount.mountpoint.rstrip("/") + "/")
    ]
    nearest = max(mounts, key=lambda mount: len(mount.mountpoint), default=None)
    if nearest is None or nearest.fstype not in NETWORK_FILE_SYSTEMS:
        return None
    if nearest.device.startswith("//"):  # CIFS: //server/share
        return nearest.device[2:].partition("/")[0]
    return nearest.device.rpartition(":/")[0].split(",")[0].strip("[]") or None


def _addresses_of_devices() -> Iterator[tuple[str, str]]:
    """Yield (device, address) of the devices that are up, IPv4 first, without loopback."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    for family in (socket.AF_INET, socket.AF_INET6):
        for device, addresses in psutil.net_if_addrs().items():
            for known in addresses:
                host = _plain(known.address)
                if device not in up or known.family != family or is_loopback(host):
                    continue
                if not ipaddress.ip_address(host).is_link_local:
                    yield device, host


def _address_of_device(device: str) -> NodeAddress:
    """Return the address of a network device that the run file names. Raises RunFolderError."""
    known = psutil.net_if_addrs().get(device, [])
    for family in (socket.AF_INET, socket.AF_INET6):
        for address in known:
            if address.family == family:
                return NodeAddress(
                    _plain(address.address), device, "cluster.gloo_interface names its device"
                )
    raise RunFolderError(
        f"this machine has no network device {device} with an address",
        where="cluster.gloo_interface",
        remedy="use one of " + ", ".join(sorted(psutil.net_if_addrs())) + ", or auto",
    )


def _unless_auto(value: str, planned: str) -> str:
    return planned if value == AUTO else value


def _plain(address: str) -> str:
    """Return an IPv6 address without its zone ("fe80::1%eth0")."""
    return address.partition("%")[0]
