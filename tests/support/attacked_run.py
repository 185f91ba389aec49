"""A run that is attacked, its listeners, and their answers to attempts."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from holdfast.events import RequestsRefused
from holdfast.wire.http.auth import Aim, headers_of
from holdfast.wire.secret import Secret, open_secret
from holdfast.wire.store.run_store import FolderStore
from holdfast.wire.term import newest_term
from tests.support.attacker import MARK, statuses, told
from tests.support.journal_reader import Journal
from tests.support.ranks import ROOT, wait_until
from tests.support.trainer_process import Trainer, gone

ATTEMPTS = int(os.environ.get("HOLDFAST_STRANGERS", "1200"))
SEED = int(os.environ.get("HOLDFAST_STRANGERS_SEED", "6"))
REFUSED = {400, 401, 404, 405, 411, 413, 414, 421, 431, 501, 505}
GROWTH = 24 << 20
"""Bytes that a process may grow by, however many attempts are made. (The agent grew by 1.2 MB over
10,000 at its control; a leak of 10 KB each would be 100 MB.)"""
DEADLINE = 60.0


# --- the run that is attacked -------------------------------------------------------------------
class World:
    """A trainer with a mover that listens to peers, and a staging machine; none of their secrets
    is known to a stranger."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "run"
        self.folder.mkdir(parents=True)
        (self.folder / "plan.json").write_text(json.dumps({"steps": 10**6, "pace": 0.05}))
        self.trainer = Attacked(
            self.folder, "layout.workers=1", "checkpoint.peer_memory_gb=0.05",
        )  # fmt: skip
        self.trainer.wait_step(1, 1)
        self.secret = open_secret(self.folder, {})
        holder = newest_term(FolderStore(self.folder))[1]
        assert holder is not None
        self.control = str(holder["address"])
        agent = self.trainer.process.pid
        (self.health,) = {a for a, pid in listening(self.trainer.family()).items()
                          if pid == agent and a != self.control}  # fmt: skip
        self.mover = next(
            pid for pid in self.trainer.family() if "checkpoint.mover" in command(pid)
        )
        (self.peers,) = {a for a, pid in listening({self.mover}).items() if ":" in a}
        (self.socket,) = {a for a, pid in listening({self.mover}).items() if a.startswith("/")}
        self.paths: dict[str, bool] = json.loads((self.folder / "paths.json").read_text())
        self.stage = Stage(self.secret, folder / "stage.secret")
        self.refused: dict[str, int] = {}  # by listener: answers 401 to strangers

    def end(self) -> None:
        """End the run in order. It reports how many requests it refused, and keeps nothing that a
        stranger sent."""
        family = self.trainer.family()
        os.kill(self.trainer.process.pid, signal.SIGTERM)
        assert self.trainer.end() == 0, self.trainer.said
        wait_until(lambda: gone(family), DEADLINE, "nobody is left")
        counted: dict[str, int] = {}
        told_by: dict[str, list[float]] = {}
        for record in self.trainer.records():
            if isinstance(record.event, RequestsRefused):
                told_by.setdefault(record.writer, []).append(record.time)
                for listener, reasons in record.event.counts.items():
                    counted[listener] = counted.get(listener, 0) + sum(reasons.values())
        for listener in ("control", "health"):  # a mover that ends cannot report any more
            assert counted.get(listener, 0) >= self.refused.get(listener, 0), counted
        for times in told_by.values():  # a mover has two listeners; and one more at the end
            assert len(times) <= 2 * ((max(times) - min(times)) / 60 + 2), times
        said = self.trainer.said + self.trainer.logs() + self.stage.close()
        if self.refused.get("control"):
            assert "refused requests: " in self.trainer.said
        if self.refused.get("stage"):
            assert '"refused":{"peers":{' in said
        assert "Traceback" not in said
        for hidden in (MARK, self.secret.hex()):
            assert hidden not in said
            for path in self.folder.rglob("*"):
                if path.is_file() and path.name != "secret":
                    assert hidden.encode() not in path.read_bytes(), path

    def close(self) -> None:
        self.stage.close()
        if self.trainer.process.poll() is None:
            os.kill(self.trainer.process.pid, signal.SIGKILL)
        self.trainer.process.wait(10)


class Attacked(Trainer):
    def __init__(self, folder: Path, *overrides: str) -> None:
        self.folder, self._journal = folder, Journal(folder)
        self.output = folder.parent / f"{folder.name}.out"
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.attacked_trainer", str(folder),
                 "cluster.recovery=restart", *overrides],
                cwd=ROOT, stdout=output, stderr=output, start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip


class Stage:
    """`holdfast stage` as a process; what it says, line by line."""

    def __init__(self, secret: Secret, file: Path, port: int = 0) -> None:
        file.write_text(secret.hex())
        file.chmod(0o600)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "holdfast.cli.main", "stage", "--listen", f"127.0.0.1:{port}",
             "--secret", str(file), "--memory", "0.05", "--json"],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        self.address: str = json.loads(self.process.stdout.readline())["address"]

    def close(self) -> str:
        """End it; everything that it said since the start."""
        if self.process.returncode is None:
            self.process.terminate()
            said, complaints = self.process.communicate(timeout=DEADLINE)
            return said + complaints
        return ""


# --- what is looked at --------------------------------------------------------------------------
def command(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


def listening(pids: set[int]) -> dict[str, int]:
    """Address -> who listens there, of TCP ("host:port") and unix sockets (their path)."""
    holders = {}
    for pid in pids:
        with suppress(OSError):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    holders[os.readlink(entry)] = pid
    found = {}
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        with suppress(FileNotFoundError):
            for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
                columns = line.split()
                pid = holders.get(f"socket:[{columns[9]}]")
                if columns[3] == "0A" and pid is not None:
                    host, port = columns[1].split(":")
                    words = [bytes.fromhex(host[n : n + 8])[::-1] for n in range(0, len(host), 8)]
                    found[f"{socket.inet_ntop(family, b''.join(words))}:{int(port, 16)}"] = pid
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        columns = line.split()
        pid = holders.get(f"socket:[{columns[6]}]")
        if int(columns[3], 16) & 1 << 16 and pid is not None:  # __SO_ACCEPTCON
            found[columns[7] if len(columns) > 7 else "(no name)"] = pid
    return found


def resident(pid: int) -> int:
    """Bytes of memory."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def place(address: str) -> tuple[str, int]:
    host, port = address.rsplit(":", 1)
    return host, int(port)


def connecting(address: str) -> Callable[[], socket.socket]:
    def connect() -> socket.socket:
        if not address.startswith("/"):
            return socket.create_connection(place(address), DEADLINE)
        made = socket.socket(socket.AF_UNIX)
        made.settimeout(DEADLINE)
        made.connect(address)
        return made

    return connect


class Tap:
    """A man in the middle: it reads the traffic, and may change the answers."""

    def __init__(self, address: str, change: Callable[[bytes], bytes] = lambda data: data) -> None:
        self._there, self.change = address, change
        self.requests: list[bytes] = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                here, _ = self._server.accept()
                threading.Thread(target=self._carry, args=(here,), daemon=True).start()

    def _carry(self, here: socket.socket) -> None:
        with here, socket.create_connection(place(self._there), DEADLINE) as there, \
                suppress(OSError):  # fmt: skip
            while (request := message(here)) is not None:
                self.requests.append(request)
                there.sendall(request)
                answer = message(there)
                if answer is None:
                    return
                changed = self.change(answer)
                here.sendall(changed)
                if changed != answer:
                    return  # so no client waits for bytes that will not come


def message(connection: socket.socket) -> bytes | None:
    """One request or answer of HTTP, with its body; None at the end."""
    data = b""
    while b"\r\n\r\n" not in data:
        more = connection.recv(65536)
        if not more:
            return None
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)content-length: (\d+)", head)
    due = int(length[1]) if length else 0
    while len(body) < due:
        body += connection.recv(65536)
    return head + b"\r\n\r\n" + body


@contextmanager
def tapped(address: str, change: Callable[[bytes], bytes] = lambda data: data) -> Iterator[Tap]:
    tap = Tap(address, change)
    try:
        yield tap
    finally:
        tap.close()


def signing(
    address: str, secret: Secret, generation: int, requests: list[tuple[str, str, bytes]],
    aim: Aim,
) -> Callable[[], bytes]:  # fmt: skip
    """Requests that never arrive, one after the other, each rightly signed for a listener."""
    number = iter(range(10**9))

    def fresh() -> bytes:
        method, path, body = requests[next(number) % len(requests)]
        headers = headers_of(aim.sign(secret, method, path, body, generation), body)
        found = [f"{method} {path} HTTP/1.1", f"host: {address}"]
        found += [f"{name}: {value}" for name, value in headers.items()]
        if body:
            found.append(f"content-length: {len(body)}")
        return "\r\n".join([*found, "", ""]).encode() + body

    return fresh


# --- attempts -----------------------------------------------------------------------------------
def attack(
    address: str, attempts: Iterator[tuple[str, bytes]], pid: int | None,
    honest: Callable[[], object], may: set[int],
) -> dict[int, int]:  # fmt: skip
    """Make all attempts. Every answer is one of `may`, or none. In between, an honest client is
    served at once, and at the end the process is no larger. Return how often each status came (0:
    none)."""
    connect, counts = connecting(address), dict[int, int]()
    size = resident(pid) if pid else 0
    for number, (name, data) in enumerate(attempts):
        answer = told(connect, data)
        found = statuses(answer)
        assert set(found) <= may, (name, data[:2000], answer[:500])
        if not may:
            assert answer == b"", (name, data[:2000], answer[:500])
        for status in found or [0]:
            counts[status] = counts.get(status, 0) + 1
        if number % 100 == 0:
            honest()
        if pid and number == 300:  # whatever a first refusal needs has been made by then
            size = resident(pid)
    honest()
    if pid:
        assert resident(pid) - size < GROWTH
    return counts
