"""Run a test's body in n real processes.

    @ranks(2)
    def test_sum(rank: RankContext) -> None:
        rank.init_torch_world()
        ...

    def body(rank: RankContext, size: int) -> float: ...

    def test_values() -> None:
        assert rank_values(body, 3, {"size": 8}) == [0.5, 0.5, 0.5]

    @ranks(3, dies={1: "SIGKILL"})           # rank 1 must die so, the others must succeed
    def test_loss(rank: RankContext) -> None: ...

The processes are forked from one server per pytest session (`tests/support/rank_server.py`). It has
imported torch and touched no device, so a rank costs milliseconds instead of seconds. The server
hands out at most `MAX_RANKS` at a time over all pytest workers, first come first served. A call for
more, up to `MOST_OF_A_CALL`, runs while no other does. A body is
a function at the top level of its module; it is found again by name in the rank. Arguments and
return values are JSON values (and paths), never pickles.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

MAX_RANKS, MOST_OF_A_CALL = 8, 16
ADDRESS = "HOLDFAST_RANK_SERVER"  # environment variable: path of the server's unix socket
ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 180.0  # of a wait: more than ten times what a quiet machine needs
T = TypeVar("T")

Dies = Mapping[int, str | int]  # rank -> a signal's name ("SIGKILL") or an exit code


@dataclass(frozen=True)
class RankContext:
    """A body's knowledge about itself. `folder` is shared by the ranks of one call."""

    rank: int
    world_size: int
    folder: Path

    def store(self, name: str = "store") -> Store:
        """A FileStore that all ranks of this call share; another name is another store.

        It does not know the number of ranks. A store that knows it removes its file if all ranks
        have closed it for a moment. A rank that is just coming back would then wait in the old
        file.
        """
        from torch.distributed import FileStore  # type: ignore[attr-defined]

        return FileStore(str(self.folder / f"{name}.filestore"))

    def init_torch_world(self, name: str = "world", seconds: float = DEADLINE_S) -> Any:
        """torch's default gloo group over all ranks: for references such as DDP and FSDP2."""
        from datetime import timedelta

        import torch.distributed as dist

        dist.init_process_group(
            "gloo",
            store=self.store(name),
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=seconds),
        )
        self.barrier(f"{name}.joined", seconds)  # who leaves early breaks a connection being made
        return dist.group.WORLD

    def pid(self, rank: int, seconds: float = DEADLINE_S) -> int:
        """Process id of a peer, as soon as it has started."""
        path = self.folder / f"rank{rank}.pid"
        wait_until(path.exists, seconds, f"rank {rank} to start")
        return int(path.read_text())

    def kill(self, rank: int, signal_name: str = "SIGKILL") -> None:
        """Send a signal to a peer, or to myself (then this does not return for SIGKILL)."""
        os.kill(self.pid(rank), signal.Signals[signal_name])

    def die_within(self, seconds: float) -> None:
        """Be ended by SIGALRM, whatever my threads do until then, and whether they run at all."""
        signal.setitimer(signal.ITIMER_REAL, seconds)

    def mark(self, name: str) -> None:
        """Say to the peers that this rank came to `name`."""
        (self.folder / f"{name}.{self.rank}.mark").touch()

    def wait_mark(self, name: str, rank: int, seconds: float = DEADLINE_S) -> None:
        """Wait until peer `rank` came to `name`."""
        path = self.folder / f"{name}.{rank}.mark"
        wait_until(path.exists, seconds, f"rank {rank} to come to {name!r}")

    def barrier(self, name: str, seconds: float = DEADLINE_S) -> None:
        """All ranks come to `name`, without any collective."""
        self.mark(name)
        for rank in range(self.world_size):
            self.wait_mark(name, rank, seconds)


@dataclass(frozen=True)
class Result:
    """The end of one rank: `exit` is its exit code, or minus a signal's number."""

    rank: int
    exit: int
    value: Any
    log: str
    reason: str = ""  # "deadline" or "peer failed" when the server ended it

    @property
    def ended(self) -> str:
        how = f"exit {self.exit}" if self.exit >= 0 else signal.Signals(-self.exit).name
        return f"{how} ({self.reason})" if self.reason else how


class RanksError(AssertionError):
    """At least one rank ended otherwise than it should; the message shows every rank's log."""


class Server:
    """The fork server, started at once and torch-free until the first request comes.

    Its socket listens before this constructor returns. It lives as long as the pipe whose
    write end this object holds, so it ends with this process however that ends. `bare`: it imports
    nothing beforehand, for ranks that need nothing.
    """

    def __init__(self, bare: bool = False) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-"))  # mode 0700
        self.address = str(self.folder / "socket")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(self.address)
        listener.listen(256)
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONUNBUFFERED": "1",
            "PYTHONFAULTHANDLER": "1",
        }
        environment.pop("PYTEST_CURRENT_TEST", None)
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.support.rank_server",
                str(listener.fileno()),
                str(self.folder),
                *["bare"] * bare,
            ],
            stdin=subprocess.PIPE,
            pass_fds=[listener.fileno()],
            cwd=ROOT,
            env=environment,
            start_new_session=True,  # Ctrl-C at the terminal is pytest's to handle
        )
        listener.close()

    def close(self) -> None:
        """End the server and with it every rank; idempotent."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(120)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def run_ranks(
    body: Callable[..., Any],
    n: int,
    args: Mapping[str, Any] | None = None,
    *,
    deadline: float = DEADLINE_S,
    dies: Dies | None = None,
    folder: Path | None = None,
    address: str | None = None,
) -> list[Result]:
    """Run `body(RankContext, **args)` in n processes and wait for all of them.

    deadline: seconds from the fork (waiting for a free place does not count); then every rank
        prints the traces of its threads into its log and is killed with its process group.
    dies: ranks that are expected to end otherwise than with 0. When another rank fails, its
        peers get three more seconds.
    folder: becomes RankContext.folder, kept; without it a temporary one is removed.
    Raises nothing for ranks that fail: see `rank_values` and `expect` for that.
    """
    server = address or os.environ.get(ADDRESS)
    if not server:
        raise RuntimeError(
            "no rank server: run this under pytest, or pass address=Server().address"
        )
    if not 1 <= n <= MOST_OF_A_CALL:
        raise ValueError(f"{n} ranks: 1 to {MOST_OF_A_CALL} are possible")
    if "<locals>" in body.__qualname__:
        raise ValueError(f"{body.__qualname__} must stand at the top level of its module")
    own = folder or Path(tempfile.mkdtemp(prefix="call-", dir=Path(server).parent))
    request = {
        "module": body.__module__,
        "function": body.__qualname__,
        "n": n,
        "args": encode(dict(args or {})),
        "deadline": deadline,
        "folder": str(own),
        "dies": sorted(dies or {}),
    }
    try:
        answer = _ask(server, request)
        if "error" in answer:
            raise RuntimeError(f"the rank server failed:\n{answer['error']}")
        return [_result(own, r, *answer["ended"][r]) for r in range(n)]
    finally:
        if not folder:
            shutil.rmtree(own, ignore_errors=True)


def rank_values(
    body: Callable[..., Any], n: int, args: Mapping[str, Any] | None = None, **options: Any
) -> list[Any]:
    """`run_ranks`, then every rank's return value; RanksError when a rank ended unexpectedly."""
    results = run_ranks(body, n, args, **options)
    expect(results, options.get("dies"))
    return [result.value for result in results]


def expect(results: list[Result], dies: Dies | None = None) -> None:
    """Raise RanksError unless each rank ended as it should: with 0, or as `dies` says."""
    wanted = {rank: _exit_code(how) for rank, how in (dies or {}).items()}
    wrong = [r for r in results if r.exit != wanted.get(r.rank, 0) or r.reason]
    if wrong:
        summary = ", ".join(f"rank {r.rank}: {r.ended}" for r in results)
        logs = "\n".join(f"----- rank {r.rank}: {r.ended}\n{r.log.rstrip()}" for r in results)
        raise RanksError(f"{summary}\n{logs}")


def ranks(
    n: int | str,
    *,
    deadline: float = DEADLINE_S,
    dies: Dies | None = None,
    check: Callable[..., None] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Make a test of a body: its first parameter is the RankContext, the rest are pytest's.

    n: number of ranks, or the name of a parametrized argument that holds it.
    check: called in the test's own process with the list of return values, and with those of
        the test's arguments that it names.
    """

    def decorate(body: Callable[..., Any]) -> Callable[..., None]:
        parameters = list(inspect.signature(body).parameters.values())

        @functools.wraps(body)
        def test(**args: Any) -> None:
            count = n if isinstance(n, int) else int(args[n])
            values = rank_values(body, count, args, deadline=deadline, dies=dies)
            if check is not None:
                named = inspect.signature(check).parameters
                check(values, **{k: v for k, v in args.items() if k in named})

        test.__signature__ = inspect.Signature(parameters[1:])  # type: ignore[attr-defined]
        test.rank_body = body  # type: ignore[attr-defined]
        del test.__wrapped__  # pytest would look through it at the body's signature
        return test

    return decorate


def wait_until(
    condition: Callable[[], T],
    seconds: float = DEADLINE_S,
    what: str | Callable[[], str] = "the condition",
    pause_s: float = 0.01,
) -> T:
    """Poll `condition` until it holds, and return its value. All waits of the tests end here.

    Args:
        seconds: Shorter ones than the default are for a wait that has to fail.
        what: What the test waits for, or a function that says it at the end, with what it sees.
        pause_s: Between two calls; longer if a call takes a core.
    Raises:
        TimeoutError: It did not hold.
    """
    end = time.monotonic() + seconds
    pause = threading.Event()
    while not (value := condition()):
        if time.monotonic() > end:
            text = what if isinstance(what, str) else what()
            raise TimeoutError(f"waited {seconds:g} s for {text}")
        pause.wait(pause_s)
    return value


def encode(value: Any) -> Any:
    """JSON value of an argument; paths are marked. Raises TypeError for anything else."""
    if isinstance(value, Path):
        return {"__path__": str(value)}
    if isinstance(value, dict):
        return {str(k): encode(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [encode(v) for v in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{value!r} is not a JSON value: ranks take and return simple values only")


def decode(value: Any) -> Any:
    """What `encode` was given, tuples as lists."""
    if isinstance(value, dict):
        if set(value) == {"__path__"}:
            return Path(value["__path__"])
        return {k: decode(v) for k, v in value.items()}
    return [decode(v) for v in value] if isinstance(value, list) else value


def _ask(server: str, request: dict[str, Any]) -> dict[str, Any]:
    """One request, one answer, one connection; closing it early ends the ranks."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(server)
        connection.sendall(json.dumps(request).encode() + b"\n")
        with connection.makefile("rb") as stream:
            line = stream.readline()
    if not line:
        raise RuntimeError("the rank server ended before it answered")
    answer: dict[str, Any] = json.loads(line)
    return answer


def _result(folder: Path, rank: int, exit_code: int, reason: str) -> Result:
    log_path = folder / f"rank{rank}.log"
    log = log_path.read_text(errors="replace") if log_path.exists() else "(it never began)"
    path = folder / f"rank{rank}.result"
    value = decode(json.loads(path.read_text())) if path.exists() else None
    return Result(rank, exit_code, value, log, reason)


def _exit_code(how: str | int) -> int:
    return how if isinstance(how, int) else -signal.Signals[how].value
