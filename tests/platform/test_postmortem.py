"""A draft of a post-mortem comes from the journal alone, and says what the run's records say."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from holdfast.events import NonFinite, WorkerHeld
from holdfast_platform.observe.postmortem import draft_postmortem
from tests.support.commands import within
from tests.support.journal_builder import Scribe, lossy_run
from tests.support.ranks import ROOT

GOLDEN = ROOT / "tests" / "golden" / "runs"


@pytest.mark.parametrize("name", ["nodes", "cut", "halfway"])
def test_a_copy_of_the_journal_gives_the_same_bytes(name: str, tmp_path: Path) -> None:
    """Journals of really killed runs, in another folder and read twice."""
    drafts = []
    for copy in ("one", "other"):
        shutil.copytree(GOLDEN, tmp_path / copy)
        run, to = tmp_path / copy / name, tmp_path / f"{copy}.md"
        within("postmortem", run, "--to", to).succeeds()
        assert within("postmortem", run).succeeds().out == to.read_text()
        drafts.append(to.read_bytes())
    assert drafts[0] == drafts[1]


def test_a_draft_does_not_depend_on_the_order_of_records() -> None:
    records = lossy_run().records
    shuffled = records.copy()
    random.Random(1).shuffle(shuffled)
    assert draft_postmortem(shuffled) == draft_postmortem(records)


def test_root_event_repeated_work_and_questions() -> None:
    draft = draft_postmortem(lossy_run().records)
    root = draft.split("## Timeline")[0].split("## Root event")[1]
    assert "rank 1 of a" in root
    assert "`1/agent/" in root
    assert "3 steps were done again, which is 3.0 s and 3,072 tokens" in draft
    assert "| 1 | 20.25 | 3.00 |" in draft
    assert "rung" not in draft
    assert "What caused it" in draft.split("## Open questions")[1], "a SIGKILL has no known sender"


def test_the_first_of_several_findings_is_the_root_event() -> None:
    run = Scribe()
    run.start()
    run.generate()
    run.steps(1, 3)
    run.write(NonFinite(1, "a gradient", "a", step=4))
    run.write(WorkerHeld(1, 3, 4, "step 4: a gradient is not finite on rank 1"))
    run.restart(3, "non_finite")
    run.steps(4, 5)
    run.lose(0)
    run.restart(5)
    run.steps(6, 7)
    run.finish()
    draft = draft_postmortem(run.records)
    root = draft.split("## Timeline")[0].split("## Root event")[1]
    assert "divergence" in root
    assert "worker crash" in draft.split("## Timeline")[1]


def test_a_run_without_a_failure() -> None:
    run = Scribe()
    run.start()
    run.generate()
    run.steps(1, 3)
    run.finish()
    assert "The journal shows no failure." in draft_postmortem(run.records)
    assert "# Post-mortem" in draft_postmortem([])
