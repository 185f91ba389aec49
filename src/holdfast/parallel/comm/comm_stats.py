"""Counts the payload bytes that leave this rank, by purpose.

Payload is what the algorithms of the literature count. It is elements times their size, without
headers, acknowledgements and the rendezvous of groups. A message counts at its sender. A collective
counts with the bytes of its bandwidth-optimal form over n ranks, for any implementation. An
all-gather or a reduce-scatter of s bytes in all sends (n - 1) / n * s, an all-reduce twice that
(Thakur et al., 2005, section 4; Rajbhandari et al., 2020, section 7).
"""

from __future__ import annotations

import threading

TRAFFIC_KINDS = ("reduce", "gather", "scatter", "tp", "cp", "pp", "ep", "control")
"""reduce: gradients between the members of a cell. gather, scatter: parameters and gradients on
the dp_shard axis. tp: activations of tensor parallelism. cp: what attention gets of other ranks'
tokens, and the gradients of that. pp: between pipeline stages. ep: tokens on their way to experts
and back, and their numbers. control: votes and other small exchanges."""


class TrafficCounter:
    """A counter that any thread of a rank may add to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes: dict[str, int] = {}

    def add(self, kind: str, nbytes: int) -> None:
        """Count `nbytes` that leave this rank. Raises ValueError for an unknown kind."""
        if kind not in TRAFFIC_KINDS:
            raise ValueError(
                f"{kind!r} is no kind of traffic: use one of {', '.join(TRAFFIC_KINDS)}"
            )
        with self._lock:
            self._bytes[kind] = self._bytes.get(kind, 0) + nbytes

    @property
    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes since the last reset; kinds that sent nothing are missing."""
        with self._lock:
            return dict(self._bytes)

    def reset(self) -> None:
        """Begin again from nothing."""
        with self._lock:
            self._bytes.clear()
