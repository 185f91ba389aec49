"""`holdfast search`: refusals, suggestions that depend on results alone, kills at any moment."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

import holdfast
from holdfast.errors import ConfigError
from holdfast_platform.search.file import read_search
from holdfast_platform.search.ray_tune import TrialRun, trainable
from holdfast_platform.search.trial import State, Trial
from tests.support.commands import apart, here, start, write_run_file

DEADLINE_S = 900.0
RATE = "train.optimizer.learning_rate"
SEARCH: dict[str, Any] = {
    "run": "run.yaml",
    "trials": 4,
    "parallel": 2,
    "set": {"train.steps": 6, "layout.workers": 1},
    "space": {
        RATE: {"low": 1e-4, "high": 3e-2, "log": True},
        "train.schedule.warmup_steps": {"low": 0, "high": 4},
        "train.batch_size": [4, 8],
    },
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_run_file(tmp_path / "root")
    return tmp_path / "root"


def write_search(root: Path, name: str = "search.yaml", **keys: Any) -> Path:
    (root / name).write_text(json.dumps({**SEARCH, **keys}))
    return root / name


BRANCH = {"branch_at": 3, "space": {RATE: [1e-3, 1e-2]}}
REFUSED: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"space": {"train.optimizer.learning_rat": [1]}}, ("learning_rat", "learning_rate")),
    ({"space": {RATE: {"low": 1e-2, "high": 1e-4}}}, ("low must be below high",)),
    ({"space": {RATE: {"low": 0, "high": 1e-2, "log": True}}}, ("needs a low above 0",)),
    ({"space": {RATE: {"low": 1e-3}}}, ("high is missing",)),
    ({"space": {RATE: 3}}, ("train.optimizer.learning_rate", "docs/guide/search.md")),
    ({"space": {RATE: [1e-3, -1]}}, (RATE, "-1")),
    ({"space": {"train.steps": [3, 6]}}, ("train.steps cannot be searched",)),
    ({"set": {"folder": "x"}}, ("set has folder",)),
    ({"trials": 0}, ("trials", "greater than or equal to 1")),
    ({"parallel": 1.5}, ("parallel",)),
    ({"sampler": "grid"}, ("'grid'", "tpe")),
    ({"direction": "down"}, ("'down'", "minimize")),
    ({"prune": {"after": 2}}, ("prune.after",)),
    ({"set": {"data.validation_fraction": 0}}, ("validation_fraction is 0",)),
    ({"set": {"train.stop": [{"metric": "loss", "below": 1}]}}, ("train.stop", "prune")),
    ({"trails": 3}, ("trails",)),
    ({**BRANCH, "branch_at": 6}, ("branch_at is 6", "below 6")),
    ({**BRANCH, "space": {"model.dim": [16, 32]}}, ("model.dim cannot change after step 3",)),
]


@pytest.mark.parametrize(("keys", "words"), REFUSED, ids=[words[0] for _, words in REFUSED])
def test_what_cannot_work_is_refused_before_the_start(
    root: Path, keys: dict[str, Any], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    here(capsys, "search", write_search(root, **keys)).refuses(*words)
    assert not (root / "searches").exists()


def test_a_suggestion_depends_on_numbers_and_results_alone(root: Path) -> None:
    pytest.importorskip("optuna", reason="pip install 'holdfast[search]'")
    from holdfast_platform.search.suggest import pruned_at, suggest

    search = read_search(write_search(root, prune={"startup_trials": 2}))
    draw = random.Random(1)
    trials: list[Trial] = []
    for number in range(14):
        parameters = suggest(search, trials, number)
        assert parameters == suggest(search, trials, number), number
        value = abs(parameters[RATE] - 3e-3)
        by_step = {3: value + draw.random(), 6: value}
        trials.append(Trial(number, parameters, State.COMPLETE, value, 1, by_step))
    rates = [trial.parameters[RATE] for trial in trials]
    assert len(set(rates)) == len(rates)
    other = [*trials[:-1], Trial(13, trials[-1].parameters, State.COMPLETE, 9.0, 1, {6: 9.0})]
    assert suggest(search, trials, 14) != suggest(search, other, 14)
    assert pruned_at(search, trials, 14, {3: 99.0}) == 3
    assert pruned_at(search, trials, 14, {3: 0.0}) is None
    assert pruned_at(search, trials, 14, {3: 0.0, 6: 99.0}) is None, "it is over at its last step"


@pytest.fixture
def trials_end_here(tmp_path: Path) -> Iterator[None]:
    yield
    for process in trainers(tmp_path):
        with suppress(psutil.Error):
            process.kill()


def trainers(folder: Path) -> list[psutil.Process]:
    """The agents of trials below a folder, and their workers, movers and fork servers."""
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            words = " ".join(process.cmdline())
            if str(folder) in words and " search " not in words:
                found |= {each.pid: each for each in [process, *process.children(recursive=True)]}
    return list(found.values())


def run_with_kills(file: Path, kills: int, draw: random.Random) -> list[str]:
    """Run a search again and again until it is done. Kill processes of trials, and now and then
    the search itself. Return what was killed."""
    killed: list[str] = []
    deadline = time.monotonic() + DEADLINE_S
    while True:
        process = start("search", file)
        while process.poll() is None:
            assert time.monotonic() < deadline, killed
            with suppress(Exception):
                process.communicate(timeout=draw.uniform(1.0, 8.0))
            at_work = trainers(file.parent)
            if process.poll() is not None or len(killed) >= kills or not at_work:
                continue
            with suppress(psutil.Error):
                chosen = draw.choice(at_work)
                killed.append(" ".join(chosen.cmdline())[:60])
                chosen.kill()
            if draw.random() < 0.2:
                process.kill()
        if process.returncode == 0:
            return killed
        logs = [path.read_text()[-2000:] for path in file.parent.rglob("log")]
        assert process.returncode == -signal.SIGKILL, (process.communicate(), killed, logs)


def found_trials(capsys: pytest.CaptureFixture[str], file: Path) -> list[dict[str, Any]]:
    shown = here(capsys, "search", file, "--show", "--json").succeeds()
    trials: list[dict[str, Any]] = json.loads(shown.out)
    return trials


@pytest.mark.slow
@pytest.mark.usefixtures("trials_end_here")
def test_killed_workers_leave_the_best_trial_as_it_is(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("optuna", reason="pip install 'holdfast[search]'")
    trials = int(os.environ.get("HOLDFAST_SEARCH_TRIALS", "6"))
    kills = int(os.environ.get("HOLDFAST_SEARCH_KILLS", "3"))
    keys = {"trials": trials, "prune": {"startup_trials": 3}}
    calm = write_search(root, **keys)
    apart("search", calm, deadline=DEADLINE_S).succeeds()
    write_run_file(tmp_path / "hard")
    hard = write_search(tmp_path / "hard", **keys)
    killed = run_with_kills(hard, kills, random.Random(5))
    assert len(killed) == kills, killed
    expected, found = found_trials(capsys, calm), found_trials(capsys, hard)
    assert sum(trial["starts"] for trial in found) > trials, killed
    for trial in (*expected, *found):
        del trial["starts"]
    assert found == expected
    best = [
        json.loads((f.parent / "searches/search/report.json").read_text()) for f in (calm, hard)
    ]
    assert best[0]["best"] == best[1]["best"]
    assert {trial["state"] for trial in expected} == {"complete", "pruned"}
    pruned = next(trial["trial"] for trial in found if trial["state"] == "pruned")
    place = hard.parent / f"searches/search/trials/{pruned:04}/run"
    here(capsys, "checkpoint", "list", place).succeeds()


@pytest.mark.slow
@pytest.mark.usefixtures("trials_end_here")
def test_trials_branch_where_only_later_steps_differ(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trunk is trained once. A trial with the trunk's own value computes what a run without a
    branch computes, bit for bit."""
    pytest.importorskip("optuna", reason="pip install 'holdfast[search]'")
    keys = {"sampler": "random", "trials": 4, "parallel": 1, "prune": None}
    file = write_search(root, **{**BRANCH, "space": {RATE: [3e-3, 1e-2]}}, **keys)
    apart("search", file, deadline=DEADLINE_S).succeeds()
    trials = found_trials(capsys, file)
    assert {trial["state"] for trial in trials} == {"complete"}
    folder = root / "searches/search"
    for trial in trials:
        records = holdfast.journal(folder / f"trials/{trial['trial']:04}/run")
        assert records[0]["kind"] == "run_branched", records[0]
        assert min(r["step"] for r in records if r["kind"] == "step_done") == 4
    by_rate = {trial["parameters"][RATE]: trial["value"] for trial in trials}
    assert len(set(by_rate.values())) == len(by_rate) == 2

    words = ("layout.workers=1", f"folder={root / 'alone'}")
    apart("train", root / "run.yaml", *words, deadline=DEADLINE_S).succeeds()
    alone = [r for r in holdfast.journal(root / "alone") if r["kind"] == "evaluated"]
    assert alone[-1]["loss"] == by_rate[3e-3]


@pytest.mark.slow
@pytest.mark.usefixtures("trials_end_here")
def test_a_trial_of_ray_tune_that_is_lost_continues(root: Path, tmp_path: Path) -> None:
    """Its process is killed after a validation, and Ray starts the trial again elsewhere."""
    keys = {"train.steps": 6, "layout.workers": 1}
    config = {"run_file": str(root / "run.yaml"), "folder": str(root / "trials"), "keys": keys}
    calm = TrialRun(config, "calm")
    expected = [calm.next_validation(), calm.next_validation()]
    assert [result["done"] for result in expected] == [False, True]
    lost = TrialRun(config, "lost")
    first = lost.next_validation()
    lost.save(str(tmp_path))
    for process in trainers(root / "trials/lost"):
        with suppress(psutil.Error):
            process.kill()
    again = TrialRun(config, "lost")
    again.load(str(tmp_path))
    assert [first, again.next_validation()] == expected
    with pytest.raises(ConfigError, match="of another one"):
        TrialRun(config, "other").load(str(tmp_path))
    with pytest.raises(ConfigError, match="keys of the run file go into keys"):
        TrialRun({**config, "train.steps": 6}, "other")


@pytest.mark.slow
@pytest.mark.usefixtures("trials_end_here")
def test_ray_tune_runs_trials(root: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray.tune", reason="pip install 'holdfast[tune]'")
    import ray
    from ray import tune

    ray.init(num_cpus=1, include_dashboard=False)
    try:
        rates = tune.grid_search([1e-3, 1e-2])
        keys = {"train.steps": 6, "layout.workers": 1, RATE: rates}
        found = tune.Tuner(
            trainable(),
            param_space={
                "run_file": str(root / "run.yaml"),
                "folder": str(root / "trials"),
                "keys": keys,
            },
            tune_config=tune.TuneConfig(metric="loss", mode="min"),
            run_config=tune.RunConfig(storage_path=str(tmp_path / "ray")),
        ).fit()
    finally:
        ray.shutdown()
    assert not found.errors
    assert {result.metrics["train_step"] for result in found} == {6}
    assert found.get_best_result().config["keys"][RATE] == 1e-2
