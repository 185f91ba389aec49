"""Many disturbed runs, one after the other, each with a verdict; a finished one is not repeated.

OUT/undisturbed-112/       the same run, undisturbed, of so many steps, once; for a shard
                           undisturbed-112-1of2
OUT/runs/tp-7-3/           one disturbed run: agents/ (what each said), faults/ (orders),
                           notices/, run (the run folder), result.json
OUT/result.json            all of them; of a shard, result-1of2.json

A run's result holds a digest of all that it came from. So does the file that marks an undisturbed
run as complete. A result of other inputs than those requested now is refused.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from fcntl import LOCK_EX, LOCK_NB, LOCK_SH, flock
from hashlib import sha256
from pathlib import Path
from typing import Any

import holdfast
from holdfast.chaos.actions import Scene
from holdfast.chaos.agents import Fleet, end_with_starter
from holdfast.chaos.catalog import FAULTS
from holdfast.chaos.compare import judge
from holdfast.chaos.experiment import TAIL, Disturbance, Story
from holdfast.chaos.layouts import Shape
from holdfast.chaos.network import Network, available
from holdfast.chaos.results import recovered, sentence, tracebacks
from holdfast.chaos.schedule import Draw, drawn, node_names, refuse_hopeless
from holdfast.config.load import load
from holdfast.elastic.protocol.fault_orders import Armoury
from holdfast.errors import HoldfastError, RunFolderError, UserError

MOST = 25
"""Faults of one run."""
EACH, RARE = 4, 8
"""Steps of a run for a fault, and how many more for one that is where the state is saved."""
BEAT = 0.4
RESULT = "result.json"
QUICK = (
    f"cluster.beat_seconds={BEAT}", "cluster.settle_seconds=0.3", "cluster.alone_seconds=2",
    "cluster.gather_seconds=30", "cluster.threads_per_worker=1", "cluster.notices=file",
    "cluster.notices_every_seconds=0.2", "cluster.max_restarts_without_progress=7",
)  # fmt: skip
"""The last: a fault of two losses may take the run back a step, where the next two are due. Four
losses without a new step are what a run gives up after; here they are no sign of a broken one."""


@dataclass(frozen=True)
class Settings:
    """command: how `holdfast` is called. run_file and overrides: what is trained. draws: a trace;
    None: from the seed, out of `names`, or of all where there are none. shard: which part of how
    many this is."""

    command: tuple[str, ...]
    run_file: Path
    overrides: tuple[str, ...]
    out: Path
    seed: int
    names: tuple[str, ...]
    draws: tuple[Draw, ...] | None = None
    networks: bool = True
    minutes: float = 10.0  # of one run
    shard: tuple[int, int] = (1, 1)

    @property
    def part(self) -> str:
        """The suffix of the names of files that belong to one shard alone."""
        index, parts = self.shard
        return "" if parts == 1 else f"-{index}of{parts}"


@dataclass(frozen=True)
class Task:
    """One disturbed run."""

    shape: Shape
    number: int
    faults: int
    last: int = 0  # the step of the last fault, where that is known
    each: int = EACH  # steps for a fault

    def name(self, seed: int) -> str:
        plain = "".join(c if c.isalnum() or c in "_-" else "-" for c in self.shape.name)
        return f"{plain}-{seed}-{self.number}"

    @property
    def steps(self) -> int:
        return max(self.each * self.faults + 3 * TAIL, self.last + 2 * TAIL)


def tasks(shapes: Sequence[Shape], faults: int, names: Sequence[str] = ()) -> list[Task]:
    """So many faults over these layouts in turn, at most `MOST` a run, and some for each layout.
    names: of the faults; none: all of them."""
    made: list[Task] = []
    rare = sum(FAULTS[name].saves for name in names) / max(1, len(names))
    each = EACH + round(RARE * rare)
    number, most = 0, max(1, min(MOST, faults // len(shapes)))
    while faults > 0:
        size = min(most, faults)
        made.append(Task(shapes[number % len(shapes)], number + 1, size, each=each))
        number, faults = number + 1, faults - size
    return made


class Campaign:
    """Runs tasks. say: gets a line for each fault and each run."""

    def __init__(self, settings: Settings, say: Callable[[str], None]) -> None:
        self._it, self._say = settings, say
        self._no_network = available()
        if not settings.networks:
            self._no_network = "networks of the nodes are switched off"
        self._trained: dict[int, str] = {}
        self._code = code()

    def check(self, shapes: Sequence[Shape]) -> None:
        """Raises UserError for faults that can never happen in one of these layouts."""
        faults = [FAULTS[name] for name in self._it.names or FAULTS]
        for shape in shapes:
            refuse_hopeless(faults, self._it.draws or (), shape, self._no_network)

    def run(self, work: Sequence[Task]) -> list[dict[str, Any]]:
        """The results, in order, with those that were there already.

        Raises UserError, before anything is started, where something else lies there."""
        for task in work:
            self._check_ours(task)
        with self._alone():
            return self._each(work)

    def _each(self, work: Sequence[Task]) -> list[dict[str, Any]]:
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

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the lock against a second campaign of the same runs. Shards run side by side, each
        once.

        Raises UserError."""
        shard = self._it.part
        locks = {".lock": LOCK_SH, f".lock{shard}": LOCK_EX} if shard else {".lock": LOCK_EX}
        self._it.out.mkdir(parents=True, exist_ok=True)
        with ExitStack() as held:
            for name, how in locks.items():
                file = held.enter_context((self._it.out / name).open("w"))
                try:
                    flock(file, how | LOCK_NB)
                except BlockingIOError:
                    raise UserError(
                        "another chaos command is at work here", where=str(self._it.out),
                        remedy="wait for its end, or name another --out",
                    ) from None  # fmt: skip
            yield

    # --- whether what lies there is ours ----------------------------------------------------------
    def _check_ours(self, task: Task) -> None:
        stored = self._it.out / "runs" / task.name(self._it.seed) / RESULT
        whole = self._whole(task.steps)
        try:
            found = json.loads(stored.read_text()).get("made_from") if stored.exists() else None
            other = stored.exists() and found != self._made_from(task)
        except (ValueError, AttributeError):
            other = True
        if other or (whole.exists() and whole.read_text() != self._trains(task.steps)):
            folder = stored.parent if other else whole.parent
            raise RunFolderError(
                "this holds what another campaign made, of other faults or settings, or by other "
                "code", where=str(folder), remedy="name another --out, or remove it",
            )  # fmt: skip

    def _trains(self, steps: int) -> str:
        """A digest of what is trained, by which code. Raises ConfigError."""
        if steps not in self._trained:
            loaded = load(self._it.run_file, self._settings(steps))
            self._trained[steps] = _digest([self._code, loaded.config.model_dump(mode="json")])
        return self._trained[steps]

    def _made_from(self, task: Task) -> str:
        """A digest of all that a run comes from; the same for every shard."""
        draws = self._it.draws
        asked = self._it.names if draws is None else [asdict(d) | {"where": ""} for d in draws]
        return _digest([
            self._trains(task.steps), asdict(task), self._it.seed, asked, self._no_network is None,
        ])  # fmt: skip

    def _whole(self, steps: int) -> Path:
        """Return the file that exists once the undisturbed run is complete."""
        folder = self._it.out / f"undisturbed-{steps}{self._it.part}"
        return folder.absolute() / "undisturbed"

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
            "unexpected_ends": story.ends, "problem": story.problem, "asked": task.faults,
            "cut": story.cut, "notes": story.notes, "made_from": self._made_from(task),
            "tracebacks": tracebacks(folder / "agents", folder / "run.d"),
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
        nodes = node_names(task.shape)
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
                return Disturbance(
                    scene, armoury, task.shape, nodes, task.steps, self._say, self._saves_every
                ).run(self._draws(task), task.faults, time.monotonic() + 60 * self._it.minutes)
            finally:
                fleet.end()
        finally:
            if network is not None:
                network.down()

    @property
    def _saves_every(self) -> int:
        return load(self._it.run_file, self._settings(1)).config.checkpoint.by_steps

    def _draws(self, task: Task) -> Iterator[Draw]:
        if self._it.draws is not None:
            return iter(self._it.draws)
        return drawn(f"{self._it.seed} {task.shape.name} {task.number}", self._it.names)

    def _settings(self, steps: int) -> list[str]:
        return [f"train.steps={steps}", *self._it.overrides]

    def _undisturbed(self, steps: int) -> Path:
        """The run that is compared with: one worker, made once."""
        done = self._whole(steps)
        folder = done.parent
        if done.exists():
            return folder
        shutil.rmtree(folder, ignore_errors=True)
        line = [
            *self._it.command, "train", str(self._it.run_file), *self._settings(steps),
            f"folder={folder}", "layout.workers=1", "cluster.threads_per_worker=1",
        ]  # fmt: skip
        with (self._it.out / ".preparing").open("w") as turn:
            flock(turn, LOCK_EX)  # the first prepares the data, which no two may at once
            made = subprocess.run(
                line, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False,
                env=os.environ | {"OMP_NUM_THREADS": "1"}, preexec_fn=end_with_starter(),
            )  # fmt: skip
        if made.returncode:
            raise UserError(
                f"the undisturbed run ended with {made.returncode}: {_reason(made)}",
                where=str(self._it.run_file), remedy="see that it trains: holdfast train",
            )  # fmt: skip
        new = done.with_name(".undisturbed")
        new.write_text(self._trains(steps))
        new.replace(done)
        return folder


def code() -> str:
    """A digest of Holdfast's own sources: what an older state of them has shown says nothing of
    this one."""
    package, found = Path(holdfast.__file__).parent, sha256()
    for path in sorted(package.rglob("*.py")):
        found.update(f"{path.relative_to(package)} {path.stat().st_size} ".encode())
        found.update(path.read_bytes())
    return found.hexdigest()


def _reason(ended: subprocess.CompletedProcess[str]) -> str:
    """The sentence in which a command said why, which need not be its last line."""
    said = ended.stderr.strip().splitlines() or ended.stdout.strip().splitlines() or [""]
    return next((line for line in reversed(said) if line.startswith("holdfast: ")), said[-1])


def _digest(what: object) -> str:
    return sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()
