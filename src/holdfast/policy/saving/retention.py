"""Which checkpoints to keep: data in, data out.

Kept are the newest `keep_last`, every step that `keep_every` divides, and always the newest one
that has been verified by reading it back: as long as the newer ones are only believed to be
good, it must not go.
"""

from __future__ import annotations

from collections.abc import Collection


def removable(
    steps: Collection[int], keep_last: int, keep_every: int = 0, verified: Collection[int] = ()
) -> list[int]:
    """The steps whose checkpoints may be removed, oldest first.

    `verified` are the steps that have been read back in full and found whole. When none has,
    only age decides.
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
