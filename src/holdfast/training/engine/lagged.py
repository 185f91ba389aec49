"""The weights of the last few steps, as a part of the state.

A run that trains on completions of an older policy (`rollout.lag`) still needs that policy after a
restart. So the older weights are state tensors, cut as the parameters are. Checkpoints, memory,
peers and reshards carry them as they carry what the optimizer keeps.
"""

from __future__ import annotations

import torch

from holdfast.core.sharding.state_table import lagged_policy_prefix
from holdfast.training.engine.state import LocalTensor, Parameters


class LaggedPolicies:
    """Copies of `master_tensors` as they were 1, 2, ... steps before the state."""

    def __init__(self, parameters: Parameters, lag: int) -> None:
        self._parameters = parameters
        tensors = parameters.master_tensors
        # policies[i] is i + 1 steps older than the state
        self._policies = [[torch.zeros_like(t) for t in tensors] for _ in range(lag)]

    @torch.no_grad()
    def shift(self) -> None:
        """Let each policy age by a step; call before an update."""
        newer = [self._parameters.master_tensors, *self._policies[:-1]]
        for older, source in reversed(list(zip(self._policies, newer, strict=False))):
            for tensor, value in zip(older, source, strict=True):
                tensor.copy_(value)

    @torch.no_grad()
    def reset(self) -> None:
        """Let all be the initial policy."""
        for policy in self._policies:
            for tensor, value in zip(policy, self._parameters.master_tensors, strict=True):
                tensor.copy_(value)

    def of_age(self, age: int, prefix: str) -> list[LocalTensor]:
        """Return the policy that is `age` steps older than the state; 0: the state's own."""
        own = self._parameters.master_tensors
        return self._parameters.local_tensors(prefix, [own, *self._policies][age])

    def state(self) -> list[LocalTensor]:
        """All that a checkpoint must hold of them; the same storage every time."""
        ages = range(1, len(self._policies) + 1)
        return [tensor for age in ages for tensor in self.of_age(age, lagged_policy_prefix(age))]
