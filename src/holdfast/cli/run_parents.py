"""The runs that a branch continues, the texts that a run reads, and steps in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from holdfast.core.data.data_ledger import merge_ranges
from holdfast.data.order.audit import branch_event
from holdfast.data.stream.batch import Batches
from holdfast.data.stream.dataset import Dataset
from holdfast.data.stream.dataset_location import open_dataset
from holdfast.errors import DataError, UserError
from holdfast.events import RunBranched
from holdfast.launch.run.runs import Run, named_path, open_run
from holdfast.show.output import say
from holdfast.wire.journal import read_journal


def with_parents(run: Run) -> Iterator[tuple[str, Run, int]]:
    """Yield a run, and the runs that it continues, each with the last step that counts; 0: all."""
    found: Run | None = run
    last = 0
    while found is not None:
        yield found.place, found, last
        event = branch_event(read_journal(found.store))
        if event is None:
            return
        found, last = open_parent(event), event.step
        if found is None and last:
            say(f"the run {event.folder} dealt the steps up to {last}, and is no longer there")


def open_parent(event: RunBranched) -> Run | None:
    """The run that a branch continues; None if another run, or none, lies at its path."""
    try:
        run = open_run(named_path(event.folder))
    except UserError:
        return None
    return run if str(run.resolved.get("run_id", "")) == event.parent_id else None


def texts_of(run: Run) -> tuple[Dataset, Batches]:
    """Open a run's dataset, and what each of its steps reads from it. Raises DataError for a run
    whose data are no texts."""
    config = run.config
    if run.is_simulated or config.has_own_data:
        raise DataError(
            "the run trained on no texts of a dataset",
            where=run.place,
            remedy="name a run that was trained on texts",
        )
    dataset = open_dataset(run.dataset_location, config.data)
    return dataset, Batches(dataset, config.data, config.step_train, config.seed)


def describe_steps(steps: Sequence[int]) -> str:
    """Steps in short: 3, 7-9."""
    merged = merge_ranges((step, step + 1) for step in steps)
    return ", ".join(f"{a:,}" if b == a + 1 else f"{a:,}-{b - 1:,}" for a, b in merged)
