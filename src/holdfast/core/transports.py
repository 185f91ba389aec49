"""What carries the data of a device's backend: NVLink, PCIe, shared memory, InfiniBand or TCP.

NCCL and RCCL tell it in a log alone. The lines here are those of NCCL 2.28 to 2.30:

    Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read
    Channel 00 : 0[0] -> 1[1] via SHM/direct/direct
    Channel 00/0 : 1[0] -> 0[0] [receive] via NET/IB/0/GDRDMA

The number in brackets is a card's index on its node, as `nvidia-smi` counts. Pure: a text and the
links of a node are the arguments.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

_CHANNEL = re.compile(
    r"Channel \d+(?:/\d+)? : \d+\[(\w+)\] -> \d+\[(\w+)\]"
    r"(?: \[(?:send|receive)\])? via (P2P|SHM|NET)(?:/([^/\n]+))?"
)
_SETTING = re.compile(r"\b(NCCL_\w+) set (?:by environment )?to (\S+)")
_NETWORKS = {"Socket": "TCP", "IB": "InfiniBand"}
_SHARED_MEMORY, _PCIE = "shared memory", "PCIe"
_SLOW_NETWORK = {"NCCL_NET": ("Socket",), "NCCL_IB_DISABLE": ("1",), "NCCL_IB_HCA": ()}
"""Settings that keep NCCL from a fast network, with the values that do; (): any value may."""
_SLOW_CARDS = {"NCCL_P2P_DISABLE": ("1",), "NCCL_P2P_LEVEL": ("LOC", "0")}


@dataclass(frozen=True)
class CardLink:
    """A fast link between two cards of a node, by their indices. name: "NVLink NV18", "xGMI"."""

    first: int
    second: int
    name: str


@dataclass(frozen=True)
class NetworkPort:
    """An active port of a card for InfiniBand, RoCE or EFA. rate: as the kernel says it."""

    device: str
    layer: str
    rate: str = ""

    def __str__(self) -> str:
        return f"{self.device} ({', '.join(part for part in (self.layer, self.rate) if part)})"


@dataclass(frozen=True)
class NodeLinks:
    """The fast links of a node."""

    cards: tuple[CardLink, ...] = ()
    ports: tuple[NetworkPort, ...] = ()

    def between(self, one: int, other: int) -> str:
        """Return the name of the link between two cards; "" if there is none."""
        pair = {one, other}
        return next((each.name for each in self.cards if {each.first, each.second} == pair), "")


@dataclass(frozen=True)
class Channel:
    """One way of the backend's data. cards: the indices of its two ends on their nodes; -1: not
    known. how: P2P, SHM or NET. network: of NET."""

    cards: tuple[int, int]
    how: str
    network: str = ""


@dataclass(frozen=True)
class SlowTransport:
    """Data that takes a slow way although a fast one is there. advice: what may be the reason."""

    sentence: str
    advice: str


def find_channels(log: str) -> frozenset[Channel]:
    """Return the ways that a backend's log names."""
    found = set()
    for one, other, how, network in _CHANNEL.findall(log):
        on_network = how == "NET"
        cards = (-1, -1) if on_network else (_card(one), _card(other))
        found.add(Channel(cards, how, network if on_network else ""))
    return frozenset(found)


def name_transports(channels: Iterable[Channel], links: NodeLinks) -> str:
    """Return what carries the data, for the journal: "NVLink and InfiniBand"; "" if nothing is
    known."""
    return " and ".join(sorted({_name(each, links) for each in channels}))


def find_slow_transport(
    log: str, links: NodeLinks, environment: Mapping[str, str], *, has_other_nodes: bool
) -> SlowTransport | None:
    """Return the way that is slow without need, if there is one.

    Args:
        log: of the backend.
        environment: of the process.
        has_other_nodes: ranks are on other nodes too, so that some data must use the network.
    """
    channels = find_channels(log)
    set_here = {**dict(_SETTING.findall(log)), **environment}
    for channel in sorted(channels, key=str):
        if channel.how == "SHM" and (link := links.between(*channel.cards)):
            one, other = sorted(channel.cards)
            return SlowTransport(
                f"data between the cards {one} and {other} goes through shared memory, though "
                f"{link} joins them",
                _advice_on_cards(log, set_here),
            )
    is_on_tcp = any(each.network == "Socket" for each in channels)
    if is_on_tcp and has_other_nodes and links.ports:
        return SlowTransport(
            f"data between nodes goes over TCP, though {links.ports[0]} is active here",
            _advice_on_network(log, set_here, links.ports),
        )
    if is_on_tcp and not has_other_nodes and links.cards:
        return SlowTransport(
            f"data between the cards goes over TCP, though {links.cards[0].name} joins them",
            _advice_on_cards(log, set_here),
        )
    return None


def _advice_on_cards(log: str, set_here: Mapping[str, str]) -> str:
    if harmful := _harmful(set_here, _SLOW_CARDS):
        return f"unset {harmful}"
    if "P2P is disabled between" in log:
        return "look at the cards, for NCCL says that peer access between them is disabled"
    return "look at what NCCL says in the worker's log"


def _advice_on_network(
    log: str, set_here: Mapping[str, str], ports: Collection[NetworkPort]
) -> str:
    if harmful := _harmful(set_here, _SLOW_NETWORK):
        return f"unset {harmful}"
    if any(port.device.startswith(("efa", "rdmap")) for port in ports):
        return "install the plugin aws-ofi-nccl, without which NCCL cannot use EFA"
    if "libibverbs" in log:
        return "install libibverbs (rdma-core), which NCCL could not load"
    if "NET/IB : No device found" in log:
        return "give the process /dev/infiniband and an unlimited `ulimit -l`"
    return "look at what NCCL says in the worker's log"


def _harmful(set_here: Mapping[str, str], known: Mapping[str, tuple[str, ...]]) -> str:
    """Return the first setting that keeps the backend from the fast way: "NCCL_NET=Socket"."""
    for name, values in known.items():
        value = set_here.get(name, "").rstrip(".")
        if value and (not values or value in values):
            return f"{name}={value}"
    return ""


def _name(channel: Channel, links: NodeLinks) -> str:
    if channel.how == "NET":
        return _NETWORKS.get(channel.network, channel.network or "a network")
    if channel.how == "SHM":
        return _SHARED_MEMORY
    return links.between(*channel.cards).partition(" ")[0] or _PCIE


def _card(text: str) -> int:
    """Return a card's index. Older versions print the address of its bus instead."""
    return int(text) if text.isdigit() and len(text) < 4 else -1
