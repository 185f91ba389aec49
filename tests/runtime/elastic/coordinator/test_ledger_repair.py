"""Entries that lost workers did not live to tell, made again: against the audit."""

from __future__ import annotations

import asyncio
import random

import pytest

from holdfast.config.run import RunConfig
from holdfast.data.order.audit import audit_records
from holdfast.data.stream.batch import Batches
from holdfast.data.stream.dataset import Dataset
from holdfast.elastic.coordinator.ledger_repair import LedgerCoverage, LedgerRepair
from holdfast.elastic.event_log import EventLog
from holdfast.errors import RunFolderError
from holdfast.events import BatchFed, Event, GenerationStarted, Record, RunStarted, StepDone
from holdfast.wire.journal import JournalTail, read_journal
from tests.support.corpus import data_config, make, text_folder, text_source
from tests.support.memory_store import MemoryStore

STEPS = 12


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    folder = tmp_path_factory.mktemp("told")
    text_folder(folder / "text", 12, 400)
    data = data_config(folder / "data", text_source(folder / "text"))
    folder = make(data).folder
    return RunConfig.model_validate(
        {
            "data": data.model_copy(update={"folder": str(folder)}).model_dump(),
            "model": {
                "preset": None,
                "layers": 1,
                "dim": 8,
                "heads": 2,
                "kv_heads": 2,
                "ffn_dim": 8,
            },
            "train": {"steps": STEPS, "batch_size": 8, "microbatch_size": 4},
        }
    )


def _batches(config: RunConfig) -> Batches:
    return Batches(Dataset.open(config.data.folder), config.data, config.train, config.seed)


def _fed(batches: Batches, step: int, parts: int) -> list[BatchFed]:
    """One event a share of a microbatch."""
    return [
        BatchFed(0, batches.microbatch(step, index, part, parts).entries, step=step)
        for index in range(batches.microbatches(step))
        for part in range(parts)
    ]


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_what_is_missing_is_made_and_the_audit_is_content(config: RunConfig, parts: int) -> None:
    batches, told, chooser = _batches(config), LedgerCoverage(config), random.Random(parts)
    records: list[Record] = []

    def happens(generation: int, event: Event) -> None:
        told.observe(event)
        records.append(Record(generation, "agent", len(records), 0.0, event))

    happens(1, RunStarted("toy", "", batches.dataset.version))
    happens(1, GenerationStarted({"nodes": ["a"]}, "start"))
    assert told.find_missing() == []
    for step in range(1, 8):
        for event in _fed(batches, step, parts):
            if chooser.random() < 0.7:
                happens(1, event)
    happens(2, GenerationStarted({"nodes": ["a"]}, "worker_lost", None, 2, [0], step=6))
    missing = told.find_missing()
    assert missing
    for made in told.make_entries(missing):
        assert all(entry["stands_in"] for entry in made.entries)
        happens(2, made)
    assert told.find_missing() == []
    told.mark_complete(told.end_position)
    for step in range(7, STEPS + 1):
        for event in _fed(batches, step, parts):
            happens(2, event)
    found = audit_records(records, batches, STEPS)
    assert found.ok, found.describe()
    assert len(told._ranges) == 1


def test_the_step_that_survivors_apply_as_they_recover_is_completed(config: RunConfig) -> None:
    """Rank 1 was killed after the sum of step 7, and rank 0 applies that step from its gradient."""
    batches, told = _batches(config), LedgerCoverage(config)
    records: list[Record] = []

    def happens(generation: int, *events: Event) -> None:
        for event in events:
            told.observe(event)
            records.append(Record(generation, "agent", len(records), 0.0, event))

    happens(1, RunStarted("toy", "", batches.dataset.version))
    happens(1, GenerationStarted({"nodes": ["a"]}, "start"))
    happens(1, *(event for step in range(1, 7) for event in _fed(batches, step, 1)))
    happens(2, GenerationStarted({"nodes": ["a"]}, "worker_lost", None, 0, [0], step=6))
    happens(2, _fed(batches, 7, 1)[0], _step_done(7))
    until = told.end_position
    missing = told.find_missing()
    assert missing == [(52, 56)]
    happens(2, *_fed(batches, 8, 1), _step_done(8))  # before the entries are made
    made = told.make_entries(missing)
    happens(2, *made)
    told.mark_complete(until)
    assert [(event.step, event.entries[0]["microbatch"]) for event in made] == [(7, 1)]
    assert audit_records(records, batches, 8).ok
    happens(3, GenerationStarted({"nodes": ["a"]}, "worker_lost", None, 0, [0], step=9))
    assert told.find_missing() == [(64, 72)]  # step 9 is required, whatever was complete


def _step_done(step: int) -> StepDone:
    return StepDone(1.0, 8, 1.0, 0.1, 0.0, samples=8, phases={}, step=step)


def test_what_was_restored_was_told_before(config: RunConfig) -> None:
    told = LedgerCoverage(config)
    told.observe(GenerationStarted({"nodes": ["a"]}, "worker_lost", "key", step=6))
    assert told.find_missing() == []
    told.observe(GenerationStarted({"nodes": ["a"]}, "worker_lost", None, 1, [0], step=8))
    assert told.find_missing() == [(48, 64)]


def test_what_nobody_told_before_a_restore_is_made_again_where_snapshots_do_not_wait_for_it(
    config: RunConfig,
) -> None:
    """Of several nodes; but not what lies before all that the journal knows of."""
    told = LedgerCoverage(config, snapshots_follow_ledger=False)
    told.observe(GenerationStarted({"nodes": ["a"]}, "start", "key", step=6))
    assert told.find_missing() == []
    told.observe(GenerationStarted({"nodes": ["a"]}, "node_lost", "key", step=8))
    assert told.find_missing() == [(48, 64)]


class _Away(MemoryStore):
    """A run store that cannot be listed so many times."""

    fails = 0

    def list(self, prefix: str) -> list[str]:
        self.fails -= 1
        if self.fails >= 0:
            raise RunFolderError("the run folder failed")
        return super().list(prefix)


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_hole_in_the_journal_is_repaired_when_the_next_generation_is_ready(
    config: RunConfig, nodes: int
) -> None:
    """Rank 1 was killed before its agent had what it fed in the last steps. With several nodes, the
    agent that leads now knows the entries from the journal only, and waits until it can read it."""
    batches, store, said = _batches(config), _Away(), list[str]()
    told = LedgerCoverage(config, snapshots_follow_ledger=nodes == 1)
    log = EventLog(
        store, [lambda record: told.observe(record.event)] if nodes == 1 else [], said.append
    )
    log.begin_generation(1)
    log.emit("agent", RunStarted("toy", "", batches.dataset.version))
    log.emit("agent", GenerationStarted({"nodes": ["a"]}, "start"))
    for step in range(1, 7):
        for rank, event in enumerate(_fed(batches, step, 1)):
            if rank == 0 or step < 4:
                log.emit(f"rank{rank}", event)
    log.begin_generation(2)
    log.emit("agent", GenerationStarted({"nodes": ["a"]}, "worker_lost", None, 2, [0], step=6))
    for step in range(7, STEPS + 1):
        for event in _fed(batches, step, 1):
            log.emit("rank0", event)

    async def ready() -> None:
        assert await log.flush()
        assert not audit_records(read_journal(store), batches, STEPS).ok
        repair = LedgerRepair(told, log, said.append, 0.01)
        repair.is_pending = True
        if nodes == 1:
            await repair.repair()
            assert not repair.is_pending
        else:
            store.fails = 2
            await repair.repair_from_journal(JournalTail(store))
        assert await log.flush()

    asyncio.run(ready())
    found = audit_records(read_journal(store), batches, STEPS)
    assert found.ok, found.describe()
    waits = "the ledger of a lost node waits for the journal: the run folder failed"
    assert said == [waits] * (nodes - 1)
    rebuilt = [
        (event.step, entry["microbatch"])
        for event in (record.event for record in read_journal(store))
        if isinstance(event, BatchFed)
        for entry in event.entries
        if entry.get("stands_in")
    ]
    assert rebuilt == [(4, 1), (5, 1), (6, 1)]
