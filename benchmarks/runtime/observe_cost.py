"""What it costs a training step to be observed, with everything on against everything off.

    python -m benchmarks.runtime.observe_cost [--workers 1] [--rounds 100] [--block 40]

One run trains a small decoder, with one thread a worker. Blocks of `--block` steps alternate. All
of this is on in a block that is "on":

    page        the live page follows the run, and a client has it open
    alerts      the run's own evaluation looks each second
    observer    `holdfast observe --serve` follows the journal
    scrapes     of `/metrics` of the observer and of the agent, each second
    trace       of one step of the block (`layout.trace_every`)

In a block that is "off" these processes are stopped (SIGSTOP). So a block that is on also pays for
what was journaled meanwhile. The journal, and the agent's sums of metrics and of time by class,
have no switch: they are in both.

The ratio of a round is the mean step of an "on" block over that of the "off" blocks around it. The
median of all rounds is printed with its 95 % interval (`benchmarks/runtime/paired.py`). The first
steps of a block are left out, because signals need a moment.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import groupby
from pathlib import Path
from statistics import fmean, median
from urllib.error import URLError
from urllib.request import urlopen

import psutil
from tests.support.commands import start, write_run_file
from tests.support.dashboards import Served, dashboard_of
from tests.support.listener import free_ports
from tests.support.monitoring import receiver
from tests.support.ranks import wait_until

from benchmarks.runtime.paired import estimate
from holdfast.events import StepDone
from holdfast.wire.journal import JournalTail
from holdfast.wire.store.run_store import FolderStore

MODEL = (
    "model={preset: null, layers: 4, dim: 128, heads: 4, kv_heads: 4, ffn_dim: 384}",
    "data.sequence_length=64",
    "train.batch_size=16",
    "train.microbatch_size=4",
    "train.evaluate.every=0",
    "checkpoint.every_steps=1000",
    "cluster.threads_per_worker=1",
)
SKIPPED_STEPS = 3  # at the beginning of a block
EVERY_S = 1.0  # between two looks, or two scrapes
POLL_S = 0.03  # between two looks for the newest step
TRACKER_MODULE = "holdfast.report.trackers.process"


class Observers:
    """All that observes, and its switch."""

    def __init__(self, agent: subprocess.Popen[str], addresses: Sequence[str]) -> None:
        self.processes = [psutil.Process(agent.pid)]  # the agent, then all that can be stopped
        self._addresses = addresses
        self._is_on = threading.Event()
        self.scrapes = self.failed_scrapes = self.pages = 0
        threading.Thread(target=self._scrape, daemon=True).start()

    def add(self, processes: Sequence[psutil.Process]) -> None:
        self.processes += processes

    def switch(self, is_on: bool) -> None:
        for process in self.processes[1:]:
            os.kill(process.pid, signal.SIGCONT if is_on else signal.SIGSTOP)
        (self._is_on.set if is_on else self._is_on.clear)()

    def cpu_s(self) -> list[float]:
        """Return seconds of processor time of each process so far."""
        return [sum(process.cpu_times()[:2]) for process in self.processes]

    def read_page(self, page: Served) -> None:
        """Take the page's changes, as a browser does."""
        for _ in page.events():
            self.pages += 1

    def _scrape(self) -> None:
        while True:
            self._is_on.wait()
            for address in self._addresses:
                try:
                    with urlopen(f"http://{address}/metrics", timeout=10) as answer:
                        answer.read()
                    self.scrapes += 1
                except (URLError, OSError):
                    self.failed_scrapes += 1
            time.sleep(EVERY_S)


@contextmanager
def observed_run(root: Path, workers: int, block: int) -> Iterator[tuple[Observers, Path]]:
    """Start a run, and all that observes it."""
    folder, ports = root / "observed", free_ports(2)
    agent_metrics, observer_metrics = (f"127.0.0.1:{port}" for port in ports)
    with ExitStack() as stack, receiver() as hook:
        output = stack.enter_context((root / "output").open("wb"))
        agent = start(
            "train",
            write_run_file(root / "run", documents=400),
            f"folder={folder}",
            "train.steps=1000000",
            f"layout.workers={workers}",
            f"layout.trace_every={2 * block}",
            f"observe.webhook={hook.address}",
            f"observe.every_seconds={EVERY_S}",
            f"cluster.metrics_port={ports[0]}",
            *MODEL,
            output=output,
        )
        stack.callback(agent.wait)
        stack.callback(agent.send_signal, signal.SIGKILL)
        wait_until(lambda: newest_step(folder) > 0, 300, lambda: (root / "output").read_text())
        observers = Observers(agent, (agent_metrics, observer_metrics))
        tracker = [
            child
            for child in observers.processes[0].children()
            if TRACKER_MODULE in child.cmdline()
        ]
        assert len(tracker) == 1, tracker
        observer = start("observe", folder, "--serve", observer_metrics)
        stack.callback(observer.communicate)
        stack.callback(observer.kill)
        page = stack.enter_context(dashboard_of(folder))
        threading.Thread(target=observers.read_page, args=(page,), daemon=True).start()
        is_page = [p for p in psutil.Process().children() if "dashboard" in p.cmdline()]
        observers.add([*tracker, psutil.Process(observer.pid), *is_page])
        yield observers, folder
        observers.switch(True)


def newest_step(folder: Path) -> int:
    if not (folder / "journal").exists():
        return 0
    records = JournalTail(FolderStore(folder)).read_new()
    return max((r.event.step for r in records if isinstance(r.event, StepDone)), default=0)


def is_on(step: int, block: int) -> bool:
    """Return whether a step is in a block that is on: its middle is a step that is traced."""
    return (step + block // 2) % (2 * block) < block


def measure(
    observers: Observers, folder: Path, rounds: int, block: int
) -> tuple[list[float], list[tuple[bool, float, list[float]]]]:
    """Switch at the boundaries of blocks. Return the ratio of each round, and of each block
    whether it was on, its wall time, and the processor time of each process."""
    tail = JournalTail(FolderStore(folder))
    seconds: dict[int, float] = {}
    first = state = None
    blocks: list[tuple[bool, float, list[float]]] = []
    since, cpu = time.monotonic(), observers.cpu_s()
    while first is None or max(seconds) < first + (2 * rounds + 2) * block:
        for record in tail.read_new():
            if isinstance(record.event, StepDone):
                seconds[record.event.step] = record.event.seconds
        if seconds:
            step = max(seconds) + 1  # which is under way
            if first is None:
                first = step + 2 * block
            if is_on(step, block) is not state:
                now, used = time.monotonic(), observers.cpu_s()
                if state is not None and step > first:
                    spent = [b - a for a, b in zip(cpu, used, strict=True)]
                    blocks.append((state, now - since, spent))
                state, since, cpu = is_on(step, block), now, used
                observers.switch(state)
        time.sleep(POLL_S)
    return ratios({step: s for step, s in seconds.items() if step >= first}, block), blocks


def ratios(seconds: dict[int, float], block: int) -> list[float]:
    """Return the ratio of each block that is on to the two around it."""
    means = []
    for on, steps in groupby(sorted(seconds), lambda step: is_on(step, block)):
        numbers = [*steps]
        if len(numbers) == block:
            means.append((on, fmean(seconds[step] for step in numbers[SKIPPED_STEPS:])))
    return [
        2 * here / (before + after)
        for (_, before), (on, here), (_, after) in zip(means, means[1:], means[2:], strict=False)
        if on
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--block", type=int, default=40, help="steps")
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as root,
        observed_run(Path(root), arguments.workers, arguments.block) as (observers, folder),
    ):
        found, blocks = measure(observers, folder, arguments.rounds, arguments.block)
        step_ms = 1e3 * median(
            record.event.seconds
            for record in JournalTail(FolderStore(folder)).read_new()
            if isinstance(record.event, StepDone)
        )
    print(f"{arguments.workers} workers, {len(found)} rounds, a step takes {step_ms:.1f} ms")
    ratio = estimate(found)
    print(f"step time, on over off: {ratio.median:.4f} [{ratio.low:.4f}, {ratio.high:.4f}]")
    print(
        f"{observers.scrapes} scrapes ({observers.failed_scrapes} failed), "
        f"{observers.pages} changes of the page"
    )
    names = ("agent", "alerts", "observer", "page")
    for state in (False, True):
        rows = [(wall, spent) for on, wall, spent in blocks if on is state]
        wall = sum(wall for wall, _ in rows)
        shares = (sum(spent[i] for _, spent in rows) / wall for i in range(len(names)))
        text = ", ".join(
            f"{name} {1e3 * share:.1f}" for name, share in zip(names, shares, strict=True)
        )
        print(f"{'on' if state else 'off'}: ms of a processor a second: {text}")


if __name__ == "__main__":
    main()
