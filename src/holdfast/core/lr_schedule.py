"""The learning rate of a step: warm-up, then a schedule. Pure arithmetic in float64.

Step N has passed through `N` updates once it is applied. The rate rises linearly over the first
`warmup_steps`: step 1 gets 1/warmup of the peak. With `counts_from` 0, which transformers and
DeepSpeed have, it gets 0. Then it follows its kind down to `final_ratio`
times the peak at the schedule's last step, and stays there.
"""

from __future__ import annotations

from collections.abc import Callable
from math import cos, pi

from holdfast.config.sections.train import ScheduleConfig, TrainConfig

RateFunction = Callable[[int, int], float]
"""A function of the run file's, from the step and the schedule's steps to rate / peak rate."""


def learning_rate(train: TrainConfig, step: int, function: RateFunction | None = None) -> float:
    """The rate that step `step` (1 .. train.steps) is applied with. function: what
    `schedule.kind` names, if that is no schedule of ours."""
    schedule, steps = train.schedule, train.schedule_steps
    if not schedule.is_function:
        counted = step - 1 + schedule.counts_from
        return train.optimizer.learning_rate * schedule_factor(schedule, counted, steps)
    if function is None:
        raise RuntimeError(f"{schedule.kind} was not loaded")
    return train.optimizer.learning_rate * function(step, steps)


def schedule_factor(schedule: ScheduleConfig, step: int, steps: int) -> float:
    """Rate over peak rate, in (0, 1] while `final_ratio` is above 0. `steps`: of the schedule.

    - constant: 1
    - linear: a straight line from 1 to `final_ratio`
    - cosine: half a cosine wave from 1 to `final_ratio` (Loshchilov and Hutter, 2017)
    - wsd (warm-up, stable, decay): 1, then linearly to `final_ratio` over the last `decay_steps`
      (Hu et al., 2024, section 4). By default these are a fifth of the schedule.
    """
    warmup = schedule.warmup_steps
    if step < warmup:
        return step / warmup
    if schedule.kind == "constant":
        return 1.0
    if schedule.kind == "wsd":
        decay = min(schedule.decay_steps or max(1, steps // 5), steps - min(warmup, steps - 1))
        progress = _clamp((step - (steps - decay)) / decay)
        return 1.0 - (1.0 - schedule.final_ratio) * progress
    progress = _clamp((step - warmup) / max(1, steps - warmup))
    if schedule.kind == "cosine":
        progress = 0.5 * (1.0 - cos(pi * progress))
    return 1.0 - (1.0 - schedule.final_ratio) * progress


def _clamp(value: float) -> float:
    return min(1.0, max(0.0, value))


def last_common_step(before: TrainConfig, after: TrainConfig, until: int) -> int:
    """Return the last step up to `until` before the first with different learning rates. Of a
    function, only its name and source are known here."""
    if before.schedule.is_function or after.schedule.is_function:
        same = before.schedule == after.schedule and before.schedule_steps == after.schedule_steps
        return until if same else 0
    for step in range(1, until + 1):
        if learning_rate(before, step) != learning_rate(after, step):
            return step - 1
    return until
