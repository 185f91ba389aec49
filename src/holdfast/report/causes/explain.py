"""`holdfast explain`: what went wrong in a run, from its journal and its logs alone."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.events import Record
from holdfast.report.causes.finding import Finding, LogReader, no_logs
from holdfast.report.causes.losses import explain_ends
from holdfast.report.causes.slowness import explain_slowness, explain_topology
from holdfast.report.causes.state import explain_bad_steps, explain_checkpoints
from holdfast.report.causes.story import tell_generations
from holdfast.report.ledger.ordering import order_records


def explain(records: Iterable[Record], logs: LogReader = no_logs) -> list[Finding]:
    """Return what went wrong, in order. The same records and logs give the same findings."""
    findings: list[Finding] = []
    topology_causes: set[str] = set()
    for story in tell_generations(order_records(records)):
        of_generation = [
            *explain_checkpoints(story),
            *explain_bad_steps(story),
            *explain_slowness(story),
            *explain_ends(story, logs),
        ]
        findings += sorted(of_generation, key=lambda finding: finding.time)
        for finding in explain_topology(story):
            if finding.cause not in topology_causes:  # the next generation has the same placement
                topology_causes.add(finding.cause)
                findings.append(finding)
    return findings
