"""The page in a real browser, at the width of a desk and of a phone: nothing is cut.

The pictures stay in the test's folder, which `pytest --basetemp` names.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.config.loading.load import resolve_config
from holdfast.events import CheckpointFailed, MemoryUsed, NonFinite, SettingIgnored
from holdfast.report.history.history import build_history
from holdfast.report.page import page
from tests.support.browser import Browser, browser
from tests.support.journal_builder import Scribe, lossy_run
from tests.support.ranks import wait_until

pytestmark = pytest.mark.slow

MEASURE = """(() => {
  const found = [], width = WIDTH;
  const name = el => el.tagName + '.' + (el.className.baseVal ?? el.className) + ' ' +
    el.textContent.trim().slice(0, 40);
  const shown = el => el.getClientRects().length > 0;
  if (innerWidth !== width) found.push('the window is ' + innerWidth);
  const all = document.documentElement.scrollWidth;
  if (all > width) found.push('the page is ' + all);
  for (const el of document.querySelectorAll('main, main *')) {
    if (!shown(el) || el.closest('script') || el.matches('.cross, .spot')) continue;
    const box = el.getBoundingClientRect();
    if (box.right > width + 0.5 || box.left < -0.5) found.push('outside: ' + name(el));
    if (!el.closest('svg') && el.clientWidth && el.scrollWidth > el.clientWidth + 1)
      found.push('cut: ' + name(el));
  }
  for (const label of document.querySelectorAll('svg text')) {
    if (!shown(label)) continue;
    const box = label.getBoundingClientRect();
    const frame = label.closest('figure').getBoundingClientRect();
    if (box.right > frame.right || box.left < frame.left || box.bottom > frame.bottom)
      found.push('label outside: ' + name(label));
    if (box.height < 9) found.push('label too small: ' + name(label));
  }
  return found;
})()"""
NEWEST_STEP = """(() => {
  const line = [...document.querySelectorAll('path.smooth')].find(e => e.getClientRects().length);
  return line.getBoundingClientRect().right;
})()"""


def eventful_run() -> Scribe:
    """Every part of the page: losses, joins, many checkpoints, long names, notices, memory."""
    run = Scribe()
    run.start()
    names = ("gpu-node-0017.cluster.example", "gpu-node-0018.cluster.example", "c")
    run.among(*names)
    for step in range(1, 121):
        run.steps(step, step)
        run.write(MemoryUsed(step % 3, (900 + 2 * step + 40 * (step % 3)) << 20, step=step))
        if step % 6 == 0:
            run.commit(step)
        if step % 30 == 0:
            run.evaluate(step)
    run.lose(2, cause="SIGKILL")
    run.open_generation()
    run.among(*names[:2], step=120, reason="worker_lost", rung=0)
    run.steps(121, 180)
    run.open_generation()
    run.among(*names, step=180, reason="node_joined", rung=5)
    run.write(CheckpointFailed("rank 2: the disk of /very/long/path/without/any/space is full"))
    run.write(SettingIgnored("layout.reduction", "its second implementation is not there"))
    run.write(NonFinite(1, "blocks.11.attention.query.weight", "c", [3], step=200))
    run.steps(181, 1000)
    run.stop(reason="SIGTERM")
    run.start(resumed=True, pause=4000.0)
    run.generate(1000, "resume", f"commits/{'f' * 16}-0000000003.json")
    run.steps(1001, 1500)
    run.evaluate(1500)
    run.finish()
    return run


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("name", ["eventful", "lossy"])
def test_nothing_is_cut(name: str, width: int, tab: Browser, tmp_path: Path) -> None:
    run = eventful_run() if name == "eventful" else lossy_run()
    history = build_history(run.records)
    config: dict[str, Any] = resolve_config(None, "command line", ["train.steps=1500"]).to_json()
    target = tmp_path / "report.html"
    page.write_result(
        target,
        page.render_page(
            history,
            config,
            baselines={"unigram": 3.4, "bigram": 1.94},
            samples=["def f():\n    return " + "a_very_long_name_" * 12],
        ),
    )
    tab.open(target, width)
    tab.value("document.querySelectorAll('details').forEach(each => each.open = true)")
    tab.photograph(tmp_path / f"{name}-{width}.png")
    assert tab.value(MEASURE.replace("WIDTH", str(width))) == []
    assert 0.7 * width < tab.value(NEWEST_STEP) <= width, "the newest steps are in sight"


def test_the_page_of_a_run_that_trains_shows_new_steps_by_itself(
    tab: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "REFRESH_S", 1)
    run, target = Scribe(), tmp_path / "report.html"
    run.start()
    run.generate()
    run.steps(1, 5)
    page.write_result(target, page.render_page(build_history(run.records), {}, written_at=0.0))
    tab.open(target, 400)
    run.steps(6, 9)
    run.finish()
    page.write_result(target, page.render_page(build_history(run.records), {}))
    text = "document.body && document.body.textContent"
    wait_until(lambda: "finished" in str(tab.value(text)), what="the page to be loaded again")
    assert "9 steps" in tab.value("document.body.textContent")
    assert tab.value("document.querySelector('meta[http-equiv=refresh]')") is None
