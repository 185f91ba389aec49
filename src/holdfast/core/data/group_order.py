"""The order of completions: which sample of which prompt stands at each position of a run.

A pass is a permutation of the prompts. The `samples` completions of a prompt, its group, stand next
to each other. Step s trains on completions of the policy after step s - 1 - lag; before that there
is the initial policy, 0. All of it is a pure function of the run file.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from holdfast.core.data.sample_order import SampleOrder, SamplePlace

Group = tuple[int, int]
"""(pass from 0, prompt)"""


class GroupOrder(SampleOrder):
    """`SampleOrder` of completions. Sample `prompt * samples + k` is completion k of a prompt."""

    def __init__(self, seed: int, prompts: int, samples: int) -> None:
        super().__init__(seed, [prompts * samples], [1.0])
        self._prompts = SampleOrder(seed, [prompts], [1.0])
        self.samples = samples

    def places(
        self, start: int, stop: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Sources (0), passes and samples [n] of the positions [start, stop)."""
        first, last = start // self.samples, -(-stop // self.samples)
        source, epoch, prompt = self._prompts.places(first, last)
        cut = slice(start - first * self.samples, stop - first * self.samples)
        sample = prompt[:, None] * self.samples + np.arange(self.samples)
        source, epoch = (np.repeat(each, self.samples)[cut] for each in (source, epoch))
        return source, epoch, sample.reshape(-1)[cut]

    def place(self, position: int) -> SamplePlace:
        source, epoch, sample = (int(each[0]) for each in self.places(position, position + 1))
        return SamplePlace(source, epoch, sample)

    def groups(self, start: int, stop: int) -> list[Group]:
        """The groups that the positions [start, stop) touch, in their order."""
        _, epoch, sample = self.places(start, stop)
        pairs = zip(epoch.tolist(), (sample // self.samples).tolist(), strict=True)
        return list(dict.fromkeys(pairs))


def policy_of(step: int, lag: int) -> int:
    """Return the step whose weights generate the completions of `step`."""
    return max(0, step - 1 - lag)
