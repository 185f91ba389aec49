"""Sentences about events that a person should know of."""

from __future__ import annotations

from holdfast.events import (
    Blamed,
    BudgetReached,
    CheckpointFailed,
    CheckpointRejected,
    CheckpointSkipped,
    EmergencyPlanned,
    Event,
    MajorityLacked,
    NonFinite,
    NoticeReceived,
    NoticesUnheard,
    PeerFailed,
    PredictedMove,
    PredictionFailed,
    ReferenceProgress,
    RoleExited,
    RoleMissing,
    RunBranched,
    RunFailed,
    SaveInterval,
    SaveWaiting,
    SettingIgnored,
    ShardAwaited,
    SourceRejected,
    StopRequested,
    UploadFailed,
)
from holdfast.report.formatting import format_bytes


def notice_text(event: Event) -> str:
    """Return what a person should know about this event, or an empty string."""
    if isinstance(event, CheckpointFailed | CheckpointSkipped):
        return f"step {event.step} is not saved: {event.reason}"
    if isinstance(event, SaveWaiting):
        missing = (
            f", {format_bytes(event.missing_bytes)} are missing" if event.missing_bytes else ""
        )
        place = f"{event.folder}: " if event.folder else ""
        remedy = f"; {event.remedy}" if event.remedy else ""
        return (
            f"the state after step {event.step} is not saved and waits in memory: {place}"
            f"{event.reason}{missing}{remedy}. Ctrl-C gives it up"
        )
    if isinstance(event, MajorityLacked):
        return _majority_text(event)
    if isinstance(event, ShardAwaited | RoleMissing | ReferenceProgress | BudgetReached):
        return event.text
    if isinstance(event, RoleExited):
        how = f"signal {-event.exit_code}" if event.exit_code < 0 else f"code {event.exit_code}"
        lost = "" if event.tokens is None else f" ({event.tokens} tokens of them were lost)"
        return f"{event.name} exited with {how}; its completions are made elsewhere{lost}"
    if isinstance(event, CheckpointRejected):
        return f"checkpoint {event.key} was not trusted: {event.reason}"
    if isinstance(event, SourceRejected):
        who = f"rank {event.rank}" if event.rank >= 0 else "the search for a restore point"
        return f"{who} took from another source what the {event.source} had not: {event.reason}"
    if isinstance(event, PeerFailed):
        return f"{event.peer} keeps no copy of step {event.step}: {event.reason}"
    if isinstance(event, UploadFailed):
        return f"the checkpoint of step {event.step} is not in the bucket yet: {event.reason}"
    if isinstance(event, NonFinite):
        return f"step {event.step}: {event.parameter} is not finite on rank {event.rank}"
    if isinstance(event, Blamed):
        return event.why
    if isinstance(event, SaveInterval):
        return event.reason
    if isinstance(event, NoticeReceived):
        leave = ", and the run is to leave" if event.leave else ""
        nodes = ", ".join(event.nodes)
        return f"notice ({event.source}): {nodes} will be taken away in {event.seconds:g} s{leave}"
    if isinstance(event, PredictedMove):
        return f"prediction: the workers of {event.node} move to other nodes: {event.reason}"
    if isinstance(event, PredictionFailed):
        cost = "one planned move" if event.moved else "early saves"
        return f"prediction: {event.node} was not lost; the false alarm cost {cost}"
    if isinstance(event, NoticesUnheard):
        return f"notices could not be read: {event.reason}"
    if isinstance(event, EmergencyPlanned):
        return f"emergency save: {event.reason}"
    if isinstance(event, SettingIgnored):
        return f"{event.key} is not honoured here: {event.reason}"
    if isinstance(event, RunBranched):
        changes = f" with {', '.join(event.changed)}" if event.changed else ""
        return f"continues {event.parent} after step {event.step}{changes} ({event.folder})"
    if isinstance(event, StopRequested):
        return f"asked to stop ({event.reason})"
    if isinstance(event, RunFailed):
        return f"the run failed: {event.reason}"
    return ""


def _majority_text(event: MajorityLacked) -> str:
    if not event.nodes:
        return f"{event.node} has a coordinator again"
    away = ", ".join(name for name in event.nodes if name not in event.reached)
    return (
        f"{event.node} misses the run's coordinator and reaches {len(event.reached)} of the "
        f"{len(event.nodes)} nodes of the last generation, no majority. It does not reach {away}. "
        "It waits, and nothing is committed meanwhile. Continue or restart the agents there, or "
        f"mend the network; if its processes end there, {event.node} continues at once. "
        f"Otherwise it continues without {away} in {event.seconds:.0f} s "
        "(cluster.alone_seconds)"
    )
