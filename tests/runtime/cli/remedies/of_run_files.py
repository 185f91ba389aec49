"""Remedies of messages about the text of a run file, its paths and its overrides."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from re import Match
from typing import Any

import pytest

from holdfast.config.loading.identity import config_differences, refuse_other_run
from holdfast.config.loading.load import load_config, resolve_config
from holdfast.launch.run.microbatch_size import by_microbatch_size
from holdfast.launch.start.facts import Facts
from holdfast.launch.start.machine import plan_for_machine
from holdfast.machine.hardware import detect_hardware
from holdfast.plan.placing.layouts import check_dealing_of_steps, layouts_of
from tests.runtime.cli.remedies.lab import Case, Lab, case, fixed

GOOD = "train:\n  steps: 5\n"


def load(lab: Lab) -> None:
    named = lab.settings.get("address") or lab.folder / lab.settings.get("name", "run.yaml")
    load_config(Path(named), lab.settings["overrides"])


def file(content: str | bytes, *overrides: str) -> Callable[[Lab], None]:
    def begin(lab: Lab) -> None:
        lab.write("run.yaml", content)
        lab.settings["overrides"] = list(overrides)

    return begin


def rewritten(content: str) -> Callable[[Lab, Match[str]], None]:
    """Mend the text as the remedy says."""
    return lambda lab, found: lab.write("run.yaml", content)


def override(*words: str) -> Callable[[Lab], None]:
    return file(GOOD, *words)


def use(pattern: str = "{0}") -> Callable[[Lab, Match[str]], None]:
    """Type the override that the remedy shows, in place of the wrong one."""

    def mend(lab: Lab, found: Match[str]) -> None:
        lab.settings["overrides"] = [pattern.format(*found.groups())]

    return mend


def leave_out(lab: Lab, found: Match[str]) -> None:
    lab.settings["overrides"] = []


def as_yaml(text: str, remedy: str, content: str, good: str = GOOD) -> Case:
    return case(
        f"config/loading/yaml_tree.py: {text}", file(content), load, remedy, rewritten(good)
    )


def plan(lab: Lab) -> None:
    """Plan for this machine, as a start does. A person has another machine, or none of g++."""
    with pytest.MonkeyPatch.context() as patch:
        for target, value in lab.settings.get("patches", {}).items():
            patch.setattr(target, value)
        loaded = resolve_config(None, "command line", lab.settings["overrides"])
        layouts_of(plan_for_machine(loaded, Facts(detect_hardware())).config)


def on_machine(*overrides: str, **patches: Any) -> Callable[[Lab], None]:
    def begin(lab: Lab) -> None:
        lab.settings.update(overrides=list(overrides))
        lab.settings["patches"] = {
            name.replace("__", "."): value for name, value in patches.items()
        }

    return begin


def add(lab: Lab, found: Match[str]) -> None:
    lab.settings["overrides"].append(found[1])


def set_workers(lab: Lab, found: Match[str]) -> None:
    lab.settings["overrides"].append(f"layout.workers={found[1]}")


# --- another configuration in a folder ------------------------------------------------------
def resume(lab: Lab) -> None:
    stored = resolve_config(None, "command line", lab.settings.get("first", ())).config
    now = resolve_config(None, "command line", lab.settings["overrides"]).config
    refuse_other_run(stored.model_dump(mode="json"), now, "run")
    assert config_differences(stored.model_dump(mode="json"), now) == []


def size_microbatch(lab: Lab) -> None:
    """Choose the microbatch as a start does, of a model whose vocabulary is known."""
    words = ["train.microbatch_size=auto", *lab.settings["overrides"]]
    loaded = resolve_config(None, "command line", ["layout.workers=1", "device=cpu", *words])
    by_microbatch_size(loaded, Facts(detect_hardware()))


def deal(lab: Lab) -> None:
    check_dealing_of_steps(resolve_config(None, "command line", lab.settings["overrides"]).config)


A = "launch/run/microbatch_size.py: "
KNOWN = ("model.vocab_size=512", "model.preset=tiny")
ROOM = "train.memory.device_gb=1"
L, P, T = ("config/loading/load.py: ", "config/loading/paths.py: ", "launch/start/machine.py: ")
DEEP = "a: " + "[" * 200 + "]" * 200

CASES: list[Case] = [
    case(
        A + "… auto needs a formula of the memory, and none covers this model, precision, "
        "mask, task, layout.quantized or layout.ep",
        on_machine(*KNOWN, "train.precision=fp16"),
        size_microbatch,
        r"name a number: (train\.microbatch_size=\d+)",
        add,
    ),
    case(
        A + "… auto needs the vocabulary, and the dataset is not prepared",
        on_machine("model.preset=tiny", ROOM),
        size_microbatch,
        r"name it with (model\.vocab_size=\d+), or prepare: holdfast data prepare",
        add,
    ),
    case(
        A + "… auto needs a limit, and the device … has none that is known",
        on_machine(*KNOWN),
        size_microbatch,
        r"name one with (train\.memory\.device_gb=\d+), or a number: train\.microbatch_size=2",
        add,
    ),
    case(
        A + "no microbatch fits: one of … needs … on a rank, and there are …",
        on_machine(*KNOWN, "train.memory.device_gb=0.001"),
        size_microbatch,
        r"use (train\.memory\.device_gb=[\d.]+) or more",
        add,
    ),
    case(
        "plan/memory/microbatch_size.py: a step of … samples has no microbatch that … shards can "
        "share",
        on_machine(*KNOWN, ROOM, "layout.dp_shard=3", "layout.workers=3", "train.batch_size=16"),
        size_microbatch,
        r"use (\d+)",
        lambda lab, found: lab.settings["overrides"].append(f"train.batch_size={found[1]}"),
    ),
    case(
        L + "there is no such run file",
        lambda lab: lab.settings.update(overrides=[]),
        load,
        r"make one: holdfast init (\S+)",
        lambda lab, found: Path(found[1]).write_text(GOOD),
    ),
    case(
        L + "this is the address of a bucket, and this command takes a run file",
        lambda lab: (file(GOOD)(lab), lab.settings.update(address="s3://runs/a?endpoint=e")),
        load,
        r"name the run file, and the address with folder=ADDRESS",
        lambda lab, found: lab.settings["overrides"].append(
            f"folder={lab.settings.pop('address')}"
        ),
    ),
    case(
        L + "this is a folder, not a run file",
        lambda lab: (file(GOOD)(lab), lab.settings.update(name=".")),
        load,
        r"name the YAML file in it",
        fixed(name="run.yaml"),
    ),
    case(
        L + "the byte 0x… is not UTF-8",
        file(b"name: caf\xe9\n"),
        load,
        r"save the file as UTF-8 text",
        rewritten(GOOD),
    ),
    case(
        L + "an override is written key=value",
        override("steps"),
        load,
        r"for example (train\.steps=\d+)",
        use(),
    ),
    case(
        L + "unknown key …",
        override("train.stpes=3"),
        load,
        r"did you mean (train\.\w+)\?",
        use("{0}=3"),
    ),
    case(
        L + "what follows the # would be a comment",
        override("name=a #b"),
        load,
        r"put the value in quotes: '(name=.*)'",
        use(),
        (r"'?(\w+)'? would work", use("name={0}")),
    ),
    *(
        case(
            L + "a text that begins with * or & has to be in quotes",
            override(wrong),
            load,
            r"write (.*)",
            lambda lab, found: lab.settings.update(overrides=shlex.split(found[1])),
        )
        for wrong in (
            "train.optimizer.groups.0.match=*norm*",
            "train.optimizer={name: muon, adamw_for: [*embed*, b]}",
        )
    ),
    case(
        L + "… has no item …",
        override("data.sources.3.kind=python-stdlib"),
        load,
        r"the next one is (data\.sources\.\d+)",
        use("{0}.kind=python-stdlib"),
    ),
    case(
        L + "… is … keys of their own",
        override("data.sources.name=x"),
        load,
        r"write (data\.sources\.0\.name)=\.\.\.",
        use("{0}=x"),
    ),
    case(
        P + "the path is empty",
        override("folder='  '"),
        load,
        r"name a file or a folder",
        use("folder=runs/a"),
    ),
    case(
        P + "… has a $, and Holdfast fills in no variables",
        override("folder=$HOME/x"),
        load,
        r"write (\S+)",
        use("folder={0}"),
    ),
    case(
        P + "… has a $, and Holdfast fills in no variables",
        override("folder=$NO_SUCH_NAME/x"),
        load,
        r"write the path in full",
        use("folder=/tmp/x"),
    ),
    case(
        P + "… has a control character",
        override('folder="a\\x01b"'),
        load,
        r"write a path of visible characters",
        use("folder=ab"),
    ),
    case(
        P + "… starts at the home of …, and there is no such user",
        override("folder=~nobody-here/x"),
        load,
        r"write the path in full, or (\S+) for a name that begins with ~",
        use("folder={0}"),
    ),
    case(
        P + "a name in … has more than … bytes",
        override(f"folder={'n' * 300}"),
        load,
        r"use a shorter one",
        use("folder=n"),
    ),
    as_yaml(
        "the run file is empty",
        r"start from one made by 'holdfast init'",
        "\n",
    ),
    as_yaml(
        "a run file is made of sections and keys, and this is not",
        r"write for example 'train:' and, indented below it, 'steps: 1000'",
        "just words\n",
        "train:\n  steps: 1000\n",
    ),
    as_yaml(
        "this is not valid YAML (…)",
        r"write 'key: value' with a space after the colon, and indent by two spaces",
        "train: steps: 5\n",
    ),
    as_yaml("… was already given on line …", r"keep one", "name: a\nname: b\n", "name: a\n"),
    as_yaml("a tab cannot indent YAML", r"use spaces", "train:\n\tsteps: 5\n"),
    as_yaml("a run file is one YAML document", r"remove the '---' line", "name: a\n---\nname: b\n"),
    as_yaml(
        "anchors (&) and aliases (*) are not used in a run file",
        r"write the value out, or put it in quotes if it is text",
        "name: &a b\n",
        "name: b\n",
    ),
    as_yaml(
        "a list belongs to a key, and none is above it",
        r"remove the line, or write its key above it",
        "- b\nname: a\n",
        "name: a\n",
    ),
    as_yaml(
        "the first key is indented, and a later one is not",
        r"begin it at the start of the line",
        "  name: a\nseed: 1\n",
        "name: a\nseed: 1\n",
    ),
    as_yaml("the tag … is not used in a run file", r"remove it", "name: !!int a\n", "name: a\n"),
    as_yaml("a key must be a word", r"write 'key: value'", "? [a]\n: b\n", GOOD),
    as_yaml("nested too deeply", r"write it flatter", DEEP, GOOD),
    as_yaml(
        "the character … does not belong in a text file",
        r"give a YAML file as 'holdfast init' writes it",
        "name: a\0\n",
    ),
    case(
        "config/loading/model_from.py: model.preset … and … … both give the shape",
        override("model.preset=tiny", "model.from=hf"),
        load,
        r"use one of the two",
        use("model.preset=tiny"),
    ),
    case(
        "config/loading/identity.py: this run folder belongs to another configuration (…)…",
        override("seed=9"),
        resume,
        r"put the values back, choose another name or folder, or start over with --fresh.*",
        leave_out,
    ),
    case(
        "plan/placing/layouts.py: …, but step … has … microbatch… of … samples, so … would have "
        "nothing to do",
        on_machine("layout.workers=9", "train.batch_size=4", "train.microbatch_size=1"),
        deal,
        r"use (\d+).*",
        set_workers,
    ),
    case(
        "launch/node/devices.py: … is …, but this machine has … accelerators",
        on_machine("device=cuda", "layout.workers=2"),
        plan,
        r"use (device=cpu)",
        add,
    ),
    case(
        T + "train.compile needs a C++ compiler on a CPU, and there is none on the PATH",
        on_machine("train.compile=true", holdfast__cli__train__cpp_compiler=lambda _: None),
        plan,
        r"install g\+\+, name another in CXX, or use (train\.compile=false)",
        add,
    ),
    case(
        T + "on macOS one worker is supported",
        on_machine("layout.workers=2", platform__system=lambda: "Darwin"),
        plan,
        r"use (1)",
        set_workers,
    ),
]
