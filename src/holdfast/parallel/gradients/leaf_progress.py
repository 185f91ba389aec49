"""Which microbatches of the open step a rank has computed, if its stages do not keep step.

A rank with several pipeline stages computes the gradients of a microbatch stage by stage, with
other microbatches between them. A microbatch counts as computed when all stages have done it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class StageParameters:
    """The parameters that one of a rank's stages computes the gradients of.

    stages: of this rank, all of which give gradients to each microbatch.
    """

    parameters: Sequence[Tensor]
    stages: int


class LeafProgress:
    """The leaves of one step. At most one is open at a time."""

    def __init__(self) -> None:
        self._stages_done: Counter[int] = Counter()
        self._stages = 1
        self._open: int | None = None

    def open(self, leaf: int, stages: int = 1) -> None:
        """Gradients of a leaf begin to come, from one of so many stages."""
        self._open, self._stages = leaf, stages

    def close(self) -> None:
        """They have all come, if any had begun."""
        if self._open is not None:
            self._stages_done[self._open] += 1
            self._open = None

    @property
    def done(self) -> list[int]:
        """The leaves that are complete, in the order in which they were begun. There are none while
        one is open, or while stages have done unequal parts."""
        if self._open is not None or any(n < self._stages for n in self._stages_done.values()):
            return []
        return list(self._stages_done)
