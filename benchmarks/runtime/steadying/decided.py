"""The work of `least`, and in addition what the architecture requires, and nothing more.

Requests of a node travel as signed JSON lines over a unix socket, those between nodes as signed
HTTP. A part's sealed manifest, with a checksum for each extent, goes with its bytes. The receiver
checks every extent, and writes the slot's header last. One agent a node polls its mover, gets an
answer once a step, and writes it into a journal. The parts are Holdfast's own (`framing`,
`wire.http.auth`, `exchange`, `manifest`, `arena`); there is no snapshot store, no placement, no
rate limit, no retry and no change of generation. The thread that reads a message also answers it.

    python -m benchmarks.runtime.steadying.decided RUN_FILE [key=value ...]
"""

from __future__ import annotations

import json
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httptools
import numpy as np
from xxhash import xxh3_128_hexdigest

from holdfast.checkpoint.format.blob import blob_header, blob_size
from holdfast.checkpoint.format.save_context import SaveContext, choose_extent_bytes
from holdfast.checkpoint.memory.arena import Arena, identity_digest, slot_capacity
from holdfast.checkpoint.mover import protocol
from holdfast.checkpoint.save.writer import seal_part
from holdfast.config.loading.load import load_config
from holdfast.core.format.manifest import PartManifest, PlacedBox, place_boxes
from holdfast.core.json_parsing import Json, parse_json
from holdfast.core.sharding.ownership import owned_boxes
from holdfast.core.sharding.state_table import StateTable, state_table
from holdfast.layout import Layout, Topology, place_layout
from holdfast.wire.http.auth import (
    BODY_HEADER,
    ListenerIdentity,
    Proof,
    Verifier,
    body_statement,
    check_answer,
    request_headers,
    sha256_hex,
    sign_answer,
)
from holdfast.wire.http.head_fields import HeadFields
from holdfast.wire.http.sync_connection import ClientResponse, SocketReader
from holdfast.wire.secret import Secret

SECRET = Secret(bytes(range(32)))
PUSH = "/push?run=r"
META: dict[str, Json] = {"position": 0, "ledger": "0" * 32}


class Node:
    """What both ends of a node know of its part."""

    def __init__(self, rank: int, topology: Topology, table: StateTable) -> None:
        self.rank = rank
        self.tensors: tuple[PlacedBox, ...] = place_boxes(owned_boxes(topology, table, rank), table)
        self.head = blob_header(self.tensors)
        self.size = blob_size(self.head, self.tensors)
        state = sum(spec.nbytes for spec in table)
        self.plan = SaveContext(1, topology, table, "c", "d", choose_extent_bytes(16 << 20, state))
        self.fd = Arena.create(f"captured-{rank}", 1, slot_capacity(self.size))
        self.arena = Arena(self.fd)
        self.arena.data(0, len(self.head))[:] = self.head


class Asking:
    """One connection over which JSON lines are asked."""

    def __init__(self, link: socket.socket) -> None:
        self._link, self._lines = link, protocol.LineReader(link)

    def ask(self, verb: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send a request and return its answer. Raises EOFError if the other end has closed."""
        line, nonce = protocol.encode_request(SECRET, verb, body, 1, time.time())
        protocol.send_line(self._link, line)
        received = self._lines.read_line()
        if received is None:
            raise EOFError
        return protocol.parse_answer(SECRET, nonce, received[0])


def answering(link: socket.socket, do: Callable[[str, dict[str, Any]], dict[str, Any]]) -> None:
    """Until the other end goes."""
    lines, verifier = protocol.LineReader(link), Verifier(SECRET, time.time, name="")
    while (received := lines.read_line()) is not None:
        asked = protocol.parse_request(received[0])
        verifier.check(protocol.METHOD, asked.verb, asked.raw, asked.proof)
        answer = do(asked.verb, parse_json(asked.raw))
        protocol.send_line(
            link, protocol.encode_answer(SECRET, asked.proof.nonce, protocol.OK, answer)
        )


class Mover:
    """One node's, with its threads."""

    def __init__(self, node: Node, outwards: socket.socket, inwards: socket.socket) -> None:
        self._node, self._outwards, self._inwards = node, outwards, inwards
        self._steps: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._told: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._listener = Verifier(SECRET, time.time)
        self._to = ""  # the other listener's name
        self._slot = Arena(Arena.create("kept", 1, node.arena.capacity))

    def start(self) -> None:
        protocol.send_line(self._inwards, self._listener.name.encode())
        self._to = self._outwards.recv(len(self._listener.name), socket.MSG_WAITALL).decode()
        for each in (self._copies, self._keeps):
            threading.Thread(target=each, daemon=True).start()

    def do(self, verb: str, body: dict[str, Any]) -> dict[str, Any]:
        if verb == "captured":
            self._steps.put(int(body["step"]))
        elif verb == "events":
            return {"step": self._told.get()}
        return {"seconds": time.process_time()}

    def _copies(self) -> None:
        node, aim, incoming = self._node, ListenerIdentity(time.time), SocketReader(self._outwards)
        aim.update_from({"to": self._to, "now": time.time()})
        while True:
            step = self._steps.get()
            due = node.arena.header(0)
            assert due is not None
            with node.arena.reading(0, due) as data:
                part = seal_part(
                    node.plan, step, node.rank, data, len(node.head), node.tensors, META
                )
            body = json.dumps({"part": part.to_bytes().decode(), "run": "r"}).encode()
            proof = aim.sign(SECRET, "POST", PUSH, body, 1)
            lines = "".join(f"{k}: {v}\r\n" for k, v in request_headers(proof, body).items())
            length = f"content-length: {len(body)}\r\nholdfast-bytes: {node.size}\r\n"
            head = f"POST {PUSH} HTTP/1.1\r\nhost: other\r\n{lines}{length}\r\n".encode()
            self._outwards.sendall(head + body)
            at, end = node.arena.data_offset(0), node.arena.data_offset(0) + node.size
            while at < end:
                at += os.sendfile(self._outwards.fileno(), node.fd, at, end - at)
            answer = ClientResponse(incoming, incoming.read_head())
            content = answer.read(1 << 20)
            check_answer(SECRET, proof.nonce, 200, content, answer.header("holdfast-hmac"))
            self._told.put(step)

    def _keeps(self) -> None:
        incoming, slot = SocketReader(self._inwards), self._slot
        while head := incoming.read_head():
            asked = HeadFields()
            httptools.HttpRequestParser(asked).feed_data(head)
            proof = Proof.from_headers(asked.headers)
            length, said = int(asked.headers["content-length"]), asked.headers[BODY_HEADER]
            self._listener.check("POST", asked.target.decode(), body_statement(length, said), proof)
            body = incoming.read(length)
            assert sha256_hex(body) == said
            part = PartManifest.from_bytes(json.loads(body)["part"].encode(), "a part")
            slot.begin_write(0)
            view = slot.data(0, part.blob.size)
            _fill(incoming, view)
            for extent in part.blob.extents():
                found = view[extent.offset : extent.offset + extent.length]
                assert xxh3_128_hexdigest(found) == extent.xxh3
            slot.finish_write(
                0, identity_digest("r"), 1, part.step, part.blob.size, identity_digest(b"head")
            )
            slot.release(0)
            content = b'{"state":"held"}'
            signed = sign_answer(SECRET, proof.nonce, 200, content)
            about = f"content-length: {len(content)}\r\nholdfast-hmac: {signed}\r\n\r\n"
            self._inwards.sendall(f"HTTP/1.1 200 OK\r\n{about}".encode() + content)


def _fill(incoming: SocketReader, out: memoryview) -> None:
    while out:
        count = incoming.readinto(out)
        if not count:
            os._exit(0)
        out = out[count:]


def agent(mover: socket.socket, seconds: socket.socket, journal: Path) -> None:
    """Asks its mover what has happened, and writes it down; tells its CPU seconds where it is
    asked for them."""

    def listens() -> None:
        asking = Asking(mover)
        file = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        while True:
            step = asking.ask("events", {"since": 0, "wait": 5.0})["step"]
            said = {"kind": "snapshot_kept", "time": time.time(), "event": {"step": step}}
            os.write(file, json.dumps(said).encode() + b"\n")

    threading.Thread(target=listens, daemon=True).start()
    answering(seconds, lambda verb, body: {"seconds": time.process_time()})


def started(
    node: Node, listening: socket.socket, other: tuple[str, int], journal: Path
) -> tuple[Asking, Asking]:
    """A node's mover and agent: what each is asked over."""
    ours, theirs = socket.socketpair()
    events, asked = socket.socketpair()
    seconds, told = socket.socketpair()
    if not os.fork():
        for link in (ours, events, seconds, told):
            link.close()
        outwards = socket.create_connection(other)
        inwards, _ = listening.accept()
        for link in (outwards, inwards):
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        mover = Mover(node, outwards, inwards)
        mover.start()
        threading.Thread(target=answering, args=(asked, mover.do), daemon=True).start()
        answering(theirs, mover.do)
        os._exit(0)
    if not os.fork():
        for link in (ours, theirs, asked, seconds):
            link.close()
        agent(events, told, journal)
        os._exit(0)
    for link in (theirs, events, asked, told):
        link.close()
    return Asking(ours), Asking(seconds)


def main() -> None:
    run_file = Path(sys.argv[1])
    config = load_config(run_file, ["model.vocab_size=512", *sys.argv[2:]]).config
    table = state_table(config.model, config.train.precision)
    topology = place_layout(Layout(dp_replicate=2), 1, ("n0", "n1"))
    nodes = [Node(rank, topology, table) for rank in range(2)]
    listening = [socket.create_server(("127.0.0.1", 0)) for _ in nodes]
    asked = [
        started(node, listening[n], listening[1 - n].getsockname(), run_file.with_suffix(f".j{n}"))
        for n, node in enumerate(nodes)
    ]
    states = [np.ones(node.size - len(node.head), np.uint8) for node in nodes]
    print("ready", flush=True)
    for step, _ in enumerate(sys.stdin, 1):
        for node, state, (mover, _agent) in zip(nodes, states, asked, strict=True):
            node.arena.begin_write(0)
            target = node.arena.data(0, node.size)[len(node.head) :]
            np.copyto(np.frombuffer(target, np.uint8), state)
            made = node.arena.finish_write(
                0, identity_digest("r"), 1, step, node.size, identity_digest(node.head)
            )
            about = {"rank": node.rank, "step": step, "slot": 0, "sequence": made.sequence}
            mover.ask("captured", {**about, "meta": META, "durable": False})
        seconds = time.process_time()
        time.sleep(0.05)  # as in `least`
        for node, (mover, telling) in zip(nodes, asked, strict=True):
            node.arena.release(0)
            for each in (mover, telling):
                seconds += float(each.ask("seconds", {})["seconds"])
        print(seconds, flush=True)


if __name__ == "__main__":
    main()
