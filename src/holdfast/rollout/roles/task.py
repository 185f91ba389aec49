"""The built-in decoder, trained on completions that it generates."""

from __future__ import annotations

from torch import Tensor

from holdfast.data.stream.batch import ValidationSet
from holdfast.errors import ConfigError
from holdfast.rollout.roles.batches import RolloutBatches
from holdfast.training.engine.evaluate import TokenValidation
from holdfast.training.engine.task import DecoderTask, TaskBatchSource


class RolloutTask(DecoderTask):
    """`DecoderTask` with completions in place of a dataset."""

    def open_batches(self, dataset: str) -> RolloutBatches:  # type: ignore[override]
        return RolloutBatches(self._config)

    def validation(self, batches: TaskBatchSource, samples: int) -> TokenValidation:
        """There is none: rewards of the completions are the measure."""
        return TokenValidation(ValidationSet([], 0, 1.0))

    def read_step(self, dataset: str, step: int) -> list[dict[str, Tensor]]:
        raise ConfigError(
            "a step of a run that generates its data has no tokens before it is trained",
            where="rollout.prompts",
            remedy="look at the completions in the journal: holdfast report RUN",
        )
