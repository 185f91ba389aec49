"""What an agent knows of the run it takes part in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from holdfast.config.run import RunConfig
from holdfast.elastic.protocol.worker_spec import DEFAULT_ENTRY
from holdfast.wire.secret import Secret
from holdfast.wire.store.run_store import RunStore
from holdfast.wire.term import Term


@dataclass(frozen=True)
class Joining:
    """What an agent joins with. folder: the run folder that `store` stands for. resume: the command
    that takes the run up again. alone: the term of a run of this node only. begin: looks for what a
    lost run folder held, by whoever leads first; above which generation the run's are to be then.
    entry: a worker's main function."""

    config: RunConfig
    store: RunStore
    secret: Secret
    folder: Path
    node: str
    config_hash: str
    dataset_version: str
    entry: str = DEFAULT_ENTRY
    resume: str = "holdfast train"
    alone: Term | None = None
    begin: Callable[[], int] = lambda: 0

    @property
    def suffix(self) -> str:
        """What this node's part of the run is called by; "" where it is the only one."""
        return "" if self.alone is not None else self.node

    @property
    def places(self) -> int:
        workers = self.config.layout.workers
        return workers if self.alone is not None else self.config.cluster.places or workers
