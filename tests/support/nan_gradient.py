"""A gradient that comes out wrong."""

from __future__ import annotations

import math
from typing import Any


def spoil_once(reducer: Any) -> None:
    """The next bucket that this rank hands over has a NaN in it."""
    plain = reducer.done

    def done(index: int) -> None:
        turn, bucket = reducer._turn, reducer.layout.buckets[index]
        slot = reducer.slot((turn.piece, 0) if turn.depth == 0 else (0, turn.depth))
        slot[bucket.start] = math.nan
        reducer.done = plain
        plain(index)

    reducer.done = done
