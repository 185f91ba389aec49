"""Training on this machine: one agent, in the process that the person started.

By itself it is the run's only node. With `cluster.node` it is one of several. The node that is
started first makes the run folder and leads. Later nodes, on any machine, join by the run folder
and its secret. No node needs to know the other nodes.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

from holdfast.checkpoint.bucket.fencing import adopt_bucket_generation
from holdfast.checkpoint.bucket.recover_folder import recover_folder
from holdfast.checkpoint.peers.client import run_identity
from holdfast.checkpoint.peers.generation_floor import generation_floor
from holdfast.config.loading.load import LoadedConfig
from holdfast.config.run import RunConfig
from holdfast.config.sections.task import SCRIPT_TASK
from holdfast.core.sharding.run_table import run_state_table
from holdfast.elastic.agent.agent import NodeAgent, check_node_name
from holdfast.elastic.event_log import Observer, Say
from holdfast.elastic.node.launch_specs import plan_single_node
from holdfast.elastic.node.mover_supervisor import make_peer_settings
from holdfast.elastic.protocol.worker_spec import DEFAULT_ENTRY
from holdfast.elastic.run_context import RunContext
from holdfast.errors import HoldfastError, OutOfSpaceError, RunFolderError
from holdfast.launch.node.addresses import plan_addresses, uses_tls
from holdfast.launch.node.node_name import default_node_name
from holdfast.launch.node.node_price import node_price, refuse_spent_budget, refuse_unknown_price
from holdfast.launch.node.process_limits import raise_open_files, refuse_low_limits
from holdfast.launch.node.trackers import tracker_programs
from holdfast.launch.owners.owner import stop_cause_of
from holdfast.launch.run.auto_layout import predictor_of, source_of_plan
from holdfast.launch.run.holder import HolderWatch
from holdfast.launch.run.resume_checks import bring_back_fallback
from holdfast.launch.run.run_folder import refuse_in_use, run_hash
from holdfast.machine.hardware import detect_hardware
from holdfast.plan.auto.machines import machines_of
from holdfast.plan.hardware.cluster_file import HERE
from holdfast.plan.placing.interface import Planner
from holdfast.plan.placing.planner import plan_layout
from holdfast.plan.placing.searched import SearchedPlanner, fixed_limits
from holdfast.plan.placing.topology_cost import Fleet
from holdfast.policy.spending import NodePrice
from holdfast.report.formatting import format_bytes
from holdfast.wire.http.sockets import address_of, bind_listener
from holdfast.wire.http.tls import with_tls
from holdfast.wire.secret import Secret, open_secret
from holdfast.wire.store.run_location import store_of_run
from holdfast.wire.store.run_store import RunStore, free_bytes, segment_sizes
from holdfast.wire.term import open_term


def train_locally(
    loaded: LoadedConfig,
    *,
    dataset_version: str,
    observers: Sequence[Observer] = (),
    render_metrics: Callable[[], bytes] = lambda: b"",
    seen_progress: Callable[[], tuple[int, int]] = lambda: (0, 0),
    say: Say = print,
    say_last: Say | None = None,
    entry: str = DEFAULT_ENTRY,
    fresh: bool = False,
    resume: str = "",
    watch: HolderWatch | None = None,
    before_joining: Callable[[], None] | None = None,
) -> int:
    """Train in the run folder of a planned configuration; the exit code (0, 1, 130).

    `observers` see each record of the journal as it is written. `render_metrics` answers
    `/metrics`. `seen_progress` tells `/healthz` the newest step and the newest committed step.
    `say` prints one line, `say_last` the result. `fresh`: begin, whatever a bucket or
    peers hold. `resume`: the command that resumes the run. `watch`: of the folder's holder. Raises
    UserError and CannotGoOnError.
    """
    folder = Path(loaded.config.run_folder)
    store = store_of_run(folder)
    config, address = plan_addresses(loaded.config, store)
    if not config.layout.workers or config.device == "auto":
        raise RunFolderError(
            "the number of workers and the device have not been planned", where="layout.workers"
        )
    # A node of several may get fewer workers than it has places for.
    places = (config.cluster.places or 1) if config.cluster.node else config.layout.workers
    refuse_low_limits(config, places, raise_open_files())
    node = config.cluster.node or default_node_name(os.environ)
    if config.cluster.node:
        check_node_name(node)
    price = node_price(config, os.environ)
    refuse_unknown_price(loaded, price)
    refuse_spent_budget(loaded, store)
    secret = open_secret(folder, say=say)
    secret = with_tls(secret) if uses_tls(config) else secret
    hash_ = run_hash(folder, config)
    start = _RunOrigin(config, store, secret, hash_, dataset_version, fresh, say)
    joining = RunContext(
        config,
        store,
        secret,
        folder,
        node,
        hash_,
        dataset_version,
        entry,
        resume or resume_command(loaded),
        generation_floor=start.restore_and_find_floor,
        trackers=tracker_programs(config, folder),
        predict=predictor_of(config),
        plan=source_of_plan(loaded),
        before_joining=before_joining,
        stop_cause=stop_cause_of(folder),
        price=None if price == NodePrice() else price,
    )
    views: dict[str, Any] = {"observers": observers, "render_metrics": render_metrics, "say": say}
    views |= {"say_last": say_last, "seen_progress": seen_progress}
    if config.cluster.node:
        say(
            f"node {node} listens on {address.host} (device {address.device}): {address.reason}; "
            f"cluster.interface=ADDRESS sets another"
        )
        with bind_listener(config.cluster.host, 0, "cluster.interface") as control:
            return NodeAgent(joining, control, planner_of(config), **views).run()
    return _train_alone(joining, start, watch or HolderWatch(folder, say), views)


def _train_alone(
    context: RunContext, origin: _RunOrigin, watch: HolderWatch, views: dict[str, Any]
) -> int:
    """Train as the run's only node, with a term of its own; the exit code."""
    origin.restore_folder()
    interface = context.config.cluster.host
    # The agent listens before the term names its address: a reader of the term can ask.
    with bind_listener(interface, 0, "cluster.interface") as control:
        term = open_term(
            context.store,
            address_of(control),
            lambda: refuse_in_use(context.folder, watch),
            context.secret.uses_tls,
        )
        try:
            context = replace(
                context, single_node_term=term, generation_floor=origin.generation_floor
            )
            return NodeAgent(context, control, plan_single_node, **views).run()
        finally:
            with suppress(HoldfastError):  # a full disk: the next trainer asks, and gets no answer
                term.close()


@dataclass
class _RunOrigin:
    """The state that a run with a new or lost folder resumes from: what a bucket and peers have."""

    config: RunConfig
    store: RunStore
    secret: Secret
    config_hash: str
    dataset_version: str
    fresh: bool
    say: Say
    bucket: RunStore | None = None

    def restore_and_find_floor(self) -> int:
        self.restore_folder()
        return self.generation_floor()

    def restore_folder(self) -> None:
        """Raises UserError if the bucket is another run's or cannot be asked, or if the disk has
        no room for a checkpoint."""
        check_room(self.store, self.config, self.say)
        bring_back_fallback(self.store, self.config, self.config_hash, self.fresh, self.say)
        location = self.config.checkpoint.bucket
        if location:
            self.bucket = recover_folder(
                self.store, location, self.config_hash, self.fresh, self.say
            )

    def generation_floor(self) -> int:
        """Above which generation the folder's are to be. Raises UserError where a peer does not
        accept the run's secret."""
        peers = make_peer_settings(self.config.checkpoint)
        above = generation_floor(
            self.store,
            () if peers is None else peers.peers,
            self.secret,
            run_identity(self.config_hash, self.dataset_version),
            self.fresh,
            self.say,
        )
        if self.bucket is not None:
            adopt_bucket_generation(self.store, self.bucket, self.say)
        return above


def check_room(store: RunStore, config: RunConfig, say: Say) -> None:
    """Say if a folder's disk has not the room for all checkpoints that are to be kept, and the one
    that is being written. Raises OutOfSpaceError if it has none for a single one."""
    free, size = free_bytes(store), sum(spec.nbytes for spec in run_state_table(config))
    if free is None or not size:
        return
    room, keep = free + sum(segment_sizes(store, "data/").values()), config.checkpoint.keep_last
    where = getattr(store, "where", None) or str(getattr(store, "folder", ""))
    found = f"a checkpoint takes {format_bytes(size)}, and {format_bytes(room)} are free"
    if room < size:
        raise OutOfSpaceError(
            found, where=where, remedy="free some space, or use another folder with folder=<path>"
        )
    fits = room // size
    if fits <= keep:
        if fits == 1:
            result = "no second one can be saved"
        elif fits == keep:
            result = "an older one goes before a new one is written"
        else:
            result = f"later saves fail; use checkpoint.keep_last={fits}, or free some space"
        needs = f"checkpoint.keep_last={keep} needs room for {keep + 1}"
        say(f"{where}: {found} for checkpoints: room for {fits}. {needs}, so {result}")


def resume_command(loaded: LoadedConfig) -> str:
    """Return the command that resumes this run."""
    task = loaded.config.task
    if task.name != SCRIPT_TASK:
        return shlex.join(["holdfast", "train", loaded.name, *loaded.overrides])
    words = ["holdfast", "run", str(Path(task.folder, task.args["script"]))]
    if loaded.text:
        words += ["--config", loaded.name]
    for given in loaded.overrides:
        if not given.startswith(("task.", "name=")):  # `holdfast run` gives these itself
            words += ["--set", given]
    return shlex.join([*words, "--", *map(str, task.args["arguments"])])


def planner_of(config: RunConfig) -> Planner:
    """With `layout: auto`, the planner that searches; otherwise the simple one. Every node counts
    as one of the first pool of `plan.cluster`, or as this machine."""
    is_given = config.plan.cluster not in ("", HERE)
    if config.layout.mode != "auto" and not is_given:
        return plan_layout
    machines = machines_of(config, detect_hardware())
    whole = machines.cluster if is_given else None
    if config.layout.mode != "auto":
        return partial(plan_layout, cluster=whole)
    if machines.cores:  # workers share them
        machines = machines.with_workers(config.cluster.places or 1)
    fleet = Fleet(machines.devices, machines.cluster.pools[0], whole)
    return SearchedPlanner(fleet, fixed_limits(config), later=_in_a_thread)


def _in_a_thread(work: Callable[[], None]) -> None:
    Thread(target=work, name="next plans", daemon=True).start()
