"""A search for the weights of `data.sources`: which runs are its trials, and what they show."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from holdfast.config.loading.load import load_config
from holdfast.config.loading.yaml_tree import dump, parse_value
from holdfast.config.run import RunConfig
from holdfast.core.data.sample_order import BatchSchedule
from holdfast.data.stream.dataset_location import open_dataset
from holdfast.errors import ConfigError, RunFolderError
from holdfast.wire.store.publish import replace_file
from holdfast_platform.search.file import Search, check_keys
from holdfast_platform.search.mix_fit import (
    HUNDRED,
    LEAST_RUNS,
    MixtureFit,
    best_shares,
    draw_shares,
    fit_losses,
    rank_correlation,
    whole_shares,
)
from holdfast_platform.search.runner import REPORT, SearchRunner
from holdfast_platform.search.trial import Trial

MIX, SECTION = "data.mix", "mix.yaml"
OWN = 0
"""Number of the trial with the run file's own weights."""


class MixSearch(Search):
    """The first trial has the run file's weights. The regression does not see the next `check`
    trials. The last trial has the mixture with the least predicted loss."""

    check: int
    max_passes: float | None

    @property
    def has_datasets(self) -> bool:
        """Return False: all mixtures are drawn from one dataset."""
        return False

    @property
    def identity(self) -> str:
        """As of each search. A random mixture depends neither on how many trials are
        side by side nor on `max_passes`."""
        return self.model_copy(update={"parallel": 1, "max_passes": None}).search_identity

    @cached_property
    def names(self) -> list[str]:
        return [source.mix_name for source in self.config.data.sources]

    @property
    def last(self) -> int:
        """Number of the trial whose mixture the regression chooses."""
        return self.trials - 1

    def is_fitted(self, number: int) -> bool:
        return number == OWN or self.check < number < self.last

    @cached_property
    def run_file(self) -> RunConfig:
        """The run that the mixture is for."""
        return load_config(Path(self.run)).config

    @cached_property
    def passes(self) -> list[float]:
        """Passes over each source that the run would make with this source alone."""
        dataset = open_dataset(self.config.data.folder, self.config.data)
        tokens = {
            name: stream.tokens
            for name, stream in zip(dataset.source_names, dataset.streams("train"), strict=True)
        }
        train = self.run_file.train
        stages = [(stage.from_step, stage.batch_size) for stage in train.batch_warmup]
        samples = BatchSchedule(train.batch_size, stages).position(train.steps + 1)
        needed = samples * self.run_file.data.sequence_length
        return [needed / max(tokens[name], 1) for name in self.names]

    @cached_property
    def limits(self) -> list[float]:
        """The largest share of each source. Raises ConfigError if their sum is below 1."""
        if self.max_passes is None:
            return [1.0] * len(self.names)
        limits = [self.max_passes / passes for passes in self.passes]
        if sum(int(limit * HUNDRED) for limit in limits) < HUNDRED:
            least = 1 / sum(1 / passes for passes in self.passes)
            raise ConfigError(
                f"{self.max_passes:g} passes over all sources are fewer tokens than the run has",
                where="command line, --max-passes",
                remedy=f"use {1.05 * least + 0.05:.1f} or more, or a run with fewer steps",
            )
        return limits

    def mixture(self, number: int, finished: Sequence[Trial]) -> list[int]:
        """Return the mixture of a trial. finished: all other trials, for the last one."""
        if number == OWN:
            data = self.config.data
            weights = [source.weight for source in data.sources]
            if data.mix and data.mix[0].from_step == 1:
                weights = list(data.mix_weights()[1].values())
            return whole_shares(weights)
        if number < self.last:
            return draw_shares(self.seed, number, len(self.names))
        return best_shares(self.fit(finished), self.limits, self.seed)

    def fit(self, trials: Sequence[Trial]) -> MixtureFit:
        """Raises RunFolderError if too few trials are complete."""
        fitted = [trial for trial in trials if self.is_fitted(trial.number) and trial.is_complete]
        if len(fitted) < LEAST_RUNS:
            raise RunFolderError(
                f"{len(fitted)} of {self.last - self.check} trials are complete, too few for a "
                "regression",
                where=self.folder,
                remedy="use keys with which the runs do not fail, and another folder",
            )
        losses = [trial.value or 0.0 for trial in fitted]
        return fit_losses(np.array([self.shares(trial) for trial in fitted]), losses)

    def shares(self, trial: Trial) -> list[float]:
        weights: Mapping[str, float] = trial.parameters[MIX][0]["weights"]
        return [weights[name] / HUNDRED for name in self.names]

    def parameters(self, mixture: Sequence[int]) -> dict[str, Any]:
        weights = dict(zip(self.names, mixture, strict=True))
        return {MIX: [{"from_step": 1, "weights": weights}]}


def make_search(
    run: Path,
    overrides: Sequence[str],
    folder: Path | None,
    fitted: int,
    check: int,
    jobs: int,
    max_passes: float | None,
    seed: int,
) -> MixSearch:
    """Return the search for a run file. Raises ConfigError."""
    place = run.absolute()
    config = load_config(place, overrides).config
    data, where = config.data, "data.sources"
    if config.has_own_data or len(data.sources) < 2:
        what = "a mixture needs two sources or more, and this run has "
        what += "data of its own" if config.has_own_data else "one"
        raise ConfigError(what, where=f"{run}: {where}", remedy="write a second item of sources")
    for index, source in enumerate(data.sources):
        if source.at_end != "repeat":
            raise ConfigError(
                f"source {source.mix_name} has at_end {source.at_end}, and with a large share of "
                "it a trial ends early",
                where=f"{run}: {where}.{index}",
                remedy=f"add data.sources.{index}.at_end=repeat to the command",
            )
    if config.train.epochs:
        raise ConfigError(
            "passes over the data depend on the mixture, and trials must have equal steps",
            where=f"{run}: train.epochs",
            remedy="add train.steps=... to the command",
        )
    pairs = (override.partition("=") for override in overrides)
    given = {key.strip(): parse_value(text, key) for key, _, text in pairs}
    search = MixSearch(
        run=str(place),
        folder=str((folder or Path(f"searches/{config.name}-mix")).absolute()),
        trials=fitted + check + 1,
        parallel=jobs,
        seed=seed,
        set={"train.evaluate.every": 0, **given},
        space={MIX: ("drawn",)},
        check=check,
        max_passes=max_passes,
    )
    own = search.parameters(search.mixture(OWN, ()))[MIX]
    check_keys(search.model_copy(update={"space": {MIX: (own,)}}), str(run))
    return search


@dataclass(frozen=True)
class Found:
    """What a search has found. Losses are of the trials, which are smaller than the run."""

    mixture: dict[str, int]
    trial: int
    loss: float
    predicted: float
    own_loss: float | None
    passes: dict[str, float]  # of each source, in the run, with this mixture
    features: str
    rank_correlation: float  # by leaving out one run
    check_rank_correlation: float | None  # of mixtures that the regression has not seen
    unmeasured: dict[str, int] | None  # best by prediction, if the limit of passes has changed

    @property
    def section(self) -> str:
        """The section `data.mix` of a run file."""
        return dump({"data": {"mix": [{"from_step": 1, "weights": self.mixture}]}})

    def lines(self) -> list[str]:
        seen = (
            ""
            if self.check_rank_correlation is None
            else (f", and {self.check_rank_correlation:.2f} on mixtures that it has not seen")
        )
        shares = ", ".join(f"{name} {self.passes[name]:.2g}" for name in self.mixture)
        own = "" if self.own_loss is None else f"; own weights: {self.own_loss:.4f}"
        stale = ""
        if self.unmeasured is not None:
            weights = ", ".join(f"{name} {share}%" for name, share in self.unmeasured.items())
            stale = (
                f"the last trial was chosen with another --max-passes; with this one it would be "
                f"{weights}: one more of --trials measures it"
            )
        return [
            *([stale] if stale else []),
            f"regression ({self.features}): rank correlation {self.rank_correlation:.2f} by "
            f"leaving out one run{seen}",
            f"best is trial {self.trial}: loss {self.loss:.4f}, "
            f"predicted {self.predicted:.4f}{own}",
            f"passes over the sources in the run: {shares}",
        ]


class MixRunner(SearchRunner):
    """Runs a search for a mixture."""

    _search: MixSearch

    def _require(self) -> None:
        """Do nothing: no package beyond the core's is used."""

    def _begin_together(self, lock: TextIO) -> int:
        """As of each search. Raises ConfigError if no mixture is within `max_passes`."""
        code = super()._begin_together(lock)
        if code == 0:
            _ = self._search.limits
        return code

    def _seen(self, number: int) -> list[Trial] | None:
        """Return what a trial waits for: the last one waits for all of them."""
        if number < self._search.last:
            return []
        seen = [self._trials.get(n) for n in range(number)]
        return [t for t in seen if t] if all(t and t.is_over for t in seen) else None

    def _suggest(self, number: int, seen: Sequence[Trial]) -> dict[str, Any]:
        return self._search.parameters(self._search.mixture(number, seen))

    def _may_begin(self, number: int) -> bool:
        return len(self._running) < self._search.parallel and super()._may_begin(number)

    def _describe(self, trial: Trial) -> str:
        weights = trial.parameters[MIX][0]["weights"]
        return ", ".join(f"{name} {weight}%" for name, weight in weights.items())

    def found(self) -> Found:
        """Return what the complete trials show. Raises RunFolderError."""
        search = self._search
        trials = self.trials()
        fit = search.fit(trials)
        done = [trial for trial in trials if trial.is_complete and trial.value is not None]
        shares = {trial.number: search.shares(trial) for trial in done}
        values = {trial.number: trial.value or 0.0 for trial in done}
        guess = {n: float(fit.predict(np.array([each]))[0]) for n, each in shares.items()}
        unseen = [n for n in values if 0 < n <= search.check]
        allowed = [
            n
            for n, each in shares.items()
            if all(s <= limit + 1e-9 for s, limit in zip(each, search.limits, strict=True))
        ]
        if not allowed:
            raise RunFolderError(
                f"no trial is within {search.max_passes:g} passes over each source",
                where=search.folder,
                remedy="ask for one more with --trials, or for more with --max-passes",
            )
        best = min(allowed, key=lambda n: (values[n], n))
        check = [[of[n] for n in unseen] for of in (guess, values)]
        passes = [share * n for share, n in zip(shares[best], search.passes, strict=True)]
        names = search.names
        wanted = dict(zip(names, best_shares(fit, search.limits, search.seed), strict=True))
        last = next((trial for trial in done if trial.number == search.last), None)
        is_stale = last is not None and last.parameters[MIX][0]["weights"] != wanted
        return Found(
            mixture={n: round(s * HUNDRED) for n, s in zip(names, shares[best], strict=True)},
            trial=best,
            loss=values[best],
            predicted=guess[best],
            own_loss=values.get(OWN),
            passes=dict(zip(names, passes, strict=True)),
            features=fit.features,
            rank_correlation=fit.rank_correlation,
            check_rank_correlation=rank_correlation(*check) if len(unseen) > 2 else None,
            unmeasured=wanted if is_stale else None,
        )

    def _report(self) -> None:
        """Write what was found, with all trials, and the section of the run file."""
        found = self.found()
        rows = [
            {
                "number": trial.number,
                "state": trial.state,
                "weights": trial.parameters[MIX][0]["weights"],
                "loss": trial.value,
                "is_fitted": self._search.is_fitted(trial.number),
            }
            for trial in self.trials()
        ]
        report = {**asdict(found), "trials": rows}
        replace_file(self._search.place / REPORT, json.dumps(report, indent=1) + "\n")
        replace_file(self._search.place / SECTION, found.section)
        for line in found.lines():
            self._say(line)
