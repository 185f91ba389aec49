"""Remedies of messages about optimizers and schedules of users, and about models of transformers.

Objects stand in the place of that package, whose import takes seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from re import Match
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from holdfast.config.run import RunConfig
from holdfast.config.sections.task import TaskConfig
from holdfast.tasks.child import describe_named
from holdfast.tasks.huggingface import CausalLM
from holdfast.tasks.named import named
from holdfast.tasks.task.loading import load_task, source_digest
from holdfast.tasks.task.module import meta_module, module_rows
from holdfast.tasks.task.own import OwnTask
from holdfast.tasks.task.task import Task
from tests.runtime.cli.remedies.lab import Case, Lab, Mend, case, fetch_again, fixed
from tests.runtime.cli.remedies.of_others import values
from tests.support.corpus import data_config, make, text_folder, text_source
from tests.support.models import train_tokenizer
from tests.support.own_tasks import task_config
from tests.support.sample_optimizers import Damped, Scaled
from tests.support.sample_tasks import EncoderDecoder

THIS, SAMPLES = __name__, "tests.support.sample_optimizers"


# --- optimizers and schedules ---------------------------------------------------------------
class Misnamed(Scaled):
    state_shapes = {"norm": "number"}  # noqa: RUF012


class Rateless(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"step_size": lr})


class Mixed(Damped):
    """Its mean is a tensor for a matrix, and a count for a vector."""

    def change(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        if parameter.dim() > 1:
            return super().change(parameter, gradient, state)
        state["mean"] = state.get("mean", 0) + 1
        return gradient


class Open(Damped):
    """Counts in its state, where `Secretive` counts in an attribute."""

    def change(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        state["calls"] = state.get("calls", 0) + 1
        return gradient / float(state["calls"])


def describe(lab: Lab) -> None:
    """What the child answers that a start asks."""
    describe_named(RunConfig.model_validate({"train": {"steps": 8, **lab.settings}}))


def optimizer(site: str, wrong: str, remedy: str, right: str) -> Case:
    """A class, and the one that the remedy makes a user write or name."""
    start = values(optimizer={"name": _named(wrong)})
    mend = fixed(optimizer={"name": _named(right)})
    return case(f"tasks/{site}", start, describe, remedy, mend)


def _named(name: str) -> str:
    if name.startswith("torch."):
        return name
    return f"{THIS if name in globals() and name not in ('Damped', 'Scaled') else SAMPLES}:{name}"


RATE = "def rate(step, steps):\n    return 1.0\n"


def begin_changed_rate(lab: Lab) -> None:
    """A run was begun, and the file of its schedule has changed since."""
    path = lab.write("remedy_rate.py", RATE)
    with loaded_module(lab):
        task = TaskConfig(name="remedy_rate:x", folder=str(lab.folder))
        lab.settings["source"] = source_digest(task)
    lab.spoil(path, f"{RATE}\n\nmore = 1\n".encode())


@contextmanager
def loaded_module(lab: Lab) -> Iterator[None]:
    """Inside, `remedy_rate` is imported as by a process of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, str(lab.folder)])
        patch.setattr(sys, "dont_write_bytecode", True)
        import_module("remedy_rate")
        yield
    sys.modules.pop("remedy_rate", None)


def load_rate(lab: Lab) -> None:
    schedule = {"kind": "remedy_rate:rate", "source": lab.settings["source"]}
    given = {"train": {"schedule": schedule}, "task": {"folder": str(lab.folder)}}
    with loaded_module(lab), pytest.MonkeyPatch.context() as patch:
        patch.setattr(named, "describe_named", describe_named)
        named.load_user_parts(RunConfig.model_validate(given))


# --- models of transformers -----------------------------------------------------------------
class TheirModel(nn.Module):
    """A model that knows no places, so documents cannot be kept apart."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Embedding(8, 8)

    def forward(self, input_ids: Tensor, use_cache: bool) -> Any:
        return SimpleNamespace(logits=self.head(input_ids))


def installed(lab: Lab) -> Any:
    """The part of the package that `CausalLM` uses. A file of weights has names alone."""

    def read(folder: Path, **_: Any) -> Any:
        text = SimpleNamespace(vocab_size=8)
        kind = (folder / "config.json").read_text()
        is_encoder_decoder = kind == "t5"
        return SimpleNamespace(
            model_type=kind, is_encoder_decoder=is_encoder_decoder, get_text_config=lambda: text
        )

    def load(folder: Path, **_: Any) -> Any:
        stored = (folder / "model.safetensors").read_text().split()
        return TheirModel(), {"missing_keys": {"head.weight"} - set(stored)}

    def make(config: Any, **_: Any) -> TheirModel:
        if config.model_type == "bloom":
            raise ValueError("no attention by torch.nn.functional.scaled_dot_product_attention")
        return TheirModel()

    logs = SimpleNamespace(disable_progress_bar=lambda: None)
    return SimpleNamespace(
        AutoConfig=SimpleNamespace(from_pretrained=read),
        AutoModelForCausalLM=SimpleNamespace(from_pretrained=load, from_config=make),
        utils=SimpleNamespace(logging=logs),
    )


def begin_theirs(kind: str = "gpt2", **given: Any) -> Callable[[Lab], None]:
    def start(lab: Lab) -> None:
        lab.write("theirs/config.json", kind)
        lab.write("theirs/model.safetensors", "head.weight")
        lab.settings.update({"folder": "theirs", "installed": True, **given})

    return start


def cut_weights(lab: Lab) -> None:
    begin_theirs()(lab)
    lab.spoil(lab.folder / "theirs/model.safetensors", b"")


def without_weights(lab: Lab) -> None:
    begin_theirs()(lab)
    (lab.folder / "theirs/model.safetensors").unlink()


def train_theirs(lab: Lab) -> None:
    """Load the folder and compute a loss, as a worker does."""
    with pytest.MonkeyPatch.context() as patch:
        found = installed(lab) if lab.settings["installed"] else None
        patch.setitem(sys.modules, "transformers", found)
        task = lab.settings.get("task") or load_theirs(lab)
        module_rows(task, meta_module(task))
        if isinstance(task, CausalLM):
            task.weights()
            task.loss(TheirModel(), rows(lab.settings.get("attention", "full")))


def load_theirs(lab: Lab) -> Task:
    args = {"pretrained": lab.settings.get("pretrained", True)}
    args["folder"] = lab.path(lab.settings["folder"])
    return load_task(TaskConfig(name="holdfast.tasks.huggingface:CausalLM", args=args))


def rows(attention: str) -> dict[str, Tensor]:
    """A batch of prepared tokens: with documents if they are kept apart."""
    ids = torch.zeros(1, 4, dtype=torch.int64)
    found = {"inputs": ids, "targets": ids}
    return {**found, "documents": ids} if attention == "document" else found


def theirs(site: str, begin: Callable[[Lab], None], remedy: str, mend: Mend) -> Case:
    return case(f"tasks/huggingface.py: {site}", begin, train_theirs, remedy, mend)


# --- a model that knows fewer tokens --------------------------------------------------------
class Knowing(EncoderDecoder):
    """A task of prepared tokens, whose model knows as many as its own tokenizer has."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens

    def data(self) -> Any:
        return None

    def vocabulary(self) -> int:
        return self.tokens


def begin_few_tokens(lab: Lab) -> None:
    text_folder(lab.folder / "in", files=6, words=60)
    (lab.folder / "own").mkdir()
    made = train_tokenizer(lab.folder / "own/tokenizer.json")
    lab.settings.update(tokenizer={"vocab_size": 300, "sample_bytes": 20_000}, folder="out")
    lab.settings["task"] = Knowing(made.get_vocab_size())


def open_tokens(lab: Lab) -> None:
    given = data_config(
        lab.folder / lab.settings["folder"],
        text_source(lab.folder / "in"),
        tokenizer=lab.settings["tokenizer"],
    )
    make(given)
    config = task_config("Gru")
    task = config.task.model_copy(update={"samples": 0, "data": ""})
    config = config.model_copy(update={"data": given, "task": task})
    OwnTask(lab.settings["task"], config).open_batches(given.folder)


def use_own_tokenizer(lab: Lab, found: Match[str]) -> None:
    lab.settings.update(tokenizer={"path": lab.path("own/tokenizer.json")}, folder="other")


PROBE, NAMED = "optimizer_probe.py: ", "named.py: "

CASES: list[Case] = [
    optimizer(
        NAMED + "module … (…) has no …",
        "Dampened",
        r"name something that is in it",
        "Damped",
    ),
    optimizer(
        NAMED + "… is no subclass of torch.optim.Optimizer",
        "NoOptimizer",
        r"name a class that is, for example torch\.optim\.RMSprop",
        "torch.optim.RMSprop",
    ),
    case(
        "tasks/" + NAMED + "…(…, …) returned …",
        values(schedule={"kind": f"{SAMPLES}:falls_below_zero"}),
        describe,
        r"return a finite number that is not negative, a multiple of train\.optimizer\."
        r"learning_rate",
        fixed(schedule={"kind": f"{SAMPLES}:rate"}),
    ),
    case(
        "tasks/" + NAMED + "the source of … has changed since this run was started",
        begin_changed_rate,
        load_rate,
        r"put the files back, or begin another run: holdfast train RUN\.yaml folder=NEW",
        fetch_again,
    ),
    optimizer(
        PROBE + "declares state … as …, and has … for a parameter of shape …",
        "Misdeclared",
        r"declare what it is in state_shapes",
        "Scaled",
    ),
    optimizer(
        PROBE + "declares … as …",
        "Misnamed",
        r"use one of .*\bscalar",
        "Scaled",
    ),
    optimizer(
        PROBE + "has no learning rate lr",
        "Rateless",
        r"name a class whose groups have lr",
        "Damped",
    ),
    case(
        "tasks/" + PROBE + "has no weight_decay",
        values(optimizer={"name": "torch.optim.Rprop", "weight_decay": 0.1}),
        describe,
        r"use train\.optimizer\.weight_decay (0)",
        lambda lab, found: lab.settings.update(
            optimizer={"name": "torch.optim.Rprop", "weight_decay": float(found[1])}
        ),
    ),
    optimizer(
        PROBE + "has state … of two kinds: … and …",
        "Mixed",
        r"give it one shape",
        "Damped",
    ),
    optimizer(
        PROBE + "has state …, … for a parameter of shape …: it is not elementwise, and is not "
        "declared",
        "Undeclared",
        r"declare it in the class: state_shapes = \{'norm': 'scalar'\} \(docs/optimizers\.md\)",
        "Scaled",
    ),
    optimizer(
        PROBE + "keeps more than its state: after a restore, its third update is another one",
        "Secretive",
        r"keep everything in self\.state\[parameter\]",
        "Open",
    ),
    theirs(
        "there is no … in …",
        begin_theirs(folder="."),
        r"name the folder of a model in Hugging Face form",
        fixed(folder="theirs"),
    ),
    theirs(
        "there are no weights in …: it has no file *.safetensors",
        without_weights,
        r"fetch it again, or set task\.args\.pretrained=false for the shape alone",
        fixed(pretrained=False),
    ),
    theirs(
        "model.code transformers needs the package transformers (…)",
        begin_theirs(installed=False),
        r"pip install 'holdfast\[hf\]'",
        fixed(installed=True),
    ),
    theirs(
        "… is an encoder-decoder, which does not continue a text",
        begin_theirs("t5"),
        r"write a task of your own for it \(docs/python\.md\)",
        lambda lab, found: lab.settings.update(task=EncoderDecoder()),
    ),
    theirs(
        "… has no attention by SDPA in transformers",
        begin_theirs("bloom"),
        r"use another model, or write a task of your own for it \(docs/python\.md\)",
        lambda lab, found: lab.settings.update(task=EncoderDecoder()),
    ),
    theirs("the weights in … lack …", cut_weights, r"fetch it again", fetch_again),
    theirs(
        "… of transformers lets a document see the one before it in a row",
        begin_theirs(attention="document"),
        r"use (full), or another model",
        lambda lab, found: lab.settings.update(attention=found[1]),
    ),
    case(
        "tasks/task/own.py: the dataset has token ids up to …, and the model knows …",
        begin_few_tokens,
        open_tokens,
        r"name the model's own tokenizer there, and another data\.folder",
        use_own_tokenizer,
    ),
]
