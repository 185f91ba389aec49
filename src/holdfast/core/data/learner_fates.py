"""What became of the tokens of each learner in a round of `outer.mode: free`. Pure.

A learner has a slice of the sample order in each round. It trains on the first part of it, until
it is done or the round closes:

    used            it did all of its inner steps
    used_late       the round closed before, and its part counts by the tokens of that part
    late            the round closed before, and its part counts in the next round, discounted
    dropped         the round closed before, and nothing of it counts
    not_computed    no learner trained on them

A row says the fate of what the learner read; the rest of its slice is not computed. So every token
of the order has one fate, and the fates of a round add up to its slices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

USED, USED_LATE, LATE = "used", "used_late", "late"
DROPPED, NOT_COMPUTED = "dropped", "not_computed"
FATES = (USED, USED_LATE, LATE, DROPPED, NOT_COMPUTED)
_FATE_OF = {"drop": DROPPED, "use": USED_LATE, "discount": LATE}
"""By `outer.free.late`."""


@dataclass(frozen=True)
class LearnerFate:
    """A row of a round's ledger."""

    learner: int
    base: int  # its inner steps began with the weights after this round
    steps: int  # inner steps that it did
    tokens: int  # that it read in them
    rest: int  # tokens of its slice that it did not read
    weight: float  # of its change in the sum, for `late` in that of the next round; 0: not used
    fate: str  # of `tokens`

    @property
    def is_used(self) -> bool:
        """Return True if its change is part of the update."""
        return self.fate in (USED, USED_LATE)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> LearnerFate:
        """Parse a row of `events.OuterRound`. Raises KeyError and ValueError for what is none."""
        if value["fate"] not in FATES:
            raise ValueError(f"no fate {value['fate']!r}")
        kinds = {"weight": float, "fate": str}
        return LearnerFate(
            **{f.name: kinds.get(f.name, int)(value[f.name]) for f in fields(LearnerFate)}
        )


def read_fates(values: Iterable[Mapping[str, Any]]) -> list[LearnerFate]:
    """Return the ledger of `events.OuterRound`; nothing if one of its values is no row."""
    try:
        return [LearnerFate.from_json(value) for value in values]
    except (KeyError, TypeError, ValueError):
        return []


@dataclass(frozen=True)
class LearnerProgress:
    """How far a learner came in a round. What travels between ranks."""

    steps: int
    tokens: int
    rest: int


def decide_fates(
    step: int, every: int, progress: Sequence[LearnerProgress], late: str, discount: float
) -> list[LearnerFate]:
    """Return the rows of a round, by learner. every: inner steps of a learner in a round. late,
    discount: of `outer.free`."""
    rows = []
    for learner, done in enumerate(progress):
        fate = USED if done.steps == every else _FATE_OF[late]
        fate = fate if done.steps else NOT_COMPUTED
        weight = float(done.tokens) if fate in (USED, USED_LATE) else 0.0
        weight = discount * done.tokens if fate == LATE else weight
        counts = done.steps, done.tokens, done.rest
        rows.append(LearnerFate(learner, step - 1, *counts, weight, fate))
    return rows


def count_fates(rows: Iterable[LearnerFate]) -> dict[str, int]:
    """Return the tokens of each fate. Their sum is that of the slices."""
    found = dict.fromkeys(FATES, 0)
    for row in rows:
        found[row.fate] += row.tokens
        found[NOT_COMPUTED] += row.rest
    return found


def row_problems(rows: Sequence[LearnerFate], expected: Sequence[LearnerFate]) -> Iterator[str]:
    """Yield what is wrong with the rows of a round. expected: what its data and its inner steps
    make of them."""
    if [row.learner for row in rows] != [row.learner for row in expected]:
        yield f"it names the learners {[row.learner for row in rows]}"
        return
    for row, right in zip(rows, expected, strict=True):
        for name, value in right.to_json().items():
            if (said := getattr(row, name)) != value:
                yield f"learner {row.learner} has {name} {said}, and {value} follows from its data"
