"""Chooses the checkpoints to keep: data in, data out.

The newest `keep_last` and every step that `keep_every` divides are kept. The newest one that was
verified by reading it back is always kept, because newer ones are only believed to be good.
"""

from __future__ import annotations

from collections.abc import Collection


def removable_steps(
    steps: Collection[int], keep_last: int, keep_every: int = 0, verified: Collection[int] = ()
) -> list[int]:
    """The steps whose checkpoints may be removed, oldest first.

    `verified` are the steps that were read back in full and found intact. If there is none, only
    age decides.
    """
    if keep_last < 1:
        raise ValueError("keep_last must be at least 1")
    ordered = sorted(set(steps))
    keep = set(ordered[-keep_last:])
    if keep_every:
        keep.update(step for step in ordered if step % keep_every == 0)
    proven = [step for step in ordered if step in set(verified)]
    keep.update(proven[-1:])
    return [step for step in ordered if step not in keep]
