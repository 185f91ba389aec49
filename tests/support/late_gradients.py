"""A slow second opinion on asynchronous schedules: one process that computes each gradient with the
weights that the rules name, stage by stage.

It knows no table and no messages. A microbatch's forward on stage s comes as many steps early as
2 (p - 1) - s microbatches ahead make, and its backward uses the weights of its forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from holdfast.core.sharding.reduction_tree import deal
from holdfast.train.engine import StepEngine


def steps_early(stage: int, ranks: int, share: int, place: int, step: int) -> int:
    """Steps before `step` in which the stage computes the forward of its microbatch `place`. No
    step is before the first."""
    ahead = 2 * (ranks - 1) - stage
    early = 0
    while early < step - 1 and place < ahead - early * share:
        early += 1
    return early


class LateExecutor:
    """The executor of a single process, told to compute as a pipeline of `ranks` would.

    stage_of: the stage of each parameter, by name. replicas: pipelines that share a step.
    """

    is_asynchronous = False

    def __init__(
        self,
        made: StepEngine,
        rule: str,
        ranks: int,
        stage_of: Mapping[str, int],
        replicas: int = 1,
    ):
        self._replicas = replicas
        self._made, self._rule, self._ranks, self._stage_of = made, rule, ranks, stage_of
        self._inner: Any = made.executor
        self._after: list[dict[str, Tensor]] = []  # the weights after each step
        self.loss_scale = self._inner.loss_scale
        made.executor = self

    def train(
        self, leaves: Sequence[int], batches: Sequence[Any], listener: Any, losses: Any = None
    ) -> list[Tensor]:
        objective, step = self._made.objective, self._made.step
        named = dict(objective.named_parameters())
        self._after.append({name: p.detach().clone() for name, p in named.items()})
        losses = [] if losses is None else losses
        held = {name: p.data for name, p in named.items()}
        shares = deal(len(leaves), self._replicas)
        places = {leaf: (at, len(share)) for share in shares for at, leaf in enumerate(share)}
        for leaf, batch in zip(leaves, batches, strict=True):
            place, size = places[leaf]
            for name, parameter in named.items():
                stage = self._stage_of[name]
                early = steps_early(stage, self._ranks, size, place, step)
                if self._rule == "pipedream-2bw":
                    early = min(1, step - 1)
                parameter.data = self._after[step - 1 - early][name].clone()
            self._inner.train([leaf], [batch], listener, losses)
        for name, parameter in named.items():
            parameter.data = held[name]
        return list(losses)

    def evaluate(self, *given: Any) -> list[Tensor]:
        found: list[Tensor] = self._inner.evaluate(*given)
        return found
