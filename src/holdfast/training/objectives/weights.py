"""What the microbatches of an objective weigh, and which side tensors they must have."""

from __future__ import annotations

from collections.abc import Callable, Set

import numpy as np

from holdfast.config.sections.objective import ObjectiveConfig
from holdfast.data.stream.batch import MASKED_TARGET, Microbatch
from holdfast.errors import DataError
from holdfast.training.objectives.protocol import Objective

_REMEDIES = {
    "reference": "prepare the dataset again with reference log-probabilities, or train adapters "
    "(lora.rank), whose base is the reference",
    "label": "use rows with a label, or objective.kind: dpo",
}
ADDED = frozenset({"values", "entropies"})
"""Side tensors that the engine computes."""


def make_weigher(
    config: ObjectiveConfig, objective: Objective, added: Set[str] = ADDED
) -> Callable[[Microbatch], float]:
    """Return what counts the weight of a microbatch. It raises DataError if side tensors are
    missing. added: those that the engine adds."""
    needs = objective.needs - added

    def weigh(read: Microbatch) -> float:
        if not (read.targets != MASKED_TARGET).any():
            return 0
        for name in sorted(needs - read.side.keys()):
            raise DataError(
                f"objective.kind {config.kind} needs {name!r} of each row, which this data lacks",
                where="data.sources",
                remedy=_REMEDIES.get(name, "use objective.kind: next_token"),
            )
        documents = read.documents
        if documents is None:
            documents = np.zeros(read.targets.shape, dtype=np.int32)
        return objective.weigh(read.targets, documents, read.side)

    return weigh
