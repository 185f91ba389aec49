"""The load of experts: from the journal to the page."""

from __future__ import annotations

import json

import pytest

from holdfast.core.expert_load import ExpertsRouted, load_entropy
from holdfast.events import from_json, to_json
from holdfast.report.history.history import build_history
from holdfast.report.history.summary import summary
from holdfast.report.page import page
from tests.support.journal_builder import lossy_run


def test_the_load_adds_up_over_ranks_and_is_a_heat_map() -> None:
    run = lossy_run()
    assert "Load of the experts" not in page.render_page(build_history(run.records), {})
    for rank, counts in ((0, [30, 10, 0, 0]), (1, [20, 20, 0, 0])):
        run.write(ExpertsRouted(rank, {"1": counts}, step=2))
    run.write(ExpertsRouted(2, {"0": [5, 5, 5, 5]}, 7, step=3))
    history = build_history(run.records)
    assert history.experts == {0: [5, 5, 5, 5], 1: [50, 30, 0, 0]}
    content = page.render_page(history, {})
    assert "Load of the experts" in content
    assert "7.0 % of the choices were dropped" in content
    assert 'title="block 1, expert 0: 62.5 %, 50 choices"' in content
    assert content.index(">1.000</td>") < content.index(">0.477</td>")
    assert summary(history)["experts"] == {"0": [5, 5, 5, 5], "1": [50, 30, 0, 0]}


def test_the_highest_load_without_copies_and_with_them() -> None:
    run = lossy_run()
    for rank, load in ((0, [40, 60, 45, 0]), (1, [40, 20, 35, 1])):
        run.write(ExpertsRouted(rank, {"1": [30, 10]}, loads={"1": load}, step=2))
    run.write(ExpertsRouted(1, {"1": [5, 5]}, loads={"1": [10, 20, 10, 0]}, step=3))
    history = build_history(run.records)
    content = page.render_page(history, {})
    assert "in block 1, from 1.50 to 1.12 even parts" in content
    found = summary(history)["expert_copies"]
    loads = {"even": (40, 50), "own": (60, 40), "computed": (45, 45), "copies": (0, 1)}
    assert found == {"1": loads}


def test_an_event_comes_back() -> None:
    loads = {"7": [3, 3, 4, 1]}
    record = lossy_run().write(ExpertsRouted(3, {"7": [1, 2]}, loads=loads, step=9))
    assert from_json(json.loads(json.dumps(to_json(record)))) == record


@pytest.mark.parametrize(
    ("counts", "entropy"), [([3, 3], 1.0), ([9, 0], 0.0), ([], 1.0), ([0, 0], 1.0)]
)
def test_entropy_is_that_of_an_even_load(counts: list[int], entropy: float) -> None:
    assert load_entropy(counts) == pytest.approx(entropy)
