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
import secrets
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
import holdfast_lab
from holdfast.config.loading.load import load_config
from holdfast.elastic.protocol.fault_orders import FaultOrders
from holdfast.errors import HoldfastError, RunFolderError, UserError
from holdfast.launch.node.fleet import Fleet, die_with_parent
from holdfast.wire.store.location import parse_location
from holdfast.wire.store.run_location import make_local_folder
from holdfast_lab.chaos.actions import ChaosEnvironment
from holdfast_lab.chaos.catalog import FAULTS
from holdfast_lab.chaos.compare import compare_runs
from holdfast_lab.chaos.experiment import Experiment
from holdfast_lab.chaos.layouts import ChaosLayout
from holdfast_lab.chaos.network import Network, why_unavailable
from holdfast_lab.chaos.results import (
    DisturbedRunReport,
    count_tracebacks,
    describe_result,
    is_recovered,
)
from holdfast_lab.chaos.run_driver import STEPS_AFTER_LAST_FAULT
from holdfast_lab.chaos.schedule import Draw, check_faults_possible, draw_faults, node_names

MAX_FAULTS_PER_RUN = 25  # faults of one run
STEPS_PER_FAULT, EXTRA_STEPS_PER_SAVE_FAULT = 4, 8
"""Steps of a run for a fault, and how many more for one that is where the state is saved."""
HEARTBEAT_S = 0.4
RESULT_FILE = "result.json"
FAST_SETTINGS = (
    f"cluster.beat_seconds={HEARTBEAT_S}",
    "cluster.settle_seconds=0.3",
    "cluster.alone_seconds=2",
    "cluster.gather_seconds=30",
    "cluster.threads_per_worker=1",
    "cluster.notices=file",
    "cluster.notices_every_seconds=0.2",
    "cluster.max_restarts_without_progress=7",
)
"""The last: a fault of two losses may take the run back a step, where the next two are due. Four
losses without a new step are what a run gives up after; here they are no sign of a broken one."""


@dataclass(frozen=True)
class CampaignSettings:
    """command: how `holdfast` is called. run_file and overrides: what is trained. draws: a trace;
    None: from the seed, out of `fault_names`, or of all where there are none. shard: which part of
    how many this is. store: address of a bucket in which each run gets a prefix; "": folders."""

    command: tuple[str, ...]
    run_file: Path
    overrides: tuple[str, ...]
    out: Path
    seed: int
    fault_names: tuple[str, ...]
    draws: tuple[Draw, ...] | None = None
    use_networks: bool = True
    minutes_per_run: float = 10.0  # of one run
    shard: tuple[int, int] = (1, 1)
    store: str = ""

    @property
    def shard_suffix(self) -> str:
        """The suffix of the names of files that belong to one shard alone."""
        index, parts = self.shard
        return "" if parts == 1 else f"-{index}of{parts}"

    def run_settings(self, steps: int) -> list[str]:
        """The overrides of a run of so many steps."""
        return [f"train.steps={steps}", *self.overrides]

    def address_of(self, run: str) -> str:
        """The address of a run in the bucket. Each attempt has an unused prefix."""
        place, mark, options = self.store.partition("?")
        return f"{place.rstrip('/')}/{run}-{secrets.token_hex(4)}{mark}{options}"


@dataclass(frozen=True)
class DisturbedRun:
    """One disturbed run."""

    shape: ChaosLayout
    number: int
    faults: int
    last: int = 0  # the step of the last fault, where that is known
    each: int = STEPS_PER_FAULT  # steps for a fault

    def name(self, seed: int) -> str:
        plain = "".join(c if c.isalnum() or c in "_-" else "-" for c in self.shape.name)
        return f"{plain}-{seed}-{self.number}"

    @property
    def steps(self) -> int:
        return max(
            self.each * self.faults + 3 * STEPS_AFTER_LAST_FAULT,
            self.last + 2 * STEPS_AFTER_LAST_FAULT,
        )


def plan_runs(
    shapes: Sequence[ChaosLayout], fault_count: int, fault_names: Sequence[str] = ()
) -> list[DisturbedRun]:
    """So many faults over these layouts in turn, at most `MOST` a run, and some for each layout.
    fault_names: of the faults; none: all of them."""
    made: list[DisturbedRun] = []
    rare = sum(FAULTS[name].needs_save_step for name in fault_names) / max(1, len(fault_names))
    each = STEPS_PER_FAULT + round(EXTRA_STEPS_PER_SAVE_FAULT * rare)
    number, most = 0, max(1, min(MAX_FAULTS_PER_RUN, fault_count // len(shapes)))
    while fault_count > 0:
        size = min(most, fault_count)
        made.append(DisturbedRun(shapes[number % len(shapes)], number + 1, size, each=each))
        number, fault_count = number + 1, fault_count - size
    return made


class CampaignFolder:
    """The folder of a campaign's results, which checks that older results have the same inputs.

    with_networks: the nodes have their own networks.
    """

    def __init__(self, settings: CampaignSettings, with_networks: bool) -> None:
        self._settings, self._with_networks = settings, with_networks
        self._training_digests: dict[int, str] = {}
        self._source_digest = source_digest()

    def result_file(self, task: DisturbedRun) -> Path:
        """Return the file that exists once a run has been made."""
        return self._settings.out / "runs" / task.name(self._settings.seed) / RESULT_FILE

    def check(self, task: DisturbedRun) -> None:
        """Raises RunFolderError where what lies there was made of something else."""
        stored = self.result_file(task)
        whole = self.undisturbed_marker(task.steps)
        try:
            found = json.loads(stored.read_text()).get("made_from") if stored.exists() else None
            other = stored.exists() and found != self.run_digest(task)
        except (ValueError, AttributeError):
            other = True
        if other or (whole.exists() and whole.read_text() != self.training_digest(task.steps)):
            folder = stored.parent if other else whole.parent
            raise RunFolderError(
                "this holds what another campaign made, of other faults or settings, or by other "
                "code",
                where=str(folder),
                remedy="name another --out, or remove it",
            )

    def training_digest(self, steps: int) -> str:
        """A digest of what is trained, by which code. Raises ConfigError."""
        if steps not in self._training_digests:
            loaded = load_config(self._settings.run_file, self._settings.run_settings(steps))
            self._training_digests[steps] = _digest(
                [self._source_digest, loaded.config.model_dump(mode="json")]
            )
        return self._training_digests[steps]

    def run_digest(self, task: DisturbedRun) -> str:
        """A digest of all that a run comes from; the same for every shard."""
        draws = self._settings.draws
        asked = (
            self._settings.fault_names
            if draws is None
            else [asdict(d) | {"where": ""} for d in draws]
        )
        return _digest(
            [
                self.training_digest(task.steps),
                asdict(task),
                self._settings.seed,
                asked,
                self._with_networks,
                *([self._settings.store] if self._settings.store else []),
            ]
        )

    def undisturbed_marker(self, steps: int) -> Path:
        """Return the file that exists once the undisturbed run is complete."""
        folder = self._settings.out / f"undisturbed-{steps}{self._settings.shard_suffix}"
        return folder.absolute() / "undisturbed"


class Campaign:
    """Runs tasks. say: gets a line for each fault and each run."""

    def __init__(self, settings: CampaignSettings, say: Callable[[str], None]) -> None:
        self._settings, self._say = settings, say
        self._why_no_network = why_unavailable()
        if not settings.use_networks:
            self._why_no_network = "networks of the nodes are switched off"
        if settings.store:
            self._why_no_network = "a node in a network of its own does not reach the bucket"
        self._folder = CampaignFolder(settings, self._why_no_network is None)

    def check(self, shapes: Sequence[ChaosLayout]) -> None:
        """Raises UserError for faults that can never happen in one of these layouts, and for a
        store that is no address."""
        if self._settings.store:
            parse_location(self._settings.store)
        faults = [FAULTS[name] for name in self._settings.fault_names or FAULTS]
        for shape in shapes:
            check_faults_possible(
                faults,
                self._settings.draws or (),
                shape,
                self._why_no_network,
                in_bucket=bool(self._settings.store),
            )

    def run(self, runs: Sequence[DisturbedRun]) -> list[dict[str, Any]]:
        """The results, in order, with those that were there already.

        Raises UserError, before anything is started, where something else lies there."""
        for task in runs:
            self._folder.check(task)
        with self._hold_locks():
            return self._run_each(runs)

    def _run_each(self, runs: Sequence[DisturbedRun]) -> list[dict[str, Any]]:
        results = []
        for task in runs:
            stored = self._folder.result_file(task)
            folder = stored.parent
            if stored.exists():
                self._say(f"{folder.name}: done before")
                results.append(json.loads(stored.read_text()))
                continue
            self._say(
                f"{folder.name}: {task.faults} faults, {task.shape.ranks} ranks on "
                f"{task.shape.nodes} nodes"
            )
            results.append(self._run_one(task, folder))
            new = folder / f".{RESULT_FILE}"
            new.write_text(json.dumps(results[-1], indent=1))
            new.replace(stored)
        return results

    @contextmanager
    def _hold_locks(self) -> Iterator[None]:
        """Hold the lock against a second campaign of the same runs. Shards run side by side, each
        once.

        Raises UserError."""
        shard = self._settings.shard_suffix
        locks = {".lock": LOCK_SH, f".lock{shard}": LOCK_EX} if shard else {".lock": LOCK_EX}
        self._settings.out.mkdir(parents=True, exist_ok=True)
        with ExitStack() as held:
            for name, how in locks.items():
                file = held.enter_context((self._settings.out / name).open("w"))
                try:
                    flock(file, how | LOCK_NB)
                except BlockingIOError:
                    raise UserError(
                        "another chaos command is at work here",
                        where=str(self._settings.out),
                        remedy="wait for its end, or name another --out",
                    ) from None
            yield

    # --- one run ----------------------------------------------------------------------------------
    def _run_one(self, task: DisturbedRun, folder: Path) -> dict[str, Any]:
        undisturbed = self._ensure_undisturbed(task.steps)
        shutil.rmtree(folder, ignore_errors=True)
        for name in ("faults", "notices", "agents", "run.d"):
            (folder / name).mkdir(parents=True)
        (folder / "run").symlink_to("run.d")
        begun, store = time.monotonic(), self._settings.store
        address = self._settings.address_of(folder.name) if store else ""
        real = make_local_folder(address) if address else folder / "run.d"
        story = self._run_disturbed(task, folder, address)
        result: dict[str, Any] = {
            "run": folder.name,
            "layout": task.shape.name,
            "ranks": task.shape.ranks,
            "nodes": task.shape.nodes,
            "seed": self._settings.seed,
            "steps": task.steps,
            "tolerance": task.shape.tolerance,
            "seconds": round(time.monotonic() - begun, 1),
            "faults": [asdict(done) for done in story.faults],
            "rejected": story.rejected_draws,
            "unexpected_ends": story.unexpected_ends,
            "problem": story.problem,
            "asked": task.faults,
            "cut": story.cut,
            "notes": story.notes,
            "made_from": self._folder.run_digest(task),
            "tracebacks": count_tracebacks(folder / "agents", real),
        }
        if not story.problem:
            try:
                verdict = compare_runs(real, undisturbed, task.steps, task.shape.tolerance)
            except (HoldfastError, OSError, KeyError, ValueError) as error:
                result["problem"] = f"the verdict could not be made: {error!r}"
            else:
                result["verdict"] = asdict(verdict)
        result["recovered"] = is_recovered(result)
        self._say(f"{folder.name}: {describe_result(result)}")
        return result

    def _run_disturbed(self, task: DisturbedRun, folder: Path, address: str) -> DisturbedRunReport:
        nodes = node_names(task.shape)
        network = Network() if self._why_no_network is None else None
        folder = folder.absolute()
        armoury = FaultOrders(folder / "faults")
        armoury.prepare()
        settings = [
            *self._settings.run_settings(task.steps),
            *task.shape.settings,
            *FAST_SETTINGS,
            f"folder={address or folder / 'run'}",
            f"cluster.faults={armoury.folder}",
        ]
        try:
            if network is not None:
                network.up(nodes)

            def own(node: str) -> list[str]:
                place = [f"cluster.notices_at={folder / 'notices' / node}"]
                return place + (network.settings(node) if network is not None else [])

            def wrap(node: str, line: list[str]) -> list[str]:
                return [*network.command(node), *line] if network is not None else line

            fleet = Fleet(
                folder / "agents",
                [*self._settings.command, "train", str(self._settings.run_file)],
                settings,
                node_settings=own,
                wrap_command=wrap,
                environment={"OMP_NUM_THREADS": "1"},
            )
            scene = ChaosEnvironment(
                fleet,
                make_local_folder(address) if address else folder / "run",
                make_local_folder(address) if address else folder / "run.d",
                folder / "notices",
                network,
                HEARTBEAT_S,
                1.0,
            )
            try:
                return Experiment(
                    scene,
                    armoury,
                    task.shape,
                    nodes,
                    task.steps,
                    self._say,
                    self._save_interval_steps,
                ).run(
                    self._draws_of(task),
                    task.faults,
                    time.monotonic() + 60 * self._settings.minutes_per_run,
                )
            finally:
                fleet.kill_all()
        finally:
            if network is not None:
                network.down()

    @property
    def _save_interval_steps(self) -> int:
        return load_config(
            self._settings.run_file, self._settings.run_settings(1)
        ).config.checkpoint.by_steps

    def _draws_of(self, task: DisturbedRun) -> Iterator[Draw]:
        if self._settings.draws is not None:
            return iter(self._settings.draws)
        return draw_faults(
            f"{self._settings.seed} {task.shape.name} {task.number}", self._settings.fault_names
        )

    def _ensure_undisturbed(self, steps: int) -> Path:
        """The run that is compared with: one worker, made once."""
        done = self._folder.undisturbed_marker(steps)
        folder = done.parent
        if done.exists():
            return folder
        shutil.rmtree(folder, ignore_errors=True)
        line = [
            *self._settings.command,
            "train",
            str(self._settings.run_file),
            *self._settings.run_settings(steps),
            f"folder={folder}",
            "layout.workers=1",
            "cluster.threads_per_worker=1",
        ]
        with (self._settings.out / ".preparing").open("w") as turn:
            flock(turn, LOCK_EX)  # the first prepares the data, which no two may at once
            made = subprocess.run(
                line,
                capture_output=True,
                text=True,
                stdin=subprocess.DEVNULL,
                check=False,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                preexec_fn=die_with_parent(),
            )
        if made.returncode:
            raise UserError(
                f"the undisturbed run ended with {made.returncode}: {_failure_reason(made)}",
                where=str(self._settings.run_file),
                remedy="see that it trains: holdfast train",
            )
        new = done.with_name(".undisturbed")
        new.write_text(self._folder.training_digest(steps))
        new.replace(done)
        return folder


def source_digest() -> str:
    """A digest of Holdfast's own sources: what an older state of them has shown says nothing of
    this one."""
    digest = sha256()
    for package in (Path(holdfast.__path__[0]), Path(holdfast_lab.__path__[0])):
        for path in sorted(package.rglob("*.py")):
            digest.update(f"{path.relative_to(package)} {path.stat().st_size} ".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _failure_reason(ended: subprocess.CompletedProcess[str]) -> str:
    """The sentence in which a command said why, which need not be its last line."""
    said = ended.stderr.strip().splitlines() or ended.stdout.strip().splitlines() or [""]
    return next((line for line in reversed(said) if line.startswith("holdfast: ")), said[-1])


def _digest(what: object) -> str:
    return sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()
