"""Schedules on waiting devices: the executed timeline against the timer's and the formula.

Processes, sends, receives and tables are real; only the arithmetic is a wait. Every case has the
makespan and the mean bubble of the timer (`core/schedule/timing.py`), and those that were executed.
It also has the largest difference of any rank's bubble. The floor is the error of a bare wait of
the same length in a process that does nothing else, in the same run. Nothing executed here can be
closer than that.

The asynchronous schedule runs several steps, with a vote of all ranks between two. Its row is of
the last of them. All three have one table.

    python -m benchmarks.runtime.bubble [--forward-ms 40] [--microbatches 8] [--trace FOLDER]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tests.support.ranks import RankContext, Result, Server, expect, run_ranks

from benchmarks.runtime.waiting_stages import WaitingStages
from holdfast.core.schedule.csv import from_csv, to_csv
from holdfast.core.schedule.named import build_schedule
from holdfast.core.schedule.step_window import look_ahead, step_window
from holdfast.core.schedule.table import ActionKind, Schedule, Value, actions_of
from holdfast.core.schedule.timing import Durations, Timeline, time_schedule
from holdfast.core.spans import COMPUTE, TraceSpan, chrome_trace
from holdfast.parallel.comm.trace import SpanRecorder
from holdfast.parallel.comm.transport import PeerGroup, exchange
from holdfast.parallel.pipeline.pipeline import PipelineInterpreter

# A V of two stages on each of two ranks, the backward in two halves (zero bubble).
SPLIT_V = (
    "0F0,0F1,3F0,3I0,3F1,3I1,0I0,3W0,0W0,0I1,3W1,0W1\n"
    "1F0,2F0,1F1,2F1,2I0,1I0,2I1,1I1,2W0,1W0,2W1,1W1\n"
)


@dataclass(frozen=True)
class PipelineMeasurement:
    """A run as it was executed, over all ranks of one pipeline.

    makespan_s: seconds from the first action's begin to the last one's end, over all ranks.
    bubble: per rank, the share of the makespan in which it computed nothing.
    """

    makespan_s: float
    bubble: tuple[float, ...]


def measure_pipeline(spans: Sequence[Sequence[TraceSpan]]) -> PipelineMeasurement:
    """Return a summary of the compute spans of a run (one sequence a rank, on one machine).

    Raises ValueError when no rank computed anything.
    """
    actions = [[s for s in rank if s.track == COMPUTE] for rank in spans]
    every = [s for rank in actions for s in rank]
    if not every:
        raise ValueError("no compute spans: nothing was executed while the recorder was there")
    makespan = max(s.stop for s in every) - min(s.start for s in every)
    bubble = tuple(1.0 - sum(s.seconds for s in rank) / makespan for rank in actions)
    return PipelineMeasurement(makespan, bubble)


def wait_through(
    rank: RankContext, table: str, forward: list[float], backward: list[float], nbytes: int
) -> list[list[Any]]:
    """Body of a rank: execute a table (as CSV) on waiting stages; its spans as lists."""
    schedule = from_csv(table, "table")
    durations = Durations(tuple(forward), tuple(backward))
    seconds = {
        (action.stage, action.kind): durations.duration_of(action)
        for cell in schedule.actions[rank.rank]
        for action in actions_of(cell)
    }
    line = PeerGroup(rank.store(), "line", rank.rank, schedule.ranks, seconds=60)
    recorder = SpanRecorder()
    interpreter = PipelineInterpreter(line, torch.device("cpu"), recorder=recorder)
    exchange(line, torch.zeros(1, dtype=torch.int64), [1] * schedule.ranks, tag=1)
    interpreter.run(schedule, WaitingStages(schedule.stages, seconds, nbytes))
    interpreter.wait_until_sent()
    rank.barrier("settled", seconds=60)
    return [[s.track, s.name, s.start, s.stop] for s in recorder.spans]


def wait_through_steps(
    rank: RankContext, ranks: int, microbatches: int, forward: float, nbytes: int
) -> list[list[Any]]:
    """Body of a rank: three steps of an asynchronous schedule on waiting stages; the spans of the
    last."""
    seconds = {
        (rank.rank, kind): forward * (1 if kind is ActionKind.FORWARD else 2) for kind in ActionKind
    }
    line = PeerGroup(rank.store(), "line", rank.rank, ranks, seconds=60)
    recorder, carried = SpanRecorder(), dict[Value, torch.Tensor]()
    interpreter = PipelineInterpreter(line, torch.device("cpu"), recorder=recorder)
    work = WaitingStages(ranks, seconds, nbytes)
    before, ahead = 0, look_ahead(ranks)
    for _ in range(3):
        exchange(line, torch.zeros(1, dtype=torch.int64), [1] * ranks, tag=1)  # the vote
        recorder.begin(is_traced=True)
        window = step_window("pipedream", ranks, microbatches, before, ahead)
        interpreter.run(window, work, carried)
        carried = {replace(v, microbatch=v.microbatch - microbatches): carried[v] for v in carried}
        before = ahead
    interpreter.wait_until_sent()
    rank.barrier("settled", seconds=60)
    return [[s.track, s.name, s.start, s.stop] for s in recorder.spans]


def execute(
    schedule: Schedule, durations: Durations, nbytes: int = 1 << 16, address: str | None = None
) -> list[list[TraceSpan]]:
    """The spans of every rank of one execution. address: of a rank server, outside pytest."""
    body = partial(run_ranks, address=address, deadline=120.0)
    if schedule.is_open:
        sizes = {"ranks": schedule.ranks, "microbatches": backwards_of(schedule)}
        steps = {**sizes, "forward": durations.forward[0], "nbytes": nbytes}
        return _spans(body(wait_through_steps, schedule.ranks, steps))
    args = {
        "table": to_csv(schedule),
        "forward": durations.forward,
        "backward": durations.backward,
        "nbytes": nbytes,
    }
    return _spans(body(wait_through, schedule.ranks, args))


def backwards_of(schedule: Schedule) -> int:
    """Those of each rank: the microbatches of a step in the midst of a run."""
    row = [action for cell in schedule.actions[0] for action in actions_of(cell)]
    return sum(action.kind is ActionKind.BACKWARD for action in row)


def _spans(results: list[Result]) -> list[list[TraceSpan]]:
    expect(results)
    return [[TraceSpan(*span) for span in result.value] for result in results]


def in_order(schedule: Schedule, spans: list[list[TraceSpan]]) -> bool:
    """Return True if every rank executed exactly its row of the table, in its order."""
    return all(
        [s.name for s in mine if s.track == COMPUTE] == [str(a) for c in row for a in actions_of(c)]
        for row, mine in zip(schedule.actions, spans, strict=True)
    )


def late(seconds: float, times: int = 20) -> float:
    """Median share by which a bare wait of `seconds` is too long."""
    found = []
    for _ in range(times):
        began = time.monotonic()
        time.sleep(seconds)
        found.append((time.monotonic() - began) / seconds - 1)
    return statistics.median(found)


def cases(forward: float, microbatches: int) -> dict[str, tuple[Schedule, Durations]]:
    """What is executed; the backward takes two forwards. A rank of two stages has twice half."""
    even = Durations.uniform(4, forward, 2 * forward)
    halves = Durations.uniform(8, forward / 2, forward)
    uneven = tuple(forward * factor for factor in (0.75, 1.5, 1.0, 1.25))
    return {
        "1f1b pp4": (build_schedule("1f1b", 4, microbatches), even),
        "gpipe pp4": (build_schedule("gpipe", 4, microbatches), even),
        "1f1b pp4 uneven": (
            build_schedule("1f1b", 4, microbatches),
            Durations(uneven, tuple(2 * f for f in uneven)),
        ),
        "interleaved pp4": (build_schedule("interleaved", 4, microbatches, 2), halves),
        "zb-h1 pp4": (build_schedule("zb-h1", 4, microbatches), even),
        "zbv pp4": (build_schedule("zbv", 4, microbatches), halves),
        "dualpipev pp4": (build_schedule("dualpipev", 4, microbatches), halves),
        "pipedream pp4": (build_schedule("pipedream", 4, microbatches), even),
        "split V pp2": (from_csv(SPLIT_V, "split V"), even),
    }


def line(name: str, planned: Timeline, spans: list[list[TraceSpan]], formula: str) -> str:
    """One row of the table."""
    found = measure_pipeline(spans)
    off = max(abs(f - p) for f, p in zip(found.bubble, planned.bubble, strict=True))
    return (
        f"{name:<18}{planned.makespan:>10.4f}{found.makespan_s:>10.4f}"
        f"{found.makespan_s / planned.makespan - 1:>+9.2%}"
        f"{statistics.mean(planned.bubble):>9.4f}{statistics.mean(found.bubble):>9.4f}{off:>9.4f}"
        f"{formula:>9}"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--forward-ms", type=float, default=40.0, help="20 or more")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3, help="the median makespan is shown")
    parser.add_argument("--trace", type=Path, help="a folder for Chrome traces")
    given = parser.parse_args()
    forward = given.forward_ms / 1000
    server = Server()
    try:
        print(f"{'':<18}{'makespan s':>20}{'':9}{'mean bubble':>18}{'worst':>9}")
        print(
            f"{'':<18}{'timer':>10}{'executed':>10}{'':9}{'timer':>9}{'executed':>9}"
            f"{'rank off':>9}{'formula':>9}"
        )
        for name, (schedule, durations) in cases(forward, given.microbatches).items():
            runs = [
                execute(schedule, durations, address=server.address) for _ in range(given.rounds)
            ]
            spans = sorted(runs, key=lambda run: measure_pipeline(run).makespan_s)[
                given.rounds // 2
            ]
            p, m = schedule.ranks, schedule.microbatches
            formula = f"{(p - 1) / (m + p - 1):.4f}" if name in ("1f1b pp4", "gpipe pp4") else "-"
            order = "" if all(in_order(schedule, run) for run in runs) else "  OUT OF ORDER"
            print(line(name, time_schedule(schedule, durations), spans, formula) + order)
            if given.trace:
                given.trace.mkdir(parents=True, exist_ok=True)
                trace = chrome_trace(dict(enumerate(spans)))
                (given.trace / f"{name.replace(' ', '_')}.json").write_text(json.dumps(trace))
    finally:
        server.close()
    print(f"floor: a bare wait of {given.forward_ms:g} ms is {late(forward):+.2%} too long")


if __name__ == "__main__":
    from benchmarks.runtime import bubble

    bubble.main()
