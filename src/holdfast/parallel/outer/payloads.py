"""What the ranks send each other of a round: the coded change of each learner, to every rank.

The ranks of a run with few sites hold few learners each. All of them need all changes, decode them
to the same bits and add them up in the same order. A payload leaves as soon as its learner is
done, while the next one computes.
"""

from __future__ import annotations

from collections.abc import Sequence

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
    of each payload. Raises PeerLostError.
    """

    def __init__(self, peers: PeerGroup, learners: Sequence[Sequence[int]], nbytes: int) -> None:
        self._peers = peers
        self._receipts: list[Work] = []
        self._payloads: dict[int, Tensor] = {}
        peers.forget_sends()
        try:
            for peer in peers.others:
                for learner in learners[peer]:
                    into = self._payloads[learner] = torch.empty(nbytes, dtype=torch.uint8)
                    self._receipts.append(peers.receive(into, peer, _FIRST_TAG + learner))
        except RuntimeError as error:
            raise _lost(error) from error

    def send(self, learner: int, payload: Tensor) -> None:
        """Send the payload of a learner of this rank. payload: [nbytes] uint8, in host memory.
        Raises PeerLostError."""
        self._payloads[learner] = payload
        try:
            for peer in self._peers.others:
                self._peers.send(payload, peer, _FIRST_TAG + learner)
        except RuntimeError as error:
            raise _lost(error) from error

    def wait_for_all(self) -> dict[int, Tensor]:
        """Return the payloads of all learners. Raises PeerLostError."""
        receive_all(self._peers, self._receipts)
        return self._payloads


def receive_all(peers: PeerGroup, receipts: Sequence[Work]) -> None:
    """Wait until these messages have arrived. Raises PeerLostError."""

    def receive(errand: AbortableWait) -> None:
        for receipt in receipts:
            errand.wait(receipt)

    if receipts:
        wait = AbortableWait(receive, "payloads")
        peers.start_wait(wait)
        try:
            peers.join_wait(wait)
        except RuntimeError as error:
            raise _lost(error) from error


def _lost(error: RuntimeError) -> PeerLostError:
    return PeerLostError(f"a peer was lost while learners were exchanged: {error}")
