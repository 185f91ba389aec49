"""Steady cost of fault tolerance: `python -m benchmarks.runtime.steady [NAME ...]`.

Two agents on this machine are two nodes of one worker each, with 0.8 M parameters and 8,192 tokens
a step. Each step's state goes into the node's memory (tier 0) and the other node's (tier 1), with
heartbeats and the commit of every step. Stretches of steps alternate in the same processes. "off"
captures nothing, and "on" captures and sends every step. "floor" captures nothing, while a pair of
bare processes does the unavoidable work. That is one copy of the state, one hash of it, the peer's
bytes over a loopback socket into warm memory and a hash there. So neither neighbours nor the age of
the run decide.

    step ms      off, on and floor: the median step, first steps of a stretch left out
    blocked ms   of a step's time, in the training thread, for tiers: median, and the worst rank's.
                 Below them are its parts, and the same of a plain memcpy of as many bytes in that
                 thread, in the stretches that are floor
    least        the same work as two nodes must divide it, with signed messages and nothing else
                 (`steadying.least`), over the floor. decided: with Holdfast's messages, manifests,
                 checks, reports to an agent, and nothing else (`steadying.decided`)
    added        wall of on over off, paired by rounds; CPU ms a step of all processes (workers,
                 movers, agents) more than off, of the bare work likewise, and their ratio
    request      cost of an empty one. A step needs eight of them at least: on each node a capture
                 is announced, offered, read and reported
    agents       CPU of both agents with heartbeats and journal, as a share of the run's

The commit is no part of the difference: its vote rides with the norm that clipping needs anyway.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import psutil

from benchmarks.runtime.children import ROOT, environment
from benchmarks.runtime.paired import Estimate, estimate
from benchmarks.runtime.recovering.ours import prepare
from benchmarks.runtime.steadying import requests
from benchmarks.runtime.steadying.worker import COPIED, KINDS, LINES, PARTS, STRETCH, kind_of
from holdfast_lab.chaos.sample_run import SAMPLE_HEAD

RUN_FILE = (
    SAMPLE_HEAD % ("steady", 512, 128)
    + """\
model: {{preset: tiny, ffn_dim: 512}}
train: {{steps: 100000, batch_size: 64, microbatch_size: 8, evaluate: {{every: 0}}}}
checkpoint: {{every_steps: 0, memory_every_steps: 1}}
cluster: {{threads_per_worker: 1, gather_seconds: 60, standbys: 0}}
layout: {{workers: 2}}
"""
)
CASES = {"replicated": (), "dp_shard 2": ("layout.dp_shard=2",)}
STATE = 12
"""Bytes of a parameter: itself and its two moments."""
WORLD = 2
WORST = 3
"""Number of the worst blocked steps that are shown in their parts."""
OURS = ("agents", "movers", "workers")
HEAD = (
    f"{'':<12}{'rounds':>7}{'step ms: off':>14}{'on':>8}{'floor':>8}{'blocked ms':>12}{'worst':>8}"
    f"{'wall on/off':>22}{'CPU ms added':>14}{'floor':>8}{'ratio':>22}{'agents':>8}"
)


@dataclass
class Stretch:
    """Steps of one kind that followed each other. blocked: of each step, seconds of `PARTS` of the
    rank whose sum is higher. cpu: seconds of each kind of process."""

    kind: str
    steps: int
    times: list[float]
    blocked: list[dict[str, float]]
    cpu: dict[str, float]

    @property
    def step(self) -> float:
        return statistics.median(b - a for a, b in itertools.pairwise(self.times))

    @property
    def cpu_step(self) -> float:
        return sum(self.cpu[name] for name in OURS) / self.steps


class SilentError(Exception):
    """The run ended, or did not continue."""


class Line(NamedTuple):
    """A rank's report of a step. when: seconds since the epoch; spent: seconds of `PARTS`."""

    when: float
    step: int
    rank: int
    spent: dict[str, float]


@dataclass
class Run:
    """Two agents, and what their workers tell."""

    run_file: Path
    folder: Path
    nbytes: int
    settings: tuple[str, ...]
    stretch: int
    seconds: float
    agents: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __enter__(self) -> Run:
        environ = environment(
            **{
                STRETCH: str(self.stretch),
                LINES: str(self.folder.with_suffix(".lines")),
                COPIED: str(self.nbytes // WORLD),
            }
        )
        self.folder.with_suffix(".lines").touch()
        for number in range(WORLD):
            log = self.folder.with_suffix(f".n{number}").open("w")
            self.agents.append(
                subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        "benchmarks.runtime.steadying.worker",
                        str(self.run_file),
                        f"folder={self.folder}",
                        f"cluster.node=n{number}",
                        "cluster.places=1",
                        "cluster.min_nodes=2",
                        *self.settings,
                    ],
                    stdout=log,
                    stderr=log,
                    env=environ,
                    cwd=ROOT,
                    start_new_session=True,
                )
            )
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self.agents:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
            agent.wait()

    def lines(self) -> list[Line]:
        found = []
        for text in self.folder.with_suffix(".lines").read_text().splitlines(keepends=True):
            if text.endswith("\n"):
                when, step, rank, *spent = text.split()
                parts = dict(zip(PARTS, map(float, spent), strict=True))
                found.append(Line(float(when), int(step), int(rank), parts))
        return found

    def until(self, step: int) -> list[Line]:
        """Every rank has ended `step`. Raises SilentError."""
        deadline, seen = time.monotonic() + self.seconds, 0
        while True:
            found = self.lines()
            if len(found) > seen:
                deadline, seen = time.monotonic() + self.seconds, len(found)
            if sum(line.step == step for line in found) == WORLD:
                return found
            if time.monotonic() > deadline or any(a.poll() is not None for a in self.agents):
                raise SilentError(f"step {step} did not come")
            time.sleep(0.002)

    def cpu(self) -> dict[str, float]:
        """Seconds so far, by kind of process."""
        found = {"agents": 0.0, "movers": 0.0, "workers": 0.0}
        for agent in self.agents:
            own = psutil.Process(agent.pid)
            for process in (own, *own.children(recursive=True)):
                times = process.cpu_times()
                kind = "agents" if process is own else "workers"
                if "holdfast.checkpoint.mover.main" in process.cmdline():
                    kind = "movers"
                found[kind] += times.user + times.system
        return found


class Bare:
    """Processes that do a step's work on request: `steadying.floor` and its variants."""

    def __init__(self, name: str, *about: object) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"benchmarks.runtime.steadying.{name}", *map(str, about)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
            cwd=ROOT,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"
        self.cpu = self.once()

    def once(self) -> float:
        """CPU seconds so far."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def followed(run: Run, bare: tuple[Bare, ...], first: int) -> Stretch:
    """The stretch that begins with step `first`. Its first step is left out: it hides what is left
    of the stretch before."""
    run.until(first)
    kind, last = kind_of(first, run.stretch), first + run.stretch - 1
    before, spent = run.cpu(), {each.name: each.cpu for each in bare}
    for step in range(first + 1, last + 1):
        if kind == "floor":
            for each in bare[:: 1 if step % 2 else -1]:
                each.cpu = each.once()
        run.until(step)
    after = run.cpu()
    cpu = {name: after[name] - before[name] for name in after}
    cpu |= {each.name: each.cpu - spent[each.name] for each in bare}
    found = run.until(last)
    times = [min(e.when for e in found if e.step == step) for step in range(first, last + 1)]
    blocked = [
        max((e.spent for e in found if e.step == step), key=_sum)
        for step in range(first + 1, last + 1)
    ]
    return Stretch(kind, last - first, times, blocked, cpu)


def _sum(spent: Mapping[str, float]) -> float:
    return sum(spent.values())


def measure(run: Run, bare: tuple[Bare, ...], rounds: int) -> list[Stretch]:
    """Raises SilentError."""
    return [
        followed(run, bare, 1 + index * run.stretch)
        for index in range(1, len(KINDS) // 2 * rounds + 1)  # the first stretch warms up
    ]


def row(name: str, stretches: list[Stretch]) -> str:
    each = len(KINDS) // 2
    rounds = [
        {s.kind: s for s in stretches[at : at + each]} for at in range(0, len(stretches), each)
    ]
    of = {kind: [r[kind] for r in rounds] for kind in ("off", "on", "floor")}
    step = {kind: 1e3 * statistics.median(s.step for s in of[kind]) for kind in of}
    blocked = [_sum(b) for s in of["on"] for b in s.blocked]
    wall = estimate([r["on"].step / r["off"].step for r in rounds])
    added = [r["on"].cpu_step - r["off"].cpu_step for r in rounds]
    bare = [s.cpu["floor"] / s.steps for s in of["floor"]]
    ratio = _over(added, bare)
    agents = sum(s.cpu["agents"] for s in of["on"]) / sum(s.cpu_step * s.steps for s in of["on"])
    return (
        f"{name:<12}{len(rounds):7d}{step['off']:14.1f}{step['on']:8.1f}{step['floor']:8.1f}"
        f"{1e3 * statistics.median(blocked):12.2f}{1e3 * max(blocked):8.2f}{wall!s:>22}"
        f"{1e3 * statistics.median(added):14.1f}{1e3 * statistics.median(bare):8.1f}"
        f"{ratio!s:>22}{agents:8.1%}"
    )


def held_up(stretches: list[Stretch]) -> str:
    """Return the parts of the worst blocked steps, and the time of a memcpy in that thread."""
    on = sorted((b for s in stretches if s.kind == "on" for b in s.blocked), key=_sum)
    worst = "; ".join(
        " + ".join(f"{name} {1e3 * part:.2f}" for name, part in each.items() if part >= 1e-4)
        for each in on[: -1 - WORST : -1]
    )
    bare = [1e3 * b["memcpy"] for s in stretches if s.kind == "floor" for b in s.blocked]
    return (
        f"{'':<12} blocked, the worst of {len(on)}, ms: {worst}\n"
        f"{'':<12} memcpy of as much in that thread, ms: median {statistics.median(bare):.2f}, "
        f"worst of {len(bare)} {max(bare):.2f}"
    )


def by_kind(stretches: list[Stretch]) -> str:
    """Return CPU ms a step of all processes of a kind, without and with captures, as means over all
    stretches. Also return what movers and agents add over the floor. Workers are left out of it,
    because their steps differ by more than a capture costs them."""

    def spent(name: str, kind: str) -> float:
        chosen = [s for s in stretches if s.kind == kind]
        return 1e3 * sum(s.cpu[name] for s in chosen) / sum(s.steps for s in chosen)

    pairs = {name: (spent(name, "off"), spent(name, "on")) for name in OURS}
    told = ", ".join(f"{name} {off:.1f} and {on:.1f}" for name, (off, on) in pairs.items())
    added = sum(on - off for name, (off, on) in pairs.items() if name != "workers")
    floor, least, decided = (spent(name, "floor") for name in ("floor", "least", "decided"))
    return (
        f"{'':<12} CPU ms a step, off and on: {told}\n"
        f"{'':<12} movers and agents alone: {added:.1f} ms, {added / floor:.2f} of the floor; "
        f"least {least / floor:.2f}, as decided {decided / floor:.2f}"
    )


def _over(added: list[float], bare: list[float]) -> Estimate:
    """A difference of two noisy sums: over the typical floor, not round by round over its own."""
    floor = statistics.median(bare)
    return estimate([each / floor for each in added])


def state_bytes(run_file: Path, changes: list[str]) -> int:
    from holdfast.config.loading.load import load_config
    from holdfast.core.sharding.state_table import state_table

    config = load_config(run_file, ["model.vocab_size=512", *changes]).config
    return sum(spec.nbytes for spec in state_table(config.model, config.train.precision))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "names", nargs="*", help=f"beginnings of {', '.join(CASES)}; key=value changes the run file"
    )
    parser.add_argument("--rounds", type=int, default=12, help="of off, on and floor")
    parser.add_argument("--stretch", type=int, default=6, help="steps of one kind in a row")
    parser.add_argument("--seconds", type=float, default=90.0, help="deadline of each step")
    settings = parser.parse_args()
    changes = [word for word in settings.names if "=" in word]
    names = tuple(word for word in settings.names if "=" not in word)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started ends with it
    failed = False
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run_file = prepare(folder, RUN_FILE)
        nbytes = state_bytes(run_file, changes)
        print(f"state: {nbytes / 1e6:.1f} MB in all, each half of it to the other node\n{HEAD}")
        for case, given in CASES.items():
            if names and not case.startswith(names):
                continue
            place = folder / case.replace(" ", "-")
            bare = (
                Bare("floor", nbytes, nbytes),
                Bare("least", nbytes),
                Bare("decided", run_file, *changes),
            )
            try:
                told = (*given, *changes)
                with Run(run_file, place, nbytes, told, settings.stretch, settings.seconds) as run:
                    stretches = measure(run, bare, settings.rounds)
                told_of = (row(case, stretches), held_up(stretches), by_kind(stretches))
                print(*told_of, sep="\n", flush=True)
                kept = sum(
                    text.count('"snapshot_kept"')
                    for path in place.rglob("*.jsonl")
                    for text in [path.read_text()]
                )
                print(f"{'':<12} copies that the other node has told of: {kept}", flush=True)
            except SilentError as error:
                failed = True
                print(f"{case:<12} {error}; see {place}.n0", flush=True)
            finally:
                for each in bare:
                    each.close()
    print(f"a signed request that does nothing, both ends: {requests.milliseconds():.2f} ms of CPU")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
