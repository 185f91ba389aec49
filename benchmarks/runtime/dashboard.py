"""Milliseconds of a refresh of the live page, for a run of many nodes with a long journal.

    python -m benchmarks.runtime.dashboard [--nodes 1000] [--events 1000000] [--rounds 30]

The journal is made. In each step every rank writes its line of the data ledger, rank 0 the step.
Two nodes are lost on the way. A refresh is what follows one more step. The page's process reads
what was appended and writes the changes as JSON, and Chromium draws them. The floor of the server's
part reads the sizes of all segments and parses the new lines, and nothing else.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from tests.support.browser import Browser, browser
from tests.support.dashboards import dashboard_of
from tests.support.journal_builder import store_run
from tests.support.ranks import wait_until

from holdfast.core.json_parsing import parse_json
from holdfast.events import (
    BatchFed,
    Event,
    GenerationStarted,
    Record,
    RunStarted,
    StepDone,
    WorkerLost,
    WorkerReady,
    to_json,
)
from holdfast.report.dashboard.app import FILES, STATIC
from holdfast.report.dashboard.follower import Dashboard, PageState
from holdfast.report.dashboard.run_view import RunSource
from holdfast.wire.journal import segment_key
from holdfast.wire.store.run_store import JOURNAL_PREFIX, FolderStore, segment_sizes

STEPS_AT_ONCE = 20  # of the journal that there is before the first refresh
PHASES = {"data": 0.05, "compute": 0.7, "reduce": 0.2, "apply": 0.05}


class JournalMaker:
    """Writes the journal of a run of so many nodes, a rank each, a step a second."""

    def __init__(self, folder: Path, nodes: int) -> None:
        self.folder, self.nodes, self.step, self.written = folder, nodes, 0, 0
        self._generation, self._time = 0, 1e9
        self._sequences: dict[str, int] = {}

    def begin(self, reason: str) -> list[tuple[str, Event]]:
        """Begin a generation of all nodes."""
        self._generation += 1
        self._sequences.clear()
        names = [f"node-{number:04d}" for number in range(self.nodes)]
        start = GenerationStarted({"nodes": names}, reason, step=self.step)
        first = [RunStarted("large", "cafe", "d1")] if self._generation == 1 else []
        ready = [(f"rank{rank}", WorkerReady(rank, 1.0)) for rank in range(self.nodes)]
        return [*(("agent", each) for each in (*first, start)), *ready]

    def next_step(self) -> list[tuple[str, Event]]:
        """Return what is written in one step."""
        self.step, self._time = self.step + 1, self._time + 1
        step = self.step
        loss = 2 + 6 / (1 + step / 50)
        events: list[tuple[str, Event]] = [
            (f"rank{rank}", BatchFed(rank, [_entry(step, rank)], step=step))
            for rank in range(self.nodes)
        ]
        done = StepDone(loss, 1 << 20, 1.0, 1e-3, 1.0, samples=self.nodes, phases=PHASES, step=step)
        return [*events, ("rank0", done)]

    def lose(self) -> list[tuple[str, Event]]:
        """Lose a node, and begin again two steps earlier."""
        lost = WorkerLost(7, 100, "SIGKILL", "heartbeat", "node-0007", step=self.step)
        self._append([("agent", lost)])
        self.step -= 2
        return self.begin("worker_lost")

    def write(self, events: list[tuple[str, Event]]) -> list[str]:
        """Append events to the segments of their writers, and return the lines."""
        return self._append(events)

    def _append(self, events: list[tuple[str, Event]]) -> list[str]:
        lines: dict[str, list[str]] = {}
        for writer, event in events:
            number = self._sequences[writer] = self._sequences.get(writer, -1) + 1
            record = Record(self._generation, writer, number, self._time, event)
            lines.setdefault(writer, []).append(json.dumps(to_json(record)) + "\n")
        for writer, own in lines.items():
            path = self.folder / segment_key(self._generation, writer)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as segment:
                segment.writelines(own)
        self.written += len(events)
        return [line for own in lines.values() for line in own]


def _entry(step: int, rank: int) -> dict[str, Any]:
    start = step * 4096 + rank * 4
    return {"microbatch": rank, "source": "", "start": start, "stop": start + 4, "hash": "00c0ffee"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    page = [STATIC / name for name in ("index.html", *FILES)]
    size = sum(path.stat().st_size for path in page)
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "large"
        store_run(folder, [], 10**6)
        maker = JournalMaker(folder, arguments.nodes)
        maker.write(maker.begin("start"))
        losses = [arguments.events // 3, 2 * arguments.events // 3]
        while maker.written < arguments.events:
            maker.write([event for _ in range(STEPS_AT_ONCE) for event in maker.next_step()])
            if losses and maker.written >= losses[0]:
                del losses[0]
                maker.write(maker.lose())
        print(f"{maker.written:,} events of {arguments.nodes:,} nodes, page {size:,} bytes")
        measure_server(maker, arguments.rounds)
        with browser(Path(root) / "profile") as tab:
            measure_browser(maker, tab, arguments.rounds)


def measure_server(maker: JournalMaker, rounds: int) -> None:
    """Print what a refresh costs the process of the page, and the floor of it."""
    store = FolderStore(maker.folder)
    source = RunSource("large", str(maker.folder), store, 10**6, lambda: False)
    board = Dashboard(lambda: {"large": lambda: source}, is_single=True)
    board.search()
    view, known = board.view("large"), PageState()
    began = time.perf_counter()
    board.look(view)
    print(f"first read: {time.perf_counter() - began:.1f} s")
    first = board.news("large", known)
    spent, floors, sizes, busy = [], [], [], []
    for _ in range(rounds):
        lines = maker.write(maker.next_step())
        began, computed = time.perf_counter(), time.thread_time()
        board.look(view)
        text = board.news("large", known)
        spent.append(1e3 * (time.perf_counter() - began))
        busy.append(1e3 * (time.thread_time() - computed))
        sizes.append(len(text))
        began = time.perf_counter()
        segment_sizes(store, JOURNAL_PREFIX)
        for line in lines:
            parse_json(line)
        floors.append(1e3 * (time.perf_counter() - began))
    print(f"first state: {len(first):,} bytes; a refresh: {median(sizes):,.0f} bytes")
    print(f"server: {_words(spent)}; floor {_words(floors)}; {median(spent) / median(floors):.2f}x")
    print(f"of the server's time a processor was busy for: {_words(busy)}")


def measure_browser(maker: JournalMaker, tab: Browser, rounds: int) -> None:
    """Print what a refresh costs Chromium, and the seconds from a step to the page."""
    with dashboard_of(maker.folder) as served:
        tab.open(served.address, 1280)
        shown = (
            "Number(document.querySelector('.tile b')?.textContent.split('/')[0].replace(/,/g, ''))"
        )
        wait_until(lambda: tab.value(shown) == maker.step, 600)
        tab.value(
            "window.spent = []; window.original = show; show = news => { const began = "
            "performance.now(); original(news); queueMicrotask(() => queueMicrotask(() => "
            "{ document.body.offsetHeight; spent.push(performance.now() - began); })); }"
        )
        late = []
        for _ in range(rounds):
            maker.write(maker.next_step())
            began = time.perf_counter()
            wait_until(lambda: tab.value(shown) == maker.step)
            late.append(time.perf_counter() - began)
        spent = tab.value("spent")
    print(f"browser: {_words(spent)}; from a step to the page: {median(late):.2f} s")


def _words(values: list[float]) -> str:
    return f"median {median(values):.1f} ms, p95 {quantiles(values, n=20)[-1]:.1f} ms"


if __name__ == "__main__":
    main()
