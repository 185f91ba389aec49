"""Every request proves that its sender knows the run's secret, and cannot be sent again.

A request carries an HMAC-SHA256 (RFC 2104) over method, path, body, generation, listener, nonce and
time. A nonce is accepted once; nonces are remembered for as long as their time stamp is acceptable,
so the memory is bounded. The answer carries an HMAC over the request's nonce. So a client knows
that its own agent answered, not another process that has the port now.

A listener has a name, drawn at random when its process starts. So a request recorded on its way to
another listener, or to the port's previous process, is useless here. A client that does not know
the name yet signs for none, and receives name and clock in a signed answer. It signs again by both
(`ListenerIdentity`), so clocks need not agree either.

Over HTTP the proof covers a body by its length and its SHA-256, which the head states. So the head
alone proves the sender, and no stranger's body is read.
"""

from __future__ import annotations

import hashlib
import heapq
import hmac
import secrets
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from holdfast.errors import HoldfastError
from holdfast.wire.secret import Secret

PROOF_MAX_AGE_S = 120.0
"""Seconds that a request's time stamp may differ from the server's clock. It bounds the memory of
nonces and decides nothing else: a client that is farther off receives the time."""

MAX_REMEMBERED_NONCES = 100_000
"""Nonces remembered at most."""

PROTOCOL_VERSION = "2"
"""Version of the requests' form, and a part of what is signed."""

BODY_HEADER = "holdfast-body"
"""Header of a request with a body: the body's SHA-256, in hexadecimal digits."""

MISDIRECTED_STATUS = 421
"""Status of the answer to a request that is signed for another listener, or at another time; its
body is what `ListenerIdentity.update_from` takes."""

AuthFault = Literal["no proof", "wrong proof", "replayed", "misdirected", "first contact"]


class AuthError(HoldfastError):
    """A request or an answer without a valid proof. Says nothing that would help to forge one;
    `fault` is for counting."""

    def __init__(self, message: str, fault: AuthFault = "wrong proof") -> None:
        self.fault: AuthFault = fault
        super().__init__(message)


class MisdirectedError(AuthError):
    """Signed by one of us, but not for this listener, or not now. It was not done."""


@dataclass(frozen=True)
class Proof:
    """The proof in a request's headers."""

    generation: int
    nonce: str
    time: float
    digest: str
    listener_name: str = ""  # the listener's name; "" where it is not known yet

    def headers(self) -> dict[str, str]:
        to = {"holdfast-to": self.listener_name} if self.listener_name else {}
        return to | {
            "holdfast-protocol": PROTOCOL_VERSION,
            "holdfast-generation": str(self.generation),
            "holdfast-nonce": self.nonce,
            "holdfast-time": repr(self.time),
            "holdfast-hmac": self.digest,
        }

    @staticmethod
    def from_headers(headers: Mapping[str, str], repeated: Collection[str] = ()) -> Proof:
        """Raises AuthError when a header is missing or malformed, or came twice."""
        if any(name.startswith("holdfast-") for name in repeated):
            raise AuthError("a header of the proof comes twice", "no proof")
        try:
            if headers["holdfast-protocol"] != PROTOCOL_VERSION:
                raise AuthError("the request's protocol version is not ours", "no proof")
            return Proof(
                int(headers["holdfast-generation"]),
                headers["holdfast-nonce"],
                float(headers["holdfast-time"]),
                headers["holdfast-hmac"],
                headers.get("holdfast-to", ""),
            )
        except (KeyError, ValueError):
            raise AuthError("the request carries no proof", "no proof") from None


def sign(
    secret: Secret,
    method: str,
    path: str,
    covered: bytes,
    generation: int,
    now: float,
    listener_name: str = "",
) -> Proof:
    """A fresh proof for one request. covered: its body, or over HTTP what `stated` says of it."""
    nonce = secrets.token_hex(16)
    return Proof(
        generation,
        nonce,
        now,
        _digest(secret, method, path, covered, generation, nonce, now, listener_name),
        listener_name,
    )


def body_statement(length: int, digest: str) -> bytes:
    """Return what a proof over HTTP covers in place of a body; without a body, nothing."""
    return f"{length} {digest}".encode() if length else b""


def sha256_hex(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


class ListenerIdentity:
    """What a client knows of the listener that it asks: its name, and how its clock runs. Threads
    may share it: what is lost in a race is one more answer that tells."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._known = ("", 0.0)

    def sign(self, secret: Secret, method: str, path: str, body: bytes, generation: int) -> Proof:
        """A proof for a request over HTTP; its headers are `request_headers` this and the body."""
        to, ahead = self._known
        covered = body_statement(len(body), sha256_hex(body)) if body else b""
        return sign(secret, method, path, covered, generation, self._clock() + ahead, to)

    def update_from(self, answer: Any) -> None:
        """From the body of a signed answer MISDIRECTED. Raises AuthError for another one."""
        try:
            self._known = (str(answer["to"]), float(answer["now"]) - self._clock())
        except (KeyError, TypeError, ValueError):
            raise AuthError("the answer does not say for whom to sign") from None


def request_headers(proof: Proof, body: bytes) -> dict[str, str]:
    """Return the headers of a request over HTTP."""
    return proof.headers() | ({BODY_HEADER: sha256_hex(body)} if body else {})


def sign_answer(secret: Secret, nonce: str, status: int, body: bytes) -> str:
    """The digest that an answer to the request `nonce` carries."""
    return _hmac(secret, b"answer", nonce.encode(), str(status).encode(), body)


def check_answer(secret: Secret, nonce: str, status: int, body: bytes, digest: str) -> None:
    """Raises AuthError unless the answer comes from a holder of the secret."""
    if not hmac.compare_digest(sign_answer(secret, nonce, status, body).encode(), digest.encode()):
        raise AuthError("the answer does not come from this run's agent")


class Verifier:
    """Checks requests' proofs and remembers their nonces. Safe to share between threads."""

    def __init__(
        self,
        secret: Secret,
        clock: Callable[[], float],
        *,
        window: float = PROOF_MAX_AGE_S,
        capacity: int = MAX_REMEMBERED_NONCES,
        name: str | None = None,
    ) -> None:
        """`name`: of the listener, random unless given. "" if only this process's own user can
        reach it, so that nothing can be recorded."""
        self.name = secrets.token_hex(8) if name is None else name
        self._secret = secret
        self._clock = clock
        self._window = window
        self._capacity = capacity
        self._seen_nonces: set[str] = set()
        self._order: list[tuple[float, str]] = []  # heap of (time stamp, nonce)
        self._floor = 0.0  # stamps up to here are refused: a nonce of that age was forgotten early
        self._lock = threading.Lock()

    def check(self, method: str, path: str, covered: bytes, proof: Proof) -> None:
        """Raises AuthError for a wrong digest and a nonce seen before, MisdirectedError for
        another listener's name and an old or future time stamp.

        The digest is looked at first and in constant time, so an outsider learns nothing and
        cannot fill the memory of nonces.
        """
        right = _digest(
            self._secret,
            method,
            path,
            covered,
            proof.generation,
            proof.nonce,
            proof.time,
            proof.listener_name,
        )
        if not hmac.compare_digest(right.encode(), proof.digest.encode("utf-8", "replace")):
            raise AuthError("the request's proof is wrong")
        now = self._clock()
        with self._lock:
            # Forget the oldest stamps, not the first received. When a clock is set
            # back, earlier stamps lie in the future. They must neither hide expired
            # ones nor raise the floor above the present.
            while self._order and self._order[0][0] + self._window < now:
                self._seen_nonces.discard(heapq.heappop(self._order)[1])
            while len(self._order) >= self._capacity:
                stamp, nonce = heapq.heappop(self._order)
                self._seen_nonces.discard(nonce)
                self._floor = max(self._floor, stamp)
            # NaN compares false, so it is refused too.
            if not (abs(now - proof.time) <= self._window and proof.time > self._floor):
                raise MisdirectedError(
                    "the request's time stamp is outside the window", "misdirected"
                )
            if proof.nonce in self._seen_nonces:
                raise AuthError("the request has been seen before", "replayed")
            self._seen_nonces.add(proof.nonce)
            heapq.heappush(self._order, (proof.time, proof.nonce))
        if proof.listener_name != self.name:
            fault: AuthFault = "misdirected" if proof.listener_name else "first contact"
            raise MisdirectedError("the request is for another listener", fault)

    def misdirected_answer(self) -> dict[str, Any]:
        """Return the content of the answer to a misdirected request."""
        return {"to": self.name, "now": self._clock()}


def _digest(
    secret: Secret,
    method: str,
    path: str,
    covered: bytes,
    generation: int,
    nonce: str,
    now: float,
    listener_name: str,
) -> str:
    return _hmac(
        secret,
        PROTOCOL_VERSION.encode(),
        method.encode(),
        path.encode(),
        str(generation).encode(),
        listener_name.encode(),
        nonce.encode(),
        repr(now).encode(),
        covered,
    )


def _hmac(secret: Secret, *fields: bytes) -> str:
    """Fields are prefixed by their lengths, so that no two lists of fields sign alike."""
    parts: list[bytes] = []
    for value in fields:
        parts += (len(value).to_bytes(8, "big"), value)
    return hmac.digest(secret.key, b"".join(parts), "sha256").hex()
