"""Refuses a node that would compute something else than the coordinator's (`NodeIdentity`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from holdfast.elastic.event_log import Say
from holdfast.elastic.protocol.coordinator_messages import IDENTITY_KEY, JoinRequest
from holdfast.policy.membership.node_identity import LikeProcessors, NodeIdentity, judge_joiner


class JoinGate:
    """Judges the nodes that ask one agent's coordinators to join."""

    def __init__(
        self,
        node: str,
        like_processors: LikeProcessors,
        own_identity: Callable[[], Mapping[str, Any]],
        say: Say,
    ) -> None:
        """own_identity: returns the identity of `node`, the coordinator's, as JSON."""
        self._node, self._like_processors = node, like_processors
        self._own_identity, self._say = own_identity, say
        self._said: set[str] = set()  # a node that is started again asks again

    def refuse(self, asked: JoinRequest) -> str:
        """Return why an agent may not join, "" if it may; tell the user what differs."""
        theirs = asked.told.get(IDENTITY_KEY)
        if asked.name == self._node or not isinstance(theirs, Mapping):
            return ""
        ours = NodeIdentity.from_json(self._own_identity())
        verdict = judge_joiner(
            ours, NodeIdentity.from_json(theirs), self._node, asked.name, self._like_processors
        )
        sentence = verdict.warning or (
            f"{asked.name} may not join: {verdict.refusal}" if verdict.refusal else ""
        )
        if sentence and sentence not in self._said:
            self._said.add(sentence)
            self._say(sentence)
        return verdict.refusal
