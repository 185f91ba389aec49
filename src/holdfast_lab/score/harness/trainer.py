"""What `holdfast score` at level 1 asks of a trainer, and how a trainer is named.

A trainer runs on nodes that the harness starts, kills, warns and freezes. It tells which steps it
has committed, out of its own journal or a file that its loop writes, never by a summary.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from math import sqrt
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

from holdfast.errors import ConfigError
from holdfast_lab.chaos.network import DEVICE, Network
from holdfast_lab.chaos.relay import LinkShape
from holdfast_lab.score.record import Commit
from holdfast_lab.score.scenarios import ScenarioRun
from holdfast_lab.traces.events import TraceEvent

_HELPERS = "helpers"


def needs_network(run: ScenarioRun) -> bool:
    """Whether a scenario changes a link."""
    return any(event.kind == "net" for event in run.events)


class NodeNetwork:
    """The namespaces of one run's nodes. Raises UserError if this machine cannot make them.

    The network has two regions (`holdfast_lab.chaos.network`). A scenario's `net` events name the
    nodes of the first one, as in "n1->rest". All other nodes, and helpers such as a store or a
    lighthouse, are in the second one. The harness reads files and writes to pipes, so it needs no
    network."""

    def __init__(self, run: ScenarioRun) -> None:
        nodes = list(dict.fromkeys(e.node for e in run.events if e.kind == "join"))
        far = dict.fromkeys(e.node.partition("->")[0] for e in run.events if e.kind == "net")
        self._network = Network()
        try:
            self._network.up([_HELPERS, *nodes])
            self._link = self._network.split(list(far))
        except BaseException:
            self._network.down()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._network.down()

    def command(self, node: str = _HELPERS) -> list[str]:
        """What to put before a command so that it runs on a node, or where the helpers run."""
        return self._network.command(node)

    def address(self, node: str = _HELPERS) -> str:
        return self._network.address(node)

    def settings(self, node: str) -> list[str]:
        """Of a run file of Holdfast, for a node."""
        return self._network.settings(node)

    def environment(self) -> dict[str, str]:
        """For all processes of the run."""
        return {"GLOO_SOCKET_IFNAME": DEVICE}

    def degrade(self, event: TraceEvent) -> None:
        """Give the line between the regions the shape of a `net` event. A direction is late by half
        of the round trip."""
        self._link.shape(LinkShape(float(event.extra["rtt_ms"]) / 2000, 0.0, event.value))


# --- trainers -------------------------------------------------------------------------------------
SAVE_S = 1.0
"""What trainers take for the time of a save before they have measured one, in real seconds."""


@dataclass(frozen=True)
class Workplace:
    """The place and the settings of one run.

    Attributes:
        folder: for everything of the run.
        places: nodes that the run is made for, one worker each.
        microbatch_s: seconds of one of the 12 microbatches of a step.
        between_s: T_b of the scenario, in compressed seconds.
        k: compression; detection time-outs and waiting times are divided by it.
        is_resilient: False: as fast as the trainer can be if it saves nothing.
        python: the interpreter in which the trainer is installed.
        network: of the nodes, one namespace each; None: all share the loopback device.
    """

    folder: Path
    places: int
    microbatch_s: float
    between_s: float
    k: float
    is_resilient: bool
    python: str
    network: NodeNetwork | None = None

    def address(self, node: str) -> str:
        """At which the other nodes reach a node."""
        return "127.0.0.1" if self.network is None else self.network.address(node)

    @property
    def helper_address(self) -> str:
        """At which nodes reach a helper: a store, a lighthouse."""
        return "127.0.0.1" if self.network is None else self.network.address()

    @property
    def save_interval_s(self) -> float:
        """Young's interval for a save of one real second, in compressed seconds."""
        return sqrt(2 * SAVE_S / self.k * self.between_s)

    def environment(self) -> dict[str, str]:
        """For all processes of the run."""
        return {
            "HOLDFAST_SCORE_MICROBATCH_S": str(self.microbatch_s),
            "HOLDFAST_SCORE_LINES": str(self.folder / "lines"),
            "HOLDFAST_SCORE_BETWEEN_S": str(self.between_s),
            "HOLDFAST_SCORE_SAVE_S": str(SAVE_S / self.k),
            "HOLDFAST_SCORE_RESILIENT": "1" if self.is_resilient else "0",
            "OMP_NUM_THREADS": "1",
            **(self.network.environment() if self.network is not None else {}),
        }


class TrainerRun(Protocol):
    """One run of a trainer. Its nodes have the names of the scenario."""

    def start(self, nodes: Sequence[str]) -> None:
        """Start nodes: at the beginning, and whenever one joins or is repaired."""
        ...

    def kill(self, node: str) -> None:
        """SIGKILL to all processes of a node."""
        ...

    def warn(self, node: str, seconds: float) -> None:
        """The node will be taken so many seconds from now. A trainer may ignore it."""
        ...

    def worker_pids(self, node: str) -> list[int]:
        """Processes that compute: the harness stops and continues them to make a node slow."""
        ...

    def commits(self) -> list[Commit]:
        """All committed steps so far, in order of time; t_s in seconds since the epoch."""
        ...

    def corrupt_checkpoint(self) -> bool:
        """Damage the newest durable checkpoint; False: there is none."""
        ...

    def stop(self) -> None:
        """End everything that was started."""
        ...


@runtime_checkable
class ParkingRun(TrainerRun, Protocol):
    """A run whose nodes can be started before they join.

    The harness parks all nodes of a scenario, also those that join later, before its clock starts.
    So the start of their processes, which compression does not shorten, is not measured. For a run
    that cannot park, it is."""

    def park(self, nodes: Sequence[str]) -> None:
        """Start the processes of nodes. They load what they import, and wait. `start` lets the
        oldest parked node of a name join. A name is parked once for each time that it joins."""
        ...

    def ready_nodes(self) -> int:
        """How many parked nodes have loaded what they need."""
        ...


class Trainer(Protocol):
    """A kind of trainer.

    One whose runs obey `Workplace.network` has `obeys_network = True`. Without it, the scenarios
    that change a link are refused."""

    @property
    def name(self) -> str: ...

    def why_unavailable(self, python: str) -> str:
        """A sentence on what is missing on this machine; "": it can run."""
        ...

    def open(self, workplace: Workplace) -> TrainerRun:
        """Prepare a run; no node has been started yet."""
        ...


def obeys_network(trainer: Trainer) -> bool:
    """Whether the nodes of a trainer's runs can be put into networks of their own."""
    return bool(getattr(trainer, "obeys_network", False))


_TRAINERS = {
    "holdfast": "holdfast_lab.score.harness.holdfast_trainer:HoldfastTrainer",
    "holdfast-restart": "holdfast_lab.score.harness.holdfast_trainer:RestartingTrainer",
    "torchrun-dcp": "holdfast_lab.score.harness.torchrun_trainer:TorchrunTrainer",
    "torchft": "holdfast_lab.score.harness.torchft_trainer:TorchftTrainer",
    "ray-train": "holdfast_lab.score.harness.ray_trainer:RayTrainer",
}
TRAINERS = tuple(_TRAINERS)


def trainer_named(name: str) -> Trainer:
    """A trainer by its name, or of an adapter file as FILE.py:CLASS. Raises ConfigError."""
    if name in _TRAINERS:
        module, _, attribute = _TRAINERS[name].partition(":")
        made: Callable[[], Trainer] = getattr(import_module(module), attribute)
        return made()
    file, _, attribute = name.rpartition(":")
    if not file.endswith(".py"):
        raise ConfigError(
            f"there is no trainer {name!r}",
            where="command line, --trainer",
            remedy=f"use one of {', '.join(TRAINERS)}, or FILE.py:CLASS",
        )
    if not Path(file).is_file():
        raise ConfigError(
            f"there is no file {file}",
            where="command line, --trainer",
            remedy="name a Python file that has the class, as FILE.py:CLASS",
        )
    return _made_by_user(file, attribute)


def _made_by_user(file: str, attribute: str) -> Trainer:
    """An object of a user's class. Raises ConfigError with the line of the file that failed."""
    try:
        spec = importlib.util.spec_from_file_location("holdfast_score_adapter", file)
        if spec is None or spec.loader is None:
            raise ImportError("this is no Python file")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found = getattr(module, attribute, None)
        made: Any = found() if found is not None else None
    except Exception as error:
        from holdfast.tasks.task.loading import place_in_user_code  # it is slow to import

        said = " ".join(str(error).split())
        raise ConfigError(
            f"{file} cannot be loaded: {type(error).__name__}: {said}{place_in_user_code(error)}",
            where="command line, --trainer",
            remedy=f"run python {file}, which shows the error, and mend it",
        ) from None
    if made is None:
        raise ConfigError(
            f"{file} has no {attribute}",
            where="command line, --trainer",
            remedy="name a class of that file, as FILE.py:CLASS (docs/studies/score.md)",
        )
    missing = [name for name in ("name", "why_unavailable", "open") if not hasattr(made, name)]
    if missing:
        raise ConfigError(
            f"class {attribute} of {file} lacks {', '.join(missing)}",
            where="command line, --trainer",
            remedy="add what the protocol Trainer has (docs/studies/score.md)",
        )
    trainer: Trainer = made
    return trainer
