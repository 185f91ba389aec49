"""`holdfast data mix-search`: refusals, the regression, and the same result after kills."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from holdfast.config.loading.load import load_config
from holdfast.errors import ConfigError
from holdfast_platform.search.mix import MixRunner, make_search
from holdfast_platform.search.mix_fit import (
    HUNDRED,
    best_shares,
    draw_shares,
    fit_losses,
    rank_correlation,
    whole_shares,
)
from holdfast_platform.search.trial import State, Trial
from tests.support.commands import apart, here, start

DEADLINE_S = 900.0
NAMES = ("plain", "few", "noise")
RUN: dict[str, Any] = {
    "name": "mixed",
    "device": "cpu",
    "data": {
        "folder": "dataset",
        "sources": [{"kind": "text", "path": name, "name": name} for name in NAMES],
        "tokenizer": {"vocab_size": 300},
        "sequence_length": 16,
        "validation_fraction": 0.2,
        "processes": 1,
    },
    "model": {"preset": None, "layers": 1, "dim": 16, "heads": 2, "kv_heads": 1, "ffn_dim": 16},
    "train": {"steps": 40, "batch_size": 4, "microbatch_size": 4, "evaluate": {"sources": ["few"]}},
    "layout": {"workers": 1},
}
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "while", "rain", "falls")


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    return write_mixed(tmp_path / "root")


def write_mixed(root: Path, **data: Any) -> Path:
    draw = random.Random(3)
    drawn = {"plain": WORDS, "few": WORDS[:4], "noise": tuple("abcdefghijklmnopqrstuvwxyz")}
    for name, words in drawn.items():
        (root / name).mkdir(parents=True)
        for number in range(12):
            text = " ".join(draw.choice(words) for _ in range(100))
            (root / name / f"{number}.txt").write_text(f"Text {number}. {text}.\n")
    path = root / "run.yaml"
    path.write_text(json.dumps({**RUN, "data": {**RUN["data"], **data}}))
    return path


ONE = [{"kind": "text", "path": "plain"}]
REFUSED: list[tuple[dict[str, Any], tuple[str, ...], tuple[str, ...]]] = [
    ({"sources": ONE}, ("train.evaluate.sources=[]",), ("two sources or more",)),
    ({}, ("data.sources.1.at_end=leave",), ("source few", "data.sources.1.at_end=repeat")),
    ({}, ("train.epochs=2",), ("train.epochs", "train.steps")),
    ({}, ("folder=x",), ("set has folder",)),
    ({}, ("data.mix=[]",), ("data.mix",)),
    ({"validation_fraction": 0}, (), ("validation_fraction is 0",)),
    ({}, ("train.evaluate.sources=[fwe]",), ("fwe", "plain, few, noise")),
    ({}, ("--trials", "3"), ("--trials",)),
    ({}, ("train.stpes=3",), ("train.steps",)),
]


@pytest.mark.parametrize(("data", "words", "said"), REFUSED, ids=[row[2][0] for row in REFUSED])
def test_what_cannot_work_is_refused_before_the_start(
    tmp_path: Path,
    data: dict[str, Any],
    words: tuple[str, ...],
    said: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, folder = write_mixed(tmp_path / "root", **data), tmp_path / "search"
    here(capsys, "data", "mix-search", path, *words, "--folder", folder).refuses(*said)
    assert not folder.exists()


def made_losses(shares: NDArray[np.float64]) -> NDArray[np.float64]:
    """Losses of the form that Ye et al. 2024 found: a constant and exponentials of shares."""
    return np.asarray(
        2.0 + 1.5 * np.exp(-2.5 * shares[:, 0] - 1.2 * shares[:, 1] + 0.8 * shares[:, 3])
    )


def test_a_regression_ranks_mixtures_that_it_has_not_seen() -> None:
    seen, unseen = (
        np.array([draw_shares(5, number, 4) for number in numbers]) / HUNDRED
        for numbers in (range(32), range(100, 108))
    )
    noise = np.random.default_rng(1).normal(0, 0.003, len(seen))
    fit = fit_losses(seen, (made_losses(seen) + noise).tolist())
    assert rank_correlation(fit.predict(unseen).tolist(), made_losses(unseen).tolist()) > 0.9
    assert fit.rank_correlation > 0.9
    best = best_shares(fit, [1.0] * 4, 0)
    assert sum(best) == HUNDRED
    assert best[0] >= 90, "the first source helps most"
    bound = best_shares(fit, [0.5, 0.3, 0.9, 0.9], 0)
    assert sum(bound) == HUNDRED
    assert bound[:2] == [50, 30]
    assert best == best_shares(fit, [1.0] * 4, 0)


@pytest.mark.parametrize("weights", [[1, 1, 1], [3, 1], [0.2, 0.7, 0.1, 1e-9], [1] * 7])
def test_shares_in_hundredths_are_the_nearest(weights: list[float]) -> None:
    shares = whole_shares(weights)
    assert sum(shares) == HUNDRED
    exact = [HUNDRED * weight / sum(weights) for weight in weights]
    assert all(abs(a - b) < 1 for a, b in zip(shares, exact, strict=True))


def test_the_first_trial_has_the_weights_of_the_run_file(run_file: Path) -> None:
    def own(*keys: str) -> list[int]:
        return make_search(run_file, keys, None, 8, 2, 1, None, 0).mixture(0, ())

    assert own() == [34, 33, 33]
    assert own("data.sources.0.weight=2") == [50, 25, 25]


def test_a_limit_of_passes_that_no_mixture_meets_is_refused(run_file: Path) -> None:
    apart("data", "prepare", run_file, folder=run_file.parent).succeeds()
    keys = (f"data.folder={run_file.parent / 'dataset'}",)
    search = make_search(run_file, keys, None, 8, 2, 1, 1e-3, 0)
    with pytest.raises(ConfigError, match="fewer tokens than the run has") as refused:
        _ = search.limits
    number = float(str(refused.value.remedy).split()[1])
    again = make_search(run_file, keys, None, 8, 2, 1, number, 0)
    assert sum(int(HUNDRED * limit) for limit in again.limits) >= HUNDRED


def test_another_limit_of_passes_says_that_its_mixture_is_not_measured(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apart("data", "prepare", run_file, folder=run_file.parent).succeeds()
    keys = (f"data.folder={run_file.parent / 'dataset'}",)
    free, bound = (make_search(run_file, keys, None, 8, 2, 1, most, 0) for most in (None, 0.8))
    trials: list[Trial] = []
    monkeypatch.setattr(MixRunner, "trials", lambda runner: trials)
    for number in range(free.trials):
        mixture = free.mixture(number, trials)
        value = 3.0 - mixture[1] / 100 + mixture[2] / 200
        trials.append(Trial(number, free.parameters(mixture), State.COMPLETE, value))

    assert MixRunner(free, print).found().unmeasured is None
    found = MixRunner(bound, print).found()
    assert found.unmeasured == dict(zip(NAMES, bound.mixture(bound.last, trials[:-1]), strict=True))
    assert "--trials" in found.lines()[0]


@pytest.mark.slow
def test_a_killed_search_gives_the_same_mixture(tmp_path: Path) -> None:
    """The search is killed at random times. Its runs stay at work, and the next start waits."""
    reports = []
    for name, kills in (("calm", 0), ("hard", 3)):
        run_file = write_mixed(tmp_path / name)
        folder = run_file.parent / "search"
        words = ("data", "mix-search", run_file, "--folder", folder, "--trials", "6")
        options = ("--check", "3", "--jobs", "2")
        draw = random.Random(4)
        for _ in range(kills):
            process = start(*words, *options, folder=run_file.parent)
            try:
                process.wait(draw.uniform(4, 12))
            except Exception:
                process.send_signal(signal.SIGKILL)
                process.wait()
        done = apart(*words, *options, folder=run_file.parent, deadline=DEADLINE_S).succeeds()
        reports.append(((folder / "report.json").read_bytes(), done.out))
        assert (folder / "mix.yaml").read_text() == done.out
    assert reports[0] == reports[1]
    report = json.loads(reports[0][0])
    assert report["mixture"]["few"] > report["mixture"]["noise"]
    merged = {**RUN, "data": {**RUN["data"], "mix": json.loads(json.dumps(report["mixture"]))}}
    merged["data"]["mix"] = [{"from_step": 1, "weights": report["mixture"]}]
    path = tmp_path / "mixed.yaml"
    path.write_text(json.dumps(merged))
    assert load_config(path).config.data.mix_weights()[1] == report["mixture"]
