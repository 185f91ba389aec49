"""Every request proves that its sender knows the run's secret, and cannot be sent again.

A request carries an HMAC-SHA256 (RFC 2104) over method, path, body, generation, nonce and time.
A nonce is accepted once; nonces are remembered for as long as their time stamp is acceptable, so
the memory is bounded. The answer carries an HMAC over the request's nonce, so that a client knows
it was its own agent that answered, not whoever has the port now.
"""

from __future__ import annotations

import hashlib
import heapq
import hmac
import secrets
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from holdfast.errors import HoldfastError
from holdfast.wire.secret import Secret

WINDOW_SECONDS = 120.0
"""How far a request's time stamp may lie from the server's clock. It bounds the memory of
nonces and decides nothing else: clocks must agree to within two minutes, no better."""

NONCES = 100_000
"""Nonces remembered at most."""

PROTOCOL = "1"
"""Version of the requests' form, and a part of what is signed."""


class AuthError(HoldfastError):
    """A request or an answer without a valid proof. Says nothing that would help to forge one."""


@dataclass(frozen=True)
class Proof:
    """What a request's headers carry beside its body."""

    generation: int
    nonce: str
    time: float
    digest: str

    def headers(self) -> dict[str, str]:
        return {
            "holdfast-protocol": PROTOCOL,
            "holdfast-generation": str(self.generation),
            "holdfast-nonce": self.nonce,
            "holdfast-time": repr(self.time),
            "holdfast-hmac": self.digest,
        }

    @staticmethod
    def from_headers(headers: Mapping[str, str]) -> Proof:
        """Raises AuthError when a header is missing or malformed."""
        try:
            if headers["holdfast-protocol"] != PROTOCOL:
                raise AuthError("the request's protocol version is not ours")
            return Proof(
                int(headers["holdfast-generation"]),
                headers["holdfast-nonce"],
                float(headers["holdfast-time"]),
                headers["holdfast-hmac"],
            )
        except (KeyError, ValueError):
            raise AuthError("the request carries no proof") from None


def sign(secret: Secret, method: str, path: str, body: bytes, generation: int, now: float) -> Proof:
    """A fresh proof for one request."""
    nonce = secrets.token_hex(16)
    return Proof(
        generation, nonce, now, _digest(secret, method, path, body, generation, nonce, now)
    )


def sign_answer(secret: Secret, nonce: str, status: int, body: bytes) -> str:
    """The digest that an answer to the request `nonce` carries."""
    return _hmac(secret, b"answer", nonce.encode(), str(status).encode(), body)


def check_answer(secret: Secret, nonce: str, status: int, body: bytes, digest: str) -> None:
    """Raises AuthError unless the answer comes from somebody who knows the secret."""
    if not hmac.compare_digest(sign_answer(secret, nonce, status, body).encode(), digest.encode()):
        raise AuthError("the answer does not come from this run's agent")


class Verifier:
    """Checks requests' proofs and remembers their nonces. Safe to share between threads."""

    def __init__(
        self,
        secret: Secret,
        clock: Callable[[], float],
        *,
        window: float = WINDOW_SECONDS,
        capacity: int = NONCES,
    ) -> None:
        self._secret = secret
        self._clock = clock
        self._window = window
        self._capacity = capacity
        self._seen: set[str] = set()
        self._order: list[tuple[float, str]] = []  # heap of (time stamp, nonce)
        self._floor = 0.0  # stamps up to here are refused: a nonce of that age was forgotten early
        self._lock = threading.Lock()

    def check(self, method: str, path: str, body: bytes, proof: Proof) -> None:
        """Raises AuthError for a wrong digest, an old or future time stamp, a nonce seen before.

        The digest is looked at first and in constant time, so an outsider learns nothing and
        cannot fill the memory of nonces.
        """
        right = _digest(self._secret, method, path, body, proof.generation, proof.nonce, proof.time)
        if not hmac.compare_digest(right.encode(), proof.digest.encode("utf-8", "replace")):
            raise AuthError("the request's proof is wrong")
        now = self._clock()
        with self._lock:
            self._forget(now)
            # NaN compares false, so it is refused too.
            if not (abs(now - proof.time) <= self._window and proof.time > self._floor):
                raise AuthError("the request's time stamp is outside the window")
            if proof.nonce in self._seen:
                raise AuthError("the request has been seen before")
            self._seen.add(proof.nonce)
            heapq.heappush(self._order, (proof.time, proof.nonce))

    def _forget(self, now: float) -> None:
        """Oldest stamps first, not first come: when a clock is set back, what came before lies in
        the future and must neither hide what has expired nor raise the floor above the present."""
        while self._order and self._order[0][0] + self._window < now:
            self._seen.discard(heapq.heappop(self._order)[1])
        while len(self._order) >= self._capacity:
            stamp, nonce = heapq.heappop(self._order)
            self._seen.discard(nonce)
            self._floor = max(self._floor, stamp)


def _digest(
    secret: Secret, method: str, path: str, body: bytes, generation: int, nonce: str, now: float
) -> str:
    return _hmac(
        secret,
        PROTOCOL.encode(),
        method.encode(),
        path.encode(),
        str(generation).encode(),
        nonce.encode(),
        repr(now).encode(),
        body,
    )


def _hmac(secret: Secret, *fields: bytes) -> str:
    """Fields are prefixed by their lengths, so that no two lists of fields sign alike."""
    digest = hmac.new(secret.key, digestmod=hashlib.sha256)
    for value in fields:
        digest.update(len(value).to_bytes(8, "big"))
        digest.update(value)
    return digest.hexdigest()
