"""A run that is watched through the output of its agents, whatever its disk does."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.support.commands import start
from tests.support.ranks import DEADLINE_S, wait_until


class WatchedRun:
    """Agents under `holdfast train --json`: one, or one for each of several nodes."""

    def __init__(self, run_file: Path, settings: Sequence[str], nodes: Sequence[str] = ()) -> None:
        self.records: list[dict[str, Any]] = []
        self.said: list[str] = []
        self.done_at: dict[int, float] = {}
        """When the first step of each generation was seen, on the monotonic clock."""
        self.agents: dict[str, subprocess.Popen[str]] = {}
        self._threads: list[threading.Thread] = []
        for name in nodes or [""]:
            own = [f"cluster.node={name}"] if name else []
            process = start("train", run_file, *settings, *own, "--json")
            self.agents[name] = process
            for read in (self._read_records, self._read_lines):
                self._threads.append(threading.Thread(target=read, args=(process,), daemon=True))
                self._threads[-1].start()

    def _read_records(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout
        for line in process.stdout:
            record = json.loads(line)
            if record["kind"] == "step_done":
                self.done_at.setdefault(record["generation"], time.monotonic())
            self.records.append(record)

    def _read_lines(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr
        self.said.extend(process.stderr)

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [record["event"] for record in self.records if record["kind"] == kind]

    def newest(self, kind: str) -> int:
        """The newest step of the events of a kind; 0 for none."""
        return max((event["step"] for event in self.events(kind)), default=0)

    @property
    def newest_generation(self) -> int:
        """The newest in which a step was done."""
        return max(self.done_at, default=0)

    def workers(self) -> list[int]:
        """Process ids of workers that were not lost."""
        lost = {event["pid"] for event in self.events("worker_lost")}
        started = dict.fromkeys(event["pid"] for event in self.events("worker_started"))
        return [pid for pid in started if pid not in lost]

    def wait(self, condition: Callable[[], object], what: str) -> None:
        """Fails at once if an agent has ended with an error."""

        def is_over() -> bool:
            return bool(condition()) or any(each.poll() for each in self.agents.values())

        wait_until(is_over, DEADLINE_S, what)
        assert condition(), f"not seen: {what}\n{''.join(self.said)}"

    def wait_steps(self, count: int) -> None:
        """Until so many more steps are done."""
        until = self.newest("step_done") + count
        self.wait(lambda: self.newest("step_done") >= until, f"step {until}")

    def end(self) -> dict[str, int]:
        """Exit codes, once all have ended by themselves."""
        codes = {name: each.wait(DEADLINE_S) for name, each in self.agents.items()}
        for thread in self._threads:
            thread.join(120)
        return codes

    def close(self) -> None:
        for process in self.agents.values():
            process.kill()
            process.wait()
