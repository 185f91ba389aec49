"""A slow second opinion on asynchronous schedules: one process that computes each gradient with the
weights that the rules name, stage by stage.

It knows no table and no messages. At the end of a step, stage s of p has run 2 (p - 1) - s forwards
and s backwards of later microbatches. Each uses weights of the step in which it ran.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from holdfast.core.sharding.reduction_tree import deal
from holdfast.training.engine.engine import StepEngine
from holdfast.training.engine.executors import Executor, Share

DECAY = 0.135
"""D of pipemare."""


def steps_early(ahead: int, share: int, place: int, step: int) -> int:
    """Steps before `step` in which a stage that is `ahead` by so many microbatches runs the pass of
    microbatch `place`. No step is before the first."""
    early = 0
    while early < step - 1 and place < ahead - early * share:
        early += 1
    return early


class LateExecutor(Executor):
    """The executor of a single process, told to compute as a pipeline of `ranks` would.

    stage_of: the stage of each parameter, by name. replicas: pipelines that share a step.
    """

    def __init__(
        self,
        made: StepEngine,
        rule: str,
        ranks: int,
        stage_of: Mapping[str, int],
        replicas: int = 1,
    ):
        super().__init__()
        self._made, self._rule, self._ranks, self._stage_of = made, rule, ranks, stage_of
        self._inner: Any = made.executor
        self._replicas = replicas
        # after each step: the weights, and the mean movement of each
        self._after: list[dict[str, Tensor]] = []
        self._moved: list[dict[str, Tensor]] = []
        self.loss_scale = self._inner.loss_scale
        made.executor = self

    def train(self, share: Share, listener: Any, losses: list[Tensor]) -> None:
        named = dict(self._made.objective.named_parameters())
        shares = deal(len(share), self._replicas)
        places = {leaf: (at, len(dealt)) for dealt in shares for at, leaf in enumerate(dealt)}
        self._remember(named, len(shares[0]))
        held = {name: p.data for name, p in named.items()}
        for name, parameter in named.items():
            parameter.data = held[name].clone()
        for leaf, batch in share:
            listener.start_leaf(leaf)
            self._fill(named, *places[leaf], is_backward=False)
            loss = self._made.objective(*self._inner.arguments(batch))
            self._fill(named, *places[leaf], is_backward=True)
            loss.backward()
            listener.end_leaf()
            losses.append(loss.detach())
        for name, parameter in named.items():
            parameter.data = held[name]

    def evaluate(self, *given: Any) -> list[Tensor]:
        found: list[Tensor] = self._inner.evaluate(*given)
        return found

    def _remember(self, named: Mapping[str, Tensor], share: int) -> None:
        self._after.append({name: p.detach().clone() for name, p in named.items()})
        moved = {}
        for name, new in self._after[-1].items():
            moved[name] = new * 0
            if self._moved:
                kept = DECAY ** (share / (2 * (self._ranks - 1 - self._stage_of[name]) + 1))
                step = new - self._after[-2][name]
                moved[name] = self._moved[-1][name] * kept + step * (1 - kept)
        self._moved.append(moved)

    def _fill(
        self, named: Mapping[str, Tensor], place: int, share: int, *, is_backward: bool
    ) -> None:
        """Give each parameter the weights of this pass of a microbatch, in its memory."""
        step = self._made.step
        for name, parameter in named.items():
            stage = self._stage_of[name]
            early = steps_early(2 * (self._ranks - 1) - stage, share, place, step)
            if self._rule == "pipedream-2bw":
                early = min(1, step - 1)
            weights = self._after[step - 1 - early][name]
            if self._rule == "pipemare" and is_backward:
                now = step - 1 - steps_early(stage, share, place, step)
                late = now - (step - 1 - early)
                weights = self._after[now][name] - late * self._moved[now][name]
            parameter.data.copy_(weights)
