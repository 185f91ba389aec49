"""Remedies of messages about tasks, optimizers and folders of models that a run file names."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from re import Match
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml

from holdfast.api.reading import open_checkpoint
from holdfast.api.training import _task_overrides
from holdfast.cli.checkpoint_import import refuse_other_tokenizer
from holdfast.config.huggingface.convert import to_their_config
from holdfast.config.loading.identity import refuse_other_run
from holdfast.config.loading.load import load_config
from holdfast.config.sections.task import SCRIPT_TASK, TaskConfig, refuse_file_of_task
from holdfast.data.stream.dataset import Dataset
from holdfast.launch.run import task_run
from holdfast.launch.run.named_parts import ask_named
from holdfast.tasks import choose
from holdfast.tasks.task.loading import load_task, source_digest
from tests.runtime.cli.remedies.lab import Case, Lab, Mend, case, fetch_again, fixed
from tests.runtime.cli.remedies.of_models import export
from tests.runtime.cli.remedies.of_others import Sized
from tests.runtime.cli.remedies.of_runs import RUN, attempt, begin_run, replace
from tests.support.models import config, train_tokenizer

TASK = f"from {__name__} import Sized\n\n\nclass Net(Sized):\n    pass\n"
CODE = "model.code=transformers"


# --- a command line -------------------------------------------------------------------------
def begin(*words: str) -> Callable[[Lab], None]:
    """Begin with a model's folder and a command line; {0} stands for the folder of both."""

    def start(lab: Lab) -> None:
        export(lab.folder / "hf")
        lab.settings["overrides"] = [word.format(lab.folder) for word in words]

    return start


def load(lab: Lab) -> None:
    load_config(None, lab.settings["overrides"])


def load_task_run(lab: Lab) -> None:
    """What a start does about a task, but for the child that imports it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task_run, "describe_in", lambda loaded, folder: {})
        task_run.ask_task(load_config(None, lab.settings["overrides"]))


def load_parts(lab: Lab) -> None:
    ask_named(load_config(None, lab.settings["overrides"]))


def remove(beginning: str, instead: str = "") -> Mend:
    """Leave out the override that begins so, and write another one; {0} is of the remedy."""

    def mend(lab: Lab, found: Match[str]) -> None:
        kept = [one for one in lab.settings["overrides"] if not one.startswith(beginning)]
        assert len(kept) < len(lab.settings["overrides"])
        shown = (found.groups() or ("",))[0]
        new = [instead.format(shown, folder=lab.folder)] if instead else []
        lab.settings["overrides"] = kept + new

    return mend


def add(word: str) -> Mend:
    return lambda lab, found: lab.settings["overrides"].append(
        word.format(*found.groups(), folder=lab.folder)
    )


# --- the run of a task ----------------------------------------------------------------------
def begin_run_of_task(lab: Lab) -> None:
    """A run folder whose task is not the built-in decoder."""
    begin_run(lab)
    path = lab.folder / RUN / "resolved.json"
    resolved = json.loads(path.read_text())
    resolved["config"]["task"].update(name="nets:Net", source="1", data="1", samples=4)
    path.write_text(json.dumps(resolved))
    lab.settings["line"] = ["generate", RUN, "a"]


def read_parameters(lab: Lab) -> None:
    if lab.settings.get("reads"):
        assert list(open_checkpoint(lab.folder / RUN).names)
    else:
        attempt(lab)


def show_layout(lab: Lab) -> None:
    refuse_file_of_task(load_config(None, lab.settings["overrides"]).config.task, "holdfast layout")


def begin_unknown_activation(lab: Lab) -> None:
    """A folder of a model with a key that is wrong."""
    begin(FROM)(lab)
    path = lab.folder / "hf/config.json"
    lab.spoil(path, json.dumps(json.loads(path.read_text()) | {"hidden_act": "sillu"}).encode())


def write_activation(lab: Lab, found: Match[str]) -> None:
    path = lab.folder / "hf/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hidden_act": found[1]}))


def begin_two_tokenizers(lab: Lab) -> None:
    """A model's folder with another tokenizer than the dataset was made with."""
    for name in ("hf", "dataset"):
        (lab.folder / name).mkdir()
        train_tokenizer(lab.folder / name / "tokenizer.json")
    path = lab.folder / "hf/tokenizer.json"
    path.write_text(path.read_text().replace("<|endoftext|>", "</s>"))
    lab.settings["tokenizer"] = lab.folder / "dataset/tokenizer.json"


def begin_import(lab: Lab) -> None:
    dataset = SimpleNamespace(place="dataset", tokenizer_path=lab.settings["tokenizer"])
    refuse_other_tokenizer(lab.folder / "hf", cast(Dataset, dataset))


def begin_other_optimizer(lab: Lab) -> None:
    begin_run(lab)
    path = lab.folder / RUN / "resolved.json"
    resolved = json.loads(path.read_text())
    resolved["config"]["train"]["optimizer"]["name"] = "lion"
    path.write_text(json.dumps(resolved))
    lab.settings["line"] = ["export", RUN, "--to", "out", "--format", "dcp"]


# --- the source of a task -------------------------------------------------------------------
def begin_changed_source(lab: Lab) -> None:
    """A run was begun, and the task's file has changed since."""
    path = lab.write("remedy_net.py", TASK)
    lab.settings["source"] = digest(lab)
    lab.spoil(path, f"{TASK}\n\nmore = 1\n".encode())


def task_config(lab: Lab, **more: Any) -> TaskConfig:
    return TaskConfig(name="remedy_net:Net", folder=str(lab.folder), **more)


def digest(lab: Lab) -> str:
    """The digest that another process finds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", list(sys.path))
        patch.setattr(sys, "dont_write_bytecode", True)
        patch.delitem(sys.modules, "remedy_net", raising=False)
        config = task_config(lab)
        return source_digest(config, load_task(config))


def resume(lab: Lab) -> None:
    loaded = load_config(None, [])
    run = loaded.config
    stored = run.model_copy(update={"task": task_config(lab, source=lab.settings["source"])})
    present = task_config(lab, source=digest(lab))
    found = run.model_copy(update={"task": present})
    refuse_other_run(stored.model_dump(mode="json"), found, RUN)


def resume_optimizer(lab: Lab) -> None:
    key = "train.optimizer.source"
    loaded = load_config(None, [])
    stored = loaded.with_planned({key: lab.settings["source"]}, "the run's")
    found = loaded.with_planned({key: digest(lab)}, "the file's")
    refuse_other_run(stored.config.model_dump(mode="json"), found.config, RUN)


def load_same(lab: Lab) -> None:
    """What a worker does, but for the child that imports the task once more."""
    task = task_config(lab, source=lab.settings["source"])
    run = load_config(None, []).config.model_copy(update={"task": task})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", list(sys.path))
        patch.delitem(sys.modules, "remedy_net", raising=False)
        found = {"source": digest(lab)}
        patch.setattr(choose, "describe_task", lambda config: found)
        choose._load_same(run)


def begin_hidden(lab: Lab) -> None:
    lab.write("colorsys.py", TASK)
    lab.settings["module"] = "colorsys"


def load_module(lab: Lab) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", list(sys.path))
        load_task(TaskConfig(name=f"{lab.settings['module']}:Net", folder=str(lab.folder)))


def rename_module(lab: Lab, found: Match[str]) -> None:
    Path(lab.path("colorsys.py")).rename(lab.path("remedy_other_net.py"))
    lab.settings["module"] = "remedy_other_net"


def class_inside() -> type:
    class Inside(Sized): ...

    return Inside


def export_model(lab: Lab) -> None:
    to_their_config(config(**lab.settings))


def use_values(lab: Lab, found: Match[str]) -> None:
    """Write the values that the remedy shows: `key value, key value`."""
    lab.settings.update(
        yaml.safe_load("\n".join(p.replace(" ", ": ", 1) for p in found[1].split(", ")))
    )


FROM = "model.from={0}/hf"
M, P, R = (
    "config/loading/model_from.py: ",
    "launch/run/named_parts.py: ",
    "launch/run/task_run.py: ",
)

CASES: list[Case] = [
    case(
        M + "… … is unknown",
        begin(FROM, "model.code=mine"),
        load,
        r"use (transformers)",
        remove("model.code", "model.code={0}"),
    ),
    case(
        M + "… needs …",
        begin(CODE),
        load,
        r"name a folder in (model\.from)",
        add("{0}={folder}/hf"),
    ),
    case(
        M + "task and … both say what is trained",
        begin(FROM, CODE, "task.name=nets:Net"),
        load,
        r"use one of the two",
        remove("task.name"),
    ),
    case(
        M + "model.… has no effect with … …",
        begin(FROM, CODE, "model.dim=64"),
        load,
        r"remove it",
        remove("model.dim"),
    ),
    case(
        "config/sections/task.py: … is for the built-in decoder, and this run trains …",
        begin_run_of_task,
        read_parameters,
        r"read its parameters with holdfast\.open_checkpoint \(docs/python\.md\)",
        fixed(reads=True),
    ),
    case(
        "config/sections/task.py: … is for the built-in decoder, and this run file trains …",
        begin("task.name=nets:Net"),
        show_layout,
        r"name a run file without task",
        remove("task.name"),
    ),
    case(
        "config/huggingface/convert.py: (from_their_config)",
        begin_unknown_activation,
        load,
        r"the decoder knows (silu).*",
        write_activation,
    ),
    case(
        "launch/start/data.py: the dataset in … was tokenised with another tokenizer: …",
        begin_two_tokenizers,
        begin_import,
        r"add data\.tokenizer\.path=(\S+) and name another data\.folder",
        lambda lab, found: lab.settings.update(tokenizer=Path(found[1])),
    ),
    case(
        "export/dcp.py: the format dcp holds AdamW's state, and train.optimizer.name of this run "
        "is …",
        begin_other_optimizer,
        attempt,
        r"export the weights with --format (hf), or read its tensors with "
        r"holdfast\.open_checkpoint \(docs/python\.md\)",
        replace("dcp"),
    ),
    case(
        R + "lora.… is for the built-in decoder, and a task gives its own values",
        begin("task.name=nets:Net", "lora.base={0}/hf"),
        load_task_run,
        r"return the values from initial\(\), and remove lora\.from and lora\.base",
        remove("lora.base"),
    ),
    case(
        R + "task.… is worked out from the task",
        begin("task.name=nets:Net", "task.samples=4"),
        load_task_run,
        r"remove it",
        remove("task.samples"),
    ),
    case(
        R + "… is for the built-in decoder and its texts: a script has a model and data of its own",
        begin(f"task.name={SCRIPT_TASK}", "model.layers=4"),
        load_task_run,
        r"remove it",
        remove("model.layers"),
    ),
    case(
        R + "… is decided by the script's optimizer",
        begin(f"task.name={SCRIPT_TASK}", "train.optimizer.learning_rate=1"),
        load_task_run,
        r"remove it, and change the script",
        remove("train.optimizer"),
    ),
    case(
        P + "… is worked out from what the run file names",
        begin("train.optimizer.source=12"),
        load_parts,
        r"remove it",
        remove("train.optimizer.source"),
    ),
    case(
        P + "… … matches none of the … parameters",
        begin("model.layers=2", "train.optimizer.groups=[{{match: '*norms*', weight_decay: 0}}]"),
        load_parts,
        r"the nearest names are ([^,]*), .*",
        remove("train.optimizer", "train.optimizer.groups=[{{match: '{0}', weight_decay: 0}}]"),
    ),
    case(
        "config/loading/identity.py: this run was started with another source of …",
        begin_changed_source,
        resume,
        r"put the task's files back, or start over with --fresh.*",
        fetch_again,
    ),
    case(
        "config/loading/identity.py: this run was started with another source of …",
        begin_changed_source,
        resume_optimizer,
        r"put the files back, or start over with --fresh.*",
        fetch_again,
    ),
    case(
        "tasks/choose.py: the source of … has changed since this run was started",
        begin_changed_source,
        load_same,
        r"put the files back, or begin another run: holdfast train RUN\.yaml folder=NEW",
        fetch_again,
    ),
    case(
        "tasks/task/loading.py: module … is …, which hides …",
        begin_hidden,
        load_module,
        r"give your module another name",
        rename_module,
    ),
    case(
        "api/training.py: class … cannot be imported by a worker",
        lambda lab: lab.settings.update(task=class_inside()),
        lambda lab: _task_overrides(lab.settings["task"]),
        r"write it at the top level of a file \(in a notebook: %%writefile my_task\.py\)",
        fixed(task=Sized),
    ),
    case(
        "config/huggingface/convert.py: (to_their_config)",
        lambda lab: lab.settings.update(qk_norm=True, attention_bias="qkv"),
        export_model,
        r"use (.*)",
        use_values,
    ),
]
