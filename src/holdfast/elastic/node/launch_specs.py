"""The inputs of a generation: its topology, and the specs of its mover and its workers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from holdfast.checkpoint.mover.service import Settings
from holdfast.config.run import RunConfig
from holdfast.elastic.protocol.generation_record import GenerationRecord
from holdfast.elastic.protocol.worker_spec import WorkerBoot
from holdfast.layout import Topology, place_replicas
from holdfast.plan.interface import NodePlaces, Plan, Present
from holdfast.plan.layouts import layouts_of
from holdfast.plan.planner import plan
from holdfast.policy.saving.failure_history import Seen
from holdfast.wire.store.run_store import spoken_error


def plan_topology(config: RunConfig, generation: int, node: str) -> Topology:
    """Return a topology with all workers on this node. Raises LayoutError if the degrees do not
    fit."""
    layouts = layouts_of(config)
    workers = sum(layout.world_size for layout in layouts)
    return place_replicas(layouts, generation, (node,) * workers)


def here(
    config: RunConfig, nodes: Sequence[NodePlaces], generation: int, present: Present | None = None
) -> Plan:
    """Plan a run on one node exactly as the run file asks. With fewer places, use the general
    planner."""
    topology = plan_topology(config, generation, nodes[0].name)
    ranks = topology.world_size
    if nodes[0].places < ranks:
        return plan(config, nodes, generation, present)
    return Plan(topology, (None,) * ranks, 0, 0, 0, "")


def mover_settings(config: RunConfig, config_hash: str, dataset_version: str) -> Settings:
    checkpoint = config.checkpoint
    return Settings(
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


def standbys(config: RunConfig) -> int:
    """Return the number of idle processes to keep. Only processes that take commands can be
    standbys."""
    if config.cluster.recovery == "restart":
        return 0
    wanted = config.cluster.standbys
    return wanted if wanted != "auto" else int(config.layout.workers > 1)


def wanted_workers(config: RunConfig) -> int:
    """Return the most workers that the run file asks for; 0: as many as there are places."""
    return config.layout.least_workers if config.layout.replicas else config.layout.workers


def standby_boot(
    config: RunConfig, folder: Path, agent: str, mover_socket: str, cores: int
) -> WorkerBoot:
    """Return the spec of a standby, which has no rank; the process manager sets its log."""
    return WorkerBoot(
        config=config.model_dump(mode="json"),
        topology={}, generation=0, rank=-1,
        threads=threads_per_worker(config, cores),
        agent=agent, mover_socket=mover_socket,
        run_folder=str(folder), dataset=config.data.folder,
        restore_key=None, start_step=0,
        device=config.device, log="",
        gloo_interface=config.cluster.gloo_interface,
        heartbeat_seconds=config.cluster.heartbeat_seconds,
        orders=True,
    )  # fmt: skip


def worker_log(folder: Path, generation: int, rank: int) -> Path:
    return folder / "logs" / f"{generation:010d}" / f"rank{rank}.log"


def boots(
    config: RunConfig,
    topology: Topology,
    *,
    folder: Path,
    agent: str,
    mover_socket: str,
    cores: int,
    restore_key: str | None,
    start_step: int,
    seen: Seen | None = None,
    node: str = "",
    meet: str = "",
    record: GenerationRecord | None = None,
) -> list[WorkerBoot]:
    """Return one WorkerSpec per rank (of `node`, if given) and make the folder of their logs.

    Args:
        rendezvous_address: where the workers find each other, if not at their agent's address.
        record: of the generation, for the data that it skips and the step that it retries.

    Raises RunFolderError.
    """
    logs = worker_log(folder, topology.generation, 0).parent
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise spoken_error(error, logs) from error
    dumped = config.model_dump(mode="json")
    return [
        WorkerBoot(
            config=dumped,
            topology=topology.to_json(),
            generation=topology.generation,
            rank=rank,
            threads=threads_per_worker(config, cores),
            agent=agent,
            mover_socket=mover_socket,
            run_folder=str(folder),
            dataset=config.data.folder,
            restore_key=restore_key,
            start_step=start_step,
            device="cpu" if config.device == "cpu" else f"{config.device}:{rank}",
            log=str(worker_log(folder, topology.generation, rank)),
            gloo_interface=config.cluster.gloo_interface,
            heartbeat_seconds=config.cluster.heartbeat_seconds,
            orders=config.cluster.recovery == "live",
            hazard=None if seen is None else seen.hazard.to_json(),
            classes=None if seen is None else list(seen.classes.counts),
            skips=None if record is None or not len(record.skips) else record.skips.to_json(),
            again=None if record is None or record.retry is None else record.retry.to_json(),
            meet=meet,
        )
        for rank in range(topology.world_size)
        if node in ("", topology.nodes[rank])
    ]
