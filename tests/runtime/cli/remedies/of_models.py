"""Remedies of models, data, tasks, layouts and plans, carried out."""

from __future__ import annotations

from collections.abc import Callable
from re import Match

import holdfast
from holdfast.config.huggingface.folder import read_folder_model
from holdfast.config.loading.load import resolve_config
from holdfast.config.run import RunConfig
from holdfast.config.sections.task import TaskConfig
from holdfast.core.data.sample_order import Mixture
from holdfast.core.schedule.timing import Durations
from holdfast.core.sharding.pipeline_stages import check_number_of_stages
from holdfast.data.read.text_sources import clean_text
from holdfast.layout import Replica, Topology
from holdfast.model.generate import DecodingSession
from holdfast.model.huggingface import export_folder
from holdfast.parallel.axes.tensor_parallel import _check_units
from holdfast.parallel.torch_compat import check_version
from holdfast.plan.explain.what_if import after_loss
from holdfast.plan.hardware.cluster_file import read_cluster
from holdfast.tasks.child import describe_named
from holdfast.tasks.script import Script
from holdfast.tasks.scripts.own_loop import ScriptEnded
from holdfast.tasks.task.loading import load_task
from holdfast.training.memory.scratch_file import ScratchFile
from tests.runtime.cli.remedies.lab import (
    MODEL,
    Case,
    Lab,
    Sized,
    begin_plan,
    calling,
    export,
    fixed,
    make_plan,
    setting,
    values,
)
from tests.support.models import config, decoder, train_tokenizer

NAME = r"name the folder of a model in Hugging Face form"


def empty_folder(lab: Lab) -> None:
    lab.write("hf/readme.md", "nothing")
    export(lab.folder / "real")
    lab.settings["folder"] = "hf"


def begin_other_shape(lab: Lab) -> None:
    export(lab.folder / "hf")
    lab.settings["overrides"] = [f"model.from={lab.folder}/hf", "model.dim=64"]


def resolve(lab: Lab) -> None:
    resolve_config(None, "command line", lab.settings["overrides"])


def begin_light(lab: Lab) -> None:
    lab.settings["weights"] = [1.0, 1e-9]


def mix(lab: Lab) -> None:
    Mixture(lab.settings["weights"])


def staged(*stages: tuple[int, ...]) -> tuple[Replica, ...]:
    return tuple(
        Replica(n, (2 * n, 2 * n + 1), (2, 1, 1, 1), each) for n, each in enumerate(stages)
    )


def open_session(lab: Lab) -> None:
    DecodingSession(decoder(MODEL), lab.settings["capacity"])


def begin_no_tokenizer(lab: Lab) -> None:
    lab.write("tokenizer.txt", "a b c")
    train_tokenizer(lab.folder / "tokenizer.json")
    lab.settings.update(to="out", tokenizer="tokenizer.txt")


def write_model(lab: Lab) -> None:
    tokenizer = lab.settings.get("tokenizer")
    folder = lab.folder / lab.settings["to"]
    export_folder(folder, MODEL, decoder(MODEL).state_dict(), tokenizer and lab.folder / tokenizer)


def check_layout(lab: Lab) -> None:
    _check_units(config(**lab.settings.get("model", {})), *2 * (lab.settings["tp"],))


AUTO = "layout=auto"


def ask(text: str) -> Callable[[Lab], None]:
    return lambda lab: lab.settings.update(text=text)


def lose(lab: Lab) -> None:
    after_loss(read_cluster("4x2xA100-80"), lab.settings["text"])


def say_instead(lab: Lab, match: Match[str]) -> None:
    lab.settings["text"] = match[1]


def load(lab: Lab) -> None:
    settings = dict(lab.settings)
    load_task(TaskConfig(name=settings.pop("name"), **settings))


def describe(lab: Lab) -> None:
    """What the child answers that a start asks."""
    describe_named(RunConfig.model_validate({"train": {"steps": 8, **lab.settings}}))


def end_file(lab: Lab) -> None:
    """Let a script run what comes after its loop; or do what its error said."""
    if lab.settings.get("is_finished"):
        assert holdfast.open_checkpoint(lab.trained).step
        return
    error = FileNotFoundError("no folder")
    Script("train.py").check_end(ScriptEnded(error))


def place_state(lab: Lab) -> None:
    ScratchFile(lab.path(lab.settings["folder"]), "tiny", 64).close()


CASES: list[Case] = [
    Case(
        "config/huggingface/folder.py",
        empty_folder,
        lambda lab: read_folder_model(lab.folder / lab.settings["folder"]),
        NAME + r" .*prints its folder.",
        fixed(folder="real"),
    ),
    Case(
        "config/loading/model_from.py",
        begin_other_shape,
        resolve,
        r"remove (?:it|them) from the run file, for model.from gives (?:it|them)",
        lambda lab, match: lab.settings["overrides"].pop(),
    ),
    Case(
        "core/data/sample_order.py",
        begin_light,
        mix,
        r"raise it, or leave the source out",
        fixed(weights=[1.0, 0.1]),
    ),
    Case(
        "core/schedule/timing.py",
        values(forward=(-1.0,), backward=(2.0,)),
        lambda lab: Durations(**lab.settings),
        r"use finite numbers of at least (0)",
        lambda lab, match: lab.settings.update(forward=(float(match[1]),)),
    ),
    Case(
        "core/sharding/pipeline_stages.py",
        values(pp=5),
        lambda lab: check_number_of_stages(config().layers, lab.settings["pp"]),
        r"use (\d+) or less",
        setting("pp", int),
    ),
    Case(
        "data/read/text_sources.py",
        values(text="\ud83d"),
        lambda lab: clean_text(lab.settings["text"], "a.jsonl:1"),
        r"mend or remove it",
        fixed(text="\U0001f600"),
    ),
    Case(
        "layout.py",
        values(replicas=staged((1, 1), (2, 1)), nodes=("a",) * 4, generation=1),
        lambda lab: Topology(**lab.settings),
        r"give every replica all blocks of the model",
        fixed(replicas=staged((1, 1), (1, 1))),
    ),
    Case(
        "model/generate.py",
        values(capacity=1000),
        open_session,
        r"ask for at most (\d+), the prompt's included",
        setting("capacity", int),
    ),
    Case(
        "model/huggingface_tokenizer.py",
        begin_no_tokenizer,
        write_model,
        r"name a file that the tokenizers library wrote",
        fixed(tokenizer="tokenizer.json"),
    ),
    Case(
        "parallel/axes/tensor_parallel.py",
        values(tp=2, model={"qk_norm": True, "qk_norm_width": "all"}),
        check_layout,
        r"use tp (1)",
        setting("tp", int),
    ),
    Case(
        "parallel/torch_compat.py",
        values(version="2.3.0"),
        calling(check_version),
        r"install torch (2\.11), .*",
        lambda lab, match: lab.settings.update(version=f"{match[1]}.0"),
    ),
    Case(
        "plan/auto/search_run.py",
        begin_plan("1xA100-80", AUTO, "layout.workers=2"),
        make_plan,
        r"use (\d+)",
        lambda lab, match: lab.settings["overrides"].append(f"layout.workers={match[1]}"),
    ),
    Case(
        "plan/explain/what_if.py",
        ask("lost=rack:A100-80"),
        lose,
        r"give it nodes_per_rack, or use (lost=node:A100-80)",
        say_instead,
    ),
    Case(
        "tasks/task/loading.py",
        values(name=f"{Sized.__module__}:Sized", args={"witdh": 3}),
        load,
        r"write task\.args\.(\w+) \(its arguments: width\)",
        lambda lab, match: lab.settings.update(args={match[1]: 3}),
    ),
    Case(
        "tasks/named/optimizer_probe.py",
        values(optimizer={"name": "torch.optim.Rprop", "weight_decay": 0.1}),
        describe,
        r"use train\.optimizer\.weight_decay (0)",
        lambda lab, match: lab.settings.update(
            optimizer={"name": "torch.optim.Rprop", "weight_decay": float(match[1])}
        ),
    ),
    Case(
        "tasks/script.py",
        values(),
        end_file,
        r"read the weights with holdfast\.open_checkpoint",
        fixed(is_finished=True),
    ),
    Case(
        "training/memory/scratch_file.py",
        values(folder="not-mounted"),
        place_state,
        r"mount its disk or make it, or name another folder",
        lambda lab, match: (lab.folder / "not-mounted").mkdir(),
    ),
]
