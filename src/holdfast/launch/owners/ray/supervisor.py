"""The actor that keeps the nodes of a run on Ray: it makes their placement groups, and ends them.

It runs on Ray's head machine and is started again after it failed. All that it knows is in Ray's
own tables and on the board, so it starts where it was. Nodes do not depend on it.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from contextlib import suppress
from importlib import import_module
from typing import Any

from holdfast.launch.owners.ray.board import RayBoard, group_name, placed_groups
from holdfast.launch.owners.ray.node import NodeActor
from holdfast.launch.owners.ray.plan import (
    NAMESPACE,
    Group,
    JobStatus,
    Observation,
    RaySpec,
    decide,
    node_states,
)

ROUND_INTERVAL_S = 0.5


class Supervisor:
    """Brings Ray closer to what the job's spec wants, again and again, until the job is over."""

    def __init__(self, job: str) -> None:
        self._job, self._board = job, RayBoard(job)
        self._ray: Any = import_module("ray")
        self._status = JobStatus()
        threading.Thread(target=self._run, name="supervisor", daemon=True).start()

    def _run(self) -> None:
        is_over = False
        while not is_over:
            try:
                is_over = self._take_turn()
            except Exception:  # Ray's head is away, or a machine was lost in between
                print(traceback.format_exc(), file=sys.stderr, flush=True)
            time.sleep(ROUND_INTERVAL_S)
        self._ray.kill(self._ray.get_actor(self._job, namespace=NAMESPACE), no_restart=True)

    def _take_turn(self) -> bool:
        spec = self._board.read_spec()
        if spec is None:
            return False
        alive = frozenset(str(n["NodeID"]) for n in self._ray.nodes() if n["Alive"])
        state = import_module("ray._private.state").state
        draining = frozenset(str(node) for node in state.get_draining_nodes())
        seen = Observation(placed_groups(self._job), self._board.read_reports(), alive, draining)
        deeds = decide(spec, seen)
        for node in deeds.forget:
            self._board.forget_report(node)
        for group in deeds.remove:
            util = import_module("ray.util")
            with suppress(ValueError):
                util.remove_placement_group(util.get_placement_group(group_name(self._job, group)))
        for group in deeds.create:
            for node in group:
                self._board.forget_report(node)
            made = import_module("ray.util").placement_group(
                [spec.bundle] * len(group),
                strategy="STRICT_SPREAD",
                name=group_name(self._job, group),
                lifetime="detached",
            )
            self._ensure_actors(group, made.id.hex(), spec, made)
        for group, placed in seen.groups.items():
            if group not in deeds.remove:
                self._ensure_actors(group, placed.id, spec)
        status = JobStatus(tuple(node_states(spec, seen)), deeds.is_over)
        if status != self._status:
            self._board.write_status(status)
            self._status = status
        return deeds.is_over

    def _ensure_actors(self, group: Group, group_id: str, spec: RaySpec, made: Any = None) -> None:
        """Create the actors of a group that are not there. The group may wait for machines."""
        for index, node in enumerate(group):
            name = f"{self._job}/{node}/{group_id[:12]}"
            with suppress(ValueError):
                self._ray.get_actor(name, namespace=NAMESPACE)
                continue
            if made is None:
                made = import_module("ray.util").get_placement_group(group_name(self._job, group))
            strategies = import_module("ray.util.scheduling_strategies")
            others = {k: v for k, v in spec.bundle.items() if k not in ("CPU", "GPU")}
            self._ray.remote(NodeActor).options(
                name=name,
                namespace=NAMESPACE,
                lifetime="detached",
                max_restarts=-1,
                num_cpus=spec.bundle.get("CPU", 0),
                num_gpus=spec.bundle.get("GPU", 0),
                resources=others,
                scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(made, index),
            ).remote(self._job, node, group_id)
