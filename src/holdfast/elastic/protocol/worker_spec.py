"""A worker's spec, received when it is forked: one frozen value, sent as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from holdfast.core.data.skips import Skips
from holdfast.core.json_parsing import JsonMessage, Key
from holdfast.layout import Topology
from holdfast.policy.detection.bad_steps import StepRetry
from holdfast.policy.saving.failure_classes import FailureClassCounts
from holdfast.policy.saving.failure_rate import FailureRate

if TYPE_CHECKING:
    from holdfast.config.run import RunConfig

DEFAULT_ENTRY = "holdfast.elastic.worker.main:run"
"""A worker's main function, `module:function`."""


def modules_to_preload(config: RunConfig) -> tuple[str, ...]:
    """Return the modules that this run's workers import in addition to their main function's
    module.

    The fork server imports them for the workers: FSDP2 brings DTensor and torch's compiler, which
    is as much again as all the rest. Classes of torch.optim bring the compiler too. transformers
    takes seconds.
    """
    from holdfast.config.loading.model_from import TRANSFORMERS_TASKS
    from holdfast.config.sections.task import SCRIPT_TASK
    from holdfast.options.registry import effect_modules

    kinds = [degrees for _, degrees in config.layout.kinds]
    needed = []
    if config.task.name in TRANSFORMERS_TASKS:
        needed += ["transformers.modeling_utils"]
    if config.layout.zero_in_memory > 1 and any(degrees.dp_shard > 1 for degrees in kinds):
        needed += ["holdfast.parallel.axes.fsdp", _COMPILER]
    elif (
        config.train.compile
        or config.train.recomputes  # torch.utils.checkpoint imports it at its first call
        or config.train.optimizer.name != "adamw"
        or config.outer.is_on  # the outer optimizer is one of torch.optim
        or config.train.precision == "fp8"
        or config.task.name == SCRIPT_TASK  # its optimizer is one of torch.optim
    ):
        needed += [_COMPILER]
    if config.train.precision == "fp16" or any(degrees.pp > 1 for degrees in kinds):
        needed += ["torch.fx.experimental.symbolic_shapes"]  # a backward that is given a gradient
    return (*needed, *effect_modules(config))


_COMPILER = "torch._dynamo"


@dataclass(frozen=True)
class WorkerSpec(JsonMessage):
    """All that a worker needs to begin, except the run's secret, which travels separately.

    `config` is the RunConfig as JSON: `RunConfig.model_validate` takes it back in the worker, which
    the fork server does not do. `topology` is None for a standby. `restore_key` is the commit to
    begin from; None means initial weights, and `start_step` is then 0. `forked` is the node's
    monotonic clock just before the fork, in seconds, for `WorkerReady.seconds`.

    `failure_rate` is the failure rate that the agent has seen so far. `failure_classes` is what the
    failures took with them. Both are None if they are not needed. `skips` is the data that the run
    leaves out, None for nothing. `retry` is the step that this generation repeats. `saves_only` is
    True if the worker saves the state that it holds, and leaves without a step.

    `rank` is -1 for a standby, whose topology is None.
    """

    absent_if_default = frozenset({"saves_only", "policies"})
    empty_if_none = frozenset({"topology"})
    config: dict[str, Any]
    topology: Topology | None
    generation: int
    rank: int
    threads: int  # cores this worker may compute on
    agent: str  # "host:port" of the agent's control
    mover_socket: str  # path of the mover's unix socket, "" without a mover
    run_folder: str
    dataset: str  # folder of the prepared dataset
    restore_key: str | None
    start_step: int
    device: str  # "cpu", "cuda:0", ...; a standby may have the kind alone
    log: str  # file that the worker's output goes to
    gloo_interface: str = "lo"
    heartbeat_seconds: float = 0.2
    forked: float = 0.0
    failure_rate: Annotated[FailureRate | None, Key("hazard")] = None
    failure_classes: Annotated[FailureClassCounts | None, Key("classes")] = None
    skips: Skips | None = None
    retry: Annotated[StepRetry | None, Key("again")] = None
    orders: bool = True  # a worker of an older version takes commands only if this says so
    policies: str = ""  # folder of this node into which trainers publish their weights
    saves_only: bool = False
    meet: str = ""  # "host:port" where the generation's workers find each other; "": the agent's

    @property
    def world_size(self) -> int:
        return self.placed_topology.world_size

    @property
    def placed_topology(self) -> Topology:
        """Return the topology of a worker that has a place in it."""
        if self.topology is None:
            raise ValueError("a standby has no topology")
        return self.topology
