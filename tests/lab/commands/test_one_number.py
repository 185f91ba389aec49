"""One number for one question: plan, simulate and scale name one layout and one speed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.commands import within

RUN = """\
name: team
data: {sequence_length: 4096}
model: {preset: llama3.2-1b}
train: {steps: 100, batch_size: 64, precision: bf16}
layout: auto
"""
GIVEN: tuple[tuple[str, ...], ...] = (
    (),
    ("layout.dp_shard=8",),
    ("layout.tp=2",),
    ("layout.pp=2", "layout.tp=4"),
    ("layout.cp=2",),
    ("layout.mode=given",),
    ("layout.mode=given", "layout.tp=8"),
    ("train.microbatch_size=4",),
    ("train.microbatch_size=1", "layout.pp=4"),
    ("train.recompute=full",),
    ("layout.zero=1", "layout.dp_shard=2"),
    ("train.batch_size=32", "layout.dp_shard=16"),
)


IN_EACH_RUN = (0, 3, 7)
"""Cases of `make test`; `make campaign` has all."""
CASES = [
    pytest.param(given, id=" ".join(given), marks=[pytest.mark.slow] * (i not in IN_EACH_RUN))
    for i, given in enumerate(GIVEN)
]


@pytest.mark.parametrize("given", CASES)
def test_two_commands_give_one_layout_and_one_speed(given: tuple[str, ...], tmp_path: Path) -> None:
    run, trace = tmp_path / "run.yaml", tmp_path / "quiet.csv"
    run.write_text(RUN)
    trace.write_text("time_h,change,node\n0,add,a\n0,add,b\n999,add,c\n")
    asked = (run, *given, "--cluster", "2x8xH100-80")
    best = json.loads(within("plan", *asked, "--json").succeeds().out)["layouts"][0]
    table = within("plan", *asked).succeeds().out
    row = next(line for line in table.splitlines() if line.endswith("<- chosen"))
    layout = re.split(r"  +", row)[0]
    simulated = within("simulate", *asked, "--trace", trace).succeeds().out
    assert f"team: {layout} on 2x8xH100-80" in simulated
    found = json.loads(within("simulate", *asked, "--trace", trace, "--json").succeeds().out)
    speed = found["outcomes"][0]["estimates"]["tokens_per_s"]["mean"]
    assert speed == pytest.approx(best["tokens_per_second"], rel=0.01)
    scaled = json.loads(within("scale", *asked, "--most", "16", "--json").succeeds().out)
    assert scaled["points"][-1]["step_s"] == pytest.approx(best["step_s"], rel=0.01)


@pytest.mark.slow
def test_the_example_of_175_billion_parameters_has_one_layout(tmp_path: Path) -> None:
    """In `plan`, in `simulate` without a loss, and in the table of docs/guide/planning.md."""
    root = Path(__file__).parents[3]
    trace, nodes = tmp_path / "quiet.csv", "".join(f"0,add,n{n}\n" for n in range(128))
    trace.write_text(f"time_h,change,node\n{nodes}24,add,more\n")
    asked = (root / "examples/175b/run.yaml", "--cluster", "128x8xA100-80")
    best = json.loads(within("plan", *asked, "--json").succeeds().out)["layouts"][0]
    table = within("plan", *asked).succeeds().out
    row = next(line for line in table.splitlines() if line.endswith("<- chosen"))
    assert re.split(r"  +", row)[:4] == ["1 x pp 16, dp_shard 8, tp 8", "1f1b", "1", "selective"]
    simulated = within("simulate", *asked, "--trace", trace, "--json").succeeds().out
    speed = json.loads(simulated)["outcomes"][0]["estimates"]["tokens_per_s"]["mean"]
    assert speed == pytest.approx(best["tokens_per_second"], rel=0.01)
    page = (root / "docs/guide/planning.md").read_text()
    found = re.search(r"\| tokens/s \| ([0-9,]+) \|", page[page.index("examples/175b/run.yaml") :])
    assert found is not None
    assert float(found[1].replace(",", "")) == pytest.approx(best["tokens_per_second"], rel=0.01)
