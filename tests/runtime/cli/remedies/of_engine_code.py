"""Remedies of messages to callers of the engine: groups, pipelines, rebuilds, checkpoints.

Ranks that have to agree are threads here, with real groups between them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from re import Match
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]

import holdfast
from holdfast.checkpoint.restore.catalog import list_commits
from holdfast.checkpoint.restore.reader import Checkpoint
from holdfast.checkpoint.save.single_writer import TensorSource, write_single
from holdfast.config.sections.optimizer import OptimizerConfig
from holdfast.config.sections.task import TaskConfig
from holdfast.core.devices import device_kind
from holdfast.core.format import manifest
from holdfast.core.format.manifest import seal_manifest, unseal_manifest
from holdfast.core.schedule.csv import from_csv
from holdfast.core.schedule.named import build_schedule
from holdfast.core.sharding.boxes import Box
from holdfast.core.sharding.parameters import Own, Parameter
from holdfast.core.sharding.reshard_plan import plan_reshard
from holdfast.core.sharding.run_table import row_of_text, run_state_table
from holdfast.layout import Layout, Topology, place_layout
from holdfast.parallel.axes.process_groups import ProcessGroups, connect
from holdfast.parallel.axes.reshard import move
from holdfast.parallel.comm.devices import check_backends, select_device
from holdfast.parallel.comm.transport import PeerGroup
from holdfast.parallel.pipeline.pipeline import PipelineInterpreter
from holdfast.parallel.pipeline.pipeline_plan import make_pipeline_plan
from holdfast.tasks.task.initial import first_values
from holdfast.tasks.task.loading import load_task
from holdfast.training.engine.precision import as_indeterminate
from holdfast.training.engine.replica_check import refuse_unequal_start
from holdfast.training.engine.state import LocalTensor
from holdfast.training.engine.task import DecoderTask
from holdfast.training.engine.vote import Ballot, StepAccount, Wishes, vote
from holdfast.training.memory.ledger import MemoryLedger
from holdfast.training.optimizers.make_optimizer import make_optimizer
from holdfast.training.recover.recovery_agreement import (
    NO_STATE,
    RankProgress,
    RankStatement,
    agree,
    conclude,
)
from holdfast.wire.store.run_store import FolderStore
from tests.runtime.cli.remedies.lab import Case, Lab, case, fixed, setting
from tests.runtime.cli.remedies.of_others import values
from tests.runtime.cli.remedies.of_task_code import task
from tests.runtime.parallel.test_pipeline import stages_of
from tests.runtime.parallel.test_reshard import TABLE, held
from tests.support.memory_store import MemoryStore
from tests.support.own_tasks import config_of_task
from tests.support.sample_tasks import CLASSES, WIDTH
from tests.support.tiny_training import CPU, tiny


def in_ranks(body: Callable[[int, Any], object], count: int = 2) -> None:
    """Call `body` with a rank and the store of all, in a thread for each rank; raise what the first
    of them raises."""
    store = HashStore()
    with ThreadPoolExecutor(count) as pool:
        found = [pool.submit(body, rank, store) for rank in range(count)]
    for one in found:
        one.result()


def make_cut_optimizer(lab: Lab) -> None:
    """Of the first third of the columns of a matrix, as a table of a user may cut it."""
    part, row = torch.zeros(64, 96), Parameter("w", (64, 288), True, Own())
    config = OptimizerConfig(state_dtype=lab.settings["state_dtype"])
    make_optimizer(config, [row], [part], [part], boxes=[Box("w", (0, 0), (64, 96))])


def replicas(count: int, generation: int = 1) -> Topology:
    return place_layout(Layout(dp_replicate=count), generation, ("node",) * count)


def joined(rank: int, store: Any, count: int = 2) -> ProcessGroups:
    return connect(replicas(count), rank, store, CPU, seconds=60)


# --- groups ---------------------------------------------------------------------------------
def join(lab: Lab) -> None:
    topology, device = lab.settings["topology"], torch.device(lab.settings["device"])

    def body(rank: int, store: Any) -> None:
        connect(topology, rank, store, device, seconds=60).close()

    in_ranks(body, topology.world_size)


# --- pipelines ------------------------------------------------------------------------------
def run_pipeline(lab: Lab) -> None:
    name = lab.settings["schedule"]
    table = from_csv("0F0,0I0,0W0\n", name) if name == "own" else build_schedule(name, 1, 1)
    line = PeerGroup(None, "alone", 0, 1)  # type: ignore[arg-type]  # one rank needs no store
    PipelineInterpreter(line, CPU).run(table, stages_of(0, table, split=False))


def plan_pipeline(lab: Lab) -> None:
    """With few tags left."""
    schedule = build_schedule("forward", 1, lab.settings["microbatches"])
    make_pipeline_plan(schedule, 0, first_tag=0x7FFF0000 - 10)


# --- rebuilds -------------------------------------------------------------------------------
def plan_rebuild(lab: Lab) -> None:
    """If a rank's state is lost, a start from a checkpoint reads it."""
    if lab.settings.get("restores"):
        read_checkpoint(lab)
        return
    old = place_layout(Layout(dp_shard=2), 1, ("node",) * 2)
    plan_reshard(old, replicas(2, 2), TABLE, lab.settings["came_from"], 0)


def read_checkpoint(lab: Lab) -> None:
    store = FolderStore(lab.trained)
    checkpoint = Checkpoint.open(store, list_commits(store)[0])
    spec = checkpoint.spec(NORM)
    given = lab.settings.get("box", {"offsets": (0,), "lengths": spec.shape})
    box = Box(NORM, **given)
    checkpoint.read(box, memoryview(bytearray(4 * box.size)))


NORM = "model.norm.weight"


def rebuild(lab: Lab) -> None:
    """Two ranks move their state, each by its own orders."""

    def body(rank: int, store: Any) -> None:
        generation = lab.settings["generations"][rank]
        old = replicas(2)
        new = place_layout(Layout(dp_shard=2), generation, ("node",) * 2)
        peers = PeerGroup(store, "move", rank, 2, seconds=60)
        moves = plan_reshard(old, new, TABLE, (0, 1), rank)
        mine: dict[str, Any] = {p.name: p for p in held(old, rank, True)}
        step = lab.settings["steps"][rank]
        move(mine, held(new, rank, False), moves, peers, (0, 1), step=step)

    in_ranks(body)


def meet(lab: Lab) -> None:
    """Two ranks tell each other what they hold before a rebuild."""

    def body(rank: int, store: Any) -> None:
        new = replicas(2, lab.settings["generations"][rank])
        control = PeerGroup(store, "control", rank, 2, seconds=60)
        statement = RankStatement(RankProgress(3))
        agree(control, statement, new, replicas(2), (0, 1), 4)

    in_ranks(body)


def draw_conclusions(lab: Lab) -> None:
    """Of two ranks. After a restore, both have the checkpoint's step."""
    step = None
    if lab.settings.get("restores"):
        store = FolderStore(lab.trained)
        step = Checkpoint.open(store, list_commits(store)[0]).commit.step
    statement = NO_STATE if step is None else RankStatement(RankProgress(step))
    conclude([statement] * 2, replicas(2, 2), replicas(2), (0, 1))


def compare_starts(lab: Lab) -> None:
    """Three workers compare the values that the task's parameters begin with."""
    made = lab.settings["task"]()
    config = config_of_task(made)
    rows = {f"model.{row.name}": row for row in map(row_of_text, config.task.parameters)}

    def body(rank: int, store: Any) -> None:
        given = first_values(made, 1)
        state = [
            LocalTensor(
                spec.name,
                given(rows[spec.name]) if spec.name in rows else torch.zeros(spec.shape),
                (0,) * len(spec.shape),
                spec.shape,
            )
            for spec in run_state_table(config)
        ]
        refuse_unequal_start(config, joined(rank, store, 3), state)

    in_ranks(body, 3)


def draw_from_system(self: Any) -> nn.Module:
    module = nn.Linear(WIDTH, CLASSES)
    if not module.weight.is_meta:
        own = torch.Generator().manual_seed(int.from_bytes(os.urandom(4), "little"))
        nn.init.normal_(module.weight, generator=own)
    return module


def _one(rank: int, step: int) -> int:
    return 1


def cast_votes(lab: Lab) -> None:
    def body(rank: int, store: Any) -> None:
        rate, options = (lab.settings.get(key, _one) for key in ("rate", "options"))
        ballot = Ballot(1.0, Wishes(), learning_rate=rate(rank, 1), options=options(rank, 1))
        vote(joined(rank, store), StepAccount(8, (1.0,)), ballot)

    in_ranks(body)


# --- checkpoints ----------------------------------------------------------------------------
def import_weights(lab: Lab) -> None:
    source = TensorSource("scale", "F32", (1,), [bytes(4)])
    write_single(lab.settings["store"], 1, 6, [source], {})


def begin_imported(lab: Lab) -> None:
    lab.settings["store"] = MemoryStore()
    import_weights(lab)


def begin_newer(lab: Lab) -> None:
    """A manifest that the next version of Holdfast wrote."""
    newer = max(manifest.READABLE_FORMATS) + 1
    lab.settings["data"] = seal_manifest("commit", {"step": 3}, newer)


def read_manifest(lab: Lab) -> None:
    """What this version does; the next one reads one format more."""
    with pytest.MonkeyPatch.context() as patch:
        if lab.settings.get("is_newer"):
            known = (*manifest.READABLE_FORMATS, max(manifest.READABLE_FORMATS) + 1)
            patch.setattr(manifest, "READABLE_FORMATS", known)
        unseal_manifest("commit", lab.settings["data"], "x")


# --- a task's objective, and a script that trains ---------------------------------------------
def open_objective(lab: Lab) -> None:
    config = tiny(model__vocab_size=lab.settings["vocabulary"])
    DecoderTask(config).objective(connect(replicas(1), 0, HashStore(), CPU))


SCRIPT = """\
import holdfast
from tests.runtime.cli.remedies.of_others import Sized


class Net(Sized):
    pass


{guard}holdfast.train(Net, "run.yaml")
"""


def write_script(guard: str) -> Callable[..., None]:
    def write(lab: Lab, found: Match[str] | None = None) -> None:
        said = guard.format(*(found.groups() if found else ()))
        lab.write("remedy_script.py", SCRIPT.format(guard=said and f"{said}\n    "))

    return write


def import_script(lab: Lab) -> None:
    """What a worker does to find the task."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", list(sys.path))
        patch.setattr(sys, "dont_write_bytecode", True)
        try:
            load_task(TaskConfig(name="remedy_script:Net", folder=str(lab.folder)))
        finally:
            sys.modules.pop("remedy_script", None)


RESHARD, AGREE, PIPE = (
    "parallel/axes/reshard.py: ",
    "training/recover/recovery_agreement.py: ",
    "parallel/pipeline",
)
PLAN, GROUPS = "core/sharding/reshard_plan.py: ", "parallel/axes/process_groups.py: "
ONE_TOPOLOGY = r"give all of them one topology, and one list of where they came from"
RESTORE = r"restore this run from a checkpoint"


def add_at_places(lab: Lab) -> None:
    """An operation whose order torch does not fix on a CPU either, in a worker of a device."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("error" if lab.settings["deterministic"] else "default")
    try:
        torch.zeros(4).put_(torch.tensor([1, 1]), torch.ones(2))
    except RuntimeError as error:
        refused = as_indeterminate(error)
        assert refused is not None
        raise refused from error
    finally:
        torch.set_deterministic_debug_mode(before)


CASES: list[Case] = [
    case(
        "training/memory/ledger.py: a rank needs … GB of its device (…), which is … GB more "
        "than the "
        "limit of … GB",
        values(device_gb=0.001),
        lambda lab: MemoryLedger(int(lab.settings["device_gb"] * 1e9), ["gradients"]).add(
            "device", "parameters", 1_234_567
        ),
        r"use train\.memory\.device_gb=(\S+) or more \(holdfast layout show prints an estimate\), "
        r"or move state with train\.memory\.gradients=host",
        setting("device_gb", float),
    ),
    case(
        "training/engine/precision.py: … gives other bits each time on this device",
        values(deterministic=True),
        add_at_places,
        r"use train\.deterministic=(false), or another operation in the model",
        fixed(deterministic=False),
    ),
    case(
        "parallel/comm/devices.py: this worker was given …, but torch sees …",
        values(device="cuda:1"),
        lambda lab: select_device(torch.device(lab.settings["device"])),
        r"use device=(cpu)",
        lambda lab, found: lab.settings.update(device=found[1]),
    ),
    case(
        "parallel/comm/devices.py: several workers on … need the backend …, which this torch "
        "does not "
        "have",
        values(device="cuda"),
        lambda lab: check_backends(device_kind(lab.settings["device"])),
        r"use 1 worker, or device: (cpu)",
        lambda lab, found: lab.settings.update(device=found[1]),
    ),
    case(
        GROUPS + "a run on … has one worker",
        values(topology=replicas(2), device="mps"),
        join,
        r"use 1 worker, or device: (cpu)",
        lambda lab, found: lab.settings.update(device=found[1]),
    ),
    case(
        PIPE + ".py: the schedule … splits the backward, which these stages do not",
        values(schedule="own"),
        run_pipeline,
        r"use 1f1b or (gpipe)",
        lambda lab, found: lab.settings.update(schedule=found[1]),
    ),
    case(
        PIPE + "_plan.py: … stages and … microbatches need more message tags than there are",
        values(microbatches=10),
        plan_pipeline,
        r"use fewer microbatches",
        fixed(microbatches=2),
    ),
    case(
        PLAN + "… does not say for each of … ranks which one of … old ranks it was",
        values(came_from=(0, 0)),
        plan_rebuild,
        r"name each old rank at most once, None for a newcomer",
        fixed(came_from=(0, 1)),
    ),
    case(
        PLAN + "nobody who is left holds ……",
        values(came_from=(0, None)),
        plan_rebuild,
        RESTORE,
        fixed(restores=True),
    ),
    case(
        RESHARD + "ranks were told of different rebuilds",
        values(generations=(2, 3), steps=(7, 7)),
        rebuild,
        ONE_TOPOLOGY,
        fixed(generations=(2, 2)),
    ),
    case(
        RESHARD + "some ranks hold the state after step …, other ranks that after …",
        values(generations=(2, 2), steps=(7, 8)),
        rebuild,
        r"rebuild from ranks of one step, or restore a checkpoint",
        fixed(steps=(8, 8)),
    ),
    case(
        AGREE + "ranks were told of different rebuilds",
        values(generations=(2, 3)),
        meet,
        ONE_TOPOLOGY,
        fixed(generations=(2, 2)),
    ),
    case(AGREE + "(conclude)", values(), draw_conclusions, RESTORE, fixed(restores=True)),
    case(
        "training/engine/replica_check.py: workers … begin with other values of … than the rest",
        values(task=task(model=draw_from_system)),
        compare_starts,
        r"draw initial values from torch's generator alone, whose seed is set, or return them in "
        r"initial\(\)",
        fixed(
            task=task(
                model=draw_from_system, initial=lambda self, name, shape: holdfast.Normal(0.3)
            )
        ),
    ),
    case(
        "training/engine/vote.py: the ranks have unlike learning rates: … and …",
        values(rate=lambda rank, step: 0.1 + rank),
        cast_votes,
        r"make the rate a function of step\.number, or give run\.keep\(\) the scheduler",
        fixed(rate=lambda rank, step: 0.1 * step),
    ),
    case(
        "training/engine/vote.py: the groups of the ranks' optimizers have unlike options",
        values(options=lambda rank, step: rank),
        cast_votes,
        r"make each option a function of step\.number, or give run\.keep\(\) the scheduler",
        fixed(options=lambda rank, step: step),
    ),
    case(
        "checkpoint/restore/reader.py: … has the shape … there, the box … at … is outside",
        values(box={"offsets": (0,), "lengths": (64,)}),
        read_checkpoint,
        r"restore with the model of the run that wrote it",
        fixed(box={"offsets": (0,), "lengths": (16,)}),
    ),
    case(
        "checkpoint/save/single_writer.py: step … of generation … is committed already",
        begin_imported,
        import_weights,
        r"import into a run folder that has no checkpoint",
        lambda lab, found: lab.settings.update(store=MemoryStore()),
    ),
    case(
        "core/format/manifest.py: format version … is newer than …",
        begin_newer,
        read_manifest,
        r"use the version of Holdfast that wrote it",
        fixed(is_newer=True),
    ),
    case(
        "options/short_state/apply.py: tp cuts … … into other parts than equal ones of complete "
        "blocks of … elements",
        values(state_dtype="8bit"),
        make_cut_optimizer,
        r"use state_dtype (bf16), or tp 1",
        lambda lab, found: lab.settings.update(state_dtype=found[1]),
    ),
    case(
        "training/engine/task.py: the vocabulary size is not known yet",
        values(vocabulary=0),
        open_objective,
        r"prepare the dataset, or set it",
        fixed(vocabulary=300),
    ),
    case(
        "api/training.py: holdfast.train is called while a worker imports this file",
        write_script(""),
        import_script,
        r"put the call below: (if __name__ == '__main__':)",
        write_script("{0}"),
    ),
]
