"""Refuses a node that would compute something else than the coordinator's (`NodeIdentity`)."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.elastic.event_log import Say
from holdfast.elastic.protocol.coordinator_messages import JoinRequest
from holdfast.policy.membership.node_identity import LikeProcessors, NodeIdentity, judge_joiner


class JoinGate:
    """Judges the nodes that ask one agent's coordinators to join."""

    def __init__(
        self,
        node: str,
        like_processors: LikeProcessors,
        own_identity: Callable[[], NodeIdentity | None],
        say: Say,
    ) -> None:
        """own_identity: returns the identity of `node`, the coordinator's; None: not known."""
        self._node, self._like_processors = node, like_processors
        self._own_identity, self._say = own_identity, say
        self._said: set[str] = set()  # a node that is started again asks again

    def refuse(self, asked: JoinRequest) -> str:
        """Return why an agent may not join, "" if it may; tell the user what differs."""
        ours, theirs = self._own_identity(), asked.facts.identity
        if asked.name == self._node or ours is None or theirs is None:
            return ""
        verdict = judge_joiner(ours, theirs, self._node, asked.name, self._like_processors)
        sentence = verdict.warning or (
            f"{asked.name} may not join: {verdict.refusal}" if verdict.refusal else ""
        )
        if sentence and sentence not in self._said:
            self._said.add(sentence)
            self._say(sentence)
        return verdict.refusal
