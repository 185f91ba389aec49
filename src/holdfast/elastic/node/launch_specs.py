"""The inputs of a generation: the node's context, the topology, the specs of mover and workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.checkpoint.mover.service import MoverSettings
from holdfast.config.run import RunConfig
from holdfast.core.devices import is_accelerator
from holdfast.elastic.node.output_relay import make_log_folder
from holdfast.elastic.protocol.generation_record import GenerationRecord
from holdfast.elastic.protocol.worker_spec import WorkerSpec
from holdfast.layout import Topology, place_replicas
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
    )


def threads_per_worker(config: RunConfig, cores: int) -> int:
    return config.cluster.threads_per_worker or max(1, cores // config.layout.workers)


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


def make_standby_spec(
    config: RunConfig, folder: Path, agent_address: str, mover_socket: str, cores: int
) -> WorkerSpec:
    """Return the spec of a standby, which has no rank; the process manager sets its log."""
    return WorkerSpec(
        config=config.model_dump(mode="json"),
        topology=None,
        generation=0,
        rank=-1,
        threads=threads_per_worker(config, cores),
        agent=agent_address,
        mover_socket=mover_socket,
        run_folder=str(folder),
        dataset=config.data.folder,
        restore_key=None,
        start_step=0,
        device=config.device,
        log="",
        gloo_interface=config.cluster.gloo_device,
        heartbeat_seconds=config.cluster.heartbeat_seconds,
    )


def worker_log_path(folder: Path, generation: int, rank: int) -> Path:
    return folder / "logs" / f"{generation:010d}" / f"rank{rank}.log"


def make_worker_specs(
    config: RunConfig,
    topology: Topology,
    *,
    folder: Path,
    agent_address: str,
    mover_socket: str,
    cores: int,
    restore_key: str | None,
    start_step: int,
    failure_history: FailureHistory | None = None,
    node: str = "",
    rendezvous_address: str = "",
    record: GenerationRecord | None = None,
) -> list[WorkerSpec]:
    """Return one WorkerSpec per rank (of `node`, if given) and make the folder of their logs.

    Args:
        rendezvous_address: where the workers find each other, if not at their agent's address.
        record: of the generation, for the data that it skips and the step that it retries.

    Raises RunFolderError.
    """
    logs = worker_log_path(folder, topology.generation, 0).parent
    try:
        make_log_folder(logs)
    except OSError as error:
        raise translate_os_error(error, logs) from error
    dumped = config.model_dump(mode="json")
    return [
        WorkerSpec(
            config=dumped,
            topology=topology,
            generation=topology.generation,
            rank=rank,
            threads=threads_per_worker(config, cores),
            agent=agent_address,
            mover_socket=mover_socket,
            run_folder=str(folder),
            dataset=config.data.folder,
            restore_key=restore_key,
            start_step=start_step,
            device=config.device,
            log=str(worker_log_path(folder, topology.generation, rank)),
            gloo_interface=config.cluster.gloo_device,
            heartbeat_seconds=config.cluster.heartbeat_seconds,
            failure_rate=None if failure_history is None else failure_history.failure_rate,
            failure_classes=None if failure_history is None else failure_history.failure_classes,
            skips=None if record is None or not len(record.skips) else record.skips,
            retry=None if record is None else record.retry,
            meet=rendezvous_address,
        )
        for rank in range(topology.world_size)
        if node in ("", topology.nodes[rank])
    ]
