"""The page: whole, self-contained, safe with any text, and true to the history."""

from __future__ import annotations

import json
import math
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from holdfast.config.loading.load import resolve_config
from holdfast.core.expert_load import ExpertsRouted, load_entropy
from holdfast.errors import RunFolderError
from holdfast.events import (
    GenerationStarted,
    MemoryUsed,
    Record,
    RunStarted,
    SettingIgnored,
    StepDone,
    from_json,
    to_json,
)
from holdfast.report.history.history import StepPoint, build_history
from holdfast.report.history.progress import RunProgress
from holdfast.report.history.summary import summary
from holdfast.report.ledger.timeledger import CLASSES
from holdfast.report.live.live import step_line
from holdfast.report.page import page
from holdfast.report.page.css import COLOURS, class_colour
from holdfast.report.page.svg import step_tip
from holdfast.report.trackers.curve import Curve, Point
from tests.support.journal_builder import Scribe, lossy_run, started_run, step_done

VOID = {"meta", "br", "link", "input", "img", "hr"}


class Reader(HTMLParser):
    """Checks that elements nest, and keeps what a test asks about."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] not in (["script"], ["style"]):
            self.text += data


def rendered(run: Scribe | None = None, **options: Any) -> str:
    return page.render_page(
        build_history((run or lossy_run()).records), options.pop("resolved", {}), **options
    )


def points_of(content: str) -> list[Any]:
    """The points of each drawing, in order."""
    found = re.findall(r'class="points">(.*?)</script>', content, re.S)
    return [json.loads(each) for each in found]


def test_it_is_well_formed_and_asks_nobody_for_anything() -> None:
    content = rendered(baselines={"unigram": 3.4, "bigram": 1.94}, samples=["def f():"])
    reader = Reader(content)
    assert reader.open == []
    fetching = {"src", "href", "srcset", "action", "data", "poster", "xlink:href"}
    assert [a for a in reader.attributes if a[1] in fetching] == []
    assert "http" not in re.sub(r"http://www\.w3\.org/\S+", "", content)
    assert "@import" not in content
    assert "url(" not in content


def test_it_says_what_happened() -> None:
    text = Reader(rendered(baselines={"unigram": 3.4, "bigram": 1.94})).text
    for part in (
        "finished",
        "30 steps",
        "rank 1 lost (SIGKILL)",
        "unigram counts 3.40",
        "rework",
        "bigram counts 1.94",
        "goodput",
        "membership 3",
        "wall time",
    ):
        assert part in text


def test_the_curve_draws_each_step_that_counts_and_the_ghost_beside_it() -> None:
    content = rendered()
    points = points_of(content)[0]
    assert [p[2].split(",")[0] for p in points] == [f"step {n}" for n in range(1, 31)]
    assert [p[0] for p in points] == sorted(p[0] for p in points)
    assert content.count('class="ghost"') == 4  # in the curve and over time, for two widths
    assert "validation after step 10" in content


def test_a_join_is_a_change_and_no_incident() -> None:
    run = Scribe()
    run.start()
    run.among("a", "b")
    run.steps(1, 5)
    run.open_generation()
    run.among("a", "b", "c", step=5, reason="node_joined", rung=5)
    run.steps(6, 10)
    history = build_history(run.records)
    assert [change.title for change in history.changes] == ["c joined"]
    content = page.render_page(history, {})
    text = Reader(content).text
    assert "0incidents" in text.replace(" ", "")
    assert "Changes of membership" in text
    assert 'class="incident"' not in content
    assert 'class="wash"' not in content
    assert 'class="span change"' in content


def test_learning_rate_norm_and_memory_have_drawings() -> None:
    run = lossy_run()
    assert "memory of each worker" not in Reader(rendered(run)).text
    for step, used in ((1, 100 << 20), (12, 300 << 20)):
        run.write(MemoryUsed(1, used, step=step))
    content = rendered(run)
    text = Reader(content).text
    for title in ("learning rate", "gradient norm", "memory of each worker"):
        assert title in text
    history = build_history(run.records)
    assert content.count('class="wash"') == 2 * len(history.breaks) > 0  # wide and narrow
    tips = [tip for points in points_of(content) for _, _, tip in points]
    assert "step 12, rank 1\n300.0 MiB" in tips
    assert "step 30\ngradient norm before clipping 1.5" in tips
    run.write(MemoryUsed(0, 100 << 20, 7 << 30, step=20))
    assert "device memory of each worker" in Reader(rendered(run)).text
    found = summary(build_history(run.records))["memory"]
    assert [(sample["rank"], sample["step"]) for sample in found] == [(0, 20), (1, 12)]


def test_the_page_of_a_run_that_trains_loads_itself_again() -> None:
    run = started_run(3)
    content = page.render_page(build_history(run.records), {}, written_at=3661.0)
    assert ("meta", "http-equiv", "refresh") in Reader(content).attributes
    assert "as of 01:01:01 UTC" in content
    run.finish()
    assert "refresh" not in page.render_page(build_history(run.records), {}, written_at=3661.0)


def test_each_cell_has_its_column_name_for_narrow_screens() -> None:
    found = re.findall(r"<td[^>]*>", rendered())
    assert found
    assert all(" data-label=" in cell for cell in found)


def test_a_long_run_is_thinned_but_its_spike_stays() -> None:
    run = Scribe()
    run.start()
    run.generate()
    for step in range(1, 20_001):
        done = step_done(step, 0.01, {"compute": 0.01})
        loss = 77.0 if step == 12_345 else done.loss
        run.write(type(done)(**{**vars(done), "loss": loss}), after=0.01)
    content = rendered(run)
    assert len(content) < 600_000
    assert "77.0000 nats" in content


def test_losses_that_are_not_numbers_do_not_break_the_picture() -> None:
    run = Scribe()
    run.start()
    run.generate()
    for step, loss in enumerate((5.0, math.nan, math.inf, 4.0), 1):
        done = step_done(step, 0.0, {})
        run.write(type(done)(**{**vars(done), "loss": loss}), after=0.0)
    content = rendered(run)
    paths = "".join(re.findall(r' d="([^"]*)"', content))
    assert "nan" not in paths
    assert "inf" not in paths
    Reader(content)


@pytest.mark.parametrize("steps", [0, 1])
def test_a_run_that_has_hardly_begun(steps: int) -> None:
    run = Scribe()
    if steps:
        run.start()
        run.generate()
        run.steps(1, steps)
    assert Reader(rendered(run)).open == []


def test_text_from_outside_is_only_ever_text() -> None:
    evil = '</script><script>alert(1)</script><img src=x onerror="y">'
    run = lossy_run()
    run.write(RunStarted(evil, evil, evil, True))
    run.write(SettingIgnored(evil, evil))
    run.lose(0, cause=evil)
    run.restart(30)
    content = rendered(
        run,
        samples=[evil],
        baselines={"uni" + evil: 3.0},
        resolved={"config": {evil: evil}, "origins": {}},
    )
    reader = Reader(content)
    assert reader.open == []
    assert not [a for a in reader.attributes if a[0] == "img" or a[1] == "onerror"]
    assert content.count("<script>") == 1
    assert evil in reader.text


def test_every_value_of_the_run_file_stands_there_with_its_origin() -> None:
    loaded = resolve_config(None, "command line", ["train.steps=30"])
    reader = Reader(rendered(resolved=loaded.to_json()))
    for part in (
        "train.steps",
        "command line (train.steps=30)",
        "model.dim",
        "preset (tiny)",
        "train.optimizer.betas",
        "data.sources",
    ):
        assert part in reader.text


def test_utilisation_is_given_by_both_conventions_or_not_at_all() -> None:
    loaded = resolve_config(None, "x", ["train.precision=bf16", "model.vocab_size=1024"])
    known = rendered(resolved=loaded.to_json(), device="NVIDIA H100 80GB HBM3")
    assert "torchtitan" in known
    assert "Megatron" in known
    for device in (None, "Imaginary 9000"):
        assert "of peak" not in rendered(resolved=loaded.to_json(), device=device)


def test_every_class_of_time_has_a_colour() -> None:
    names = {class_colour(name)[6:-1].replace("-", "_") for name in CLASSES}
    assert names <= {name.replace("-", "_") for name in COLOURS}


def test_it_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    page.write_result(target, page.render_page(build_history(lossy_run().records), {}))
    assert target.read_text() == rendered()
    assert os.listdir(tmp_path) == ["report.html"]
    with pytest.raises(RunFolderError, match="mkdir -p"):
        page.write_result(
            tmp_path / "missing" / "report.html",
            page.render_page(build_history(lossy_run().records), {}),
        )


def test_the_summary_is_json_and_adds_up() -> None:
    value = summary(build_history(lossy_run().records), baselines={"unigram": 3.4}, curve=True)
    assert json.loads(json.dumps(value)) == value
    assert sum(value["seconds_by_class"].values()) == pytest.approx(value["wall_seconds"])
    assert value["last_step"] == 30
    assert value["incidents"][0]["steps_lost"] == 3
    assert [p["step"] for p in value["steps"]] == list(range(1, 31))
    assert [p["step"] for p in value["steps_done_again"][0]] == [11, 12, 13]


# --- units of samples -----------------------------------------------------------------------------
@pytest.mark.parametrize(("tokens", "unit"), [(64, "samples"), (8192, "tokens")])
def test_the_unit_of_the_speed_is_what_is_counted(tokens: int, unit: str) -> None:
    progress = RunProgress(total_steps=9)
    done = StepDone(0.5, tokens, 1.0, 0.1, 0.25, samples=64, step=1)
    progress.observe(Record(1, "rank0", 1, 1.0, done))
    assert f" {unit}/s" in step_line(progress)
    curve = Curve(can_rewind=True)
    curve.observe(Record(1, "rank0", 1, 0.5, GenerationStarted({}, "start", step=0)))
    (point,) = curve.observe(Record(1, "rank0", 1, 1.0, done))
    assert isinstance(point, Point)
    assert point.values[f"time/{unit}_per_second"] == tokens / 0.25


@pytest.mark.parametrize(
    ("unit", "words"), [("samples", "0.5000 per sample"), ("tokens", "0.5000 nats per token")]
)
def test_the_tip_of_a_step_names_the_unit(unit: str, words: str) -> None:
    tip = step_tip(StepPoint(1, 1, 0.0, 0.5, 64, 64, 1.0, 0.1, 0.25, unit), None)
    assert words in tip
    assert f"256 {unit}/s" in tip


# --- the load of experts --------------------------------------------------------------------------
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
