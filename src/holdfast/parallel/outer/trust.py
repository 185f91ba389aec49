"""What decides whether the change of a learner counts: bounds, and the draw of exact checks.

Every rank has the changes of all learners, and decides alike. A check is drawn from what all
learners have sent in the round. So no learner knows before whether another rank will compute its
round again. The learner that sends last could try several changes until none of its own is drawn.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from enum import IntEnum

import torch
from torch import Tensor

from holdfast.core.seeds import key_seed
from holdfast.parallel.comm.devices import describe_processor
from holdfast.parallel.outer.rules import median

DRAW_RANGE = 1 << 63  # `key_seed` is below
HASH_WORDS = 4  # a SHA-256 as int64
NO_CHECKERS: Mapping[int, int | None] = {}


class Verdict(IntEnum):
    """What came of a check. The order is that of `events.LearnerChecked.verdict`."""

    EQUAL = 1
    DIFFERS = 2  # the change, or the state after it
    OTHER_STATE = 3  # the state before it is not the one after the learner's last round
    NO_CHECKER = 4  # no other rank has a like processor


def hash_words(tensors: Sequence[Tensor | None]) -> tuple[int, ...]:
    """Return the SHA-256 of the bytes of these tensors as int64."""
    digest = hashlib.sha256()
    for tensor in tensors:
        if tensor is not None:
            flat = tensor.detach().cpu().contiguous().view(-1)
            digest.update(flat.view(torch.uint8).numpy().data)
    words = torch.frombuffer(bytearray(digest.digest()), dtype=torch.int64)
    return tuple(words.tolist())


def processor_word(device: torch.device) -> int:
    """Return a number that is equal on ranks whose results may have equal bits."""
    return key_seed(torch.get_num_threads(), describe_processor(device))


def draw_checks(
    seed: int, step: int, sent: Sequence[Sequence[int]], share: float, always: Collection[int]
) -> list[int]:
    """Return the learners whose round is computed again. sent: the hash of what each learner sent.
    always: learners that are checked in any case."""
    everything = [word for words in sent for word in words]
    limit = int(share * DRAW_RANGE)
    return [
        learner
        for learner in range(len(sent))
        if learner in always or key_seed(seed, "check", step, learner, *everything) < limit
    ]


def choose_checkers(
    seed: int,
    step: int,
    drawn: Sequence[int],
    owners: Sequence[int],
    processors: Sequence[int],
    before: Mapping[int, int | None] = NO_CHECKERS,
) -> dict[int, int | None]:
    """Return the rank that checks each learner; None if no other rank has a like processor.

    owners: the rank of each learner. processors: of each rank, see `processor_word`. The ranks with
    the fewest checks of the round come first. before: ranks that have checked these learners, and
    are not asked again.
    """
    load = dict.fromkeys(range(len(processors)), 0)
    chosen: dict[int, int | None] = {}
    for learner in drawn:
        owner = owners[learner]
        done = owner, before.get(learner)
        able = [r for r in load if r not in done and processors[r] == processors[owner]]
        able.sort(key=lambda rank: (load[rank], key_seed(seed, "checker", step, learner, rank)))
        chosen[learner] = able[0] if able else None
        if able:
            load[able[0]] += 1
    return chosen


def find_outliers(changes: Sequence[Tensor], norm: float, direction: float) -> dict[int, str]:
    """Return the learners whose change is out of bounds, and why.

    changes: of each learner, [n]. norm: factor from the median norm; 0: any. direction: least
    cosine to the median of the finite changes; -1: any.
    """
    is_finite = [bool(torch.isfinite(change).all()) for change in changes]
    reasons = {k: "not finite" for k, good in enumerate(is_finite) if not good}
    rest = [k for k, good in enumerate(is_finite) if good]
    if not rest:
        return reasons
    x = torch.stack([changes[k] for k in rest])
    norms = torch.linalg.vector_norm(x, dim=1, dtype=torch.float64)
    middle = float(median(norms[:, None]))
    if norm:
        for k, value in zip(rest, norms.tolist(), strict=True):
            if value > norm * middle or value * norm < middle:
                reasons[k] = f"norm {value:.4g}, the median is {middle:.4g}"
    if direction > -1:
        centre = median(x).to(torch.float64)
        length = torch.linalg.vector_norm(centre).clamp_min(1e-300)
        cosines = (x.to(torch.float64) @ centre) / (norms.clamp_min(1e-300) * length)
        for k, value in zip(rest, cosines.tolist(), strict=True):
            if value < direction:
                reasons.setdefault(k, f"cosine {value:.3f} to the median")
    return reasons
