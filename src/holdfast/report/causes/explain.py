"""`holdfast explain`: what went wrong in a run, from its journal and its logs alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from holdfast.events import Record, RunFailed, RunFinished, RunStarted, RunStopped
from holdfast.report.causes.finding import Finding, LogReader, Mode, evidence_of, no_logs
from holdfast.report.causes.losses import explain_ends
from holdfast.report.causes.slowness import explain_slowness, explain_topology
from holdfast.report.causes.state import explain_bad_steps, explain_checkpoints
from holdfast.report.causes.story import tell_generations
from holdfast.report.ledger.ordering import order_records


def explain(records: Iterable[Record], logs: LogReader = no_logs) -> list[Finding]:
    """Return what went wrong, in order. The same records and logs give the same findings."""
    findings: list[Finding] = []
    topology_causes: set[str] = set()
    ordered = order_records(records)
    lost = [*_lost_sessions(ordered)]
    for story in tell_generations(ordered):
        of_generation = [
            *explain_checkpoints(story),
            *explain_bad_steps(story),
            *explain_slowness(story),
            *explain_ends(story, logs),
            *(finding for finding in lost if finding.generation == story.number),
        ]
        findings += sorted(of_generation, key=lambda finding: finding.time)
        for finding in explain_topology(story):
            if finding.cause not in topology_causes:  # the next generation has the same placement
                topology_causes.add(finding.cause)
                findings.append(finding)
    return findings


def _lost_sessions(ordered: Sequence[Record]) -> Iterator[Finding]:
    """Yield the sessions without an end that were resumed: nothing was left to write one."""
    has_ended, step = True, 0
    for last, record in pairwise(ordered):
        step = max(step, last.event.step)
        if isinstance(last.event, RunStarted | RunFinished | RunStopped | RunFailed):
            has_ended = not isinstance(last.event, RunStarted)
        if isinstance(record.event, RunStarted) and not has_ended:
            cause = f"all agents ended after step {step:,}, and none wrote why; it was resumed."
            shown = (
                evidence_of(last, "the last record of the session"),
                evidence_of(record, "the next session began"),
            )
            generation = last.generation
            yield Finding(
                Mode.RUN_LOST, cause, None, "", generation, step, last.time, shown, is_certain=False
            )
