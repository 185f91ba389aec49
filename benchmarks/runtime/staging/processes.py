"""The processes around a trainer: storage, a staging machine, a mover. Each ends with its block."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.runtime.children import ROOT, environment
from benchmarks.runtime.staging.trainer import Order
from benchmarks.runtime.staging.ways import NODE, OURS, Places
from holdfast.checkpoint.mover.main import MoverSpec
from holdfast.checkpoint.mover.service import MoverSettings
from holdfast.checkpoint.peers.config import Peer, PeerSettings
from holdfast.policy.placement import Machine
from holdfast.wire.secret import Secret

ENDING = 30.0


@dataclass(frozen=True)
class Rates:
    """Bytes a second: into the network storage, and to the memory of another node."""

    storage: float
    link: float


@contextmanager
def started(
    command: list[str], first: bytes = b""
) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, Any]]]:
    """A process of ours and the JSON line that it begins with; `first` is its standard input."""
    process = subprocess.Popen(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(first)
        process.stdin.close()
        line = process.stdout.readline()
        if not line:
            raise SystemExit(f"{' '.join(command[:2])} ended before it was ready")
        yield process, json.loads(line)
    finally:
        process.kill()
        process.wait(ENDING)
        process.stdout.close()


@contextmanager
def stage(folder: Path, secret: Secret, room: float) -> Iterator[tuple[int, str]]:
    """A real `holdfast stage`: its process and address."""
    path = folder / "secret"
    path.touch(0o600)
    path.write_text(secret.hex())
    command = [
        "holdfast.cli.main",
        "stage",
        "--listen",
        "127.0.0.1:0",
        "--secret",
        str(path),
        "--memory",
        f"{room / 1e9:.3f}",
        "--json",
    ]
    with started(command) as (process, said):
        yield process.pid, said["address"]


def train(
    way: str,
    model: dict[str, Any],
    nbytes: int,
    rates: Rates,
    folder: Path,
    saves: int,
    every: float,
    plain: int,
    deadline: float,
) -> dict[str, Any]:
    """What the trainer found out about one way, with the processes that it needs."""
    with ExitStack() as stack:
        _, said = stack.enter_context(
            started(["benchmarks.runtime.staging.storage", str(rates.storage)])
        )
        places, helpers = Places(said["address"]), {}
        if way == NODE:
            process, said = stack.enter_context(
                started(["benchmarks.runtime.staging.storage", str(rates.link)])
            )
            places = Places(places.storage, node=said["address"])
            helpers = {"stage": process.pid}
        elif way == OURS:
            places, helpers = _ours(stack, folder, places.storage, rates.link, nbytes)
        order = Order(way, model, places, saves, every, plain, helpers)
        try:
            done = subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "benchmarks.runtime.staging.trainer",
                    json.dumps(asdict(order)),
                ],
                cwd=ROOT,
                env=environment(),
                capture_output=True,
                timeout=deadline,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"error": f"not done after {deadline:g} s"}
        if done.stdout.strip():
            answer: dict[str, Any] = json.loads(done.stdout)
            return answer
        words = done.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"]
        return {"error": f"the trainer ended: {words[-1][:300]}"}


def _ours(
    stack: ExitStack, folder: Path, storage: str, link: float, nbytes: int
) -> tuple[Places, dict[str, int]]:
    """A staging machine, and a mover that sends to it and writes into the storage."""
    secret = Secret(secrets.token_bytes(32))
    stage_pid, address = stack.enter_context(stage(folder, secret, 2.2 * nbytes + 1e8))
    peers = PeerSettings(
        Machine("trainer"),
        (Peer(Machine("stage"), address),),
        stable="stage",
        bytes_per_second=link,
    )
    run, socket = folder / "run", str(folder / "m.sock")
    run.mkdir()
    boot = MoverSpec(
        str(run),
        socket,
        MoverSettings("bench", "", "", keep_last=1),
        secret.hex(),
        peers=peers.to_json(),
    )
    process, _ = stack.enter_context(
        started(["benchmarks.runtime.staging.mover", storage], boot.to_json_line())
    )
    return (
        Places(storage, socket=socket, secret=secret.hex()),
        {"mover": process.pid, "stage": stage_pid},
    )
