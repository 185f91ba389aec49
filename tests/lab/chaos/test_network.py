"""Nodes in networks of their own: what reaches whom, cut and healed, late and lossy."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from holdfast.errors import UserError
from holdfast_lab.chaos.network import Network, why_unavailable
from holdfast_lab.chaos.relay import LinkShape
from tests.support.ranks import wait_until

WHY_NOT = why_unavailable()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

# Each line that is asked for is sent to the server, which answers with the same.
SERVE = """
import socket
listening = socket.create_server((ADDRESS, 7000))
print("ready", flush=True)
while True:
    taken, _ = listening.accept()
    while data := taken.recv(65536):
        taken.sendall(data)
"""
ASK = """
import socket, sys, time
line = socket.create_connection((ADDRESS, 7000), timeout=SECONDS)
for size in map(int, sys.argv[1:]):
    began, due = time.monotonic(), size
    line.sendall(b"x" * size)
    while due:
        due -= len(line.recv(65536))
    print(time.monotonic() - began)
"""


def asked(network: Network, node: str, of: str, *sizes: int, seconds: float = 10) -> list[float]:
    """How long each answer took; [] where none came."""
    script = ASK.replace("ADDRESS", repr(network.address(of))).replace("SECONDS", str(seconds))
    command = [*network.command(node), sys.executable, "-c", script, *map(str, sizes)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return [float(line) for line in done.stdout.split()] if done.returncode == 0 else []


@pytest.fixture
def network() -> Iterator[Network]:
    """Two nodes; the second one answers."""
    with Network() as network:
        network.up(["a", "b"])
        script = SERVE.replace("ADDRESS", repr(network.address("b")))
        server = subprocess.Popen(
            [*network.command("b"), sys.executable, "-c", script], stdout=subprocess.PIPE
        )
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
        try:
            yield network
        finally:
            server.kill()
            server.communicate()


def test_a_cut_node_is_reached_again_when_it_is_healed(network: Network) -> None:
    assert asked(network, "a", "b", 10)
    network.cut("b")
    assert asked(network, "a", "b", 10, seconds=1) == []
    network.heal("b")
    assert asked(network, "a", "b", 10)


def test_two_that_are_parted_reach_the_others(network: Network) -> None:
    network.up(["c"])
    assert asked(network, "a", "b", 10)
    network.disconnect("a", "b")
    assert asked(network, "a", "b", 10, seconds=1) == []
    assert asked(network, "c", "b", 10)
    network.reconnect("b", "a")
    assert asked(network, "a", "b", 10)


def test_a_slow_line_delays_both_directions_until_it_is_healed(network: Network) -> None:
    network.set_delay("b", 150)
    *_, last = asked(network, "a", "b", 10, 10)
    assert last >= 0.3
    network.cut("b")
    assert asked(network, "a", "b", 10, seconds=1) == []
    network.heal("b")
    assert min(asked(network, "a", "b", *[10] * 20)) < 0.3


def test_what_a_lossy_line_drops_is_sent_again(network: Network) -> None:
    network.set_loss("b", 10)
    network.set_delay("b", 1)
    assert len(asked(network, "a", "b", *[10_000] * 20, seconds=30)) == 20
    network.set_loss("b", 100)
    assert asked(network, "a", "b", 10, seconds=1) == []


def test_a_node_has_nothing_but_its_network_and_keeps_its_process_id(network: Network) -> None:
    process = subprocess.Popen(
        [
            *network.command("a"),
            sys.executable,
            "-c",
            "import os, socket; print(os.getpid(), [n for _, n in socket.if_nameindex()])",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    out, _ = process.communicate(timeout=120)
    number, _, devices = out.partition(" ")
    assert int(number) == process.pid
    assert "eth0" in devices
    assert network.settings("a")[0] == "cluster.interface=10.77.0.1"


def test_two_networks_do_not_meet_and_nothing_is_left_of_one_that_is_down(network: Network) -> None:
    with Network() as other:
        other.up(["x", "b"])
        assert asked(other, "x", "b", 10, seconds=1) == []  # the same address, elsewhere
        target = other.command("x")[2]
    other.down()
    wait_until(lambda: not os.path.exists(f"/proc/{target}"), what="the end of a node")
    with pytest.raises(UserError, match="'x' is no node"):
        other.cut("x")


def test_a_line_between_two_regions_changes_its_shape_and_loses_nothing(network: Network) -> None:
    network.up(["c", "far"])
    link = network.split(["far"])
    assert asked(network, "far", "b", 10)
    link.shape(LinkShape(delay_s=0.1))
    answers = asked(network, "far", "b", *[10] * 5)
    assert len(answers) == 5
    assert min(answers) >= 0.2
    assert min(asked(network, "c", "b", *[10] * 5)) < 0.2, "they are in the same region"
    link.shape(LinkShape(gbit_per_s=0.02))
    assert max(asked(network, "far", "b", 250_000)) >= 0.1, "0.1 s in each direction"
    link.shape(LinkShape(loss=1.0))
    assert asked(network, "far", "b", 10, seconds=1) == []
    link.shape(LinkShape())
    assert min(asked(network, "far", "b", *[10] * 5)) < 0.2
