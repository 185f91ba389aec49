"""The floor's work, divided as it is on two nodes, with every message signed, and nothing else.

Each node has a worker and a mover. For each line on stdin, a worker copies its half of the state
into existing memory, and notifies its mover over a unix socket. The mover answers, hashes the copy
on a thread of its own, and sends it after one message to the other node's mover. That mover
receives it into existing memory, hashes it and answers. Each message holds two numbers and an
HMAC-SHA256 that the other end checks. There is no HTTP and no manifest. Nothing is kept, reported
to an agent or written to a journal. The answer on stdout is the CPU seconds of all processes so
far.

    python -m benchmarks.runtime.steadying.least STATE_BYTES
"""

from __future__ import annotations

import hmac
import mmap
import os
import queue
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import numpy as np
from xxhash import xxh3_128_hexdigest

KEY = bytes(range(32))
WORDS = struct.Struct("<Qd")
DIGEST = 32
CPU = 0
"""In place of a step: the seconds so far are asked for."""


def send(link: socket.socket, number: int, value: float = 0.0) -> None:
    body = WORDS.pack(number, value)
    link.sendall(body + hmac.digest(KEY, body, "sha256"))


def receive(link: socket.socket) -> tuple[int, float]:
    """Receive one message. Raises EOFError if the other end has closed."""
    data = bytearray(WORDS.size + DIGEST)
    fill(link, memoryview(data))
    body, digest = bytes(data[: WORDS.size]), data[WORDS.size :]
    if not hmac.compare_digest(hmac.digest(KEY, body, "sha256"), digest):
        raise ValueError("a message that is not signed by us")
    number, value = WORDS.unpack(body)
    return int(number), float(value)


def fill(link: socket.socket, target: memoryview) -> None:
    while target:
        got = link.recv_into(target)
        if not got:
            raise EOFError
        target = target[got:]


def mover(
    worker: socket.socket, listening: socket.socket, other: tuple[str, int], fd: int, nbytes: int
) -> None:
    """Serve one worker. Raises EOFError if the worker has exited."""
    captured = np.frombuffer(mmap.mmap(fd, nbytes), np.uint8)
    kept = memoryview(bytearray(b"\1") * nbytes)
    outwards = socket.create_connection(other)
    inwards, _ = listening.accept()
    for link in (outwards, inwards):
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    steps: queue.SimpleQueue[int] = queue.SimpleQueue()

    def copies() -> None:
        while True:
            step = steps.get()
            xxh3_128_hexdigest(captured.data)
            send(outwards, step)
            at = 0
            while at < nbytes:
                at += os.sendfile(outwards.fileno(), fd, at, nbytes - at)
            receive(outwards)

    def keeps() -> None:
        while True:
            step, _ = receive(inwards)
            fill(inwards, kept)
            xxh3_128_hexdigest(kept)
            send(inwards, step)

    for each in (copies, keeps):
        threading.Thread(target=_until_over, args=(each,), daemon=True).start()
    while True:
        step, _ = receive(worker)
        if step != CPU:
            steps.put(step)
        send(worker, step, time.process_time())


def _until_over(work: Callable[[], None]) -> None:
    with suppress(EOFError, ConnectionError):  # the other processes have exited
        work()


def node(
    listening: socket.socket, other: tuple[str, int], nbytes: int
) -> tuple[socket.socket, np.ndarray[tuple[int], np.dtype[np.uint8]]]:
    """Start a mover: what its worker speaks to it over, and copies into."""
    fd = os.memfd_create("least")
    os.truncate(fd, nbytes)
    ours, theirs = socket.socketpair()
    if not os.fork():
        ours.close()
        try:
            mover(theirs, listening, other, fd, nbytes)
        except EOFError:
            os._exit(0)
    theirs.close()
    copy = np.frombuffer(mmap.mmap(fd, nbytes), np.uint8)
    copy[:] = 1
    return ours, copy


def main() -> None:
    half = int(sys.argv[1]) // 2
    listening = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    nodes = [node(listening[n], listening[1 - n].getsockname(), half) for n in range(2)]
    state = np.ones((2, half), np.uint8)
    print("ready", flush=True)
    for step, _ in enumerate(sys.stdin, 1):
        for number, (link, copy) in enumerate(nodes):
            np.copyto(copy, state[number])
            send(link, step)
            receive(link)
        seconds = time.process_time()
        time.sleep(0.05)  # until the copies have arrived; what comes later counts with the next
        for link, _ in nodes:
            send(link, CPU)
            seconds += receive(link)[1]
        print(seconds, flush=True)
    for link, _ in nodes:
        link.close()


if __name__ == "__main__":
    main()
