"""What the ranks send each other of a round: the coded change of each learner, to every rank.

The ranks of a run with few sites hold few learners each. All of them need all changes, decode them
to the same bits and add them up in the same order. A payload leaves as soon as its learner is
done, while the next one computes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from holdfast.errors import PeerLostError
from holdfast.parallel.comm.abortable_wait import AbortableWait
from holdfast.parallel.comm.transport import PeerGroup
from holdfast.parallel.torch_compat import Work

_FIRST_TAG = 1 << 12


class PayloadRound:
    """The payloads of one round.

    peers: all ranks; the sends of the round before are over. learners: by rank in `peers`. nbytes:
    of each payload. before: the round before, whose receives for payloads that were never sent
    wait for those of this round. Raises PeerLostError.
    """

    def __init__(
        self,
        peers: PeerGroup,
        learners: Sequence[Sequence[int]],
        nbytes: int,
        before: PayloadRound | None = None,
    ) -> None:
        self._peers = peers
        self._receipts: dict[int, Work] = {} if before is None else before._receipts
        self._payloads: dict[int, Tensor] = {} if before is None else before._payloads
        peers.forget_sends()
        try:
            for peer in peers.others:
                for learner in [k for k in learners[peer] if k not in self._receipts]:
                    into = self._payloads[learner] = torch.empty(nbytes, dtype=torch.uint8)
                    self._receipts[learner] = peers.receive(into, peer, _FIRST_TAG + learner)
        except RuntimeError as error:
            raise lost_while_exchanged(error) from error

    def send(self, learner: int, payload: Tensor) -> None:
        """Send the payload of a learner of this rank. payload: [nbytes] uint8, in host memory.
        Raises PeerLostError."""
        self._payloads[learner] = payload
        try:
            for peer in self._peers.others:
                self._peers.send(payload, peer, _FIRST_TAG + learner)
        except RuntimeError as error:
            raise lost_while_exchanged(error) from error

    def wait_for_all(self, learners: Collection[int] | None = None) -> dict[int, Tensor]:
        """Return the payloads of these learners, or of all. Raises PeerLostError."""
        wanted = self._payloads.keys() if learners is None else learners
        receipts = [self._receipts.pop(k) for k in sorted(wanted) if k in self._receipts]
        receive_all(self._peers, receipts)
        return {learner: self._payloads[learner] for learner in wanted}


def receive_all(peers: PeerGroup, receipts: Sequence[Work], name: str = "payloads") -> None:
    """Wait until these messages have arrived. Raises PeerLostError."""

    def receive(errand: AbortableWait) -> None:
        for receipt in receipts:
            errand.wait(receipt)

    if receipts:
        wait = AbortableWait(receive, name)
        peers.start_wait(wait)
        try:
            peers.join_wait(wait)
        except RuntimeError as error:
            raise lost_while_exchanged(error) from error


def lost_while_exchanged(error: Exception) -> PeerLostError:
    """Return what the failure of a message between learners, or with servers, means."""
    if isinstance(error, PeerLostError):
        return error
    return PeerLostError(f"a peer was lost in an exchange of the step: {error}")
