"""`holdfast doctor RUN`: collects the checks of a run that trains, has ended or is broken.

A part that is broken is one finding, and does not keep the other parts from being checked.
"""

from __future__ import annotations

import os
import platform
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.config.loading.load import load_config
from holdfast.config.run import RunConfig
from holdfast.doctor.checks import Check, CheckState, failed_check
from holdfast.doctor.deadline import QUICK_S, SLOW_S, Deadlines
from holdfast.doctor.nodes import check_links, check_memory, check_nodes, nodes_to_json
from holdfast.doctor.state import RunState, check_dataset, is_at_work, read_state
from holdfast.doctor.store import StoreFindings, check_folder, check_store
from holdfast.elastic.protocol.generation_record import GenerationRecord, record_of
from holdfast.elastic.protocol.node_check import NodeMemory
from holdfast.errors import HoldfastError, RunFolderError, StoreError, UserError
from holdfast.launch.run.bucket_run import place_word
from holdfast.launch.run.holder import HolderWatch
from holdfast.launch.run.node_checks import AgentAnswer, agent_addresses, ask_agents
from holdfast.launch.run.runs import RESOLVED_FILE, Run, open_run, read_secret_files, run_folder_of
from holdfast.layout import Topology, place_replicas
from holdfast.machine.hardware import detect_hardware
from holdfast.machine.limits import available_memory
from holdfast.plan.placing.layouts import layouts_of
from holdfast.report.formatting import format_duration
from holdfast.wire.secret import Secret
from holdfast.wire.store.location import open_store
from holdfast.wire.store.run_location import bucket_of_run, store_of_run
from holdfast.wire.term import generation_key, newest_generation, secret_of

MAX_NAMED_LOSSES = 8  # Lost nodes that have a line, the newest first
_RESTORE = "restore it from a backup"


@dataclass
class RunDiagnosis:
    """What was found of one run. state, store: None if it could not be looked at."""

    folder: Path
    checks: list[Check] = field(default_factory=list)
    state: RunState | None = None
    answers: dict[str, AgentAnswer] = field(default_factory=dict)
    nodes: tuple[str, ...] = ()
    store: StoreFindings | None = None

    @property
    def will_fail(self) -> bool:
        return any(check.state == "fails" for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        return {
            "folder": os.path.abspath(self.folder),
            **({} if self.state is None else self.state.to_json()),
            "nodes": nodes_to_json(self.answers, self.nodes),
            "store": {} if self.store is None else self.store.figures,
            "checks": [check.to_json() for check in self.checks],
        }


def diagnose_run(folder: Path, watch: HolderWatch) -> RunDiagnosis:
    """Check the run in `folder`. watch: of its holder. A check that hangs is one that fails."""
    found, within = RunDiagnosis(folder), Deadlines(folder)
    no_run: tuple[Run | None, list[Check]] = (None, [])
    unknown: tuple[list[Secret] | None, list[Check]] = (None, [])
    no_record: tuple[GenerationRecord | None, list[Check]] = (None, [])
    run, checks = within.run("run file", QUICK_S, lambda: _open(folder), no_run)
    found.checks += checks
    secrets, secret_checks = within.run(
        "secret", QUICK_S, lambda: _read_run_secrets(folder), unknown
    )
    config = run.config if run else None
    looked = within.run(
        "run", SLOW_S, lambda: _look(folder, config, watch, secrets is not None), _Look()
    )
    lives, found.state = looked.lives, looked.state
    found.checks += looked.checks
    record, checks = within.run("membership", QUICK_S, lambda: _read_record(folder), no_record)
    found.checks += checks
    if lives:
        known_secrets = [secret_of(looked.holder, secret) for secret in secrets or ()]
        found.answers = ask_agents(agent_addresses(record, looked.holder), known_secrets)
    found.nodes = () if record is None or record.topology is None else record.topology.nodes
    found.checks += [*check_nodes(record, found.answers), *check_links(found.answers)]
    losses = found.state.losses if found.state is not None and lives else {}
    topology = None if record is None or not lives else record.topology
    place = within.run("run folder", QUICK_S, lambda: place_word(folder), shlex.quote(str(folder)))
    found.checks += missing_node_checks(place, config, topology, found.answers, losses)
    found.checks += secret_checks
    if run is not None:
        known = run
        found.checks += within.run(
            "dataset", SLOW_S, lambda: _config_checks(known, found, record, lives), []
        )
    size = found.state.next_checkpoint_bytes if found.state is not None else 0
    nothing = StoreFindings([], {})
    found.store = within.run("run store", SLOW_S, lambda: _check_run_store(folder, size), nothing)
    found.checks += found.store.checks
    if run is not None and (bucket := run.config.checkpoint.bucket):
        found.checks += within.run("bucket", SLOW_S, lambda: _bucket_checks(bucket), [])
    found.checks += within.hung
    return found


@dataclass(frozen=True)
class _Look:
    """What the run folder tells of the run. holder: of its newest term."""

    holder: dict[str, Any] | None = None
    lives: bool = False
    state: RunState | None = None
    checks: list[Check] = field(default_factory=list)


def _look(folder: Path, config: RunConfig | None, watch: HolderWatch, may_ask: bool) -> _Look:
    try:
        lives = may_ask and is_at_work(folder, watch)
        state = read_state(folder, config, watch, lives)
        return _Look(watch.holder, lives, state, state.checks)
    except HoldfastError as error:
        remedy = "" if isinstance(error, UserError) else _RESTORE
        where = getattr(error, "where", None) or str(folder)
        return _Look(watch.holder, checks=[failed_check("run", error, where, remedy)])


def folder_of(argument: Path) -> Path:
    """Return the run folder that `argument` names: itself, or that of a run file.

    Raises UserError where no run was ever begun."""
    folder = argument
    if argument.is_file():
        folder = run_folder_of(load_config(argument).config)
    parts = (RESOLVED_FILE, "terms", "journal", "commits")
    if bucket_of_run(folder):
        return folder
    if not folder.is_dir() or not any((folder / part).exists() for part in parts):
        raise RunFolderError(
            "there is no run here",
            where=str(folder),
            remedy="name a run folder, or a run file that was trained: holdfast train RUN.yaml",
        )
    return folder


def _open(folder: Path) -> tuple[Run | None, list[Check]]:
    """Return the run; None, with a check, if its description cannot be read."""
    try:
        return open_run(folder), []
    except UserError as error:
        return None, [failed_check("run file", error, str(folder / RESOLVED_FILE), _RESTORE)]


def _read_run_secrets(folder: Path) -> tuple[list[Secret] | None, list[Check]]:
    """Return the run's secrets, without TLS, and what is wrong with them; None if none may be used
    here."""
    where = str(folder / "secret")
    try:
        secrets = read_secret_files(folder)
    except StoreError:  # the check of the run store tells it
        return None, []
    except (HoldfastError, OSError, ValueError) as error:
        return None, [failed_check("secret", error, where, _RESTORE)]
    if secrets:
        return secrets, []
    found, remedy = "none is here, so no agent can be asked", "the next start makes a new one"
    return [], [Check("secret", "weak", found, remedy, where)]


def _read_record(folder: Path) -> tuple[GenerationRecord | None, list[Check]]:
    """Return the newest generation; None before the first, or with a check for a broken one."""
    store, newest = store_of_run(folder), 0
    try:
        newest = newest_generation(store)
        return (record_of(store, newest) if newest else None), []
    except HoldfastError as error:
        where = generation_key(newest)
        remedy = "the next start makes a newer one"
        return None, [Check("membership", "weak", str(error), remedy, where)]


def missing_node_checks(
    place: str,
    config: RunConfig | None,
    topology: Topology | None,
    answers: Mapping[str, AgentAnswer],
    losses: Mapping[str, tuple[float, str]],
) -> list[Check]:
    """Return a check for workers that are missing, and one for each node without a place.

    place: the run, as a word of a command line. losses: when and why, by node. Spares are those
    that the coordinator's node names."""
    wanted = 0 if config is None else config.layout.workers
    there = wanted if topology is None else topology.world_size
    spares = {name for one in answers.values() if one.check for name in one.check.spares}
    state: CheckState = "weak" if there < wanted else "good"
    checks = []
    what = "waits as a spare: all workers have a place; it takes over when one is lost"
    if there < wanted:
        remedy = f"start nodes with holdfast launch, or on a machine: holdfast join {place}"
        checks.append(Check("workers", state, f"{there} of {wanted} train", remedy))
        what = "has joined; a next generation takes it in"
    checks += [Check(f"node {name}", "good", what) for name in sorted(spares)]
    away = losses.keys() - spares - set(() if topology is None else topology.nodes)
    for name in sorted(away, key=lambda one: -losses[one][0])[:MAX_NAMED_LOSSES]:
        at, cause = losses[name]
        ago = format_duration(max(0.0, time.time() - at))
        checks.append(Check(f"node {name}", state, f"lost {ago} ago and not back: {cause}"))
    return checks


def _config_checks(
    run: Run, found: RunDiagnosis, record: GenerationRecord | None, lives: bool
) -> list[Check]:
    """Return the checks that need the run file: memory and dataset."""
    finished = found.state is not None and found.state.history.state == "finished"
    checks = []
    if not finished:
        topology = record.topology if record is not None else None
        checks += _memory_checks(run.config, topology, found.answers, lives)
    if run.config.has_own_data:
        return checks  # its data is a part of its source
    return [*checks, check_dataset(run, finished)]


def _memory_checks(
    config: RunConfig, topology: Topology | None, answers: Mapping[str, AgentAnswer], lives: bool
) -> list[Check]:
    """Compare with the nodes' own figures; of a run that does not train, with this machine's."""
    memories = {n: one.check.memory for n, one in answers.items() if one.check is not None}
    if not lives:
        machine = detect_hardware()
        devices = tuple(one.memory_bytes for one in machine.accelerators)
        here = NodeMemory(machine.memory_bytes, available_memory(), devices)
        try:
            topology = topology or _topology_here(config)
        except UserError as error:
            return [failed_check("layout", error, error.where or "")]
        memories = dict.fromkeys(topology.nodes, here)
    return [] if topology is None else check_memory(config, topology, memories, lives)


def _topology_here(config: RunConfig) -> Topology:
    """Return the run file's layout with all ranks on this machine. Raises LayoutError."""
    layouts = layouts_of(config)
    workers = sum(layout.world_size for layout in layouts)
    return place_replicas(layouts, 1, (platform.node() or "localhost",) * workers)


def _check_run_store(folder: Path, next_checkpoint_bytes: int) -> StoreFindings:
    """Check the run store. next_checkpoint_bytes: room that a folder's disk needs."""
    if address := bucket_of_run(folder):
        return check_store(store_of_run(folder), address.partition("?")[0], "run store")
    return check_folder(folder, next_checkpoint_bytes)


def _bucket_checks(location: str) -> list[Check]:
    try:
        store = open_store(location)
    except StoreError as error:
        return [failed_check("bucket", error, error.where or "checkpoint.bucket")]
    return check_store(store, "checkpoint.bucket", "bucket").checks
