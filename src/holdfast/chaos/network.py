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

The last two are the kernel's netem where it has it; where not, a process stands in the line and
holds packets back (`relay.py`). Root can do all of this, and so can a user that may make a user
namespace. Inside it, that user is root over these networks only.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from holdfast.errors import UserError

SUBNET = "10.77.0"
DEVICE = "eth0"
MOST = 250
NOBODY = "02:00:00:00:00:01"
"""A device that is not there."""
_PROBE = "ip link add hfbr0 type bridge && ip link add hfp0 type veth peer name hfp1"
_WAYS: tuple[tuple[str, ...], ...] = (("--net",), ("--map-root-user", "--net"))
_TOOLS = {"ip": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}


def available() -> str | None:
    """Return None if `Network` works, or one sentence that says why not."""
    way, reason = _way()
    return None if way is not None else reason


def _way() -> tuple[tuple[str, ...] | None, str]:
    """With which options of unshare namespaces can be made, or why with none."""
    for tool, package in _TOOLS.items():
        if shutil.which(tool) is None:
            return None, f"there are no network namespaces here: {tool} ({package}) is missing"
    reason = ""
    for way in _WAYS:
        done = subprocess.run(
            ["unshare", *way, "sh", "-c", _PROBE], capture_output=True, text=True, check=False
        )
        if done.returncode == 0:
            return way, ""
        reason = (done.stderr.strip().splitlines() or ["no reason was given"])[-1]
    return None, (
        "network namespaces need root, or a kernel that lets others make user namespaces "
        f"({reason})"
    )


@dataclass
class _Node:
    address: str
    plug: str  # its end of the line, in the bridge's namespace
    holder: subprocess.Popen[bytes]
    relay: subprocess.Popen[bytes] | None = None
    cut: bool = False
    delay: float = 0.0  # milliseconds
    loss: float = 0.0  # percent

    @property
    def port(self) -> str:
        """What is plugged into the bridge for it."""
        return self.plug if self.relay is None else f"{self.plug}r"


class Network:
    """The nodes of one run, each in a namespace of its own."""

    def __init__(self) -> None:
        self._nodes: dict[str, _Node] = {}
        self._bridge: subprocess.Popen[bytes] | None = None
        self._enter: tuple[str, ...] = ()
        self._netem: bool | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:  # fmt: skip
        self.down()

    def up(self, names: Sequence[str]) -> None:
        """Make the network, or add nodes to it. Raises UserError where that cannot be done here."""
        if self._bridge is None:
            way, reason = _way()
            if way is None:
                raise UserError(
                    reason, where="network of nodes", remedy="run as root, or do without partitions"
                )
            if "--map-root-user" in way:
                self._enter = ("--user", "--preserve-credentials")
            self._bridge = _holder(["unshare", *way])
            self._ip("link", "add", "br0", "type", "bridge")
            self._ip("link", "set", "br0", "up")
        for name in names:
            if name in self._nodes:
                continue
            if len(self._nodes) == MOST:
                raise UserError(f"a network has room for {MOST} nodes", where=name,
                                remedy="start fewer")  # fmt: skip
            self._plug_in(name)

    def _plug_in(self, name: str) -> None:
        number = len(self._nodes) + 1
        holder = _holder([*(self._inside(self._bridge) if self._enter else ()), "unshare", "--net"])
        node = self._nodes[name] = _Node(f"{SUBNET}.{number}", f"p{number}", holder)
        self._ip("link", "add", node.plug, "type", "veth", "peer", "name", DEVICE,
                 "netns", str(holder.pid))  # fmt: skip
        self._ip("link", "set", node.plug, "master", "br0", "up")
        inside = self.command(name)
        _run([*inside, "ip", "address", "add", f"{node.address}/24", "dev", DEVICE])
        _run([*inside, "ip", "link", "set", DEVICE, "up"])
        _run([*inside, "ip", "link", "set", "lo", "up"])

    # --- starting a node --------------------------------------------------------------------
    def command(self, name: str) -> list[str]:
        """What to put before a command so that it runs on that node. It becomes the command: the
        process id stays."""
        return self._inside(self._node(name).holder, "--net")

    def address(self, name: str) -> str:
        return self._node(name).address

    def settings(self, name: str) -> list[str]:
        """Of the run file, for that node."""
        address = self.address(name)
        return [f"cluster.interface={address}", f"cluster.gloo_interface={DEVICE}",
                f"checkpoint.peer_interface={address}"]  # fmt: skip

    # --- faults -------------------------------------------------------------------------------
    def cut(self, name: str) -> None:
        """Cut that node off: no other node reaches it any more, and it reaches none."""
        node = self._node(name)
        self._ip("link", "set", node.port, "nomaster")
        node.cut = True

    def heal(self, name: str) -> None:
        """Restore the line to its first state: connected, and neither slow nor lossy."""
        node = self._node(name)
        node.cut = False
        self._shape(node, 0.0, 0.0)
        self._ip("link", "set", node.port, "master", "br0")

    def part(self, one: str, other: str) -> None:
        """What these two send each other vanishes, as with a link between two switches."""
        self._between(one, other, "replace", "lladdr", NOBODY, "nud", "permanent")

    def join(self, one: str, other: str) -> None:
        """Two nodes that were parted reach each other again."""
        self._between(one, other, "delete")

    def delay(self, name: str, ms: float) -> None:
        """Every packet of that node comes `ms` later, in each direction; 0: no longer."""
        node = self._node(name)
        self._shape(node, ms, node.loss)

    def loss(self, name: str, percent: float) -> None:
        """Of that node's packets so many are lost, in each direction; 0: no longer."""
        node = self._node(name)
        self._shape(node, node.delay, percent)

    def down(self) -> None:
        """Remove all networks; processes still on the nodes reach no other node. May be called
        again."""
        for node in self._nodes.values():
            if node.relay is not None:
                _end(node.relay)
            _end(node.holder)
        if self._bridge is not None:
            _end(self._bridge)
        self._nodes, self._bridge, self._enter = {}, None, ()

    # --- within -------------------------------------------------------------------------------
    def _node(self, name: str) -> _Node:
        try:
            return self._nodes[name]
        except KeyError:
            raise UserError(
                f"{name!r} is no node of this network", where="network of nodes",
                remedy=f"use one of {', '.join(self._nodes) or 'those that were given to up'}",
            ) from None  # fmt: skip

    def _inside(self, holder: subprocess.Popen[bytes] | None, *kinds: str) -> list[str]:
        assert holder is not None, "up was not called"
        return ["nsenter", "--target", str(holder.pid), *self._enter, *kinds, "--"]

    def _between(self, one: str, other: str, deed: str, *words: str) -> None:
        """What each of two nodes believes of the other's place in the network."""
        for here, there in ((one, other), (other, one)):
            _run([*self.command(here), "ip", "neighbour", deed, self.address(there), *words,
                  "dev", DEVICE])  # fmt: skip

    def _ip(self, *words: str) -> None:
        _run([*self._inside(self._bridge, "--net"), "ip", *words])

    def _shape(self, node: _Node, ms: float, percent: float) -> None:
        if (ms, percent) == (node.delay, node.loss):
            return
        node.delay, node.loss = ms, percent
        here = self._inside(self._bridge, "--net")
        there = self._inside(node.holder, "--net")
        if self._netem is None:
            self._netem = _netem([*here, "tc"], node.plug)
        if self._netem:
            words = ["netem", "delay", f"{ms}ms", "loss", f"{percent}%"]
            for inside, device in ((here, node.plug), (there, DEVICE)):
                _run([*inside, "tc", "qdisc", "replace", "dev", device, "root", *words])
            return
        self._relay(node, here)

    def _relay(self, node: _Node, here: list[str]) -> None:
        """A process between the node's plug and the bridge, or none where nothing is to be held
        back. While it is put there packets are lost, as of any line that is unplugged."""
        if node.relay is not None:
            self._ip("link", "delete", node.port)
            _end(node.relay)
            node.relay = None
        if node.delay or node.loss:
            self._ip("link", "set", node.plug, "nomaster")
            far = f"{node.plug}f"
            self._ip("link", "add", f"{node.plug}r", "type", "veth", "peer", "name", far)
            self._ip("link", "set", far, "up")
            self._ip("link", "set", f"{node.plug}r", "up")
            node.relay = _started([
                *here, sys.executable, "-m", "holdfast.chaos.relay", node.plug, far,
                str(node.delay), str(node.loss),
            ])  # fmt: skip
        if not node.cut:
            self._ip("link", "set", node.port, "master", "br0")


def _netem(tc: list[str], device: str) -> bool:
    """Whether this kernel has it."""
    if shutil.which("tc") is None:
        return False
    words = [*tc, "qdisc", "replace", "dev", device, "root", "netem"]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


def _holder(entering: list[str]) -> subprocess.Popen[bytes]:
    """A process in a namespace, which is there when this returns."""
    return _started([*entering, "sh", "-c", "echo ready; exec cat"])


def _started(command: list[str]) -> subprocess.Popen[bytes]:
    """A process that ends with its input, once it has said that it is ready."""
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    if process.stdout.readline() != b"ready\n":
        _, said = process.communicate()
        raise UserError(f"{' '.join(command)}: {said.decode(errors='replace').strip()}",
                        where="network of nodes", remedy="see that the rights suffice")  # fmt: skip
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with suppress(ValueError):
        process.communicate()


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"{' '.join(command)}: {done.stderr.strip()}",
                        where="network of nodes", remedy="see that the rights suffice")  # fmt: skip
