"""Nodes of one run that share nothing but a bucket: each has a network and folders of its own.

A node sees its folder at the path `here`, as each other node sees its own. It reaches the bucket at
one address of the nodes' network, behind which a proxy of the test stands. Needs root.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.wire.store.location import open_store
from holdfast_lab.chaos.network import Network, why_unavailable
from tests.support import s3
from tests.support.commands import secret_file
from tests.support.journal_reader import Journal
from tests.support.nodes import Nodes

ENDPOINT = "s3"
"""Name of the endpoint in the network of the nodes."""
_CLONE_NEWNET = 0x40000000
_OWN_FOLDER = 'mount --bind "$1" "$2" && mount -t tmpfs none "$3" && shift 3 && exec "$@"'


class SeparateNodes(Nodes):
    """The nodes, their network, and the proxy before the bucket."""

    def __init__(self, run_file: Path, network: Network, proxy: s3.Proxy, *settings: str) -> None:
        """run_file: in a folder that each node gets a copy of."""
        super().__init__(run_file, run_file.parent, *settings)
        self.network, self.proxy = network, proxy
        inside = s3.location(proxy.address)
        self._place = inside
        self.outside = s3.location(s3.server(), inside.partition("?")[0].rpartition("/")[2])
        self.store = open_store(self.outside)
        self._journal = Journal(run_file.parent, self.store)
        secret_file(run_file.parent)

    @property
    def place(self) -> str:
        return self._place

    def machine(self, name: str) -> list[str]:
        here = self.run_file.parent
        own = here.parent / "nodes" / name
        if not own.exists():
            shutil.copytree(here, own)
        return [
            *self.network.command(name),
            *("unshare", "--mount", "sh", "-c", _OWN_FOLDER, "sh"),
            *(str(own), str(here), str(own.parent)),
            *("env", f"XDG_CACHE_HOME={here}/cache"),
            f"HOLDFAST_SECRET_FILE={here}/secret-5e",
        ]

    def power_off(self, name: str) -> None:
        """Kill a node, and remove all that it had on its disk."""
        self.kill(name)
        shutil.rmtree(self.run_file.parent.parent / "nodes" / name)


@contextmanager
def separate_nodes(run_file: Path, names: list[str], *settings: str) -> Iterator[SeparateNodes]:
    """Run the nodes of a test, none of which is left afterwards."""
    if (reason := why_unavailable()) or os.geteuid() != 0:
        pytest.skip(reason or "a mount of its own for each node needs root")
    with Network() as network:
        network.up([ENDPOINT, *names])
        proxy = s3.Proxy(s3.server(), listener=_listen_in(network, ENDPOINT))
        nodes = SeparateNodes(run_file, network, proxy, *settings)
        try:
            yield nodes
        finally:
            for agent in nodes.agents.values():
                if agent.poll() is None:
                    agent.kill()
                    agent.communicate(timeout=20)
            proxy.close()


def _listen_in(network: Network, name: str) -> socket.socket:
    """Return a socket that listens in a node's network. It stays there, whichever thread uses
    it."""
    made: list[socket.socket] = []

    def listen() -> None:
        pid = int(network.command(name)[2])
        with Path(f"/proc/{pid}/ns/net").open() as namespace:
            assert ctypes.CDLL(None).setns(namespace.fileno(), _CLONE_NEWNET) == 0
        made.append(socket.create_server((network.address(name), 0), backlog=128))

    thread = threading.Thread(target=listen)  # the network is that of a thread
    thread.start()
    thread.join()
    return made[0]
