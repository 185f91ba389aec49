"""Workers for the agent's tests: real processes, real gloo groups, nearly no work.

A worker counts steps. Further actions are in `plan.json` of its run folder: {"steps": N, "pace":
seconds a step takes, "<deed>": {"generation": g, "rank": r, "step": n}}.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.checkpoint.mover.client import MoverClient
from holdfast.config.run import RunConfig
from holdfast.core.sharding.state_table import local_boxes, state_table
from holdfast.elastic.protocol import exit_codes
from holdfast.elastic.protocol.worker_spec import WorkerSpec
from holdfast.elastic.worker.commands import CommandClient
from holdfast.elastic.worker.http_store import HttpStore
from holdfast.elastic.worker.reporter import AgentReporter
from holdfast.errors import CheckpointError, NonFiniteError
from holdfast.events import NonFinite, StepDone, WorkerReady
from holdfast.policy.recovery.survivors import HeldState
from holdfast.wire.http.client import Client
from holdfast.wire.secret import Secret

if TYPE_CHECKING:
    from holdfast.checkpoint.capture.capturer import Capturer


def train(boot: WorkerSpec, secret: Secret) -> int:
    """All-reduce a counter every step until the plan's last step, or until asked to stop."""
    imported = "torch" in sys.modules  # by the fork server: a fork must find it there
    import torch
    import torch.distributed as dist

    plan = json.loads((Path(boot.run_folder) / "plan.json").read_text())
    print(f"rank {boot.rank} torch_imported={imported} entered={time.monotonic() - boot.forked}")
    print(f"threads={torch.get_num_threads()} group={os.getpgrp() == os.getpid()}")
    client = Client(boot.agent, secret, boot.generation)
    reporter = AgentReporter(client, boot.rank, heartbeat_s=boot.heartbeat_seconds)
    reporter.start()
    meet = Client(boot.meet or boot.agent, secret, boot.generation)
    store = HttpStore(meet, timedelta(seconds=120))
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("world", store),
        rank=boot.rank,
        world_size=boot.world_size,
        timeout=timedelta(seconds=60),
    )
    reporter.emit(WorkerReady(boot.rank, time.monotonic() - boot.forked, step=boot.start_step))
    step, stop = boot.start_step, False
    try:
        while step < plan["steps"] and not stop:
            step += 1
            reporter.progress(step, "compute")
            _misbehave(plan, boot, secret, step, reporter)
            _pause(float(plan.get("pace", 0.0)))
            reporter.progress(step, "reduce")
            vote = torch.tensor([1.0, float(reporter.requests.should_stop)])
            dist.all_reduce(vote)
            assert vote[0].item() == boot.world_size
            stop = bool(vote[1].item())
            if boot.rank == 0:
                reporter.emit(StepDone(1.0 / step, 1, 1.0, 1e-3, 0.0, step=step))
    except RuntimeError as error:
        print(f"rank {boot.rank} lost a peer: {error}")
        reporter.flush(2.0)
        return exit_codes.PEER_LOST
    reporter.report_outcome("left" if stop else "finished", step, plan.get("unsaved"))
    reporter.close()
    return exit_codes.DONE


def _pause(seconds: float) -> None:
    select.select([], [], [], seconds)


def _misbehave(
    plan: dict[str, Any], boot: WorkerSpec, secret: Secret, step: int, reporter: AgentReporter
) -> None:
    def due(deed: str) -> bool:
        when = plan.get(deed)
        return (
            when is not None
            and (when["generation"] in (0, boot.generation))
            and ((when["rank"], when["step"]) == (boot.rank, step))
        )

    if due("save_and_die"):
        _save_and_die(boot, secret, step)
    if due("map"):
        _capturer(boot, secret)
    if due("die"):
        os.kill(os.getpid(), signal.SIGKILL)
    if due("hang"):
        threading.Event().wait()
    if due("hold_gil"):  # a regular expression that backtracks keeps the interpreter lock
        import re

        re.match(r"(a*)*b", "a" * 64)
    if due("crash"):
        raise ValueError("the toy broke")
    if due("refuse"):
        raise CheckpointError("the toy refuses", where="plan.json", remedy="leave it out")
    if due("non_finite"):
        reporter.emit(NonFinite(boot.rank, "layers.0.ffn.up.weight", step=step))
        reporter.flush()
        error = NonFiniteError(step, boot.rank, "layers.0.ffn.up.weight")
        held = HeldState(
            boot.generation, boot.rank, step - 1, None, False, "non_finite", str(error)
        )
        commands = CommandClient(boot.agent, secret)
        commands.start()
        commands.wait_for_command(held)


def _capturer(boot: WorkerSpec, secret: Secret) -> Capturer:
    """This rank's arena, mapped: its state is all zeros."""
    import torch

    from holdfast.checkpoint.capture.capturer import Capturer

    config = RunConfig.model_validate(boot.config)
    topology, table = boot.placed_topology, state_table(config.model, config.train.precision)
    held = local_boxes(topology, table, boot.rank)
    return Capturer(
        MoverClient(boot.mover_socket, secret, boot.generation),
        topology,
        table,
        boot.rank,
        {box.name: torch.zeros(box.lengths) for box in held},
        run=config.name,
    )


def _save_and_die(boot: WorkerSpec, secret: Secret, step: int) -> None:
    """Hand a snapshot over; stop the mover while it writes, and end."""
    capturer = _capturer(boot, secret)
    with socket.socket(socket.AF_UNIX) as mover:
        mover.connect(boot.mover_socket)
        peer = mover.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    capturer.capture(step)
    assert capturer.announce(step, {}) is None
    os.kill(struct.unpack("3i", peer)[0], signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGKILL)
