"""Why a generation ended: what its agents and workers said of it.

The first cause of an end is explained, and its consequences are not. Workers stop when they lose a
peer, so of several workers that stopped, the one whose own error is known counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.events import (
    NOT_HEARD,
    GenerationStarted,
    MajorityLacked,
    Record,
    RunFailed,
    StepDone,
    WorkerHeld,
    WorkerLost,
)
from holdfast.report.causes.finding import Finding, LogReader, Mode, evidence_of
from holdfast.report.causes.story import GenerationStory, make_finding
from holdfast.report.ledger.notices import notice_text

_MEMORY = re.compile(
    r"out of memory|outofmemory|can't allocate memory|cannot allocate memory|memoryerror|bad_alloc"
    r"|oom.?kill|std::length_error",
    re.IGNORECASE,
)
_CONNECTION = re.compile(
    r"timed? ?out|connection (closed|reset|refused)|unreachable|no route|broken pipe", re.IGNORECASE
)
# Of another failure, which has an event of its own, or of a worker that was lost.
_CONSEQUENCE = re.compile(
    r"was interrupted|a peer was lost|lost (its|a) peers?|^paused after step|newer generation"
    r"|is not finite|checksum|not intact"
)
_HANG_SIGNS = ("stopped", "silent", "behind", "device", "progress")
_EXCHANGE = re.compile(r"in step \d+, (reduce|vote)")
_WORKER = re.compile(r"^worker (\d+): (.*)", re.DOTALL)
_OTHER_REASONS = ("non_finite", "loss_jump", "rot", "start", "resume", "slow_worker")
"""Reasons of a next generation that other detectors explain, or that explain nothing."""
_PLANNED = ("node_joined", "worker_joined", "start", "resume", "slow_worker")


@dataclass(frozen=True)
class _Ended:
    """A worker that was lost, or stopped by an error of its own."""

    record: Record
    rank: int
    text: str
    noticed_by: str  # of `WorkerLost`; "": it lives


def explain_ends(story: GenerationStory, logs: LogReader) -> Iterator[Finding]:
    """Yield why the generation ended, if something broke."""
    reason, cause = _said_at_end(story)
    ended = list(_ended_workers(story))
    if story.end is None or reason in _OTHER_REASONS:
        # Which of several workers stopped for a reason of its own is not decided yet, or it is
        # none of these.
        ended = [one for one in ended if one.noticed_by]
    gone = {e.rank for e in ended if e.noticed_by == "heartbeat"}
    noticed = [node for node in dict.fromkeys(story.nodes) if node in story.notices]
    if reason == "notice" or any(story.node_of(rank) in noticed for rank in gone):
        yield _preempted(story, ended, noticed)
        return
    if reason in _OTHER_REASONS and not ended:
        return
    root = _root_of(ended, cause)
    if root is not None:
        yield _of_worker(story, root, ended, logs)
    elif reason and reason not in _PLANNED:
        yield _of_reason(story, reason, cause)


def _said_at_end(story: GenerationStory) -> tuple[str, str]:
    """Return the reason of the next generation, and the cause in words; "" if not known."""
    event = story.end.event if story.end is not None else None
    if isinstance(event, GenerationStarted):
        return event.reason, event.cause
    return ("failed", event.reason) if isinstance(event, RunFailed) else ("", "")


def _ended_workers(story: GenerationStory) -> Iterator[_Ended]:
    for record, lost in story.of(WorkerLost):
        yield _Ended(record, lost.rank, lost.cause, lost.noticed_by)
    for record, held in story.of(WorkerHeld):
        if not _CONSEQUENCE.search(held.why):
            yield _Ended(record, held.rank, held.why, "")


def _root_of(ended: list[_Ended], cause: str) -> _Ended | None:
    """Return the worker that the coordinator names. If it names none, return the first to end."""
    named = _WORKER.match(cause)
    if named:
        rank, text = int(named[1]), named[2]
        for one in ended:
            if one.rank == rank:
                return _Ended(one.record, rank, text, one.noticed_by)
    own = [one for one in ended if one.noticed_by not in ("peer", "halt")]
    return min(own or ended, key=lambda one: one.record.time, default=None)


def _of_worker(
    story: GenerationStory, root: _Ended, ended: list[_Ended], logs: LogReader
) -> Finding:
    lines = () if root.noticed_by in ("heartbeat", *_HANG_SIGNS) else logs(story.number, root.rank)
    node = story.node_of(root.rank)
    who = f"rank {root.rank} of {node}" if node else f"rank {root.rank}"
    evidence = (evidence_of(root.record, root.text), *lines)
    said = " ".join((root.text, *(line.text for line in lines)))
    certain = True
    rank: int | None = root.rank
    if _MEMORY.search(said):
        mode, cause = Mode.OUT_OF_MEMORY, f"{who} asked for memory that it did not get."
    elif cut_off := _cut_off_coordinator(story, root, ended):
        node, text = cut_off, " and ".join(sorted(_silent_nodes(story, root, ended)))
        mode, rank, certain = Mode.NETWORK_TIMEOUT, None, False
        cause = f"{node} heard neither of {text} any more, so its own line failed, or all of them."
    elif root.noticed_by == "heartbeat":
        mode, cause, certain = _node_lost(story, node, root.text)
        same = {one.rank for one in ended if story.node_of(one.rank) == node}
        rank = root.rank if len(same) == 1 else None
    elif root.noticed_by in _HANG_SIGNS and (inside := _EXCHANGE.search(root.text)):
        mode = Mode.NETWORK_TIMEOUT
        cause = f"{who} was stuck in an exchange ({inside[1]}) that the other ranks had left."
    elif root.noticed_by in _HANG_SIGNS:
        mode, cause = Mode.HANG, f"{who} made no progress, and the other ranks waited for it."
    elif _CONNECTION.search(said) and not root.noticed_by:
        mode, cause = Mode.NETWORK_TIMEOUT, f"an exchange of {who} failed."
    elif not story.has_done_steps and not story.of(StepDone):
        mode, cause = Mode.STARTUP_CRASH, f"{who} ended before the first step of the run."
    else:
        mode, cause = Mode.WORKER_CRASH, f"{who} ended in the middle of training."
        certain = "SIGKILL" not in root.text
        if not certain:
            cause += " A signal killed it, and nothing says who sent it."
    # An agent counts no steps: its records have the generation's first one.
    done = [e.step for _, e in story.of(StepDone)] + [e.applied for _, e in story.of(WorkerHeld)]
    step = max([root.record.event.step, *done])
    return make_finding(
        story, mode, cause, rank, root.record, evidence, node=node, step=step, is_certain=certain
    )


def _silent_nodes(story: GenerationStory, root: _Ended, ended: list[_Ended]) -> set[str]:
    """Return the other nodes that the writer of a loss gave up because it did not hear them."""
    writer = root.record.writer
    return {
        story.node_of(one.rank)
        for one in ended
        if one.noticed_by == "heartbeat"
        and one.text.startswith(NOT_HEARD)
        and one.record.writer == writer
    } - {writer.partition(".")[2]}


def _cut_off_coordinator(story: GenerationStory, root: _Ended, ended: list[_Ended]) -> str:
    """Return the coordinator's node if it lost most of the nodes at once; "" otherwise. One line
    that fails is more likely than several nodes that do."""
    observer = root.record.writer.partition(".")[2]
    silent = _silent_nodes(story, root, ended)
    is_cut_off = observer in story.nodes and 2 * len(silent) > len(set(story.nodes))
    return observer if is_cut_off else ""


def _node_lost(story: GenerationStory, node: str, text: str) -> tuple[Mode, str, bool]:
    """Return mode and sentence of a node that was lost, and whether that is certain."""
    if not text.startswith(NOT_HEARD):
        cause = f"{node} was lost ({text}). Nothing says what ended it."
        return Mode.WORKER_CRASH, cause, False
    if any(event.node == node and event.nodes for _, event in story.of(MajorityLacked)):
        cause = f"{node} was {text}. It lives, and did not reach the coordinator."
        return Mode.NETWORK_TIMEOUT, cause, True
    cause = f"{node} was {text}. Its processes ended, or the network between the nodes failed."
    return Mode.NETWORK_TIMEOUT, cause, False


def _of_reason(story: GenerationStory, reason: str, cause: str) -> Finding:
    assert story.end is not None
    evidence = (evidence_of(story.end, cause or reason),)
    if reason == "hang":
        mode, text = Mode.NETWORK_TIMEOUT, "all ranks waited for one another."
    elif _MEMORY.search(cause):
        mode, text = Mode.OUT_OF_MEMORY, cause
    elif not story.has_done_steps and not story.of(StepDone):
        mode, text = Mode.STARTUP_CRASH, f"the run ended before its first step: {cause or reason}."
    elif reason == "peer_lost":
        mode, text = Mode.NETWORK_TIMEOUT, f"ranks lost each other: {cause}."
    else:
        mode, text = Mode.NOT_KNOWN, f"the workers started again ({cause or reason})."
    is_certain = mode is not Mode.NOT_KNOWN
    return make_finding(story, mode, text, None, story.end, evidence, is_certain=is_certain)


def _preempted(story: GenerationStory, ended: list[_Ended], noticed: list[str]) -> Finding:
    event = story.end.event if story.end is not None else None
    stays = event.topology.get("nodes", ()) if isinstance(event, GenerationStarted) else ()
    left = [node for node in dict.fromkeys(story.nodes) if node not in stays] or noticed
    losses = [one for one in ended if one.noticed_by]
    notices = [story.notices[node] for node in left if node in story.notices]
    first = next(iter(notices), story.end) or losses[0].record
    evidence = [evidence_of(record, notice_text(record.event)) for record in notices]
    evidence += [evidence_of(one.record, one.text) for one in losses]
    if story.end is not None and not evidence:
        evidence.append(evidence_of(story.end, "the node asked to leave (SIGTERM, or a notice)"))
    how = "was lost after that" if losses else "left in time"
    ranks = [rank for rank, node in enumerate(story.nodes) if node in left]
    return make_finding(
        story,
        Mode.PREEMPTION,
        f"{' and '.join(left) or 'every node'} was asked to go, and {how}.",
        ranks[0] if len(ranks) == 1 else None,
        first,
        tuple(evidence),
        node=left[0] if len(left) == 1 else "",
    )
