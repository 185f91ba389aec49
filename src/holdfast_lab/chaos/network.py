"""A network of its own for the nodes of one run on one machine, so that a partition is a real one.

Each node gets a network namespace with one device, `eth0`; all are plugged into a bridge, which has
a namespace of its own too. So nothing is added to the machine's own network: two runs cannot meet
each other, and no firewall of the machine stands between the nodes. A namespace lives as long as a
process is in it: one small holder each, which ends when its input does. So nothing is left behind,
however the process that called `up` ended.

    cut      the node's plug is pulled: packets vanish without a sign (no reset, no refusal)
    part     two nodes do not reach each other, and all other nodes reach both
    delay    every packet comes that much later, in each direction
    loss     that share of packets is dropped, in each direction
    split    some nodes get a bridge of their own, and one line joins the bridges (`RegionLink`)

Delay and loss are the kernel's netem where it has it; where not, a process stands in the line and
holds packets back (`relay.py`). Root can do all of this, and so can a user that may make a user
namespace. Inside it, that user is root over these networks only.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

from holdfast.errors import UserError
from holdfast.wire.child_command import module_command
from holdfast_lab.chaos.relay import LinkShape


class RegionLink:
    """Made by `Network.split`; ends with the network."""

    def __init__(self, relay: subprocess.Popen[bytes]) -> None:
        self._relay = relay

    def shape(self, shape: LinkShape) -> None:
        """From now on packets are so late, so many are lost, and the line carries so much."""
        assert self._relay.stdin is not None
        self._relay.stdin.write(f"{' '.join(shape.words())}\n".encode())
        self._relay.stdin.flush()


SUBNET = "10.77.0"
DEVICE = "eth0"
MAX_NODES = 250
FIRST_BRIDGE, SECOND_BRIDGE = "br0", "br1"
UNREACHABLE_MAC = "02:00:00:00:00:01"  # A device that is not there
_PROBE_COMMAND = "ip link add hfbr0 type bridge && ip link add hfp0 type veth peer name hfp1"
_UNSHARE_OPTIONS: tuple[tuple[str, ...], ...] = (("--net",), ("--map-root-user", "--net"))
_TOOLS = {"ip": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}


def why_unavailable() -> str | None:
    """Return None if `Network` works, or one sentence that says why not."""
    way, reason = _find_unshare_options()
    return None if way is not None else reason


def _find_unshare_options() -> tuple[tuple[str, ...] | None, str]:
    """With which options of unshare namespaces can be made, or why with none."""
    for tool, package in _TOOLS.items():
        if shutil.which(tool) is None:
            return None, f"there are no network namespaces here: {tool} ({package}) is missing"
    reason = ""
    for way in _UNSHARE_OPTIONS:
        done = subprocess.run(
            ["unshare", *way, "sh", "-c", _PROBE_COMMAND],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode == 0:
            return way, ""
        reason = (done.stderr.strip().splitlines() or ["no reason was given"])[-1]
    return None, (
        "network namespaces need root, or a kernel that lets others make user namespaces "
        f"({reason})"
    )


@dataclass
class _NetworkNode:
    address: str
    veth: str  # its end of the line, in the bridge's namespace
    namespace_process: subprocess.Popen[bytes]
    relay: subprocess.Popen[bytes] | None = None
    bridge: str = FIRST_BRIDGE
    cut: bool = False
    delay_ms: float = 0.0  # milliseconds
    loss_percent: float = 0.0  # percent

    @property
    def bridge_port(self) -> str:
        """What is plugged into the bridge for it."""
        return self.veth if self.relay is None else f"{self.veth}r"


class Network:
    """The nodes of one run, each in a namespace of its own."""

    def __init__(self) -> None:
        self._nodes: dict[str, _NetworkNode] = {}
        self._bridge_process: subprocess.Popen[bytes] | None = None
        self._nsenter_options: tuple[str, ...] = ()
        self._has_netem: bool | None = None
        self._line: subprocess.Popen[bytes] | None = None  # between the two bridges

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.down()

    def up(self, names: Sequence[str]) -> None:
        """Make the network, or add nodes to it. Raises UserError where that cannot be done here."""
        if self._bridge_process is None:
            way, reason = _find_unshare_options()
            if way is None:
                raise UserError(
                    reason, where="network of nodes", remedy="run as root, or do without partitions"
                )
            if "--map-root-user" in way:
                self._nsenter_options = ("--user", "--preserve-credentials")
            self._bridge_process = _start_namespace_process(["unshare", *way])
            self._ip("link", "add", FIRST_BRIDGE, "type", "bridge")
            self._ip("link", "set", FIRST_BRIDGE, "up")
        for name in names:
            if name in self._nodes:
                continue
            if len(self._nodes) == MAX_NODES:
                raise UserError(
                    f"a network has room for {MAX_NODES} nodes", where=name, remedy="start fewer"
                )
            self._plug_in(name)

    def _plug_in(self, name: str) -> None:
        number = len(self._nodes) + 1
        holder = _start_namespace_process(
            [
                *(self._nsenter_command(self._bridge_process) if self._nsenter_options else ()),
                "unshare",
                "--net",
            ]
        )
        node = self._nodes[name] = _NetworkNode(f"{SUBNET}.{number}", f"p{number}", holder)
        self._ip(
            "link",
            "add",
            node.veth,
            "type",
            "veth",
            "peer",
            "name",
            DEVICE,
            "netns",
            str(holder.pid),
        )
        self._ip("link", "set", node.veth, "master", node.bridge, "up")
        inside = self.command(name)
        _run_or_raise([*inside, "ip", "address", "add", f"{node.address}/24", "dev", DEVICE])
        _run_or_raise([*inside, "ip", "link", "set", DEVICE, "up"])
        _run_or_raise([*inside, "ip", "link", "set", "lo", "up"])

    def split(self, names: Sequence[str]) -> RegionLink:
        """Put some nodes into a region of their own, once. Returns the line between the regions,
        which has no fault at first."""
        assert self._line is None, "there are two regions already"
        self._ip("link", "add", SECOND_BRIDGE, "type", "bridge")
        self._ip("link", "set", SECOND_BRIDGE, "up")
        for bridge, plug, end in ((FIRST_BRIDGE, "r1", "r1f"), (SECOND_BRIDGE, "r2", "r2f")):
            self._ip("link", "add", plug, "type", "veth", "peer", "name", end)
            self._ip("link", "set", end, "up")
            self._ip("link", "set", plug, "master", bridge, "up")
        inside = self._nsenter_command(self._bridge_process, "--net")
        self._line = _start_until_ready(
            [*inside, *module_command("holdfast_lab.chaos.relay", "r1f", "r2f")]
        )
        for name in names:
            node = self._node(name)
            node.bridge = SECOND_BRIDGE
            self._ip("link", "set", node.bridge_port, "master", node.bridge)
        return RegionLink(self._line)

    # --- starting a node --------------------------------------------------------------------
    def command(self, name: str) -> list[str]:
        """What to put before a command so that it runs on that node. It becomes the command: the
        process id stays."""
        return self._nsenter_command(self._node(name).namespace_process, "--net")

    def address(self, name: str) -> str:
        return self._node(name).address

    def settings(self, name: str) -> list[str]:
        """Of the run file, for that node."""
        address = self.address(name)
        return [
            f"cluster.interface={address}",
            f"cluster.gloo_interface={DEVICE}",
            f"checkpoint.peer_interface={address}",
        ]

    # --- faults -------------------------------------------------------------------------------
    def cut(self, name: str) -> None:
        """Cut that node off: no other node reaches it any more, and it reaches none."""
        node = self._node(name)
        self._ip("link", "set", node.bridge_port, "nomaster")
        node.cut = True

    def heal(self, name: str) -> None:
        """Restore the line to its first state: connected, and neither slow nor lossy."""
        node = self._node(name)
        node.cut = False
        self._apply_delay_and_loss(node, 0.0, 0.0)
        self._ip("link", "set", node.bridge_port, "master", node.bridge)

    def disconnect(self, one: str, other: str) -> None:
        """What these two send each other vanishes, as with a link between two switches."""
        self._set_neighbours(one, other, "replace", "lladdr", UNREACHABLE_MAC, "nud", "permanent")

    def reconnect(self, one: str, other: str) -> None:
        """Two nodes that were parted reach each other again."""
        self._set_neighbours(one, other, "delete")

    def set_delay(self, name: str, delay_ms: float) -> None:
        """Every packet of that node comes `delay_ms` later, in each direction; 0: no longer."""
        node = self._node(name)
        self._apply_delay_and_loss(node, delay_ms, node.loss_percent)

    def set_loss(self, name: str, percent: float) -> None:
        """Of that node's packets so many are lost, in each direction; 0: no longer."""
        node = self._node(name)
        self._apply_delay_and_loss(node, node.delay_ms, percent)

    def down(self) -> None:
        """Remove all networks; processes still on the nodes reach no other node. May be called
        again."""
        for node in self._nodes.values():
            if node.relay is not None:
                _kill_and_wait(node.relay)
            _kill_and_wait(node.namespace_process)
        for process in (self._line, self._bridge_process):
            if process is not None:
                _kill_and_wait(process)
        self._nodes, self._line, self._bridge_process, self._nsenter_options = {}, None, None, ()

    # --- within -------------------------------------------------------------------------------
    def _node(self, name: str) -> _NetworkNode:
        try:
            return self._nodes[name]
        except KeyError:
            raise UserError(
                f"{name!r} is no node of this network",
                where="network of nodes",
                remedy=f"use one of {', '.join(self._nodes) or 'those that were given to up'}",
            ) from None

    def _nsenter_command(self, holder: subprocess.Popen[bytes] | None, *kinds: str) -> list[str]:
        assert holder is not None, "up was not called"
        return ["nsenter", "--target", str(holder.pid), *self._nsenter_options, *kinds, "--"]

    def _set_neighbours(self, one: str, other: str, deed: str, *words: str) -> None:
        """What each of two nodes believes of the other's place in the network."""
        for here, there in ((one, other), (other, one)):
            _run_or_raise(
                [
                    *self.command(here),
                    "ip",
                    "neighbour",
                    deed,
                    self.address(there),
                    *words,
                    "dev",
                    DEVICE,
                ]
            )

    def _ip(self, *words: str) -> None:
        _run_or_raise([*self._nsenter_command(self._bridge_process, "--net"), "ip", *words])

    def _apply_delay_and_loss(self, node: _NetworkNode, ms: float, percent: float) -> None:
        if (ms, percent) == (node.delay_ms, node.loss_percent):
            return
        node.delay_ms, node.loss_percent = ms, percent
        here = self._nsenter_command(self._bridge_process, "--net")
        there = self._nsenter_command(node.namespace_process, "--net")
        if self._has_netem is None:
            self._has_netem = _supports_netem([*here, "tc"], node.veth)
        if self._has_netem:
            words = ["netem", "delay", f"{ms}ms", "loss", f"{percent}%"]
            for inside, device in ((here, node.veth), (there, DEVICE)):
                _run_or_raise([*inside, "tc", "qdisc", "replace", "dev", device, "root", *words])
            return
        self._replace_relay(node, here)

    def _replace_relay(self, node: _NetworkNode, here: list[str]) -> None:
        """A process between the node's plug and the bridge, or none where nothing is to be held
        back. While it is put there packets are lost, as of any line that is unplugged."""
        if node.relay is not None:
            self._ip("link", "delete", node.bridge_port)
            _kill_and_wait(node.relay)
            node.relay = None
        if node.delay_ms or node.loss_percent:
            self._ip("link", "set", node.veth, "nomaster")
            far = f"{node.veth}f"
            self._ip("link", "add", f"{node.veth}r", "type", "veth", "peer", "name", far)
            self._ip("link", "set", far, "up")
            self._ip("link", "set", f"{node.veth}r", "up")
            node.relay = _start_until_ready(
                [
                    *here,
                    *module_command(
                        "holdfast_lab.chaos.relay",
                        node.veth,
                        far,
                        str(node.delay_ms),
                        str(node.loss_percent),
                    ),
                ]
            )
        if not node.cut:
            self._ip("link", "set", node.bridge_port, "master", node.bridge)


def _supports_netem(tc: list[str], device: str) -> bool:
    if shutil.which("tc") is None:
        return False
    words = [*tc, "qdisc", "replace", "dev", device, "root", "netem"]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


def _start_namespace_process(entering: list[str]) -> subprocess.Popen[bytes]:
    """A process in a namespace, which is there when this returns."""
    return _start_until_ready([*entering, "sh", "-c", "echo ready; exec cat"])


def _start_until_ready(command: list[str]) -> subprocess.Popen[bytes]:
    """A process that ends with its input, once it has said that it is ready."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    if process.stdout.readline() != b"ready\n":
        _, said = process.communicate()
        raise UserError(
            f"{' '.join(command)}: {said.decode(errors='replace').strip()}",
            where="network of nodes",
            remedy="see that the rights suffice",
        )
    return process


def _kill_and_wait(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with suppress(ValueError):
        process.communicate()


def _run_or_raise(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(
            f"{' '.join(command)}: {done.stderr.strip()}",
            where="network of nodes",
            remedy="see that the rights suffice",
        )
