"""Damaged checkpoints, and steps or states that came out wrong."""

from __future__ import annotations

import re
from collections.abc import Iterator

from holdfast.events import (
    Blamed,
    ChangeLeftOut,
    CheckpointRejected,
    GenerationStarted,
    LearnerChecked,
    NonFinite,
    Record,
    SourceRejected,
    StateDiffers,
)
from holdfast.report.causes.finding import Finding, Mode, evidence_of
from holdfast.report.causes.story import GenerationStory, make_finding

_WRITER = re.compile(r"-rank(\d+)-\d+\.safetensors")


def explain_checkpoints(story: GenerationStory) -> Iterator[Finding]:
    """Yield the checkpoints that were refused, each once."""
    seen: set[str] = set()
    for record, refused in story.of(CheckpointRejected):
        if refused.key not in seen:
            seen.add(refused.key)
            yield _damaged(
                story,
                record,
                f"the checkpoint of step {refused.step} is damaged, and was not used",
                f"{refused.key}: {refused.reason}",
            )
    for record, source in story.of(SourceRejected):
        if source.key not in seen:
            seen.add(source.key)
            yield _damaged(
                story,
                record,
                f"{source.source} has damaged bytes of step {source.step}; another copy was read",
                f"{source.key}: {source.reason}",
            )


def _damaged(story: GenerationStory, record: Record, cause: str, text: str) -> Finding:
    """Return the finding; its rank is the writer of the damaged file, if a file is named."""
    named = _WRITER.search(text)
    rank = int(named[1]) if named else None
    cause += "." if rank is None else f"; the damage is in a file that rank {rank} wrote."
    evidence = (evidence_of(record, text),)
    return make_finding(story, Mode.CHECKPOINT_CORRUPTION, cause, rank, record, evidence, node="")


def explain_bad_steps(story: GenerationStory) -> Iterator[Finding]:
    """Yield the steps that were not finite, whose loss jumped, or after which ranks differ."""
    verdicts = {e.step: (record, e) for record, e in story.of(Blamed)}
    seen: set[int] = set()
    for record, bad in story.of(NonFinite):
        if bad.step in seen:
            continue
        seen.add(bad.step)
        evidence = [evidence_of(record, f"{bad.parameter} is not finite on rank {bad.rank}")]
        cause = f"step {bad.step} was not finite, first on rank {bad.rank}; it was not applied."
        if bad.step in verdicts:
            evidence.append(evidence_of(verdicts[bad.step][0], verdicts[bad.step][1].why))
        yield make_finding(
            story, Mode.DIVERGENCE, cause, bad.rank, record, tuple(evidence), node=bad.node
        )
    end = story.end.event if story.end is not None else None
    if story.end is not None and isinstance(end, GenerationStarted) and end.reason == "loss_jump":
        cause = f"the loss of step {end.step + 1} jumped."
        evidence = [evidence_of(story.end, end.cause or end.reason)]
        yield make_finding(story, Mode.DIVERGENCE, cause, None, story.end, tuple(evidence))
    for record, check in story.of(LearnerChecked):
        for liar in check.overruled[:1]:
            cause = (
                f"rank {liar} checked learner {check.learner} wrongly in round {check.step}, as "
                f"rank {check.checker} found."
            )
            against = evidence_of(record, f"learner {check.learner}: {check.verdict}")
            yield make_finding(story, Mode.DIVERGENCE, cause, liar, record, (against,))
    refused: dict[int, list[tuple[Record, ChangeLeftOut]]] = {}
    for record, change in story.of(ChangeLeftOut):
        refused.setdefault(change.rank, []).append((record, change))
    for culprit, changes in refused.items():
        record, first = changes[0]
        cause = (
            f"rank {culprit} computed learner {first.learner} wrongly in round {first.step}: "
            f"{first.reason}. {len(changes)} of its changes were left out."
        )
        proof = tuple(evidence_of(r, f"learner {c.learner}: {c.reason}") for r, c in changes[:3])
        yield make_finding(story, Mode.DIVERGENCE, cause, culprit, record, proof, node=first.node)
    for record, differs in story.of(StateDiffers):
        names = ", ".join(map(str, differs.ranks))
        cause = f"after step {differs.step} rank {names} held other values than the rest."
        rank = differs.ranks[0] if differs.sure and len(differs.ranks) == 1 else None
        proof = (evidence_of(record, f"tensors that differ: {', '.join(differs.tensors[:3])}"),)
        yield make_finding(
            story, Mode.DIVERGENCE, cause, rank, record, proof, is_certain=differs.sure
        )
