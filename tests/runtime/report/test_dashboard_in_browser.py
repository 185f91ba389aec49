"""The live page in a real browser: widths of a desk and a phone, keys, dark, new steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runtime.report.test_page_in_browser import MEASURE, eventful_run
from tests.support.browser import Browser, browser
from tests.support.dashboards import Served, dashboard_of
from tests.support.journal_builder import append_records, lossy_run, store_run
from tests.support.ranks import wait_until

pytestmark = pytest.mark.slow

WATCH_POLICY = """
window.refused = [];
const keep = event => refused.push(`${event.message ?? event.blockedURI}`);
addEventListener('securitypolicyviolation', keep);
addEventListener('error', keep);
"""
ORIGINS = "[...new Set(performance.getEntriesByType('resource').map(e => new URL(e.name).origin))]"
STATE = "document.getElementById('state').textContent"
IS_READ = f"!['loading', 'reading', 'starting'].includes({STATE})"


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as found:
        found.call("Page.addScriptToEvaluateOnNewDocument", source=WATCH_POLICY)
        yield found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    store_run(folder / "eventful", eventful_run().records, 1500)
    store_run(folder / "lossy", lossy_run().records, 30)
    return folder


@pytest.fixture(scope="module")
def served(runs: Path) -> Iterator[Served]:
    with dashboard_of(runs) as found:
        yield found


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("run", ["", "#eventful", "#lossy"])
def test_nothing_is_cut_and_nothing_is_loaded_from_outside(
    run: str, width: int, scheme: str, tab: Browser, served: Served, tmp_path: Path
) -> None:
    tab.paint(scheme)
    tab.open(served.address + run, width)
    wait_until(lambda: bool(tab.value(IS_READ)))
    tab.photograph(tmp_path / f"{run.strip('#') or 'table'}-{width}-{scheme}.png")
    assert tab.value(MEASURE.replace("WIDTH", str(width))) == []
    assert tab.value("refused") == []
    assert tab.value(ORIGINS) == [served.address.partition("/?")[0]]
    assert "token" not in tab.value("location.href")
    paper = tab.value("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, paper[4:-1].split(","))) < 3 * 128) == (scheme == "dark")


def test_keys_move_through_steps_and_nodes(tab: Browser, served: Served) -> None:
    tab.open("about:blank", 1280)
    tab.open(served.address + "#eventful", 1280)
    wait_until(lambda: bool(tab.value(IS_READ)))

    def read(name: str) -> str:
        return str(tab.value(f"document.getElementById('{name}').textContent"))

    seen = set[str]()
    while "nodes" not in seen:
        tab.press("Tab")
        focused = tab.value("document.activeElement.id")
        seen.add(focused)
        if focused == "loss":
            tab.press("End")
            assert read("loss-reading").startswith("step 1,500: loss ")
            tab.press("ArrowLeft")
            assert "step 1,499" in read("loss-reading")
        if focused == "nodes":
            tab.press("ArrowRight")
            tab.press("ArrowRight")
            assert read("node-reading").startswith("gpu-node-0018.cluster.example")
    assert {"loss", "members"} <= seen


def test_new_steps_are_shown_without_a_reload(tab: Browser, tmp_path: Path) -> None:
    run = lossy_run()
    store_run(tmp_path / "run", run.records[:-2], 40)
    with dashboard_of(tmp_path / "run") as found:
        tab.open(found.address, 1280)
        step = "document.querySelector('.tile b')?.textContent"
        wait_until(lambda: tab.value(step) == "30 / 40")
        tab.value("window.same = true")
        written = len(run.records)
        run.steps(31, 33)
        append_records(tmp_path / "run", run.records[written:])
        wait_until(lambda: tab.value(step) == "33 / 40")
        assert tab.value("window.same") is True
    wait_until(lambda: not tab.value("document.getElementById('problem').hidden"))
