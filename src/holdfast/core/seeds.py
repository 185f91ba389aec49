"""Seeds that are functions of their purpose, never of the rank that draws.

Every random number of a run comes from a generator of its own. Its seed is a hash of the run's
seed, a purpose ("init", "shuffle", "sample") and the draw's identity (a parameter's name, a step, a
sample). Ranks, layouts and the order of calls do not enter, so they cannot matter.
"""

from __future__ import annotations

import hashlib


def key_seed(seed: int, purpose: str, *parts: int | str) -> int:
    """A seed in [0, 2^63) for the generator named by (seed, purpose, *parts).

    Each item is hashed with its type and length before it, so that ("ab", "c") and ("a", "bc"),
    or 1 and "1", are different keys. The value is part of the format of a run: changing this
    function changes every run's initial weights and sample order.
    """
    digest = hashlib.blake2b(digest_size=8, person=b"holdfast.key")
    for item in (seed, purpose, *parts):
        kind = b"s" if isinstance(item, str) else b"i"
        text = item.encode() if isinstance(item, str) else str(int(item)).encode()
        digest.update(kind + str(len(text)).encode() + b":" + text)
    return int.from_bytes(digest.digest(), "big") >> 1
