"""Explaining failures: is the cause named, with the right rank, and after how many seconds?

Each injection is a real run of four workers on this machine, two nodes of two, by the real command.
A seed draws the rank, the node and the step. A partition has three nodes in network namespaces. The
watcher reads the journal every half second, without logs, and notes the first finding after the
injection. It prints the confusion matrix, the share that is right, and the seconds.

    startup-crash          a worker raises or exits when it opens the first step
    straggler              a rank sleeps in every microbatch
    network-timeout        the line of a node is cut
    checkpoint-corruption  a bit of a file of the newest checkpoint is turned; all nodes restart
    divergence             a gradient of a rank becomes NaN
    out-of-memory          the allocator refuses a rank
    preemption             a node gets SIGTERM
    contention             endless loops of higher priority share the core that a node is bound to
    wrong-topology         of three nodes two have one place each, so a replica of tp 2 lies on both
    data-skew              the samples that one rank gets become a hundred times as long

    python -m benchmarks.runtime.explain [--injections 20] [--seed 1] [--modes MODE ...]
    python -m benchmarks.runtime.explain --undisturbed 60
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support import sample_tasks
from tests.support.commands import apart, write_run_file
from tests.support.monitoring import receiver
from tests.support.nodes import Nodes, nodes_of

from holdfast.checkpoint.restore.catalog import list_commits, step_of
from holdfast.core.data.sample_order import SampleOrder
from holdfast.elastic.protocol.fault_orders import FaultOrder, FaultOrders
from holdfast.events import BatchFed, CheckpointCommitted, Record
from holdfast.report.causes.explain import explain
from holdfast.report.causes.finding import Finding, Mode
from holdfast_lab.chaos.network import Network, why_unavailable

TIMEOUT_S = 60.0
CONTENDERS = 2  # loops of higher priority on the core of a node with two workers
POLL_S = 0.5
BATCH, FIRST_STEP, SKEWED_STEPS, ROWS = 8, 30, 4000, 1_000_000
SETTINGS = (
    "train.steps=1000000",
    f"train.batch_size={BATCH}",
    "train.evaluate.every=0",
    "checkpoint.every_steps=20",
    "cluster.min_nodes=1",
    "cluster.max_restarts_without_progress=100",
)
TASK = '''\
"""Rows of a task: those whose numbers stand in a file are a hundred times as long."""

import json
from pathlib import Path

import torch
from sample_tasks import Gru, Rows

LONG = Path(__file__).with_name("long.json")


class Skewed(Rows):
    long, read_at = frozenset(), 0.0

    def __getitem__(self, index):
        if LONG.exists() and LONG.stat().st_mtime != self.read_at:
            self.read_at = LONG.stat().st_mtime
            self.long = frozenset(json.loads(LONG.read_text()))
        row = dict(super().__getitem__(index))
        return row | {"x": row["x"].repeat(100)} if index in self.long else row


class SkewedTask(Gru):
    def data(self):
        return Skewed({rows})
'''


@dataclass(frozen=True)
class Injected:
    """What was done, when, and where; node: one of these."""

    time: float
    rank: int | None
    nodes: frozenset[str]


@dataclass(frozen=True)
class Result:
    """An injection and what the journal's first finding after it says."""

    mode: Mode
    found: Finding | None
    is_place_right: bool
    seconds: float


@dataclass
class Scene:
    """A prepared run that an injection starts and breaks."""

    nodes: Nodes
    orders: FaultOrders
    folder: Path
    draw: random.Random
    stack: ExitStack

    def start(self, **places: int) -> None:
        for name, count in (places or {"a": 2, "b": 2}).items():
            self.nodes.start(name, settings=[f"cluster.places={count}"])

    def train(self, names: str = "ab") -> int:
        """Wait for the first steps; return the newest one."""
        self.nodes.wait_step(FIRST_STEP, nodes=set(names))
        return max(self.nodes.losses())

    def node_of(self, rank: int) -> str:
        return "aabb"[rank]

    def order(self, deed: str, point: str, step: int, rank: int) -> Injected:
        """Order a fault, and return when it hit."""
        self.orders.arm(FaultOrder(1, deed, deed, point, step, rank))
        self.wait(lambda: self.orders.read_hit(1) is not None)
        return Injected(self.orders.hit_time(1), rank, frozenset({self.node_of(rank)}))

    def wait(self, due: Callable[[], object]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not due():
            if time.monotonic() > deadline:
                raise SystemExit(f"an injection did not happen\n{self.nodes.story()}")
            time.sleep(0.05)


def startup_crash(at: Scene) -> Injected:
    rank, deed = at.draw.randrange(4), at.draw.choice(["raise", "exit"])
    at.orders.arm(FaultOrder(1, deed, deed, "begin", 1, rank))
    at.start()
    return at.order(deed, "begin", 1, rank)


def straggler(at: Scene) -> Injected:
    at.start()
    at.train()
    rank = at.draw.randrange(4)
    begun = time.time()
    at.orders.set_slow_ranks({rank: at.draw.uniform(0.1, 0.2)})
    return Injected(begun, rank, frozenset({at.node_of(rank)}))


def network_timeout(at: Scene) -> Injected:
    network = at.stack.enter_context(Network())
    network.up("abc")
    for name in "abc":
        settings = ["layout.workers=3", *network.settings(name)]
        at.nodes.start(name, settings=settings, before=network.command(name))
    at.train("abc")
    node = at.draw.choice("abc")
    begun = time.time()
    network.cut(node)
    return Injected(begun, None, frozenset(node))


def checkpoint_corruption(at: Scene) -> Injected:
    at.start()
    at.train()
    at.wait(lambda: len(at.nodes.events(CheckpointCommitted)) >= at.draw.randint(2, 5))
    for name in "ab":
        at.nodes.kill(name)
    newest = max(step_of(key) for key in list_commits(at.nodes.store))
    files = sorted((at.nodes.folder / "data").rglob(f"{newest:010d}-rank*.safetensors"))
    file = at.draw.choice(files)
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    begun = time.time()
    at.start()
    return Injected(begun, int(file.name.split("-rank")[1].split("-")[0]), frozenset())


def divergence(at: Scene) -> Injected:
    at.start()
    step = at.train() + at.draw.randint(5, 50)
    return at.order("not finite", "backward", step, at.draw.randrange(4))


def out_of_memory(at: Scene) -> Injected:
    at.start()
    step, point = at.train() + at.draw.randint(5, 50), at.draw.choice(["forward", "computed"])
    return at.order("memory", point, step, at.draw.randrange(4))


def preemption(at: Scene) -> Injected:
    at.start()
    at.train()
    node = at.draw.choice("ab")
    begun = time.time()
    at.nodes.signal(node, signal.SIGTERM)
    return Injected(begun, None, frozenset(node))


def contention(at: Scene) -> Injected:
    cores = sorted(os.sched_getaffinity(0))[:2]
    for name, core in zip("ab", cores, strict=True):
        before = ["taskset", "-c", str(core)]
        at.nodes.start(name, settings=["cluster.places=2"], before=before)
    at.train()
    victim = at.draw.randrange(2)
    begun = time.time()
    for _ in range(CONTENDERS):
        bound = ["nice", "-n", "-15", "taskset", "-c", str(cores[victim])]
        loop = [*bound, sys.executable, "-c", "while True: pass"]
        at.stack.callback(subprocess.Popen(loop).kill)
    return Injected(begun, None, frozenset("ab"[victim]))


def wrong_topology(at: Scene) -> Injected:
    double = at.draw.choice("abc")
    begun = time.time()
    at.start(**{name: 2 if name == double else 1 for name in "abc"})
    return Injected(begun, None, frozenset("abc") - {double})


def data_skew(at: Scene) -> Injected:
    at.start()
    step = at.train()
    rank = at.draw.randrange(4)
    numbers = {
        entry["microbatch"]
        for fed in at.nodes.events(BatchFed)
        if fed.rank == rank and fed.step == step
        for entry in fed.entries
    }
    order = SampleOrder(0, [ROWS], [1.0])
    positions = [
        (later - 1) * BATCH + number
        for later in range(step, step + SKEWED_STEPS)
        for number in numbers
    ]
    rows = [int(order.places(p, p + 1)[2][0]) for p in positions]
    begun = time.time()
    (at.folder / "long.json").write_text(str(rows))
    return Injected(begun, rank, frozenset({at.node_of(rank)}))


INJECTIONS: dict[Mode, tuple[Callable[[Scene], Injected], tuple[str, ...]]] = {
    Mode.STARTUP_CRASH: (startup_crash, ()),
    Mode.STRAGGLER: (straggler, ()),
    Mode.NETWORK_TIMEOUT: (network_timeout, ()),
    Mode.CHECKPOINT_CORRUPTION: (checkpoint_corruption, ()),
    Mode.DIVERGENCE: (divergence, ()),
    Mode.OUT_OF_MEMORY: (out_of_memory, ()),
    Mode.PREEMPTION: (preemption, ()),
    Mode.CONTENTION: (contention, ()),
    Mode.WRONG_TOPOLOGY: (wrong_topology, ("layout.tp=2",)),
    Mode.DATA_SKEW: (data_skew, ("task=skewed:SkewedTask", "seed=0")),
}


@contextmanager
def scene(settings: Sequence[str], draw: random.Random) -> Iterator[Scene]:
    """A run that is prepared and not started; nothing of it is left afterwards."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        run_file = write_run_file(folder)
        (folder / "skewed.py").write_text(TASK.replace("{rows}", str(ROWS)))
        shutil.copy(sample_tasks.__file__, folder)
        if any(setting.startswith("task=") for setting in settings):
            run_file.write_text(TASK_RUN_FILE)
        elif (prepared := apart("data", "prepare", run_file)).code:
            raise SystemExit(prepared.err)
        orders = FaultOrders(folder / "faults")
        orders.prepare()
        faults = f"cluster.faults={orders.folder}"
        given = (*SETTINGS, "layout.workers=4", faults, *settings)
        with nodes_of(run_file, folder / "run", *given) as nodes:
            yield Scene(nodes, orders, folder, draw, stack)


TASK_RUN_FILE = """\
name: skewed
device: cpu
train: {steps: 6, batch_size: 8, microbatch_size: 1}
"""


def watched(records: Sequence[Record], since: float) -> Finding | None:
    """The first finding after an injection."""
    told = [record for record in records if not isinstance(record.event, BatchFed)]
    return next((f for f in explain(told) if f.time >= since - 0.05), None)


def inject(mode: Mode, seed: int) -> Result:
    """One run with one failure."""
    function, settings = INJECTIONS[mode]
    with scene(settings, random.Random(f"{mode} {seed}")) as at:
        done = function(at)
        found, deadline = None, time.monotonic() + TIMEOUT_S
        while found is None and time.monotonic() < deadline:
            time.sleep(POLL_S)
            found = watched(at.nodes.records(), done.time)
        seconds = time.time() - done.time
    is_right = found is not None and (
        found.rank == done.rank if done.rank is not None else found.node in done.nodes
    )
    return Result(mode, found, is_right, seconds)


def print_table(results: Sequence[Result]) -> None:
    """Print the confusion matrix, and the shares and seconds."""
    columns = [*dict.fromkeys([*INJECTIONS, *(r.found.mode for r in results if r.found)])]
    names = [str(mode) for mode in columns] + ["nothing"]
    print("| injected | " + " | ".join(names) + " | place right | median s | p90 s |")
    print("|---|" + "---:|" * (len(names) + 3))
    for mode in dict.fromkeys(result.mode for result in results):
        of_mode = [result for result in results if result.mode is mode]
        counts = Counter(str(r.found.mode) if r.found else "nothing" for r in of_mode)
        cells = [str(counts[name] or "") for name in names]
        right = f"{sum(r.is_place_right for r in of_mode)} of {len(of_mode)}"
        print(f"| {mode} | " + " | ".join([*cells, right, *_seconds(of_mode)]) + " |")
    found = [r for r in results if r.found and r.found.mode is r.mode and r.is_place_right]
    median, ninth = _seconds(results)
    print(
        f"{len(results)} injections: cause and place right in {len(found)} "
        f"({100 * len(found) / len(results):.1f} %), median {median} s, p90 {ninth} s"
    )


def _seconds(results: Sequence[Result]) -> tuple[str, str]:
    times = sorted(result.seconds for result in results)
    ninth = times[min(len(times) - 1, int(0.9 * len(times)))]
    return f"{statistics.median(times):.1f}", f"{ninth:.1f}"


def undisturbed(minutes: float) -> None:
    """Train without a failure, and print every finding, and every alert that a webhook gets."""
    with receiver() as hook, scene((f"observe.webhook={hook.address}",), random.Random(0)) as at:
        at.start()
        at.train()
        time.sleep(60 * minutes)
        found = explain(at.nodes.records())
        steps = max(at.nodes.losses())
        alerts = [alert["labels"] for body in hook.bodies for alert in body["alerts"]]
    pages = sum(labels["severity"] == "page" for labels in alerts)
    print(
        f"{minutes:g} min undisturbed, {steps:,} steps: {len(found)} findings, "
        f"{len(alerts)} messages of alerts, {pages} of them pages"
    )
    for finding in found:
        print(finding.sentence)
    for labels in alerts:
        print(f"{labels['severity']}: {labels['alertname']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--injections", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--modes", nargs="*", choices=[str(m) for m in INJECTIONS], default=None)
    parser.add_argument("--undisturbed", type=float, metavar="MINUTES")
    chosen = parser.parse_args()
    if chosen.undisturbed:
        undisturbed(chosen.undisturbed)
        return
    modes = [Mode(name) for name in chosen.modes] if chosen.modes else list(INJECTIONS)
    if why := why_unavailable():
        print(f"no line can be cut here: {why}")
        modes = [mode for mode in modes if mode is not Mode.NETWORK_TIMEOUT]
    results = []
    for number in range(chosen.injections):
        for mode in modes:
            results.append(result := inject(mode, chosen.seed + number))
            said = result.found.sentence if result.found else "nothing"
            place = "right" if result.is_place_right else "WRONG"
            print(f"{mode} {number}: {result.seconds:.1f} s, place {place}: {said}", flush=True)
    print_table(results)


if __name__ == "__main__":
    main()
