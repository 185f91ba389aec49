"""The table of `of_others.py`."""

from __future__ import annotations

import json

from torch import nn

from holdfast.api.training import train
from holdfast.core.schedule.csv import from_csv
from holdfast.core.schedule.named import build_schedule
from holdfast.core.sharding.pipeline_stages import check_number_of_stages
from holdfast.errors import ConfigError
from holdfast.layout import Layout, Replica
from holdfast.parallel.torch_compat import check_version
from holdfast_lab.chaos.layouts import parse_layout
from holdfast_lab.chaos.sample_run import write_run_file
from holdfast_lab.chaos.schedule import parse_faults_option
from tests.runtime.cli.remedies.lab import Case, Lab, case, fixed, setting
from tests.runtime.cli.remedies.of_others import (
    ONE,
    THIS,
    Buffered,
    Different,
    PlainTensor,
    Sized,
    as_shown,
    begin_elsewhere,
    calling,
    change_fault,
    check_layout,
    fault,
    faults,
    load,
    name_of,
    numbers,
    rows_of,
    text,
    topology,
    values,
)
from tests.support.models import config

TASK = "tasks/task/loading.py: "
CHAOS, LAYOUT, TP = (
    "holdfast_lab/chaos/schedule.py: ",
    "layout.py: ",
    "parallel/axes/tensor_parallel.py: ",
)
TABLE, CSV = "core/schedule/table.py: ", "core/schedule/csv.py: "
NAMED = "core/schedule/named.py: "


CASES: list[Case] = [
    case(
        CHAOS + "this is not a fault at a step",
        fault(fault="agent"),
        faults,
        r"write (\{.*\})",
        as_shown,
    ),
    case(
        CHAOS + "there is no fault …",
        fault(step=3, fault="explode"),
        faults,
        r"use one of .*\b(agent)\b.*",
        change_fault("fault"),
    ),
    case(
        CHAOS + "there is no fault …",
        values(text="explode"),
        calling(parse_faults_option),
        r"use a number, or some of .*\b(agent)\b.*",
        as_shown,
    ),
    case(
        CHAOS + "… cannot be at …",
        fault(step=3, fault="kill", point="noon"),
        faults,
        r"use one of (\w+).*",
        change_fault("point"),
    ),
    case(
        "holdfast_lab/chaos/layouts.py: … is no layout",
        text("two of them"),
        lambda lab: parse_layout(lab.settings["text"]),
        r"use one of .*, or degrees such as (\S+)",
        as_shown,
    ),
    case(
        "holdfast_lab/chaos/layouts.py: workers=… make no whole replicas of …",
        text("tp=2,workers=3"),
        lambda lab: parse_layout(lab.settings["text"]),
        r"use (?:workers=\d+ or )?(workers=\d+)",
        lambda lab, found: lab.settings.update(text=f"tp=2,{found[1]}"),
    ),
    case(
        "holdfast_lab/chaos/layouts.py: … ranks cannot be spread evenly over … nodes",
        values(text="tp=2,workers=4", nodes=3),
        calling(parse_layout),
        r"use (\d+)",
        setting("nodes", int),
    ),
    case(
        "holdfast_lab/chaos/sample_run.py: a run file lies here that 'holdfast chaos' did not "
        "write",
        lambda lab: (lab.write("run.yaml", "name: mine\n"), lab.settings.update(out="")),
        lambda lab: write_run_file(lab.folder / lab.settings["out"]),
        r"disturb it with: holdfast chaos \S+, or name another --out",
        fixed(out="other"),
    ),
    case(
        CSV + "the table has no action",
        values(text=",,\n", name="t"),
        calling(from_csv),
        r"write (0F0), (0B0) and so on",
        lambda lab, found: lab.settings.update(text=f"{found[1]},{found[2]}\n"),
    ),
    case(
        CSV + "… is no action",
        values(text="0F0,noon\n", name="t"),
        calling(from_csv),
        r"write stage, one of F, B, I, W, and microbatch, as in (\w+)",
        lambda lab, found: lab.settings.update(text="0F0,0B0\n"),
    ),
    case(
        NAMED + "there is no schedule …",
        values(name="gpip", ranks=2, microbatches=4),
        calling(build_schedule),
        r"did you mean '(\w+)'\?",
        setting("name"),
    ),
    case(
        NAMED + "the schedule … has … a rank, not …",
        values(name="1f1b", ranks=2, microbatches=4, virtual=2),
        calling(build_schedule),
        r"use the schedule interleaved or (gpipe), or one stage a rank",
        setting("name"),
    ),
    case(
        TABLE + "the schedule … over … ranks needs at least … microbatches, there are …",
        values(name="1f1b", ranks=4, microbatches=2),
        calling(build_schedule),
        r"use (\d+) or more microbatches a replica, fewer stages, or the schedule gpipe",
        setting("microbatches", int),
    ),
    case(
        NAMED + "… ranks with … stages each are no pipeline",
        values(name="gpipe", ranks=0, microbatches=2),
        calling(build_schedule),
        r"use (1) or more of both",
        setting("ranks", int),
    ),
    case(
        "core/sharding/pipeline_stages.py: … stages cannot share … blocks",
        values(pp=5),
        lambda lab: check_number_of_stages(config(), lab.settings["pp"]),
        r"use (\d+) or less",
        setting("pp", int),
    ),
    case(
        LAYOUT + "degree … is impossible",
        values(tp=0),
        calling(Layout),
        r"use (1) or more",
        setting("tp", int),
    ),
    case(
        LAYOUT + "a pipeline of … cannot have the stages …",
        values(pp=2, stages=(1,)),
        calling(Layout),
        r"give (2) numbers of blocks",
        fixed(stages=(1, 1)),
    ),
    case(
        LAYOUT + "stage … of … holds … blocks",
        values(pp=2, stages=(2, 0)),
        calling(Layout),
        r"give every stage a block",
        fixed(stages=(1, 1)),
    ),
    case(
        LAYOUT + "the weight … gives no work",
        values(index=0, ranks=(0,), weight=0),
        calling(Replica),
        r"use (1) or more",
        setting("weight", int),
    ),
    case(
        LAYOUT + "a pipeline of … stages does not say which blocks each holds",
        values(index=0, ranks=(0, 1), mesh_shape=(2, 1, 1, 1)),
        lambda lab: Replica(**lab.settings).blocks(0),
        r"give the number of blocks of each stage",
        fixed(stages=(1, 1)),
    ),
    case(
        LAYOUT + "replicas are numbered …",
        values(replicas=(Replica(1, (0,)),), nodes=("a",)),
        topology,
        r"number them 0, 1, 2, \.\.\. in order",
        fixed(replicas=(ONE,)),
    ),
    case(
        LAYOUT + "rank … stands twice, …",
        values(replicas=(ONE, Replica(1, (0,))), nodes=("a", "a")),
        topology,
        r"give every rank one place",
        fixed(replicas=(ONE, Replica(1, (1,)))),
    ),
    case(
        LAYOUT + "ranks …… are …",
        values(replicas=(ONE, Replica(1, (5,))), nodes=("a", "a")),
        topology,
        r"use ranks 0 to (\d+)",
        lambda lab, found: lab.settings.update(replicas=(ONE, Replica(1, numbers(found[1])))),
    ),
    case(
        LAYOUT + "… ranks, but nodes for …",
        values(replicas=(ONE,), nodes=("a", "b")),
        topology,
        r"name the node of each rank",
        fixed(nodes=("a",)),
    ),
    case(
        TP + "tp … does not divide the … query heads",
        values(tp=3),
        check_layout,
        r"use one of \[1, (\d+).*\]",
        setting("tp", int),
    ),
    case(
        TP + "tp … is neither a divisor nor a multiple of the … key/value heads",
        values(tp=2, model={"heads": 6, "kv_heads": 3, "dim": 48}),
        check_layout,
        r"use tp (\d+)",
        setting("tp", int),
    ),
    case(
        TP + "tp … is more than the … inner units of SwiGLU",
        values(tp=4, model={"ffn_dim": 2}),
        check_layout,
        r"use tp (\d+)",
        setting("tp", int),
    ),
    case(
        "parallel/torch_compat.py: torch … is not supported: its private interfaces were not "
        "checked",
        values(version="2.3.0"),
        calling(check_version),
        r"install torch (2\.11), .*",
        lambda lab, found: lab.settings.update(version=f"{found[1]}.0"),
    ),
    case(
        TASK + "class … takes no argument …",
        values(name=f"{THIS}:Sized", args={"witdh": 3}),
        load,
        r"write task\.args\.(\w+) \(its arguments: width\)",
        lambda lab, found: lab.settings.update(args={found[1]: 3}),
    ),
    case(
        TASK + "class … takes no argument …",
        values(name=f"{THIS}:Sized", args={"zzz": 3}),
        load,
        r"remove it \(its arguments: width\)",
        fixed(args={}),
    ),
    case(
        TASK + "… in … is no subclass of holdfast.Task | … has no class …",
        values(name=f"{THIS}:Net"),
        load,
        r"name a class that derives from holdfast.Task",
        fixed(name=f"{THIS}:Sized"),
    ),
    case(
        TASK + "there is no module … in …, nor among the installed packages",
        begin_elsewhere,
        load,
        r"name its folder in task.folder",
        name_of,
    ),
    case(
        "tasks/task/module.py: … is a plain tensor of the module",
        values(task=PlainTensor),
        rows_of,
        r"register it as a buffer, or as a parameter",
        fixed(task=Buffered),
    ),
    case(
        "tasks/task/module.py: the module does not fit its table: row … is …, and the table has …",
        values(task=Different),
        rows_of,
        r"let model\(\) make the same module in each call",
        fixed(task=Sized),
    ),
    case(
        "api/training.py: overrides are a list of texts, not …",
        values(overrides="train.steps=20"),
        lambda lab: _train(lab),
        r"write (\[.*\])",
        lambda lab, found: lab.settings.update(overrides=json.loads(found[1])),
    ),
    case(
        "api/training.py: args cannot be written into the run file: …",
        values(args={"net": nn.Linear(1, 1)}),
        lambda lab: _train(lab),
        r"give numbers, texts and lists, and make other objects in __init__",
        fixed(args={"width": 3}),
    ),
    case(
        "api/training.py: holdfast.train takes a class, not … …",
        lambda lab: lab.settings.update(task=Sized()),
        lambda lab: _train(lab),
        r"give the class itself, such as Net, and its arguments as args=\{\.\.\.\}",
        fixed(task=Sized),
    ),
]


def _train(lab: Lab) -> None:
    """Call `holdfast.train` up to the run file, which is not there."""
    given = {"task": Sized, **lab.settings}
    try:
        train(given.pop("task"), lab.folder / "none.yaml", **given)
    except ConfigError as error:
        if "there is no such run file" not in error.message:
            raise
