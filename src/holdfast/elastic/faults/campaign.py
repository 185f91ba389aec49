"""Many disturbed runs, one after the other, each with a verdict; a finished one is not done again.

OUT/undisturbed-120/       the same run that nobody disturbs, of so many steps, once
OUT/runs/tp-7-3/           one disturbed run: agents/ (what each said), faults/ (orders),
                           notices/, run (the run folder), result.json
OUT/result.json            all of them
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from holdfast.elastic.faults.armed import Armoury
from holdfast.elastic.faults.deeds import Scene
from holdfast.elastic.faults.disturb import TAIL, Disturbance, Story
from holdfast.elastic.faults.fleet import Fleet
from holdfast.elastic.faults.network import Network, available
from holdfast.elastic.faults.schedule import Draw, drawn
from holdfast.elastic.faults.shapes import Shape
from holdfast.elastic.faults.verdict import judge
from holdfast.errors import HoldfastError, UserError

MOST = 25
"""Faults of one run."""
BEAT = 0.4
RESULT = "result.json"
QUICK = (
    f"cluster.beat_seconds={BEAT}", "cluster.settle_seconds=0.3", "cluster.alone_seconds=2",
    "cluster.gather_seconds=30", "cluster.threads_per_worker=1", "cluster.notices=file",
    "cluster.notices_every_seconds=0.2",
)  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """command: how `holdfast` is called. run_file and overrides: what is trained. draws: a trace;
    None: from the seed, out of `names`."""

    command: tuple[str, ...]
    run_file: Path
    overrides: tuple[str, ...]
    out: Path
    seed: int
    names: tuple[str, ...]
    draws: tuple[Draw, ...] | None = None
    networks: bool = True
    minutes: float = 10.0  # of one run


@dataclass(frozen=True)
class Task:
    """One disturbed run."""

    shape: Shape
    number: int
    faults: int
    last: int = 0  # the step of the last fault, where that is known

    def name(self, seed: int) -> str:
        plain = "".join(c if c.isalnum() or c in "_-" else "-" for c in self.shape.name)
        return f"{plain}-{seed}-{self.number}"

    @property
    def steps(self) -> int:
        return max(4 * self.faults + 20, self.last + 2 * TAIL)


def tasks(shapes: Sequence[Shape], faults: int) -> list[Task]:
    """So many faults over these layouts in turn, at most `MOST` a run, and some for each layout."""
    made: list[Task] = []
    number, most = 0, max(1, min(MOST, faults // len(shapes)))
    while faults > 0:
        size = min(most, faults)
        made.append(Task(shapes[number % len(shapes)], number + 1, size))
        number, faults = number + 1, faults - size
    return made


class Campaign:
    """Runs tasks. say: gets a line for each fault and each run."""

    def __init__(self, settings: Settings, say: Callable[[str], None]) -> None:
        self._it, self._say = settings, say
        self._no_network = "they were switched off" if not settings.networks else available()

    def run(self, work: Sequence[Task]) -> list[dict[str, Any]]:
        """The results, in order, with those that were there already."""
        self._it.out.mkdir(parents=True, exist_ok=True)
        results = []
        for task in work:
            folder = self._it.out / "runs" / task.name(self._it.seed)
            stored = folder / RESULT
            if stored.exists():
                self._say(f"{folder.name}: done before")
                results.append(json.loads(stored.read_text()))
                continue
            self._say(f"{folder.name}: {task.faults} faults, {task.shape.ranks} ranks on "
                      f"{task.shape.nodes} nodes")  # fmt: skip
            results.append(self._one(task, folder))
            new = folder / f".{RESULT}"
            new.write_text(json.dumps(results[-1], indent=1))
            new.replace(stored)
        return results

    # --- one run ----------------------------------------------------------------------------------
    def _one(self, task: Task, folder: Path) -> dict[str, Any]:
        undisturbed = self._undisturbed(task.steps)
        shutil.rmtree(folder, ignore_errors=True)
        for name in ("faults", "notices", "agents", "run.d"):
            (folder / name).mkdir(parents=True)
        (folder / "run").symlink_to("run.d")
        begun = time.monotonic()
        story = self._disturbed(task, folder)
        result: dict[str, Any] = {
            "run": folder.name, "layout": task.shape.name, "ranks": task.shape.ranks,
            "nodes": task.shape.nodes, "seed": self._it.seed, "steps": task.steps,
            "tolerance": task.shape.tolerance, "seconds": round(time.monotonic() - begun, 1),
            "faults": [asdict(done) for done in story.faults], "rejected": story.rejected,
            "unexpected_ends": story.ends, "problem": story.problem,
        }  # fmt: skip
        if not story.problem:
            try:
                verdict = judge(folder / "run.d", undisturbed, task.steps, task.shape.tolerance)
            except (HoldfastError, OSError, KeyError, ValueError) as error:
                result["problem"] = f"the verdict could not be made: {error!r}"
            else:
                result["verdict"] = asdict(verdict)
        result["recovered"] = recovered(result)
        self._say(f"{folder.name}: {sentence(result)}")
        return result

    def _disturbed(self, task: Task, folder: Path) -> Story:
        nodes = [chr(ord("a") + index) for index in range(task.shape.nodes)]
        network = Network() if self._no_network is None else None
        folder = folder.absolute()
        armoury = Armoury(folder / "faults")
        armoury.prepare()
        settings = [
            *self._settings(task.steps), *task.shape.settings, *QUICK, f"folder={folder / 'run'}",
            f"cluster.faults={armoury.folder}",
        ]  # fmt: skip
        try:
            if network is not None:
                network.up(nodes)

            def own(node: str) -> list[str]:
                place = [f"cluster.notices_at={folder / 'notices' / node}"]
                return place + (network.settings(node) if network is not None else [])

            def wrap(node: str, line: list[str]) -> list[str]:
                return [*network.command(node), *line] if network is not None else line

            fleet = Fleet(
                folder / "agents", [*self._it.command, "train", str(self._it.run_file)], settings,
                own=own, wrap=wrap, environment={"OMP_NUM_THREADS": "1"},
            )  # fmt: skip
            scene = Scene(
                fleet, folder / "run", folder / "run.d", folder / "notices", network, BEAT, 1.0
            )
            try:
                return Disturbance(scene, armoury, task.shape, nodes, task.steps, self._say).run(
                    self._draws(task), task.faults, time.monotonic() + 60 * self._it.minutes
                )
            finally:
                fleet.end()
        finally:
            if network is not None:
                network.down()

    def _draws(self, task: Task) -> Iterator[Draw]:
        if self._it.draws is not None:
            return iter(self._it.draws)
        return drawn(f"{self._it.seed} {task.shape.name} {task.number}", self._it.names)

    def _settings(self, steps: int) -> list[str]:
        return [f"train.steps={steps}", *self._it.overrides]

    def _undisturbed(self, steps: int) -> Path:
        """The run that is compared with: one worker, made once."""
        folder = (self._it.out / f"undisturbed-{steps}").absolute()
        done = folder / "undisturbed"
        if done.exists():
            return folder
        shutil.rmtree(folder, ignore_errors=True)
        line = [
            *self._it.command, "train", str(self._it.run_file), *self._settings(steps),
            f"folder={folder}", "layout.workers=1", "cluster.threads_per_worker=1",
        ]  # fmt: skip
        made = subprocess.run(
            line, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        if made.returncode:
            said = made.stderr.strip().splitlines() or made.stdout.strip().splitlines() or [""]
            raise UserError(
                f"the undisturbed run ended with {made.returncode}: {said[-1]}",
                where=str(self._it.run_file), remedy="see that it trains: holdfast train",
            )  # fmt: skip
        done.touch()
        return folder


def recovered(result: dict[str, Any]) -> bool:
    """Reached its last step without a hand, and all three verdicts are equal."""
    verdict = result.get("verdict")
    return not result["problem"] and verdict is not None and not (
        verdict["curve"] or verdict["ledger"] or verdict["tensors"]
    )  # fmt: skip


def counted(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The faults of a run that hit at their moment."""
    return [done for done in result["faults"] if done["outcome"] in ("", "recovered")]


def sentence(result: dict[str, Any]) -> str:
    number, verdict = len(counted(result)), result.get("verdict") or {}
    if recovered(result):
        equal = "to the bit" if result["tolerance"] == 0 else f"within {verdict['worst']:.1g}"
        return (f"recovered from {number} faults in {result['seconds']:g} s; curve and tensors "
                f"equal {equal}, ledger equal")  # fmt: skip
    if result["problem"]:
        return f"NOT RECOVERED after {number} faults: {result['problem']}"
    wrong = [verdict[key] for key in ("curve", "ledger", "tensors") if verdict[key]]
    return f"NOT EQUAL after {number} faults: {'; '.join(wrong)}"


def table(results: Sequence[dict[str, Any]]) -> list[str]:
    """Fault by outcome, in lines."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        for done in result["faults"]:
            rows.setdefault(done["fault"], []).append(done | {"good": result["recovered"]})
    lines = [f"{'fault':<18}{'hit':>5}{'recovered':>11}{'missed':>8}{'median s':>10}{'worst s':>9}"]
    total: Counter[str] = Counter()
    for name in sorted(rows):
        hit = [d for d in rows[name] if d["outcome"] in ("", "recovered")]
        good = [d for d in hit if d["good"] and d["outcome"] == "recovered"]
        seconds = [d["seconds"] for d in hit if d["outcome"] == "recovered"] or [0.0]
        missed = len(rows[name]) - len(hit)
        total.update(hit=len(hit), good=len(good), missed=missed)
        lines.append(f"{name:<18}{len(hit):>5}{len(good):>11}{missed:>8}{median(seconds):>10.2f}"
                     f"{max(seconds):>9.2f}")  # fmt: skip
    lines.append(f"{'all':<18}{total['hit']:>5}{total['good']:>11}{total['missed']:>8}")
    named = [d["named"] for row in rows.values() for d in row if d["named"] is not None]
    if named:
        lines.append(f"workers that were to be lost, and were named: {sum(named)} of {len(named)}")
    rejected = Counter(
        (row["fault"], row["why"].split(" in step")[0]) for r in results for row in r["rejected"]
    )
    if rejected:
        lines.append(f"rejected draws: {sum(rejected.values())}")
        lines += [f"  {n:>4} {name}: {why}" for (name, why), n in sorted(rejected.items())]
    return lines


def summary(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What OUT/result.json holds."""
    return {
        "runs": list(results), "recovered": all(r["recovered"] for r in results),
        "faults": sum(len(counted(r)) for r in results), "last_step": TAIL,
    }  # fmt: skip
