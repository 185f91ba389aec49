"""Floor of keeping a state in another machine's memory during training.

There are two processes. For each line on its stdin, the first copies the complete state into
existing memory and hashes the copy (xxh3). It sends the peers' part to the second over a loopback
socket (sendfile). The second receives it into existing memory and hashes it too. The first answers
with the CPU seconds of both so far.

    python -m benchmarks.runtime.steadying.floor STATE_BYTES PEER_BYTES
"""

from __future__ import annotations

import mmap
import os
import resource
import socket
import sys
import time

import numpy as np
from xxhash import xxh3_128_hexdigest


def receive(link: socket.socket, nbytes: int) -> None:
    target = memoryview(bytearray(b"\1") * nbytes)
    while True:
        at = 0
        while at < nbytes:
            got = link.recv_into(target[at:])
            if not got:
                return
            at += got
        xxh3_128_hexdigest(target)
        link.sendall(f"{time.process_time():020.9f}".encode())


def main() -> None:
    nbytes, sent = (int(word) for word in sys.argv[1:3])
    state = np.ones(nbytes, np.uint8)
    fd = os.memfd_create("floor")
    os.truncate(fd, nbytes)
    copy = np.frombuffer(mmap.mmap(fd, nbytes), np.uint8)
    copy[:] = 1
    with socket.create_server(("127.0.0.1", 0)) as listening:
        link = socket.create_connection(listening.getsockname())
        other, _ = listening.accept()
    if not os.fork():
        link.close()
        receive(other, sent)
        os._exit(0)
    other.close()
    print("ready", flush=True)
    theirs = 0.0
    for _ in sys.stdin:
        np.copyto(copy, state)
        xxh3_128_hexdigest(copy.data)
        at = 0
        while at < sent:
            at += os.sendfile(link.fileno(), fd, at, sent - at)
        if sent:
            theirs = float(link.recv(20, socket.MSG_WAITALL))
        own = resource.getrusage(resource.RUSAGE_SELF)
        print(own.ru_utime + own.ru_stime + theirs, flush=True)
    link.close()
    os.wait()


if __name__ == "__main__":
    main()
