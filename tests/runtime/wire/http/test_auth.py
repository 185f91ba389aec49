from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.wire.http.auth import (
    AuthError,
    ListenerIdentity,
    MisdirectedError,
    Proof,
    Verifier,
    body_statement,
    check_answer,
    sha256_hex,
    sign,
    sign_answer,
)
from holdfast.wire.secret import Secret

SECRET = Secret(b"s" * 32)
BODY = b'{"step": 1}'


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def _proof(now: float = 1000.0, secret: Secret = SECRET) -> Proof:
    return sign(secret, "POST", "/report", BODY, 3, now)


def test_a_request_is_accepted_once() -> None:
    verifier = Verifier(SECRET, Clock(), name="")
    proof = _proof()
    verifier.check("POST", "/report", BODY, proof)
    with pytest.raises(AuthError, match="seen before"):
        verifier.check("POST", "/report", BODY, proof)


@pytest.mark.parametrize(
    "change",
    [
        {"method": "GET"},
        {"path": "/store"},
        {"covered": BODY + b" "},
        {"proof": {"generation": 4}},
        {"proof": {"nonce": "0" * 32}},
        {"proof": {"time": 1000.5}},
        {"proof": {"digest": "0" * 64}},
        {"proof": {"digest": "é"}},
        {"proof": {"digest": ""}},
        {"proof": {"listener_name": "another"}},
    ],
)
def test_whatever_is_changed_the_proof_no_longer_holds(change: dict[str, object]) -> None:
    request = {"method": "POST", "path": "/report", "covered": BODY}
    proof = _proof()
    fields = change.get("proof")
    if isinstance(fields, dict):
        proof = replace(proof, **fields)
    request |= {k: v for k, v in change.items() if k != "proof"}  # type: ignore[misc]
    with pytest.raises(AuthError):
        Verifier(SECRET, Clock(), name="").check(**request, proof=proof)  # type: ignore[arg-type]


@pytest.mark.parametrize("stamp", [879.0, 1121.0, float("nan"), float("inf"), -1.0])
def test_time_stamps_outside_the_window(stamp: float) -> None:
    with pytest.raises(AuthError, match="window"):
        Verifier(SECRET, Clock(), name="").check("POST", "/report", BODY, _proof(stamp))


def test_a_replay_is_refused_at_every_later_time() -> None:
    """While its stamp is acceptable the nonce is known; afterwards the stamp is too old."""
    clock = Clock()
    verifier = Verifier(SECRET, clock, name="")
    early, late = _proof(900.0), _proof(1110.0)
    for proof in (early, late):
        verifier.check("POST", "/report", BODY, proof)
    for now in range(1000, 1300, 7):
        clock.now = float(now)
        for proof in (early, late):
            with pytest.raises(AuthError):
                verifier.check("POST", "/report", BODY, proof)


def test_memory_is_bounded_and_forgetting_opens_no_door() -> None:
    clock = Clock()
    verifier = Verifier(SECRET, clock, capacity=10, name="")
    proofs = [_proof(1000.0 + i / 100) for i in range(50)]
    for proof in proofs:
        verifier.check("POST", "/report", BODY, proof)
    assert len(verifier._seen_nonces) <= 10
    for proof in proofs:
        with pytest.raises(AuthError):
            verifier.check("POST", "/report", BODY, proof)


def test_a_clock_that_is_set_back_locks_nobody_out() -> None:
    """A machine boots with its clock hours ahead, and time service sets it right."""
    clock = Clock()
    clock.now = 1e6
    verifier = Verifier(SECRET, clock, capacity=1000, name="")
    before = _proof(clock.now)
    verifier.check("POST", "/report", BODY, before)
    clock.now -= 7200
    for _ in range(3000):
        clock.now += 1
        verifier.check("POST", "/report", BODY, _proof(clock.now))
    assert len(verifier._seen_nonces) < 200
    clock.now = 1e6
    with pytest.raises(AuthError, match="seen before"):
        verifier.check("POST", "/report", BODY, before)


def test_headers_carry_a_proof_there_and_back() -> None:
    proof = _proof(1234.5678901)
    assert Proof.from_headers(proof.headers()) == proof
    for missing in proof.headers():
        with pytest.raises(AuthError):
            Proof.from_headers({k: v for k, v in proof.headers().items() if k != missing})
    with pytest.raises(AuthError):
        Proof.from_headers(proof.headers() | {"holdfast-generation": "two"})
    with pytest.raises(AuthError):
        Proof.from_headers(proof.headers() | {"holdfast-protocol": "9"})


def test_answers_are_bound_to_their_request() -> None:
    digest = sign_answer(SECRET, "n1", 200, b"{}")
    check_answer(SECRET, "n1", 200, b"{}", digest)
    for nonce, status, body in (("n2", 200, b"{}"), ("n1", 409, b"{}"), ("n1", 200, b"{ }")):
        with pytest.raises(AuthError):
            check_answer(SECRET, nonce, status, body, digest)


def test_a_request_is_for_one_process_alone() -> None:
    """A listener's name is another one in each process, so what was recorded before a restart, or
    on the way to another agent, has no effect, at any time."""
    clock = Clock()
    first, second = Verifier(SECRET, clock), Verifier(SECRET, clock)
    aim = ListenerIdentity(clock)
    aim.update_from(first.misdirected_answer())
    proof = aim.sign(SECRET, "POST", "/report", BODY, 3)
    covered = body_statement(len(BODY), sha256_hex(BODY))
    first.check("POST", "/report", covered, proof)
    with pytest.raises(MisdirectedError, match="another listener"):
        second.check("POST", "/report", covered, proof)
    with pytest.raises(AuthError, match="seen before"):
        second.check("POST", "/report", covered, proof)


def test_clocks_need_not_agree() -> None:
    here, there = Clock(), Clock()
    there.now = 5e6
    verifier, aim = Verifier(SECRET, there), ListenerIdentity(here)
    covered = body_statement(len(BODY), sha256_hex(BODY))
    with pytest.raises(MisdirectedError):
        verifier.check("POST", "/report", covered, aim.sign(SECRET, "POST", "/report", BODY, 3))
    aim.update_from(verifier.misdirected_answer())
    verifier.check("POST", "/report", covered, aim.sign(SECRET, "POST", "/report", BODY, 3))
    for nonsense in ({}, [], None, {"to": "x", "now": "y"}):
        with pytest.raises(AuthError):
            aim.update_from(nonsense)
