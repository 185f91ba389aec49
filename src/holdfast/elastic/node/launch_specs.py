"""The inputs of a generation: the node's context, the topology, the specs of mover and workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from holdfast.checkpoint.mover.service import MoverSettings
from holdfast.config.run import RunConfig
from holdfast.core.devices import is_accelerator
from holdfast.elastic.node.output_relay import make_log_folder
from holdfast.elastic.protocol.coordinator_messages import StartState
from holdfast.elastic.protocol.generation_record import GenerationRecord
from holdfast.elastic.protocol.worker_spec import WorkerSpec
from holdfast.layout import Topology, place_replicas
from holdfast.machine.limits import usable_cores
from holdfast.plan.placing.interface import LayoutPlan, NodePlaces, PresentPlacement
from holdfast.plan.placing.layouts import layouts_of
from holdfast.plan.placing.planner import plan_layout
from holdfast.policy.saving.failure_classes import FailureHistory
from holdfast.wire.secret import Secret
from holdfast.wire.store.run_store import translate_os_error


@dataclass(frozen=True)
class NodeContext:
    """The fixed context of a node runner. control_address: address at which this node's agent
    listens."""

    config: RunConfig
    node: str
    folder: Path
    secret: Secret
    control_address: str
    failure_history: FailureHistory
    places: int
    policies: Path | None = None  # of a run that generates its data: where trainers publish


def plan_topology(config: RunConfig, generation: int, node: str) -> Topology:
    """Return a topology with all workers on this node. Raises LayoutError if the degrees do not
    fit."""
    layouts = layouts_of(config)
    workers = sum(layout.world_size for layout in layouts)
    return place_replicas(layouts, generation, (node,) * workers)


def plan_single_node(
    config: RunConfig,
    nodes: Sequence[NodePlaces],
    generation: int,
    present: PresentPlacement | None = None,
) -> LayoutPlan:
    """Plan a run on one node exactly as the run file asks. With fewer places, use the general
    planner."""
    topology = plan_topology(config, generation, nodes[0].name)
    ranks = topology.world_size
    if nodes[0].places < ranks:
        return plan_layout(config, nodes, generation, present)
    return LayoutPlan(topology, (None,) * ranks, 0, 0, 0, "")


def make_mover_settings(config: RunConfig, config_hash: str, dataset_version: str) -> MoverSettings:
    checkpoint = config.checkpoint
    return MoverSettings(
        run=config.name,
        config_hash=config_hash,
        dataset_version=dataset_version,
        keep_last=checkpoint.keep_last,
        keep_every=checkpoint.keep_every,
        extent_bytes=checkpoint.extent_mb << 20,
        bucket=checkpoint.bucket,
        bucket_keep_last=checkpoint.bucket_keep_last,
        last_step=config.train.steps,
        fallback=checkpoint.fallback,
    )


def standby_count(config: RunConfig) -> int:
    """Return the number of idle processes to keep."""
    wanted = config.cluster.standbys
    if wanted != "auto":
        return wanted
    # A process that finds its device for the first time needs seconds for it.
    return int(config.layout.workers > 1 or is_accelerator(config.device))


def max_worker_count(config: RunConfig) -> int:
    """Return the most workers that the run file asks for; 0: as many as there are places."""
    return config.layout.least_workers if config.layout.replicas else config.layout.workers


def make_standby_spec(context: NodeContext, mover_socket: str) -> WorkerSpec:
    """Return the spec of a standby, which has no rank; the process manager sets its log."""
    config, cluster = context.config, context.config.cluster
    return WorkerSpec(
        config=config.model_dump(mode="json"),
        topology=None,
        generation=0,
        rank=-1,
        threads=cluster.threads_per_worker or max(1, usable_cores() // config.layout.workers),
        agent=context.control_address,
        mover_socket=mover_socket,
        run_folder=str(context.folder),
        dataset=config.data.folder,
        restore_key=None,
        start_step=0,
        device=config.device,
        log="",
        gloo_interface=cluster.gloo_device,
        heartbeat_seconds=cluster.heartbeat_seconds,
        policies="" if context.policies is None else str(context.policies),
    )


def worker_log_path(folder: Path, generation: int, rank: int) -> Path:
    return folder / "logs" / f"{generation:010d}" / f"rank{rank}.log"


def make_worker_specs(
    context: NodeContext,
    topology: Topology,
    mover_socket: str,
    record: GenerationRecord,
    start_state: StartState,
) -> list[WorkerSpec]:
    """Return one WorkerSpec per rank of this node, and make the folder of their logs.

    Raises RunFolderError.
    """
    generation, history = topology.generation, context.failure_history
    logs = worker_log_path(context.folder, generation, 0).parent
    try:
        make_log_folder(logs)
    except OSError as error:
        raise translate_os_error(error, logs) from error
    newest = start_state.restore_point
    spec = replace(
        make_standby_spec(context, mover_socket),
        topology=topology,
        generation=generation,
        restore_key=None if newest is None else newest.key,
        start_step=start_state.step,
        failure_rate=history.failure_rate,
        failure_classes=history.failure_classes,
        skips=record.skips if len(record.skips) else None,
        retry=record.retry,
        saves_only=bool(record.end_reason),
        meet=start_state.rendezvous,
    )
    return [
        replace(spec, rank=rank, log=str(worker_log_path(context.folder, generation, rank)))
        for rank, node in enumerate(topology.nodes)
        if node == context.node
    ]
