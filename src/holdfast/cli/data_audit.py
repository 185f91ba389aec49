"""The audit of a run and of the runs that it continues, for `holdfast data audit`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from holdfast.errors import RunFolderError, UserError
from holdfast.launch.run.runs import Run, named_path, open_run

if TYPE_CHECKING:
    from holdfast.data.order.audit import AuditResult
    from holdfast.events import RunBranched
    from holdfast.wire.journal import JournalContents


@dataclass(frozen=True)
class RunAudit:
    """The audit of one run; result: None for a parent that is not where it was."""

    result: AuditResult | None
    journal: JournalContents | None = None
    missing: str = ""  # why there is no result

    @property
    def ok(self) -> bool:
        return self.result is None or self.result.ok

    def to_json(self) -> dict[str, Any]:
        if self.result is None or self.journal is None:
            return {"missing": self.missing}
        numbers = asdict(self.result)
        if not self.result.unreadable:
            del numbers["unreadable"]
        if self.result.first_step == 1:
            del numbers["first_step"]
        if not self.result.imported_step:
            del numbers["imported_step"]
        return numbers | {"ok": self.result.ok, "sentence": self.result.describe()}

    def print(self, head: str) -> None:
        if self.result is None or self.journal is None:
            print(f"{head}{self.missing}", flush=True)
            return
        print(f"{head}{self.result.describe()}")
        for problem in self.result.problems:
            print(f"  {problem.message}")
        if self.journal.unreadable:
            print(f"  ({self.journal.unreadable_sentence()})")
        if self.result.superseded:
            number = self.result.superseded
            print(f"  ({number} ledger records are of work that was lost and redone)")


def audit_run(found: Run, last_step: int | None = None) -> RunAudit:
    """Audit a run's own steps, up to `last_step` or its last committed one. Raises RunFolderError
    for a simulated run."""
    from holdfast.checkpoint.restore.catalog import list_commits, step_of
    from holdfast.data.order.audit import AuditProblem, audit_records
    from holdfast.tasks.choose import open_audited
    from holdfast.wire.journal import read_contents
    from holdfast.wire.term import newest_term

    if found.is_simulated:
        raise RunFolderError(
            "this run was simulated, so no sample was used",
            where=found.place,
            remedy="name a run that was trained",
        )
    config, journal = found.config, read_contents(found.store)
    batches, file_problems = open_audited(config, found.dataset_location)
    result = audit_records(journal.records, batches, last_step)
    result.unreadable = len(journal.unreadable)
    commits = list_commits(found.store)
    if commits and not result.last_step and newest_term(found.store)[0]:  # a copy has no journal
        result.problems.append(
            AuditProblem(
                "missing",
                0,
                0,
                f"the journal tells of no committed step, though there is a checkpoint of step "
                f"{step_of(commits[0])}: what was fed cannot be known",
            )
        )
    # Tokens that were fed from a changed shard would agree with that shard.
    result.problems += [AuditProblem("dataset", 0, 0, text) for text in file_problems]
    return RunAudit(result, journal)


def audit_parents(found: Run) -> dict[str, RunAudit]:
    """Audit the runs that a branch continues, each up to the step that was branched from. The key
    is the run's folder; the nearest parent comes first."""
    from holdfast.data.order.audit import branch_event
    from holdfast.wire.journal import read_journal

    audits: dict[str, RunAudit] = {}
    run: Run | None = found
    while run is not None and (event := branch_event(read_journal(run.store))) is not None:
        run = _open_parent(event)
        if event.step == 0:
            break  # the parent had dealt nothing yet
        if run is None:
            missing = (
                f"it dealt the samples of the steps up to {event.step}, and is no longer in "
                f"{event.folder}: these steps are not checked"
            )
            audits[event.folder] = RunAudit(None, missing=missing)
        else:
            audits[event.folder] = audit_run(run, event.step)
    return audits


def _open_parent(event: RunBranched) -> Run | None:
    """The run that a branch continues; None if another run, or none, lies at its path."""
    try:
        run = open_run(named_path(event.folder))
    except UserError:
        return None
    return run if str(run.resolved.get("run_id", "")) == event.parent_id else None
