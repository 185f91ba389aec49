"""The run that an agent takes part in: configuration, store, folder, names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from holdfast.config.run import RunConfig
from holdfast.elastic.protocol.worker_spec import DEFAULT_ENTRY
from holdfast.events import Event
from holdfast.layout import Topology
from holdfast.policy.spending import NodePrice
from holdfast.wire.secret import Secret
from holdfast.wire.store.run_store import RunStore
from holdfast.wire.term import Term


@dataclass(frozen=True)
class TrackerProgram:
    """A program that follows the run for a tracker. The agent that leads keeps it running."""

    name: str  # of the tracker
    module: str  # the program
    spec_line: bytes  # for its standard input
    log: str  # its place in the run folder
    finish_s: float | None = None  # of the run's end that wait for it; None: logging.finish_seconds
    by_hand: str = ""  # a command that does the rest, if it is not that of trackers


@dataclass(frozen=True)
class RunContext:
    """Parameters of an agent's run.

    folder: the run folder that `store` accesses. entry: a worker's main function.
    resume_command: the command that resumes the run. single_node_term: the term of a run of this
    node only. generation_floor: searches for the content of a lost run folder and returns a
    generation. The run's next generations must be newer than that one. The first coordinator of the
    run calls it. trackers: run next to the agent that leads. predict: the plan of a generation, for
    the journal, from its topology and what says which nodes share cores. plan: where the layout of
    the run came from, likewise. before_joining: called in a thread once the node's mover and fork
    server run. The node joins when it returns. stop_cause: why the run's owner ends all nodes; ""
    if it does not, or if that is not known. It reads the run folder, so call it in a thread.
    price: of an hour of this node; None: nothing is known."""

    config: RunConfig
    store: RunStore
    secret: Secret
    folder: Path
    node: str
    config_hash: str
    dataset_version: str
    worker_entry: str = DEFAULT_ENTRY
    resume_command: str = "holdfast train"
    single_node_term: Term | None = None
    generation_floor: Callable[[], int] = lambda: 0
    trackers: tuple[TrackerProgram, ...] = ()
    predict: Callable[[Topology, Mapping[str, str]], Event | None] = lambda topology, cores: None
    plan: str = ""
    before_joining: Callable[[], None] | None = None
    stop_cause: Callable[[], str] = lambda: ""
    price: NodePrice | None = None

    @property
    def node_suffix(self) -> str:
        """Suffix of this node's names in the run; "" if it is the only node."""
        return "" if self.single_node_term is not None else self.node

    @property
    def places(self) -> int:
        workers = self.config.layout.workers
        return (
            workers if self.single_node_term is not None else self.config.cluster.places or workers
        )
