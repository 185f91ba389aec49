"""A chain of trainings on a tiny world: pretrain, fine-tune, prefer, reinforce, distil.

    python examples/tinyworld/run.py            or: make chain
    python examples/tinyworld/run.py --fresh    deletes what an earlier start left
    python examples/tinyworld/run.py --no-kills
    python examples/tinyworld/run.py --quick    a tenth of the steps, to see it work

A process of each role is killed on the way. After each stage the model answers held-out questions,
judged by exact match per skill. A second start continues where the first one ended. The page is
runs/tinyworld/chain.html.
"""

from __future__ import annotations

import argparse
import html
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import torch
from judge import judge
from tokenizers import Tokenizer
from world import document, write_world

import holdfast
from holdfast.data.stream.dataset import Dataset

HERE = Path(os.path.relpath(Path(__file__).parent))
RUNS = HERE / "../../runs/tinyworld"
LESSONS = 8_000
"""Questions that the last stage's teacher answers."""


@dataclass(frozen=True)
class Kill:
    """A process that is killed with SIGKILL once a step is done."""

    role: str  # worker, actor, scorer, or agent: the coordinator, after which a new start follows
    step: int


@dataclass(frozen=True)
class Stage:
    """One run of the chain; its run file has its name."""

    name: str
    teaches: str
    steps: int
    kills: tuple[Kill, ...]
    min_rise: float = 0  # of the score, over that of the stage before

    def shortened(self) -> Stage:
        """A tenth of the steps, and kills in their order."""
        kills = (Kill(kill.role, 1 + number) for number, kill in enumerate(self.kills))
        return replace(self, steps=self.steps // 10, kills=tuple(kills), min_rise=0)


STAGES = (
    Stage("pretrain", "the language, and worked tasks", 500, (Kill("worker", 150),)),
    Stage("tune", "to answer, wordily or briefly", 150, (Kill("agent", 70),)),
    Stage("prefer", "to answer briefly (ORPO)", 100, (Kill("worker", 40),)),
    Stage(
        "reinforce",
        "to be right (GRPO, exact match)",
        60,
        (Kill("actor", 10), Kill("scorer", 20), Kill("worker", 30), Kill("agent", 40)),
        min_rise=0.4,
    ),
    Stage("distil", "the same to a model of half the size", 500, (Kill("worker", 100),)),
)


class Runner:
    """Runs one stage with its kills, to its end."""

    def __init__(self, stage: Stage, folder: Path):
        self.stage, self.folder = stage, folder
        self._file = RUNS / f"{stage.name}.killed.json"  # of earlier starts, too
        self.killed: list[str] = json.loads(self._file.read_text()) if self._file.is_file() else []
        self._words = ["train", str(HERE / f"{stage.name}.yaml"), f"train.steps={stage.steps}"]

    def run(self, with_kills: bool) -> None:
        left = list(self.stage.kills)[len(self.killed) :] if with_kills else []
        while True:
            process = _start(*self._words)
            over, ended_agent = threading.Event(), threading.Event()
            killer = threading.Thread(target=self._kill, args=(process, left, over, ended_agent))
            killer.start()
            code = process.wait()
            over.set()
            killer.join()
            if not ended_agent.is_set():
                if code:
                    sys.exit(code)
                return

    def _kill(
        self,
        process: subprocess.Popen[bytes],
        left: list[Kill],
        over: threading.Event,
        ended_agent: threading.Event,
    ) -> None:
        """Kill what is due as the steps come; the list gets shorter."""
        while left and not over.wait(0.2):
            step = max((n for n in _steps(self.folder)), default=0)
            if step < left[0].step:
                continue
            kill = left[0]
            pids = [process.pid] if kill.role == "agent" else _pids(process.pid, kill.role)
            if not pids:
                continue  # it has not begun yet
            left.pop(0)
            with suppress(ProcessLookupError):
                if kill.role == "agent":
                    ended_agent.set()
                os.kill(pids[-1], signal.SIGKILL)
                self.killed.append(f"{kill.role} after step {step}")
                self._file.write_text(json.dumps(self.killed))
                print(f"step {step}: killed the {kill.role} (process {pids[-1]})", flush=True)
            if kill.role == "agent":
                return


def _steps(folder: Path) -> Iterator[int]:
    if folder.is_dir():
        with suppress(Exception):
            yield from (r["step"] for r in holdfast.journal(folder) if r["kind"] == "step_done")


def _pids(agent: int, role: str) -> list[int]:
    """The processes of a role under an agent, by their titles."""
    found = []
    with suppress(psutil.Error):
        for child in psutil.Process(agent).children(recursive=True):
            with suppress(psutil.Error):
                if " ".join(child.cmdline()).startswith(f"holdfast: {role} "):
                    found.append(child.pid)
    return found


def _start(*words: str | Path) -> subprocess.Popen[bytes]:
    print(f"\n$ holdfast {' '.join(map(str, words))}", flush=True)
    return subprocess.Popen([sys.executable, "-m", "holdfast.cli.main", *map(str, words)])


def _command(*words: str | Path) -> None:
    if code := _start(*words).wait():
        sys.exit(code)


def run_stage(stage: Stage, with_kills: bool) -> dict[str, Any]:
    """Run a stage, judge its model, and return the row of the report; an earlier one if it is
    there."""
    row_file, model = RUNS / f"{stage.name}.json", RUNS / "models" / stage.name
    if row_file.is_file():
        print(f"{stage.name}: done by an earlier start", flush=True)
        row: dict[str, Any] = json.loads(row_file.read_text())
        return row
    folder = RUNS / stage.name
    if stage.name == "distil":
        write_lessons()
        _command("data", "teach", HERE / "distil.yaml")
    runner = Runner(stage, folder)
    runner.run(with_kills)
    shutil.rmtree(model, ignore_errors=True)
    _command("export", folder, "--to", model)
    questions = "held_out_text.jsonl" if stage.name == "pretrain" else "held_out.jsonl"
    scores = judge(model, RUNS / "world" / questions)
    _command("report", folder)
    evaluated = [r for r in holdfast.journal(folder) if r["kind"] == "evaluated"]
    row = {
        "stage": stage.name,
        "teaches": stage.teaches,
        "seconds": _trained_seconds(folder),
        "killed": runner.killed,
        "bits_per_byte": evaluated[-1]["bits_per_byte"] if evaluated else None,
        "scores": {score.skill: [score.right, score.asked] for score in scores},
    }
    row_file.write_text(json.dumps(row, indent=1) + "\n")
    return row


def _trained_seconds(folder: Path) -> float:
    """Seconds in which the run was at work, over all its starts."""
    words = [sys.executable, "-m", "holdfast.cli.main", "report", str(folder), "--json"]
    found = json.loads(subprocess.run(words, check=True, capture_output=True).stdout)
    return float(found["wall_seconds"] - found["seconds_by_class"].get("stopped", 0.0))


def floor_of_validation() -> float:
    """Bits a byte of the validation texts by their draws. Their ends count as bytes, as in a run.

    No model expects fewer, unless it knows which texts are validation."""
    documents = json.loads((RUNS / "world" / "floor.json").read_text())["documents"]
    bits = dict(document(1, number) for number in range(documents))
    dataset = Dataset.open(RUNS / "datasets" / "text")
    (stream,) = dataset.streams("validation")
    starts = stream.document_starts().tolist()
    texts = [stream.read(*ends).tolist() for ends in pairwise(starts)]
    tokenizer = Tokenizer.from_file(str(dataset.tokenizer_path))
    return sum(bits[tokenizer.decode(ids[:-1])] for ids in texts) / stream.tokens


def write_lessons() -> None:
    """Chat rows for the last stage: new questions, with the right short answers."""
    from world import Draw, any_task, reply_row

    tasks = (any_task(Draw(f"lesson {number}")) for number in range(LESSONS))
    text = "".join(json.dumps(reply_row(task)) + "\n" for task in tasks)
    (RUNS / "world" / "lessons.jsonl").write_text(text, "utf-8")


def share(row: dict[str, Any]) -> float:
    """The share of right answers over all skills."""
    right, asked = (sum(each) for each in zip(*row["scores"].values(), strict=True))
    return float(right / asked)


def table(rows: list[dict[str, Any]]) -> list[list[str]]:
    """The scores as rows of texts, with a head."""
    skills = sorted(rows[0]["scores"])
    out = [["after", *skills, "all", "s", "killed"]]
    for row in rows:
        found = [row["scores"][skill] for skill in skills]
        shares = [f"{r / n:.0%}" for r, n in found]
        killed = ", ".join(row["killed"]) or "nothing"
        out.append([row["stage"], *shares, f"{share(row):.1%}", f"{row['seconds']:.0f}", killed])
    return out


def write_page(rows: list[dict[str, Any]], floor: float, seconds: float) -> Path:
    """Write the page of the chain: scores, bits a byte, and the reports of the runs."""
    body = []
    for number, cells in enumerate(table(rows)):
        kind = "td" if number else "th"
        body.append("<tr>" + "".join(f"<{kind}>{html.escape(c)}</{kind}>" for c in cells) + "</tr>")
    measured = rows[0]["bits_per_byte"]
    links = "".join(
        f'<li><a href="{row["stage"]}/report.html">{row["stage"]}</a>: '
        f"{html.escape(row['teaches'])}"
        for row in rows
    )
    page = RUNS / "chain.html"
    page.write_text(
        '<!doctype html><meta charset="utf-8"><title>tinyworld</title>'
        "<style>body{font:15px sans-serif;margin:2em}td,th{padding:.2em .8em;text-align:left}"
        "table{border-collapse:collapse}tr{border-bottom:1px solid #ddd}</style>"
        f"<h1>A chain on tinyworld</h1><p>Greedy answers to held-out questions, by exact match. "
        f"{seconds:.0f} s in all.</p><table>{''.join(body)}</table>"
        f"<p>Validation after pretraining: {measured:.4f} bits a byte. The text needs {floor:.4f} "
        f"at least.</p><ul>{links}</ul>",
        "utf-8",
    )
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fresh", action="store_true", help="delete what an earlier start left")
    parser.add_argument("--no-kills", action="store_true", help="disturb nothing")
    parser.add_argument("--quick", action="store_true", help="a tenth of the steps")
    parser.add_argument("--until", choices=[stage.name for stage in STAGES], default="distil")
    given = parser.parse_args()
    torch.set_num_threads(1)
    begun = time.monotonic()
    if given.fresh:
        shutil.rmtree(RUNS, ignore_errors=True)
    if not (RUNS / "world" / "floor.json").is_file():
        write_world(RUNS / "world", documents=6_000 if given.quick else 60_000)
    rows: list[dict[str, Any]] = []
    for stage in (each.shortened() if given.quick else each for each in STAGES):
        rows.append(run_stage(stage, not given.no_kills))
        for cells in table(rows):
            print("  ".join(f"{cell:9}" for cell in cells), flush=True)
        if stage.name == "pretrain":
            bits = rows[0]["bits_per_byte"]
            floor = floor_of_validation()
            print(f"validation: {bits:.4f} bits a byte; the text needs {floor:.4f} at least")
        if stage.min_rise and share(rows[-1]) < share(rows[-2]) + stage.min_rise:
            sys.exit(f"{stage.name}: the score should rise by {stage.min_rise:.0%} of the answers")
        if stage.name == given.until:
            break
    print(f"wrote {write_page(rows, floor, time.monotonic() - begun)}")


if __name__ == "__main__":
    main()
