"""A worker's spec, received when it is forked: one frozen value, sent as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from holdfast.layout import Topology

if TYPE_CHECKING:
    from holdfast.config.run import RunConfig

DEFAULT_ENTRY = "holdfast.elastic.worker.main:run"
"""A worker's main function, `module:function`."""


def modules_to_preload(config: RunConfig) -> tuple[str, ...]:
    """Return the modules that this run's workers import in addition to their main function's
    module.

    The fork server imports them for the workers: FSDP2 brings DTensor and torch's compiler, which
    is as much again as all the rest.
    """
    kinds = [degrees for _, degrees in config.layout.kinds]
    needed = []
    if config.layout.zero > 1 and any(degrees.dp_shard > 1 for degrees in kinds):
        needed += ["holdfast.parallel.fsdp", _COMPILER]
    elif config.train.compile:
        needed += [_COMPILER]
    if any(degrees.pp > 1 for degrees in kinds):
        needed += ["torch.fx.experimental.symbolic_shapes"]  # a backward that is given a gradient
    return tuple(needed)


_COMPILER = "torch._dynamo"


@dataclass(frozen=True)
class WorkerSpec:
    """All that a worker needs to begin, except the run's secret, which travels separately.

    `config` is the RunConfig as JSON (`RunConfig.model_validate` takes it back) and `topology` the
    Topology's. `restore_key` is the commit to begin from; None means initial weights, and
    `start_step` is then 0. `forked` is the node's monotonic clock just before the fork, in seconds,
    for `WorkerReady.seconds`.

    `hazard` is the failure rate that the agent has seen so far, as Hazard's JSON. `classes` is what
    the failures took with them, as the counts of `FailureClassCounts`. Both are None if they are
    not needed. `skips` is the data that the run leaves out, as Skips' JSON. `again` is the step
    that this generation retries, as Retry's JSON.

    `rank` is -1 for a standby, whose topology is any of the run's.
    """

    config: dict[str, Any]
    topology: dict[str, Any]
    generation: int
    rank: int
    threads: int  # cores this worker may compute on
    agent: str  # "host:port" of the agent's control
    mover_socket: str  # path of the mover's unix socket, "" without a mover
    run_folder: str
    dataset: str  # folder of the prepared dataset
    restore_key: str | None
    start_step: int
    device: str  # "cpu", "cuda:0", ...
    log: str  # file that the worker's output goes to
    gloo_interface: str = "lo"
    heartbeat_seconds: float = 0.2
    forked: float = 0.0
    hazard: dict[str, Any] | None = None
    classes: list[float] | None = None
    skips: list[dict[str, Any]] | None = None
    again: dict[str, Any] | None = None
    meet: str = ""  # "host:port" where the generation's workers find each other; "": the agent's

    @property
    def world_size(self) -> int:
        return len(self.topology["nodes"])

    def parse_topology(self) -> Topology:
        return Topology.from_json(self.topology)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(value: dict[str, Any]) -> WorkerSpec:
        """Parse a spec; drop keys of a newer version. Raises TypeError if one is missing."""
        known = {f.name for f in fields(WorkerSpec)}
        return WorkerSpec(**{key: item for key, item in value.items() if key in known})
