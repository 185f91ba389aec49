"""A client of the queue, wherever it is. It follows the coordinator from agent to agent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from holdfast.core.json_parsing import JsonMessage
from holdfast.errors import HoldfastError
from holdfast.rollout.roles.messages import (
    ASK_PATH,
    LOST_PATH,
    WEIGHTS_PATH,
    WORK_PATH,
    Done,
    PolicyPart,
    RoleLost,
    RoleOrders,
    RoleReport,
    TrainerAsk,
    TrainerReply,
    WeightsAsk,
    WeightsPiece,
)
from holdfast.wire.http.client import Client, UnreachableError
from holdfast.wire.secret import Secret

Reply = TypeVar("Reply", TrainerReply, RoleOrders, Done)

RETRY_PAUSE_S = 0.2
"""Seconds before an agent is asked again that did not answer, or does not know the coordinator."""
ANSWER_TIMEOUT_S = 10.0
PIECE_BYTES = 8 << 20
"""Bytes of weights in one answer."""
_UNKNOWN = "?"


class NoQueueError(HoldfastError):
    """No agent with the queue has answered yet. The caller asks again."""


class QueueClient:
    """Asks the coordinator's agent. Each call makes one attempt, and raises NoQueueError if that
    fails. `interrupt` ends the attempt that another thread makes."""

    def __init__(self, find_agent: Callable[[], str], secret: Secret) -> None:
        """find_agent: returns the address of an agent that is asked first; it may have moved."""
        self._find_agent, self._secret = find_agent, secret
        self._client: Client | None = None
        self._lock = threading.Lock()
        self._is_interrupted = False

    def ask(self, asked: TrainerAsk) -> TrainerReply:
        return self._post(ASK_PATH, asked, TrainerReply, asked.wait)

    def work(self, report: RoleReport) -> RoleOrders:
        return self._post(WORK_PATH, report, RoleOrders, report.wait)

    def lose(self, lost: RoleLost) -> None:
        """Say that a role has exited. A queue that cannot be reached learns it from its leases."""
        with suppress(NoQueueError):
            self._post(LOST_PATH, lost, Done, 0.0)

    def fetch(self, place: PolicyPart) -> bytes:
        """Return a file of a policy's weights from another agent. Raises NoQueueError."""
        client = Client(place.agent, self._secret)
        content = bytearray()
        total = 1
        try:
            while len(content) < total:
                asked = WeightsAsk(
                    place.tag, place.policy, place.part, place.parts, len(content), PIECE_BYTES
                )
                answer = client.post(WEIGHTS_PATH, asked.to_json(), ANSWER_TIMEOUT_S)
                piece = WeightsPiece.from_json(answer)
                if piece.total < 0 or (piece.total and not piece.data):
                    raise NoQueueError(f"{place.agent} no longer has policy {place.policy}")
                total = piece.total
                content += piece.data
        except (UnreachableError, OSError) as error:
            raise NoQueueError(str(error)) from error
        finally:
            client.close()
        return bytes(content)

    def interrupt(self) -> None:
        """End requests that are under way, and refuse later ones."""
        with self._lock:
            self._is_interrupted = True
            client = self._client
        if client is not None:
            client.abort()

    @property
    def is_interrupted(self) -> bool:
        return self._is_interrupted

    def _connection(self) -> Client:
        with self._lock:
            if self._is_interrupted:
                raise NoQueueError("interrupted")
            if self._client is None:
                try:
                    address = self._find_agent()
                except HoldfastError as error:  # a run store that does not answer
                    raise NoQueueError(str(error)) from error
                self._client = Client(address, self._secret, connect_retry_s=0.0)
            return self._client

    def _forget(self, client: Client, moved: str = "") -> None:
        """Ask elsewhere next time. moved: where the queue is; "" if that is not known."""
        with self._lock:
            if self._client is client:
                self._client = None
                if moved not in ("", _UNKNOWN) and not self._is_interrupted:
                    self._client = Client(moved, self._secret, connect_retry_s=0.0)
        client.close()

    def _post(self, path: str, message: JsonMessage, kind: type[Reply], wait: float) -> Reply:
        for _ in range(3):  # an agent may send us to the coordinator
            client = self._connection()
            try:
                answer = client.post(path, message.to_json(), wait + ANSWER_TIMEOUT_S)
                reply: Reply = kind.from_json(answer)
            except HoldfastError as error:
                self._forget(client)
                raise NoQueueError(str(error)) from error
            if not reply.moved:
                return reply
            self._forget(client, reply.moved)
            if reply.moved == _UNKNOWN:
                break
        raise NoQueueError("no agent coordinates the run now")


def pause() -> None:
    """Wait before the next attempt."""
    time.sleep(RETRY_PAUSE_S)
