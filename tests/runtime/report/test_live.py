"""The live view: a picture on a terminal of any size, plain lines elsewhere, never in the way."""

from __future__ import annotations

import io
import math
import os
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
from rich.console import Console

from holdfast.events import (
    AttentionChosen,
    CheckpointCommitted,
    CheckpointSkipped,
    Event,
    GenerationStarted,
    Record,
    ShardAwaited,
    SparesChanged,
    StepDone,
    WorkerLost,
)
from holdfast.report.history.progress import RunProgress
from holdfast.report.live.braille import braille, scale_top
from holdfast.report.live.live import LiveView, picture, watch_run
from tests.support.journal_builder import Scribe, lossy_run, started_run
from tests.support.ranks import wait_until


def until_step(step: int) -> list[Record]:
    records = lossy_run().records
    end = max(i for i, r in enumerate(records) if r.event == r.event and r.event.step == step)
    return records[: end + 1]


def screen(progress: RunProgress, width: int, height: int) -> str:
    console = Console(width=width, height=height, file=io.StringIO(), record=True)
    console.print(picture(progress, width, height))
    return console.export_text()


def progress_of(records: list[Record], total: int = 30) -> RunProgress:
    progress = RunProgress(total)
    for record in records:
        progress.observe(record)
    return progress


def test_imported_weights_are_not_called_initial() -> None:
    record = lossy_run().records[0]
    event = GenerationStarted({"nodes": ["a"]}, "start", "commits/x", step=0)
    progress = RunProgress(30, imported_from="Llama-3.2-1B")
    (line,) = progress.observe(replace(record, event=event, generation=1))
    assert line.text == "1 worker from the weights imported from Llama-3.2-1B (generation 1)"
    adapters = RunProgress(30, first_weights="the base model and new adapters")
    begun = replace(event, restored_from=None)
    (line,) = adapters.observe(replace(record, event=begun, generation=1))
    assert line.text == "1 worker from the base model and new adapters (generation 1)"
    assert "from initial weights" in progress_of(lossy_run().records).lines[0].text


def test_how_documents_are_kept_apart_is_said_once() -> None:
    record, event = lossy_run().records[0], AttentionChosen("blocks", "a reason", step=1)
    progress = RunProgress(30)
    told = [progress.observe(replace(record, event=event, generation=n)) for n in (1, 2)]
    changed = AttentionChosen("varlen", "cuda has the kernel", step=9)
    told.append(progress.observe(replace(record, event=changed, generation=3)))
    assert [[line.text for line in lines] for lines in told] == [
        ["documents are kept apart by blocks: a reason"],
        [],
        ["documents are kept apart by varlen: cuda has the kernel"],
    ]


def test_plain_lines_tell_the_story_when_nobody_looks_on() -> None:
    out = io.StringIO()
    with LiveView(30, console=Console(file=out, width=200), every_seconds=1e9) as view:
        for record in lossy_run().records:
            view.observe(record)
        view.say("a line of the agent's")
    text = out.getvalue()
    for part in (
        "2 workers from initial weights (generation 1)",
        "step 1/30  loss",
        "rank 1 lost: SIGKILL",
        "2 workers from the state after step 10 (generation 2)",
        "recovered in 2.2 s, 3 steps done again",
        "validation after step 30",
        "step 30/30",
        "finished after step 30",
        "a line of the agent's",
    ):
        assert part in text
    assert "\x1b" not in text
    assert text.count("step 1/30") == 1
    assert "step 17/30" not in text  # rate-limited


def test_step_lines_come_as_often_as_asked() -> None:
    out, now = io.StringIO(), 0.0

    def clock() -> float:
        return now

    run = started_run(20)
    with LiveView(100, console=Console(file=out, width=200), every_seconds=5.0, now=clock) as view:
        for record in run.records:
            now += isinstance(record.event, StepDone)
            view.observe(record)
    assert [f"step {n}/100" in out.getvalue() for n in (1, 2, 6, 11, 16)] == [
        True,
        False,
        True,
        True,
        True,
    ]


@pytest.mark.parametrize("size", [(200, 60), (100, 30), (80, 24), (60, 20), (36, 16), (20, 8)])
def test_the_picture_fits_any_terminal(size: tuple[int, int]) -> None:
    width, height = size
    run = Scribe()
    run.start()
    run.among("a", "b", "c")
    run.steps(1, 20)
    run.evaluate(20)
    for number in range(3):
        run.write(CheckpointSkipped(0, f"{number}: the disk of this node is full " * 2, step=20))
    run.write(WorkerLost(2, 7, "not heard for 1.5 s", "heartbeat", node="c"))
    run.open_generation()
    run.among("a", "b", step=20, reason="worker_lost", rung=0)
    run.steps(21, 25)
    text = screen(progress_of(run.records), width, height)
    lines = text.splitlines()
    assert max(len(line) for line in lines) <= width
    assert len(lines) < height
    assert lines[-1].startswith("╰")
    assert "step 25/30" in text or width < 24
    if width >= 60:  # the newest events with their cause, and every figure
        told = " ".join(text.replace("│", " ").split())
        for part in ("(generation 2); left out: c", "continued (rung 0)", "again", "bits/byte"):
            assert part in told
        assert "goodput" in text


def test_of_many_nodes_the_picture_names_those_that_are_away() -> None:
    progress = RunProgress(30, nodes={f"node-{n}": n != 7 for n in range(40)})
    line = next(line for line in screen(progress, 80, 24).splitlines() if "nodes" in line)
    assert "● 39 nodes   ✗ node-7" in line


def test_the_first_steps_and_single_peaks_do_not_rule_the_scale() -> None:
    losses = [11.0, 9.0, *(3.0 - 0.01 * n for n in range(100))]
    losses[60] = 40.0
    assert 2.8 < scale_top(losses) < 3.0
    assert scale_top([math.nan, 2.0]) == 2.0
    top = braille(losses, 40, 4, scale_top(losses))[0]
    assert sum(cell != chr(0x2800) for cell in top) > 5


def test_the_picture_shows_the_run_as_it_is() -> None:
    text = screen(progress_of(until_step(25)), 100, 40)
    for part in (
        "training",
        "generation 3",
        "0 training",
        "1 training",
        "goodput",
        "stopped after step 20",
        "step 20,",
    ):
        assert part in text
    lost = screen(progress_of(until_step(13)[:-1]), 100, 40)
    run = started_run(13)
    run.lose(1)
    lost = screen(progress_of(run.records), 100, 40)
    assert "recovering" in lost
    assert "✗ 1 lost" in lost


def test_nodes_come_and_go_in_lines_and_in_the_picture() -> None:
    run = Scribe()
    run.start()
    run.among("a", "b", "c")
    run.steps(1, 5)
    run.write(WorkerLost(2, 7, "SIGKILL", "exit", node="c"), after=0.25)
    run.open_generation()
    run.among("a", "b", step=5, reason="worker_lost", rung=0)
    run.steps(6, 8)
    out = io.StringIO()
    with LiveView(30, console=Console(file=out, width=200), every_seconds=1e9) as view:
        for record in run.records:
            view.observe(record)
    for part in (
        "3 workers from initial weights (generation 1), on a, b, c",
        "rank 2 of c lost: SIGKILL",
        "from the state after step 5 (generation 2); left out: c",
        "recovered: the other workers continued (rung 0), ",
        "stood still for 2.0 s, 0 steps done again",
    ):
        assert part in out.getvalue()
    text = screen(progress_of(run.records), 100, 40)
    for part in ("● a", "● b", "✗ c", "the other workers continued (rung 0)"):
        assert part in text
    run.open_generation()
    run.among("a", "b", "c", step=8, reason="node_joined", rung=5)
    run.steps(9, 9)
    progress = progress_of(run.records)
    assert progress.nodes == {"a": True, "b": True, "c": True}
    waits = Record(9.0, 3, "agent", 9, SparesChanged(nodes=["d"]))
    progress.observe(waits)
    assert "● c   ○ d spare" in screen(progress, 90, 24), "a node that waits is not lost"
    progress.observe(replace(waits, event=SparesChanged(nodes=[])))
    assert "✗ d" in screen(progress, 90, 24)
    assert progress.lines[-1].text == "c joined: training stood still for 2.0 s"
    assert progress.lines[-2].text.endswith("; taken in: c")


def test_the_curve_forgets_what_is_done_again() -> None:
    progress = progress_of(lossy_run().records)
    assert [step for step, _ in progress.curve] == list(range(1, 31))
    assert progress.state == "finished"


def test_the_estimate_is_the_pace_times_what_is_left() -> None:
    run = Scribe()
    run.start()
    run.generate()
    run.steps(1, 10, seconds=2.0)
    assert progress_of(run.records, 40).eta_s == pytest.approx(60.0)
    assert progress_of(run.records[:5], 40).eta_s is None


def test_memory_stays_bounded_over_a_long_run() -> None:
    progress = RunProgress(100_000)
    run = Scribe()
    run.start()
    run.generate()
    for record in run.records:
        progress.observe(record)
    for step in range(1, 20_001):
        event = StepDone(1.0, 8, 1.0, 0.1, 0.01, step=step)
        progress.observe(Record(1, "rank0", step, run.at + step / 100, event))
    assert len(progress.curve) <= 4096
    assert progress.curve[-1][0] > 19_900
    assert len(progress.lines) <= 50


def test_braille_draws_high_values_high() -> None:
    rows = braille([0.0] * 8 + [1.0] * 8, 8, 2)
    assert [len(row) for row in rows] == [8, 8]
    blank = chr(0x2800)
    assert rows[0][:3] == blank * 3
    assert rows[0][-1] != blank
    assert rows[1][-1] == blank
    assert rows[1][0] != blank


def test_a_reader_that_takes_nothing_does_not_hold_up_the_agent() -> None:
    read_end, write_end = os.pipe()
    stuck = os.fdopen(write_end, "w", buffering=1)
    run = started_run(3000)
    done = threading.Event()

    def feed() -> None:
        with LiveView(3000, console=Console(file=stuck, width=200), every_seconds=0.0) as view:
            for record in run.records:
                view.observe(record)
        done.set()

    thread = threading.Thread(target=feed, daemon=True)
    thread.start()
    assert done.wait(120)
    os.close(read_end)
    thread.join()


def test_a_terminal_gets_a_picture_that_is_redrawn() -> None:
    out = io.StringIO()
    console = Console(file=out, width=80, height=30, force_terminal=True, legacy_windows=False)
    with LiveView(30, console=console) as view:
        for record in lossy_run().records:
            view.observe(record)
        view.say("a line of the agent's")
        wait_until(lambda: "a line of the agent's" in out.getvalue(), what="the line")
    assert "step 30/30" in out.getvalue()
    assert "╭" in out.getvalue()


def test_a_resumed_run_goes_on_with_its_curve() -> None:
    records = lossy_run().records
    past = [r for r in records if r.generation < 3]
    out = io.StringIO()
    with LiveView(30, console=Console(file=out, width=200)) as view:
        view.replay(sorted(past, key=lambda record: record.order))
        assert out.getvalue() == ""
        assert view.progress.state == "stopped"
        for record in records[len(past) :]:
            view.observe(record)
    assert [step for step, _ in view.progress.curve] == list(range(1, 31))
    assert "2 workers from the state after step 20 (generation 3)" in out.getvalue()


def test_watch_follows_until_the_run_has_ended() -> None:
    """The journal hands out what is new, sorted by step; a stop that was resumed is no end."""
    records, seen = lossy_run().records, []

    def batches() -> Iterator[list[Record]]:
        for part in (records[:20], records[20:-5], records[-5:]):
            seen.append(len(part))
            yield sorted(part, key=lambda record: record.order)
        raise AssertionError("asked for more after the end")

    out = io.StringIO()
    with LiveView(30, console=Console(file=out, width=200)) as view:
        watch_run(batches(), view)
    assert len(seen) == 3
    assert "finished after step 30" in out.getvalue()


def test_a_new_generation_names_what_ended_the_last_one() -> None:
    cause = "worker 1: RuntimeError: cannot allocate memory\nthe library's own words"
    progress = RunProgress(30)
    start = GenerationStarted({"nodes": ["a", "a"]}, "error", cause=cause, step=3)
    (line,) = progress.observe(Record(2, "agent", 0, 1.0, start))
    assert line.text.endswith("; cause: worker 1: RuntimeError: cannot allocate memory")


# --- progress lines of a run ----------------------------------------------------------------------
def lines_of(*events: Event) -> list[str]:
    progress = RunProgress(total_steps=10)
    return [
        line.text
        for number, event in enumerate(events)
        for line in progress.observe(Record(1, "a", number, float(number), event))
    ]


def test_each_step_that_is_not_saved_has_one_line_until_a_checkpoint_is_committed() -> None:
    away = [
        CheckpointSkipped(rank, "the bucket is away", step=n) for n in (2, 4) for rank in (0, 1)
    ]
    committed = CheckpointCommitted("commits/6", 10, 0.1, step=6)
    said = lines_of(*away, committed, committed, *away)
    assert said[:2] == [f"step {step} is not saved: the bucket is away" for step in (2, 4)]
    assert said[2].startswith("checkpoints can be saved again: checkpoint of step 6 committed")
    assert said[3].startswith("checkpoint of step 6 committed")
    assert said[4:] == said[:2]


def test_a_shard_that_several_ranks_wait_for_is_said_once() -> None:
    waits = [ShardAwaited(rank, "a/0.bin", "503") for rank in (0, 1)]
    ends = [ShardAwaited(rank, "a/0.bin") for rank in (0, 1)]
    assert lines_of(*waits, *ends) == [
        "rank 0 waits for a/0.bin of the dataset: 503",
        "a/0.bin of the dataset, which rank 0 waited for, is here",
    ]
