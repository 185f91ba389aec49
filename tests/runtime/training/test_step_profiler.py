"""Profiles of steps: what is in the files, and that a real run keeps its bits."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from holdfast.config.sections.train import ProfileConfig
from holdfast.events import Event, StepsProfiled, WeightsDigest
from holdfast.training.engine.step_profiler import StepProfiler
from tests.support.commands import apart, start, within, write_run_file
from tests.support.followed_run import FollowedRun

CPU = torch.device("cpu")


def do_steps(profiler: StepProfiler, first: int, last: int) -> None:
    for step in range(first, last + 1):
        profiler.begin(step, "compute")
        torch.ones(8, 8) @ torch.ones(8, 8)
        profiler.phase("apply")
        profiler.end(step)
    profiler.wait_until_written()


def names_in(path: str) -> set[str]:
    return {event.get("name", "") for event in json.loads(Path(path).read_text())["traceEvents"]}


def test_the_steps_of_the_run_file_and_of_a_request_are_written(tmp_path: Path) -> None:
    events: list[Event] = []
    wish = [(0, 0)]
    profiler = StepProfiler(
        1, CPU, ProfileConfig(steps=(2, 3), ranks=(1,)), tmp_path, events.append, lambda: wish[0]
    )
    do_steps(profiler, 1, 4)
    wish[0] = (70, 1)
    do_steps(profiler, 5, 8)
    planned, asked = events
    assert isinstance(planned, StepsProfiled)
    assert isinstance(asked, StepsProfiled)
    assert (planned.first, planned.step, planned.request) == (2, 3, 0)
    assert (asked.first, asked.step, asked.request) == (5, 5, 70)
    assert {"step 2", "step 3", "compute", "apply", "aten::mm"} <= names_in(planned.path)
    assert "step 5" in names_in(asked.path)
    assert {"step 4", "step 6"}.isdisjoint(names_in(planned.path) | names_in(asked.path))


def test_what_was_recorded_by_the_end_of_the_run_is_written(tmp_path: Path) -> None:
    events: list[Event] = []
    do_steps(StepProfiler(0, CPU, ProfileConfig(steps=(2, 9)), tmp_path, events.append), 1, 3)
    (event,) = events
    assert isinstance(event, StepsProfiled)
    assert (event.first, event.step) == (2, 3)
    assert {"step 2", "step 3"} <= names_in(event.path)


def test_another_rank_and_a_broken_generation_write_nothing(tmp_path: Path) -> None:
    events: list[Event] = []
    do_steps(
        StepProfiler(0, CPU, ProfileConfig(steps=(1, 2), ranks=(1,)), tmp_path, events.append), 1, 3
    )
    profiler = StepProfiler(0, CPU, ProfileConfig(steps=(1, 5)), tmp_path, events.append)
    for step in (1, 2):
        profiler.begin(step, "compute")
        profiler.end(step)
    profiler.begin(3, "compute")
    profiler.close()
    assert not events
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    events: list[Event] = []
    (tmp_path / "file").touch()
    profiler = StepProfiler(
        0, CPU, ProfileConfig(steps=(1, 1)), tmp_path / "file" / "folder", events.append
    )
    do_steps(profiler, 1, 1)
    (event,) = events
    assert isinstance(event, StepsProfiled)
    assert "NotADirectoryError" in event.problem


def test_a_device_of_nvidia_gets_ranges_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranges: list[str] = []

    @contextmanager
    def record(name: str) -> Iterator[None]:
        ranges.append(name)
        yield

    monkeypatch.setattr(torch.cuda.nvtx, "range", record)
    config = ProfileConfig(steps=(1, 1))
    do_steps(StepProfiler(0, torch.device("cuda"), config, tmp_path, [].append), 1, 2)
    assert ranges == ["step 1", "compute", "apply"]


@pytest.mark.slow
def test_a_run_that_is_profiled_keeps_its_bits(tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path / "run")
    digests: list[dict[int, str]] = []
    for name in ("plain", "profiled"):
        folder, is_profiled = tmp_path / name, name == "profiled"
        settings = ("train.steps=1000000", "train.digest_every=1", "train.evaluate.every=0")
        profile = ("train.profile={steps: [3, 4], ranks: [0, 1]}",) if is_profiled else ()
        run = FollowedRun(folder, start("train", run_file, f"folder={folder}", *settings, *profile))
        run.until_step(20)
        if is_profiled:
            command = ("profile", folder, "--steps", "2", "--rank", "1", "--json")
            (written,) = json.loads(apart(*command, deadline=240).succeeds().out)
            assert written["step"] == written["first"] + 1
            assert f"step {written['first']}" in names_in(written["path"])
            within("profile", folder, "--rank", "2").refuses("there is no rank 2")
        run.process.send_signal(signal.SIGINT)
        run.end()
        digests.append({event.step: event.sha256 for event in run.events(WeightsDigest)})
        planned = [event for event in run.events(StepsProfiled) if not event.request]
        assert {event.rank for event in planned} == ({0, 1} if is_profiled else set())
    plain, profiled = digests
    both = plain.keys() & profiled.keys()
    assert len(both) >= 20
    assert {step: plain[step] for step in both} == {step: profiled[step] for step in both}
    within("profile", tmp_path / "plain").refuses("no agent of rank 0 answers")
