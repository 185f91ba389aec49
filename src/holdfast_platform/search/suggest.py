"""What Optuna suggests and prunes, as a function of finished trials in the order of numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.core.seeds import key_seed
from holdfast.errors import ConfigError
from holdfast_platform.search.file import Range, Search
from holdfast_platform.search.trial import Trial


def require_optuna() -> Any:
    """Return the module. Raises ConfigError if it is not installed."""
    try:
        import optuna
    except ImportError:
        raise ConfigError(
            "a search needs optuna",
            where="holdfast search",
            remedy="pip install 'holdfast[search]'",
        ) from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def _distributions(search: Search) -> dict[str, Any]:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    out: dict[str, Any] = {}
    for key, values in search.space.items():
        if not isinstance(values, Range):
            out[key] = CategoricalDistribution(values)
        elif all(isinstance(n, int) for n in (values.low, values.high, values.step or 1)):
            step = int(values.step or 1)
            out[key] = IntDistribution(int(values.low), int(values.high), values.log, step)
        else:
            out[key] = FloatDistribution(values.low, values.high, values.log, values.step)
    return out


def _study(search: Search, finished: Sequence[Trial], number: int) -> Any:
    """Return a study in memory with these trials, whose sampler is seeded for trial `number`."""
    optuna = require_optuna()
    seed = key_seed(search.seed, "search", number) % 2**32
    samplers = optuna.samplers
    kind = samplers.TPESampler if search.sampler == "tpe" else samplers.RandomSampler
    pruner: Any = optuna.pruners.NopPruner()
    if search.prune is not None:
        rule = search.prune
        pruner = optuna.pruners.MedianPruner(rule.startup_trials, rule.warmup_steps)
    study = optuna.create_study(direction=search.direction, sampler=kind(seed=seed), pruner=pruner)
    distributions, states = _distributions(search), optuna.trial.TrialState
    for trial in finished:
        state = states.COMPLETE if trial.is_complete else states.PRUNED
        study.add_trial(
            optuna.trial.create_trial(
                state=state if trial.by_step else states.FAIL,
                value=trial.value if trial.is_complete else None,
                params=dict(trial.parameters),
                distributions=distributions,
                intermediate_values=dict(trial.by_step),
            )
        )
    return study


def suggest(search: Search, finished: Sequence[Trial], number: int) -> dict[str, Any]:
    """Return the parameters of trial `number`."""
    trial = _study(search, finished, number).ask(_distributions(search))
    return dict(trial.params)


def pruned_at(
    search: Search, finished: Sequence[Trial], number: int, by_step: Mapping[int, float]
) -> int | None:
    """Return the first step at which trial `number` is to be pruned; None for none."""
    if search.prune is None:
        return None
    trial = _study(search, finished, number).ask(_distributions(search))
    for step in sorted(by_step):
        trial.report(by_step[step], step)
        if step < search.steps and trial.should_prune():
            return step
    return None
