"""The audit on journals of simulated workers: restarts are fine, each injected fault is found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from holdfast.config.sections.data import DataConfig
from holdfast.core.data.data_ledger import STAND_IN_KEY
from holdfast.data.order.audit import AuditResult, audit_records
from holdfast.data.stream.batch import Batches, Microbatch
from holdfast.data.stream.coverage import describe_long_rows, describe_use
from holdfast.data.stream.dataset import Dataset
from holdfast.data.stream.loader import Loader
from holdfast.events import (
    BatchFed,
    CheckpointCommitted,
    GenerationStarted,
    Record,
    RunFinished,
    RunStarted,
)
from tests.support.commands import within, write_run_file
from tests.support.corpus import batches, data_config, make, text_folder, text_source, train_config

Plan = Callable[[int], Sequence[int]]


@pytest.fixture(name="source")
def _source(small: Dataset, small_config: DataConfig) -> Batches:
    return batches(small, small_config)


class Worker:
    """A source that feeds, where `instead` says so, another microbatch than it is asked for."""

    def __init__(self, source: Batches, instead: dict[tuple[int, int], tuple[int, int]]):
        self.source, self.instead = source, instead

    def microbatch(self, step: int, index: int, part: int = 0, parts: int = 1) -> Microbatch:
        asked = self.source.microbatch(step, index, part, parts)
        other = self.source.microbatch(*self.instead.get((step, index), (step, index)), part, parts)
        return replace(other, entries=asked.entries)


def feed(
    source: Any, plans: Sequence[Plan], first: int, last: int, generation: int = 1, parts: int = 1
) -> list[Record]:
    """What workers with these plans write to the journal over some steps."""
    records = [Record(generation, "agent", 0, 0.0, GenerationStarted({}, "start", step=first - 1))]
    for rank, plan in enumerate(plans):
        part = rank % parts
        with Loader(source, plan, part=part, parts=parts, first_step=first, last_step=last) as load:
            records += [
                Record(
                    generation, f"rank{rank}", s.step, 0.0, BatchFed(rank, s.entries, step=s.step)
                )
                for s in load
            ]
    return records


def committed(step: int, generation: int = 1) -> Record:
    return Record(generation, "agent", 99, 0.0, CheckpointCommitted("key", 1, 1.0, step=step))


def changed(
    records: list[Record], step: int, rank: int, change: Callable[[Any], dict[str, Any]]
) -> list[Record]:
    """With other entries of one rank's step."""
    out = []
    for r in records:
        event = r.event
        if isinstance(event, BatchFed) and (event.step, event.rank) == (step, rank):
            event = replace(event, entries=[e | change(e) for e in event.entries])
        out.append(replace(r, event=event))
    return out


EVEN: list[Plan] = [lambda _: [0, 1], lambda _: [2, 3]]


def problems(result: AuditResult) -> list[tuple[str, int, int]]:
    return [(p.kind, p.step, p.microbatch) for p in result.problems]


def test_three_kills_leave_every_sample_used_once(source: Batches, small: Dataset) -> None:
    """Restarts from a committed step, on another number of workers, once with shards."""
    records = [Record(0, "agent", 0, 0.0, RunStarted("r", "h", small.version))]
    records += feed(source, EVEN, 1, 9)
    records += [committed(6)]
    records += feed(source, [lambda _: [0, 1, 2, 3]], 7, 12, generation=2)
    records += [committed(10, 2)]
    three: list[Plan] = [lambda _: [3], lambda _: [0, 2], lambda _: [1]]
    records += feed(source, three, 11, 15, generation=3)
    sharded: list[Plan] = [lambda _: [1, 3], lambda _: [1, 3], lambda _: [0, 2], lambda _: [0, 2]]
    records += feed(source, sharded, 11, 20, generation=4, parts=2)
    records += [Record(4, "agent", 1, 0.0, RunFinished(step=20))]
    result = audit_records(records, source)
    assert result.ok, result.problems
    assert (result.last_step, result.samples) == (20, 160)
    assert result.superseded == 3 * 2 + 2 * 1 + 5 * 3
    assert [(e.source, e.epoch, e.used, e.repeated) for e in result.epochs] == [
        ("a", 0, 120, 0),
        ("b", 0, 40, 0),
    ]
    assert "none missing, none twice" in result.describe()


def test_entries_that_were_made_for_a_lost_worker_are_counted_apart(source: Batches) -> None:
    """Its own count where they came after all; what stands in has to be right, too."""
    records = [*feed(source, EVEN, 1, 6), committed(6)]
    lost = [r for r in records if isinstance(r.event, BatchFed) and r.event.rank == 1]
    gone = [r for r in lost if r.event.step in (2, 5)]
    retold = [
        replace(
            r,
            event=replace(
                r.event,
                rank=-1,
                entries=[
                    {**entry, STAND_IN_KEY: True} for entry in cast(BatchFed, r.event).entries
                ],
            ),
        )
        for r in lost
    ]
    result = audit_records([*(r for r in records if r not in gone), *retold], source)
    assert result.ok, result.problems
    assert result.retold == 2 * 4
    assert "none twice, each fed as the dataset and the seed say; 8 by entries made" in (
        result.describe()
    )
    assert "entries made" not in audit_records(records, source).describe()


def test_whole_epochs_are_counted(source: Batches) -> None:
    steps = 2 * max(source.order.sizes) * 4 // 3 // 8
    result = audit_records([*feed(source, EVEN, 1, steps), committed(steps)], source)
    assert result.ok
    first = [e for e in result.epochs if e.epoch == 0]
    assert all(e.used == e.samples for e in first)
    assert all(e.repeated == 0 for e in result.epochs)


def test_steps_after_the_last_commit_do_not_count_yet(source: Batches) -> None:
    records = [*feed(source, EVEN, 1, 9), committed(4)]
    assert audit_records(records, source).last_step == 4
    assert audit_records(records, source, last_step=9).samples == 72
    result = audit_records(feed(source, EVEN, 1, 3), source)
    assert result.last_step == 0
    assert "nothing is committed" in result.describe()


def test_the_steps_of_an_imported_checkpoint_are_not_asked_for(source: Batches) -> None:
    records = [*feed(source, EVEN, 5, 9), committed(9)]
    assert not audit_records(records, source).ok, "nothing says that step 4 was imported"
    key = "commits/fffffffffffffffb-0000000000.json"
    records[0] = Record(1, "agent", 0, 0.0, GenerationStarted({}, "resume", key, step=4))
    result = audit_records(records, source)
    assert (result.ok, result.first_step, result.last_step) == (True, 5, 9)
    assert result.describe().endswith("the steps up to 4 were imported, and are not checked")


def test_a_microbatch_that_nobody_fed(source: Batches) -> None:
    plans: list[Plan] = [lambda _: [0, 1], lambda step: [2] if step == 5 else [2, 3]]
    result = audit_records([*feed(source, plans, 1, 8), committed(8)], source)
    assert problems(result) == [("missing", 5, 3)]
    assert result.first_problem is not None
    assert "step 5, microbatch 3: positions 38 to 39 were never fed" in result.first_problem.message
    assert result.epochs[0].repeated == 0


def test_a_step_without_any_ledger(source: Batches) -> None:
    records = [r for r in feed(source, EVEN, 1, 4) if r.event.step != 2]
    result = audit_records([*records, committed(4)], source)
    assert problems(result) == [("missing", 2, m) for m in range(4)]


def test_a_microbatch_that_two_ranks_fed(source: Batches) -> None:
    plans: list[Plan] = [lambda _: [0, 1], lambda step: [1, 2, 3] if step == 3 else [2, 3]]
    result = audit_records([*feed(source, plans, 1, 4), committed(4)], source)
    assert problems(result) == [("repeated", 3, 1)]
    assert "ranks 0, 1" in result.problems[0].message
    assert sum(e.repeated for e in result.epochs) == 2


def test_the_ledger_claims_one_microbatch_and_another_was_fed(source: Batches) -> None:
    worker = Worker(source, {(6, 2): (6, 1)})
    result = audit_records([*feed(worker, EVEN, 1, 8), committed(8)], source)
    assert problems(result) == [("repeated", 6, 2)]
    assert "step 6, microbatch 2 (rank 1): fed the tokens of microbatch 1 of step 6; its own " in (
        result.problems[0].message
    )


def test_a_loader_one_step_behind(source: Batches) -> None:
    """A rank that repeats the step before: the ledger's numbers look right, the tokens are not."""
    worker = Worker(source, {(n, m): (n - 1, m) for n in range(4, 7) for m in (2, 3)})
    result = audit_records([*feed(worker, EVEN, 1, 8), committed(8)], source)
    assert [(s, m) for _, s, m in problems(result)] == [(n, m) for n in (4, 5, 6) for m in (2, 3)]
    assert result.first_problem is not None
    assert "fed the tokens of microbatch 2 of step 3" in result.first_problem.message


def test_two_microbatches_exchanged(source: Batches) -> None:
    worker = Worker(source, {(2, 0): (2, 3), (2, 3): (2, 0)})
    result = audit_records([*feed(worker, EVEN, 1, 3), committed(3)], source)
    assert problems(result) == [("swapped", 2, 0), ("swapped", 2, 3)]
    across = Worker(source, {(2, 1): (3, 1), (3, 1): (2, 1)})
    result = audit_records([*feed(across, EVEN, 1, 3), committed(3)], source)
    assert problems(result) == [("swapped", 2, 1), ("swapped", 3, 1)]


def test_one_token_changed(source: Batches) -> None:
    class Flip:
        def microbatch(self, step: int, index: int, part: int = 0, parts: int = 1) -> Microbatch:
            batch = source.microbatch(step, index, part, parts)
            if (step, index) == (3, 3):
                batch.targets[1, 4] ^= 1
            return batch

    result = audit_records([*feed(Flip(), EVEN, 1, 3), committed(3)], source)
    assert problems(result) == [("wrong", 3, 3)]


def test_positions_of_another_step(source: Batches) -> None:
    records = feed(source, EVEN, 1, 3)
    moved = changed(records, 2, 1, lambda e: {"start": e["start"] + 8, "stop": e["stop"] + 8})
    result = audit_records([*moved, committed(3)], source)
    assert problems(result) == [
        ("missing", 2, 2),
        ("missing", 2, 3),
        ("outside", 2, 2),
        ("outside", 2, 3),
    ]
    assert "positions 20 to 21 are not of this step" in result.problems[2].message


def test_a_skipped_range_counts_as_used_with_its_reason(source: Batches) -> None:
    fed = feed(source, EVEN, 1, 3)
    records = changed(fed, 2, 0, lambda e: {"hash": "", "skipped": "loss spike"})
    result = audit_records([*records, committed(3)], source)
    assert result.ok
    assert result.skipped == {"loss spike": 4}
    assert "none twice, 4 skipped (loss spike), each fed" in result.describe()


def test_another_dataset_or_seed_is_noticed(
    source: Batches, small: Dataset, small_config: DataConfig
) -> None:
    records = [
        Record(0, "agent", 0, 0.0, RunStarted("r", "h", "another")),
        *feed(source, EVEN, 1, 2),
        committed(2),
    ]
    assert problems(audit_records(records, source)) == [("dataset", 0, 0)]
    other = batches(small, small_config, seed=2)
    assert {k for k, _, _ in problems(audit_records(records[1:], other))} <= {"wrong", "repeated"}
    assert len(audit_records(records[1:], other).problems) == 8


# --- microbatches exchanged, repeated and dropped in real workers ---------------------------------
@pytest.mark.slow
def test_the_audit_finds_what_real_workers_fed_wrongly(tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path)
    trained = subprocess.run(
        [sys.executable, "-m", "tests.support.faulty_data_trainer", str(run_file)],
        capture_output=True,
        text=True,
        timeout=90,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert trained.returncode == 0, trained.stderr
    audit = within("data", "audit", tmp_path / "run", "--json")
    assert audit.code == 1, audit.err
    found = json.loads(audit.out)
    assert not found["ok"]
    assert [(p["kind"], p["step"], p["microbatch"]) for p in found["problems"]] == [
        ("swapped", 2, 0),
        ("swapped", 2, 3),
        ("repeated", 4, 2),
        ("wrong", 5, 1),
    ]
    said = within("data", "audit", tmp_path / "run").out
    assert said.startswith("4 problems; the first: step 2, microbatch 0 (rank 0): exchanged with")
    assert "fed the tokens of microbatch 1 of step 4; its own were never fed" in said


# --- what a start says of its dataset -------------------------------------------------------------
def test_passes_over_each_source(tmp_path: Path) -> None:
    a = text_folder(tmp_path / "a", files=30, words=60, seed=1)
    b = text_folder(tmp_path / "b", files=6, words=60, seed=2)
    config = data_config(
        tmp_path / "out", text_source(a, "a", weight=3.0), text_source(b, "b"), processes=0
    )
    dataset = make(config)
    long = describe_long_rows(dataset, config, train_config())
    assert f"{len(np.diff(dataset.streams('train')[1].document_starts()))} documents are" in long[1]
    (line,) = describe_use(dataset, config, train_config(batch_size=8, steps=50))
    assert "50 steps of 16 tokens a sample: 400 samples; over the data: a " in line
    sizes = [-(-(s.tokens - 1) // 16) for s in dataset.streams("train")]
    assert f"a {300 / sizes[0]:.2f} passes, b {100 / sizes[1]:.2f} passes" in line
    steps = 31 * sum(sizes) // 8
    _, warning, decay, *_ = describe_use(dataset, config, train_config(batch_size=8, steps=steps))
    assert "31 passes with train.optimizer.weight_decay 0.1" in decay
    more = train_config(batch_size=8, steps=steps, optimizer={"weight_decay": 0.8})
    assert not any("weight_decay" in line for line in describe_use(dataset, config, more))
    has = dataset.counts("train")["tokens"]
    assert f"{has:,} tokens, and the run trains on {steps * 8 * 16:,}: it repeats" in warning


def test_an_empty_validation_set_is_said_with_its_cause(tmp_path: Path) -> None:
    one = text_folder(tmp_path / "one", files=1, words=200)
    config = data_config(tmp_path / "set", text_source(one))
    passes, said = describe_use(make(config), config, train_config(steps=10))
    assert "over the data" in passes
    assert "the validation set is empty (the dataset is one document" in said
    assert "train.evaluate.every 100 never comes" in said
    assert "cut it into several documents" in said

    two = text_folder(tmp_path / "two", files=4, words=60)
    config = data_config(tmp_path / "none", text_source(two), validation_fraction=0.0)
    _, said = describe_use(make(config), config, train_config(steps=10, evaluate={"every": 7}))
    assert "(data.validation_fraction is 0)" in said
    assert "train.evaluate.every 7 never comes" in said
    for none_is_wanted in (train_config(steps=10, evaluate={"every": 0}), train_config(steps=10)):
        assert len(describe_use(make(config), config, none_is_wanted)) == 1


def test_a_source_with_most_of_the_training_and_no_validation_is_named(tmp_path: Path) -> None:
    big = text_folder(tmp_path / "big", files=1, words=200, seed=3)
    small = text_folder(tmp_path / "small", files=8, words=60, seed=4)

    def lines(weight: float) -> list[str]:
        config = data_config(
            tmp_path / "set", text_source(big, "big", weight=weight), text_source(small, "small")
        )
        return describe_use(make(config), config, train_config(steps=10))

    _, said = lines(4.0)
    assert "source 'big' makes 80% of the training. The validation set has nothing of it" in said
    assert len(lines(0.25)) == 1
