"""The run that the tests of unauthorized requests attack: a trainer, its mover and a stage."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from holdfast.checkpoint.peers.client import run_identity
from holdfast.events import RequestsRefused, RunStarted
from holdfast.policy.membership.election import ElectionTimeouts
from holdfast.policy.membership.transitions import Phase
from holdfast.wire.http.tls import with_tls
from holdfast.wire.secret import SECRET_VARIABLE, Secret
from holdfast.wire.store.run_store import FolderStore
from holdfast.wire.term import newest_term
from tests.support.agents import SECRET, FleetAgent, scene_of, until, working
from tests.support.attacker import DEADLINE, MARK, place
from tests.support.commands import start
from tests.support.ranks import ROOT, wait_until
from tests.support.trainer_process import Trainer, gone


class AttackedRun:
    """A trainer with a mover that listens to peers, and a staging machine. The attacker does not
    know their secret."""

    def __init__(self, folder: Path, uses_tls: bool = False) -> None:
        self.folder = folder / "run"
        self.folder.mkdir(parents=True)
        (self.folder / "plan.json").write_text(json.dumps({"steps": 10**6, "pace": 0.05}))
        self.secret = Secret(secrets.token_bytes(32))
        if uses_tls:
            self.secret = with_tls(self.secret)
        self.trainer = Trainer(
            self.folder,
            "layout.workers=1",
            "checkpoint.peer_memory_gb=0.05",
            f"cluster.tls={str(uses_tls).lower()}",
            module="tests.support.attacked_trainer",
            environ={SECRET_VARIABLE: self.secret.key.hex()},
        )
        self._stage_secret = folder / "stage.secret"
        self._staged = ""  # the output of earlier stages
        self.refused: dict[str, int] = {}  # listener: requests refused with 401 or 404
        try:
            self.stage = Stage(self.secret, self._stage_secret)
            self.trainer.wait_step(1, 1)
            self._find_listeners()
        except BaseException:
            self.close()
            raise

    def _find_listeners(self) -> None:
        holder = newest_term(FolderStore(self.folder))[1]
        assert holder is not None
        self.control = str(holder["address"])
        self.agent = self.trainer.process.pid
        family = self.trainer.family()
        (self.health,) = {
            address
            for address, pid in listening(family).items()
            if pid == self.agent and address != self.control
        }
        self.mover = next(pid for pid in family if "checkpoint.mover" in command(pid))
        found = listening({self.mover})
        (self.peers,) = {address for address in found if ":" in address}
        (self.socket,) = {address for address in found if address.startswith("/")}
        self.paths: dict[str, bool] = json.loads((self.folder / "paths.json").read_text())
        (started,) = self.trainer.events(RunStarted)
        self.run_identity = run_identity(started.config_hash, started.dataset_version)

    def restart_stage(self) -> None:
        """End the stage and start another one at its port."""
        self._staged += self.stage.close()
        self.stage = Stage(self.secret, self._stage_secret, place(self.stage.address)[1])

    def end(self) -> None:
        """End the run in order. It must report all refusals and hold no trace of the attacker."""
        family = self.trainer.family()
        os.kill(self.agent, signal.SIGTERM)
        assert self.trainer.end() == 0, self.trainer.said
        wait_until(lambda: gone(family), DEADLINE, "the end of all processes")
        counted: dict[str, int] = {}
        times_of: dict[str, list[float]] = {}
        for record in self.trainer.records():
            if isinstance(record.event, RequestsRefused):
                times_of.setdefault(record.writer, []).append(record.time)
                for listener, reasons in record.event.counts.items():
                    counted[listener] = counted.get(listener, 0) + sum(reasons.values())
        for listener in ("control", "health"):  # an ending mover cannot report its last refusals
            assert counted.get(listener, 0) >= self.refused.get(listener, 0), counted
        for times in times_of.values():  # a mover has two listeners; and one report at the end
            assert len(times) <= 2 * ((max(times) - min(times)) / 60 + 2), times
        said = self.trainer.said + self.trainer.logs() + self._staged + self.stage.close()
        if self.refused.get("control"):
            assert "refused requests: " in self.trainer.said
        if self.refused.get("stage"):
            assert '"refused":{"peers":{' in said
        assert "Traceback" not in said
        for hidden in (MARK, self.secret.key.hex()):
            assert hidden not in said
            for path in self.folder.rglob("*"):
                if path.is_file():
                    assert hidden.encode() not in path.read_bytes(), path

    def close(self) -> None:
        if hasattr(self, "stage"):
            self.stage.close()
        if self.trainer.process.poll() is None:
            os.kill(self.trainer.process.pid, signal.SIGKILL)
        self.trainer.process.wait(120)


class Stage:
    """A process of `holdfast stage`."""

    def __init__(self, secret: Secret, file: Path, port: int = 0) -> None:
        file.write_text(secret.key.hex())
        file.chmod(0o600)
        options = ("--secret", file, "--memory", "0.05", "--json")
        tls = "--tls" if secret.uses_tls else "--no-tls"
        listen = f"127.0.0.1:{port}"
        self.process = start("stage", "--listen", listen, *options, tls, folder=ROOT)
        assert self.process.stdout is not None
        self.address: str = json.loads(self.process.stdout.readline())["address"]

    def close(self) -> str:
        """End the process and return its output, once."""
        if self.process.returncode is None:
            self.process.terminate()
            said, complaints = self.process.communicate(timeout=DEADLINE)
            return said + complaints
        return ""


def command(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


def listening(pids: set[int]) -> dict[str, int]:
    """Return the process of each listening address: "host:port", or the path of a unix socket."""
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
                pid = holders.get(f"socket:[{columns[9]}]", 0)
                if columns[3] == "0A" and pid:
                    host, port = columns[1].split(":")
                    words = [bytes.fromhex(host[n : n + 8])[::-1] for n in range(0, len(host), 8)]
                    found[f"{socket.inet_ntop(family, b''.join(words))}:{int(port, 16)}"] = pid
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        columns = line.split()
        pid = holders.get(f"socket:[{columns[6]}]", 0)
        if int(columns[3], 16) & 1 << 16 and pid:  # __SO_ACCEPTCON
            found[columns[7] if len(columns) > 7 else "(no name)"] = pid
    return found


@contextmanager
def fleet(folder: Path, secret: Secret = SECRET) -> Iterator[tuple[list[FleetAgent], FolderStore]]:
    """Two agents at work in a thread. They are patient: on a busy machine neither is declared lost,
    so that every change of the state comes from a request."""
    ready, done = Future[tuple[list[FleetAgent], FolderStore]](), threading.Event()

    async def scene(store: FolderStore) -> None:
        slow = ElectionTimeouts(
            leader_timeout_s=600.0, delay_per_place_s=1.0, minority_wait_s=600.0
        )
        pair = [
            FleetAgent(name, store, 2, 2, patience=slow, lost_after=600.0, secret=secret)
            for name in "ab"
        ]

        def trains() -> bool:
            leading = [a.follower.coordinator for a in pair if a.follower.coordinator]
            return [one.state.phase for one in leading] == [Phase.TRAINING]

        await until(lambda: working(pair) and trains(), "both at work", 120.0)
        ready.set_result((pair, store))
        await asyncio.to_thread(done.wait)

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(scene_of, scene, folder)
        try:
            yield ready.result(240)
        finally:
            done.set()
            running.result(DEADLINE)
