"""How many logical microbatches the steps of a run have."""

from __future__ import annotations

from holdfast.config.run import RunConfig
from holdfast.core.data.sample_order import BatchSchedule


def microbatches(config: RunConfig) -> dict[int, int]:
    """First step -> logical microbatches of a step, for every size of batch that the run has. A
    microbatch that is not chosen yet counts as one sample. A learner of `outer` is one."""
    train = config.step_train
    schedule = BatchSchedule(
        train.batch_size, [(stage.from_step, stage.batch_size) for stage in train.batch_warmup]
    )
    starts = {1} | {stage.from_step for stage in train.batch_warmup}
    return {
        step: schedule.size(step) // (train.microbatch_size or 1)
        for step in sorted(starts)
        if step <= train.steps
    }
