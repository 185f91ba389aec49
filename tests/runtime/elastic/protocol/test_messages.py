"""Messages that an older version wrote are read, and written the same.

`tests/golden/README.md` describes the golden files. The keys of a newer version change nothing, and
what makes no sense is refused as the server expects it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint.mover import messages as mover_messages
from holdfast.checkpoint.peers.messages import Inventory, Offer, OfferReply
from holdfast.checkpoint.save.commit_protocol import SaveReply, SaveReport
from holdfast.core.json_parsing import JsonMessage
from holdfast.elastic.protocol.coordinator_messages import (
    Heartbeat,
    HeartbeatReply,
    JoinRequest,
    StartState,
    TermReply,
)
from holdfast.elastic.protocol.fault_orders import CorruptLossRule, FaultHit, FaultOrder
from holdfast.elastic.protocol.fork_channel import (
    LineDecoder,
    encode_message,
    parse_fork_event,
    parse_fork_order,
)
from holdfast.elastic.protocol.generation_outcome import NodeOutcome
from holdfast.elastic.protocol.generation_record import GenerationRecord
from holdfast.elastic.protocol.hung_worker import HungWorkers, StallReport
from holdfast.elastic.protocol.messages import Message
from holdfast.elastic.protocol.notice_messages import Notice, notice_reply_from_json
from holdfast.elastic.protocol.rendezvous_messages import (
    CheckReply,
    CountReply,
    DeleteReply,
    KeysReply,
    StoreRequest,
    ValueReply,
    WaitReply,
)
from holdfast.elastic.protocol.worker_commands import CommandPoll, CommandReply
from holdfast.elastic.protocol.worker_messages import WorkerReply, WorkerReport
from holdfast.elastic.protocol.worker_spec import WorkerSpec
from holdfast.policy.recovery.survivors import HeldState
from holdfast.policy.saving.failure_rate import FailureRate

FOLDER = Path(__file__).parents[3] / "golden" / "messages"
NEWER = {"a key of a newer version": {"and": ["what", "it", "holds"]}}
STORE_REPLIES: dict[str, Callable[[Any], Message]] = {
    "wait": WaitReply.from_json,
    "gather": WaitReply.from_json,
    "check": CheckReply.from_json,
    "delete": DeleteReply.from_json,
    "num_keys": CountReply.from_json,
    "list": KeysReply.from_json,
}
"""Readers of the answers of the rendezvous, by operation. The remaining answers are a value."""


def _fork_message(value: Mapping[str, Any]) -> Message:
    return parse_fork_order(value) if "op" in value else parse_fork_event(value)


READERS: dict[str, Callable[[Any], Any]] = {
    "blame": HungWorkers.from_json,
    "command": CommandReply.from_json,
    "fault_hit": FaultHit.from_json,
    "fault_order": FaultOrder.from_json,
    "fork_server": _fork_message,
    "generation_record": GenerationRecord.from_json,
    "heartbeat": Heartbeat.from_json,
    "heartbeat_reply": HeartbeatReply.from_json,
    "held_state": HeldState.from_json,
    "hung_worker_report": StallReport.from_json,
    "join_answer": HeartbeatReply.from_json,
    "join_request": JoinRequest.from_json,
    "node_outcome": NodeOutcome.from_json,
    "orders_question": CommandPoll.from_json,
    "start_state": StartState.from_json,
    "who_is_there": TermReply.from_json,
    "worker_boot": WorkerSpec.from_json,
    "worker_reply": WorkerReply.from_json,
    "worker_report": WorkerReport.from_json,
}
"""By name of the file, what makes a message of each value in it."""


def golden(name: str) -> list[Any]:
    entries = json.loads((FOLDER / f"{name}.json").read_text())
    assert entries
    for entry in entries:
        assert set(entry) == {"what", "written_by", "read_by", "source", "json"}
    return [_as_read(entry["json"]) for entry in entries]


def _as_read(value: Any) -> Any:
    """A worker without a state is read as one whose state is torn. Nodes send what they have read.

    Every worker takes commands by now, which an older one did not always. In the constructed boots
    stands a placeholder for the failure rate, which no worker could use. A failure rate of an older
    release, with other hypotheses, is read as the prior.
    """
    if isinstance(value, list):
        return [_as_read(one) for one in value]
    if not isinstance(value, dict):
        return value
    read = {key: _as_read(one) for key, one in value.items()}
    if read.get("hazard") == {"alpha": 1.0, "beta": 2.0}:
        read["hazard"] = None
    if isinstance(read.get("weights"), list) and isinstance(read["weights"][0], float):
        return FailureRate.from_prior(read["mtbf"]).to_json()
    if read.get("orders") is False:
        read["orders"] = True
    return read | {"torn": True} if "torn" in read and read["state"] is None else read


def _text(value: Any) -> str:
    """JSON by which values are compared: 1 is not 1.0, and the order of keys is no matter."""
    return json.dumps(value, sort_keys=True)


def _with_newer_keys(value: Any) -> Any:
    return value | NEWER if isinstance(value, dict) else value


@pytest.mark.parametrize("name", sorted(READERS))
def test_a_message_is_read_and_written_the_same(name: str) -> None:
    read = READERS[name]
    for value in golden(name):
        message = read(value)
        assert _text(message.to_json()) == _text(value)
        assert read(_with_newer_keys(value)) == message


@pytest.mark.parametrize("name", sorted(READERS))
def test_what_lacks_what_it_must_have_is_refused(name: str) -> None:
    for value in golden(name):
        with pytest.raises((KeyError, TypeError, ValueError)):
            READERS[name]([*value, 1] if isinstance(value, list) else NEWER | _first_wrong(value))


def _first_wrong(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with values that nothing can be made of."""
    return {key: [object] for key in value}


def test_a_request_to_the_rendezvous_and_its_answer_are_read_and_written_the_same() -> None:
    pairs = golden("rendezvous")
    assert {pair["asked"]["op"] for pair in pairs} >= {*STORE_REPLIES, "set", "add", "append"}
    for pair in pairs:
        asked = StoreRequest.from_json(pair["asked"])
        reader = STORE_REPLIES.get(asked.op, ValueReply.from_json)
        assert _text(asked.to_json()) == _text(pair["asked"])
        assert _text(reader(pair["answer"]).to_json()) == _text(pair["answer"])
        assert StoreRequest.from_json(pair["asked"] | NEWER) == asked
        for key in pair["asked"].keys() - {"id"}:
            without = {name: value for name, value in pair["asked"].items() if name != key}
            with pytest.raises(KeyError):
                StoreRequest.from_json(without)
    with pytest.raises(ValueError, match="the rendezvous does not know the operation 'dance'"):
        StoreRequest.from_json({"op": "dance"})


def test_a_notice_and_its_answer_are_read_and_written_the_same() -> None:
    for pair in golden("notice"):
        notice, reply = Notice.from_json(pair["asked"]), notice_reply_from_json(pair["answer"])
        assert _text(notice.to_json()) == _text(pair["asked"])
        assert _text(reply.to_json()) == _text(pair["answer"])
        assert notice_reply_from_json(pair["answer"] | NEWER) == reply


MOVER_REPLIES: dict[str, type[JsonMessage]] = {
    "wait_free": mover_messages.FreeSlotReply,
    "settle": mover_messages.SaveEndReply,
    "drain": mover_messages.DrainReply,
    "newest": mover_messages.RestorePoint,
    "holdings": mover_messages.HoldingsReply,
    "holders": mover_messages.HoldersReply,
    "damage": mover_messages.DamageReply,
    "events": mover_messages.EventsReply,
    "upload": mover_messages.UploadReply,
    "status": mover_messages.StatusReply,
}
"""The answers to the mover's verbs; the other verbs are answered with nothing."""
LATER_KEYS: dict[str, dict[str, Any]] = {"newest": {"durable": True, "placement": {}}}
"""Keys of answers that today's mover always sends."""


@pytest.mark.parametrize("verb", sorted(mover_messages.REQUESTS))
def test_a_verb_of_the_mover_and_its_answer_are_read_and_written_the_same(verb: str) -> None:
    request = mover_messages.REQUESTS[verb]
    reply = MOVER_REPLIES.get(verb, mover_messages.Nothing)
    for pair in golden(f"mover_{verb}"):
        asked, answer = pair["asked"], pair["answer"]
        assert _text(request.from_json(asked).to_json()) == _text(asked)
        assert request.from_json(asked | NEWER) == request.from_json(asked)
        if pair["status"] != 200 or (verb == "status" and not answer):
            continue
        for holder in answer.get("peers", ()) if verb in ("holders", "holdings") else ():
            holder.setdefault("run", "")
        written = LATER_KEYS.get(verb, {}) | answer
        assert _text(reply.from_json(answer).to_json()) == _text(written)
        assert reply.from_json(answer | NEWER) == reply.from_json(answer)


def test_messages_between_movers_are_read_and_written_the_same() -> None:
    for pair in golden("peer_inventory"):
        assert _text(Inventory.from_json(pair["answer"]).to_json()) == _text(pair["answer"])
    for pair in golden("peer_offer"):
        assert _text(Offer.from_json(pair["asked"]).to_json()) == _text(pair["asked"])
        assert _text(OfferReply.from_json(pair["answer"]).to_json()) == _text(pair["answer"])
    report = golden("peer_save")[0]
    assert _text(SaveReport.from_json(report["asked"]).to_json()) == _text(report["asked"])
    assert _text(SaveReply.from_json(report["answer"]).to_json()) == _text(report["answer"])


def test_rules_of_wrong_losses_are_read_and_written_the_same() -> None:
    for rules in golden("fault_wrong"):
        again = [CorruptLossRule.from_json(rule | NEWER).to_json() for rule in rules]
        assert _text(again) == _text(rules)


def test_messages_of_the_fork_channel_arrive_whole_in_whatever_pieces() -> None:
    messages = [_fork_message(value) for value in golden("fork_server")]
    data = b"".join(encode_message(message) for message in messages)
    decoder = LineDecoder(_fork_message)
    pieces = [data[at : at + 999] for at in range(0, len(data), 999)]
    assert [message for piece in pieces for message in decoder.feed(piece)] == messages


@pytest.mark.parametrize(
    "value", [{"op": "dance"}, {"event": "danced", "pid": 1}, {"op": "fork", "boot": {}}]
)
def test_what_the_fork_channel_does_not_know_is_refused(value: dict[str, Any]) -> None:
    with pytest.raises((KeyError, ValueError)):
        _fork_message(value)


def test_a_command_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="kind 'dance'"):
        CommandReply.from_json({"number": 1, "orders": {"kind": "dance"}})
