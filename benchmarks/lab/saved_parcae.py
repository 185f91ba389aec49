"""Layouts that Parcae's authors published for a trace, and those that our Parcae decides there."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.core.json_parsing import parse_json
from holdfast.errors import DataError
from holdfast_lab.rivals.grid_cost import Shape
from holdfast_lab.rivals.liveput import LiveputOptimizer
from holdfast_lab.rivals.parcae import PAST, Chooser, ForecastBounds, forecast, net_changes


def saved_chooser(decisions: Sequence[Shape]) -> Chooser:
    """Decisions by minute; the last one holds after their end."""

    def choose(
        minute: int, counts: Sequence[int], lost: Sequence[int], shape: Shape | None
    ) -> Shape | None:
        return decisions[min(minute, len(decisions) - 1)]

    return choose


@dataclass(frozen=True)
class SavedDecisions:
    """What Parcae's authors published for a trace, by minute.

    intervals: (nodes before, joined, removed). by_kind: layouts by the name of the policy.
    """

    intervals: tuple[tuple[int, int, int], ...]
    by_kind: dict[str, tuple[Shape, ...]]


SAVED_KINDS = {
    "throughput": "throughut-opt",  # misspelt in the files
    "liveput, future known": "liveput-truth",
    "liveput, forecast": "liveput-predict",
}


def parse_saved(text: str, source: str) -> SavedDecisions:
    """A file of Parcae's decisions: one JSON list with an object a minute.

    Raises DataError for a file of another form.
    """
    try:
        items = parse_json(text)
        if not isinstance(items, list):
            raise TypeError
        intervals = tuple(tuple(int(n) for n in item["interval"]) for item in items)
        by_kind = {
            name: tuple((int(item[key][0]), int(item[key][1])) for item in items)
            for name, key in SAVED_KINDS.items()
        }
        return SavedDecisions(tuple((a, b, c) for a, b, c in intervals), by_kind)
    except (ValueError, KeyError, TypeError, IndexError):
        raise DataError(
            "this is no file of Parcae's decisions",
            where=source,
            remedy="give a JSON list with 'interval', 'throughut-opt', 'liveput-truth' and "
            "'liveput-predict' for each minute",
        ) from None


def layout_changes(decisions: Sequence[Shape]) -> int:
    return sum(a != b for a, b in itertools.pairwise(decisions))


def offline_decisions(
    saved: SavedDecisions,
    optimizer: LiveputOptimizer,
    look_ahead: int,
    *,
    knows: bool,
    seed: int = 0,
) -> list[Shape]:
    """The authors' loop over their own intervals: what this reading of Parcae decides.

    knows: the future, instead of a forecast. As in their code, a forecast is made before the
    minute's changes are known, and the width is cut to the nodes that are there.
    """
    counts = [before + joined - removed for before, joined, removed in saved.intervals]
    removed = [gone for _, _, gone in saved.intervals]
    draw = random.Random(f"{seed}/parcae")
    past = PAST.get(look_ahead, look_ahead)
    bounds = ForecastBounds()
    shape: Shape | None = None
    out: list[Shape] = []
    for minute, nodes in enumerate(counts):
        before = counts[minute - 1] if minute else 0
        if knows:
            ahead = [
                (joined, gone) for _, joined, gone in saved.intervals[minute : minute + look_ahead]
            ]
        elif minute == 0:
            ahead = [(nodes, 0), *[(0, 0)] * (look_ahead - 1)]
        elif minute - 1 < past:
            ahead = [(0, 0)] * look_ahead
        else:
            window, gone = counts[minute - past : minute], removed[minute - past : minute]
            ahead = net_changes([before, *forecast(window, gone, look_ahead, bounds, draw)])
        shape = optimizer.choose(before, shape, ahead) or shape or (1, nodes)
        if shape[0] * shape[1] > nodes:
            shape = max(1, nodes // shape[1]), shape[1]
        out.append(shape)
    return out
