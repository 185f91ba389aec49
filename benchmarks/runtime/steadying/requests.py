"""Cost of a request that does nothing: `python -m benchmarks.runtime.steadying.requests` is its
server.

Signed, answered with a signature, over a connection that is open: as movers of two nodes ask each
other. CPU of both ends, which are processes of their own.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

import psutil

from benchmarks.runtime.children import ROOT, environment
from holdfast.checkpoint.memory.snapshot_store import SnapshotStore
from holdfast.checkpoint.peers.client import PeerClient
from holdfast.checkpoint.peers.rate_limiter import TokenBucket
from holdfast.checkpoint.peers.receiver import SnapshotReceiver
from holdfast.checkpoint.peers.server import PeerServer
from holdfast.wire.secret import Secret

SECRET = Secret(bytes(range(32)))
COUNT = 3000


def milliseconds() -> float:
    """CPU of one, both ends together."""
    server = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.runtime.steadying.requests"],
        stdout=subprocess.PIPE,
        text=True,
        stdin=subprocess.PIPE,
        env=environment(),
        cwd=ROOT,
    )
    try:
        assert server.stdout is not None
        client = PeerClient(f"127.0.0.1:{int(server.stdout.readline())}", SECRET, 1)
        for _ in range(100):
            client.newest_generation()
        before = _cpu(server.pid)
        for _ in range(COUNT):
            client.newest_generation()
        return 1e3 * (_cpu(server.pid) - before) / COUNT
    finally:
        server.communicate()


def _cpu(pid: int) -> float:
    """Seconds of this process and another one."""
    times = [psutil.Process(each).cpu_times() for each in (os.getpid(), pid)]
    return sum(each.user + each.system for each in times)


def main() -> None:
    shelf = SnapshotStore()
    listener = socket.create_server(("127.0.0.1", 0))
    budget = TokenBucket(0, time.monotonic, lambda seconds: False)
    server = PeerServer(listener, SECRET, shelf, SnapshotReceiver(shelf, SECRET, 0), budget, None)
    server.start()
    print(server.address.rpartition(":")[2], flush=True)
    sys.stdin.read()
    server.close()


if __name__ == "__main__":
    main()
