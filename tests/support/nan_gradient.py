"""A gradient that comes out wrong."""

from __future__ import annotations

import math
from typing import Any


def spoil_once(reducer: Any) -> None:
    """The next bucket that this rank hands over has a NaN in it."""
    plain = reducer.bucket_done

    def done(index: int) -> None:
        turn, bucket = reducer._leaf_action, reducer.layout.buckets[index]
        slot = reducer.slot((turn.piece, 0) if turn.depth == 0 else (0, turn.depth))
        slot[bucket.start] = math.nan
        reducer.bucket_done = plain
        plain(index)

    reducer.bucket_done = done
