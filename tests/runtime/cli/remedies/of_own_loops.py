"""Remedies of messages about scripts with a loop of their own.

A script is text that a user writes. Here a thread runs it, and the case gives the runner's orders.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import holdfast
from holdfast.cli.run import _script_overrides
from holdfast.config.loading.load import resolve_config
from holdfast.tasks.script import Script, _refuse_settings
from holdfast.tasks.scripts import own_loop
from holdfast.tasks.scripts.own_loop import Run, enter_run
from holdfast.tasks.scripts.script_validation import ScriptPart, compute_losses
from holdfast.tasks.task.batches import TaskMicrobatch
from holdfast.tasks.task.turns import (
    Answer,
    ComputeShare,
    DataNamed,
    EndLoop,
    LoopReached,
    OpenStep,
    ScriptEnded,
)
from holdfast.tasks.task.validation import ValidationPart
from holdfast.training.engine.loss_scale import NOT_SCALED
from tests.runtime.cli.remedies.lab import Case, Lab, Mend, case, fixed
from tests.runtime.cli.remedies.of_others import values
from tests.runtime.tasks.test_own_loop_steps import Data, Listener

STEPS = 2
LOOP = """\
for step in run.steps(2):
    for batch in step.batches(data):
        step.backward(model(batch["x"]).sum(), len(batch["x"]))
    step.apply()
"""
SCRIPT = f"""\
model = nn.Linear(3, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
run.keep(model, optimizer)
data = Data()
{LOOP}"""
OPTIMIZER = "torch.optim.AdamW(model.parameters(), lr=0.5)"
KEEP, BATCHES = "run.keep(model, optimizer)", "step.batches(data)"
BACKWARD = 'step.backward(model(batch["x"]).sum(), len(batch["x"]))'
APPLY = "    step.apply()\n"


class Bare(Data):
    version = ""


NAMES = {
    "torch": torch,
    "nn": nn,
    "Data": Data,
    "Bare": Bare,
    "DataLoader": torch.utils.data.DataLoader,
}


def begin(old: str, new: str) -> Callable[[Lab], None]:
    """Begin with a script that has `new` in the place of `old`."""
    assert old in SCRIPT
    return values(text=SCRIPT.replace(old, new))


def write(old: str, new: str) -> Mend:
    """Write `new` in the place of `old`."""

    def mend(lab: Lab, found: object) -> None:
        assert old in lab.settings["text"]
        lab.settings["text"] = lab.settings["text"].replace(old, new)

    return mend


def train(lab: Lab) -> None:
    """Run the script as one rank does, with two microbatches in each step."""
    known = lab.settings.get("known", (0, ""))
    current = Run(torch.device("cpu"), torch.float32, *known)

    def script() -> None:
        enter_run(current)
        exec(lab.settings["text"], {**NAMES, "run": current})

    answer, steps = current._turns.start(script), 0
    while not isinstance(answer, ScriptEnded):
        steps += isinstance(answer, DataNamed)
        answer = _next(current, answer, steps)
    if answer.error is not None:
        raise answer.error


def _next(current: Run, answer: Answer, steps: int) -> Answer:
    """Give the order that follows the answer."""
    if isinstance(answer, LoopReached):
        return current._turns.give(OpenStep(1))
    if isinstance(answer, DataNamed):
        batches = [TaskMicrobatch({"x": torch.ones(2, 3)}, 7, [], 0) for _ in range(2)]
        return current._turns.give(ComputeShare((0, 1), batches, Listener(), [], NOT_SCALED))
    return current._turns.give(OpenStep(steps + 1) if steps < STEPS else EndLoop())


def loop(site: str, old: str, wrong: str, remedy: str, right: str | None = None) -> Case:
    """A script with `wrong` in the place of `old`; the remedy makes a user write `right` there."""
    mend = write(wrong, old if right is None else right)
    return case(f"tasks/{site}", begin(old, wrong), train, remedy, mend)


def rest(site: str, text: str, remedy: str, right: str) -> Case:
    """A script that is begun with `text`, and mended by `right`."""
    return case(f"tasks/{site}", values(text=text), train, remedy, fixed(text=right))


def optimizer(site: str, wrong: str, remedy: str, right: str) -> Case:
    wrong, right = f"torch.optim.{wrong}", f"torch.optim.{right}"
    return loop(f"kept_optimizers.py: {site}", OPTIMIZER, wrong, remedy, right)


def two_groups(of_bias: str) -> str:
    """A script that sets the rate of one of two groups in its loop."""
    groups = f"[{{'params': [model.weight]}}, {{'params': [model.bias]{of_bias}}}]"
    text = SCRIPT.replace(OPTIMIZER, f"torch.optim.AdamW({groups})")
    return text.replace(APPLY, f"    optimizer.param_groups[0]['lr'] = 0.2\n{APPLY}")


NORM_KEPT = nn.BatchNorm1d(3)
VALIDATE = "run.validate(data, lambda batch: (batch['x'].sum(), 1))"


def lab_norm(is_training: bool) -> nn.Module:
    return NORM_KEPT.train(is_training)


def validate(lab: Lab) -> None:
    """Compute the loss of one microbatch of the validation."""
    current = Run(torch.device("cpu"), torch.float32, 0, "")
    current.keep(NORM_KEPT, torch.optim.SGD(NORM_KEPT.parameters()))
    current.validate(Data(), lab.settings["loss"])
    read = ValidationPart({"x": torch.ones(4, 3)}, 7, 0)
    compute_losses(NORM_KEPT, [ScriptPart(read, current)], lambda: None)


# --- a script in a file ---------------------------------------------------------------------
FILE = f"""\
import sys

import torch
from torch import nn

import holdfast
from tests.runtime.tasks.test_own_loop_steps import Data

run = holdfast.run()
if "--wrong" in sys.argv:
    sys.exit(2)
{SCRIPT}"""


def begin_file(text: str, *arguments: str) -> Callable[..., None]:
    def start(lab: Lab, found: object = None) -> None:
        lab.write("train.py", text)
        lab.settings["given"] = arguments

    return start


def start_file(lab: Lab) -> None:
    """Run the script up to its first batch."""
    config = resolve_config(None, "command line", [f"task.folder={lab.folder}"]).config
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [])
        patch.setitem(sys.modules, "__main__", sys.modules["__main__"])
        script = Script("train.py", lab.settings["given"])
        script.begin(config, torch.device("cpu"))
        script.named_data()


def end_file(lab: Lab) -> None:
    """Let a script run what comes after its loop; or do what its error said."""
    if lab.settings.get("is_finished"):
        assert holdfast.open_checkpoint(lab.trained).step
        return
    error = FileNotFoundError("no folder")
    Script("train.py").check_end(ScriptEnded(error))


def refuse(lab: Lab) -> None:
    _refuse_settings(resolve_config(None, "command line", lab.settings["overrides"]).config)


def setting(site: str, wrong: list[str], remedy: str) -> Case:
    """A setting that an own loop cannot have: the remedy has the value that it can have."""

    def mend(lab: Lab, found: object) -> None:
        lab.settings["overrides"] = []

    return case(f"tasks/script.py: {site}", values(overrides=wrong), refuse, remedy, mend)


def name_script(lab: Lab) -> None:
    _script_overrides(Path(lab.settings["script"]), [])


def take_part(lab: Lab) -> None:
    if lab.settings.get("started"):
        train(lab)
    else:
        own_loop.run()


OWN, KEPT, FILED = "own_loop.py: ", "kept_optimizers.py: ", "script.py: "
TIMES = "kept_state.py: "
NORM = "nn.Sequential(nn.Linear(3, 1), nn.BatchNorm1d(1{0}))"
WITH_SCHEDULER = SCRIPT.replace(KEEP, "{0}\nrun.keep(model, optimizer, scheduler)")
SCHEDULER = "scheduler = torch.optim.lr_scheduler."
STEP_LR = SCHEDULER + "StepLR(optimizer, 1)"
CYCLE = (
    "run.keep(model, optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=9"
    "{0}))"
)

CASES: list[Case] = [
    loop(OWN + "run.keep() was called twice", KEEP, f"{KEEP}\n{KEEP}", r"keep one module"),
    rest(
        OWN + "run.keep() was not called",
        SCRIPT.replace(KEEP, ""),
        r"call run\.keep\(model, optimizer\) before the loop",
        SCRIPT,
    ),
    loop(
        OWN + "run.validate() was called twice, or after run.steps()",
        "data = Data()",
        f"data = Data(); {VALIDATE}; {VALIDATE}",
        r"call it once, before the loop",
        f"data = Data(); {VALIDATE}",
    ),
    case(
        "tasks/scripts/script_validation.py: the function of run.validate() returned …",
        values(loss=lambda batch: batch["x"].sum()),
        validate,
        r"return the loss as a sum, a scalar, and its weight, a number from 0 on",
        fixed(loss=lambda batch: (batch["x"].sum(), 4)),
    ),
    case(
        "tasks/scripts/script_validation.py: the function of run.validate() returned …",
        values(loss=lambda batch: (batch["x"].sum(), -0.5)),
        validate,
        r"return the loss as a sum, a scalar, and its weight, a number from 0 on",
        fixed(loss=lambda batch: (batch["x"].sum(), 0.5)),
    ),
    case(
        "tasks/scripts/script_validation.py: the function of run.validate() changes buffer …",
        values(loss=lambda batch: (lab_norm(True)(batch["x"]).sum(), 4)),
        validate,
        r"compute the loss alone in it: the module is in evaluation mode",
        fixed(loss=lambda batch: (lab_norm(False)(batch["x"]).sum(), 4)),
    ),
    loop(
        OWN + "run.steps() was called twice",
        LOOP,
        f"{LOOP}for step in run.steps(3):\n{APPLY}",
        r"use one loop",
    ),
    loop(
        OWN + "step.batches() was given another dataset than before",
        BATCHES,
        "step.batches(Data())",
        r"make one dataset before the loop",
    ),
    rest(
        OWN + "the dataset (…) has no version",
        SCRIPT.replace("Data()", "Bare()"),
        r"give step\.batches\(\.\.\., version=\.\.\.\) a text that changes with the content",
        SCRIPT.replace("Data()", "Bare()").replace(BATCHES, 'step.batches(data, version="1")'),
    ),
    case(
        "tasks/" + OWN + "the dataset had … samples of version …, and now has … of version …",
        values(text=SCRIPT, known=(8, "two")),
        train,
        r"go back to that data, or start over with --fresh.*",
        write(BATCHES, 'step.batches(data, version="two")'),
    ),
    loop(
        OWN + "a batch had no step.backward()",
        BACKWARD,
        "pass",
        r"call step\.backward\(loss, weight\) once for each batch",
    ),
    loop(
        OWN + "step.backward() was called without a batch",
        BACKWARD,
        f"{BACKWARD}; {BACKWARD}",
        r"call it once for each batch of step\.batches\(\)",
    ),
    loop(
        OWN + "step.backward() was given …",
        BACKWARD,
        BACKWARD.replace(".sum()", ""),
        r"give it a scalar that depends on trained parameters: the sum over the batch",
    ),
    loop(
        OWN + "step.backward() was given a mean, with the weight …",
        BACKWARD,
        BACKWARD.replace(".sum()", ".mean()"),
        r'give it the sum over the batch \(reduction="sum"\), or the mean times the weight',
    ),
    loop(
        "batches.py: … is a DataLoader, which has an order and batches of its own",
        BATCHES,
        "step.batches(DataLoader(data))",
        r"give the dataset that it loads, and its collate_fn as collate",
    ),
    loop(
        OWN + "step.backward() was given the weight …",
        BACKWARD,
        BACKWARD.replace('len(batch["x"])', "-1"),
        r"give it a number from 0 on: the samples or tokens of the batch, or the sum of their "
        r"weights",
    ),
    loop(
        OWN + "the forward pass changes buffer …, so the state would depend on which rank computes "
        "what",
        "nn.Linear(3, 1)",
        NORM.format(""),
        r"keep it unchanged, or write a Task with merge\(\) \(docs/python\.md\)",
        NORM.format(", track_running_stats=False"),
    ),
    loop(
        OWN + "step.apply() was called before all batches were computed",
        BACKWARD,
        f"{BACKWARD}; break",
        r"call it after the loop over step\.batches\(\)",
    ),
    rest(
        OWN + "step … had no step.apply()",
        SCRIPT.replace(APPLY, ""),
        r"call it once in each pass of the loop",
        SCRIPT,
    ),
    case(
        "tasks/" + OWN + "this script takes part in no run",
        values(text=SCRIPT),
        take_part,
        r"start it by: holdfast run SCRIPT --workers 2",
        fixed(started=True),
    ),
    optimizer(
        "(_slots_of)",
        "NAdam(model.parameters())",
        r"declare it in a class derived from it: state_shapes = .* \(docs/optimizers\.md\)",
        "RMSprop(model.parameters())",
    ),
    optimizer(
        "the optimizer … has …",
        "SGD(model.parameters(), fused=True)",
        r"use fused=False",
        "SGD(model.parameters(), fused=False)",
    ),
    loop(
        KEPT + "run.keep() was given … as an optimizer",
        KEEP,
        "run.keep(model, [model])",
        r"give it a torch\.optim\.Optimizer, or a list of them",
    ),
    loop(
        KEPT + "parameter … is in two optimizers",
        KEEP,
        f"run.keep(model, [optimizer, {OPTIMIZER}])",
        r"give each parameter to one optimizer",
    ),
    rest(
        KEPT + "the groups had one lr at run.keep(), and now have several",
        two_groups(""),
        r"use one value in all groups, or several from the start",
        two_groups(", 'lr': 0.3"),
    ),
    loop(
        KEPT + "… of … has changed since run.keep()",
        KEEP,
        CYCLE.format(""),
        r"keep it as it was: a scheduler may need cycle_momentum=False",
        CYCLE.format(", cycle_momentum=False"),
    ),
    optimizer(
        "parameter … is not in the optimizer",
        "AdamW([model.weight], lr=0.5)",
        r"give it to the optimizer, or set requires_grad=False",
        "AdamW([model.weight, model.bias], lr=0.5)",
    ),
    optimizer(
        "the optimizer has a parameter of shape … that is not the module's",
        "AdamW([*model.parameters(), nn.Parameter(torch.ones(2))], lr=0.5)",
        r"keep one module with all trained parameters",
        "AdamW(model.parameters(), lr=0.5)",
    ),
    rest(
        TIMES + "ReduceLROnPlateau follows a metric, so that the rate is no function of the step",
        WITH_SCHEDULER.format(SCHEDULER + "ReduceLROnPlateau(optimizer)"),
        r"use a scheduler that counts steps",
        WITH_SCHEDULER.format(STEP_LR),
    ),
    rest(
        TIMES + "scheduler.step() was called for a scheduler that run.keep() was given",
        WITH_SCHEDULER.format(STEP_LR).replace(APPLY, f"{APPLY}    scheduler.step()\n"),
        r"remove the call: run\.steps\(\) sets the rate of each step",
        WITH_SCHEDULER.format(STEP_LR),
    ),
    loop(
        KEPT + "….step() was called for an optimizer that run.keep() was given",
        APPLY,
        "    optimizer.step()\n",
        r"call step\.apply\(\): it votes and updates",
    ),
    case(
        "tasks/" + FILED + "the script exited with status ……",
        begin_file(FILE, "--wrong"),
        start_file,
        r"correct the arguments after --",
        fixed(given=()),
    ),
    case(
        "tasks/" + FILED + "the script ended, and has no loop over run.steps()",
        begin_file(FILE.replace(LOOP, "")),
        start_file,
        r"let it train by such a loop \(docs/python\.md\), or start it by: python train\.py",
        begin_file(FILE),
    ),
    case(
        "tasks/" + FILED + "the script ended before the last step of the run",
        begin_file(FILE.replace(LOOP, "next(run.steps(2))\n")),
        start_file,
        r"let the loop over run\.steps\(\) run to its end",
        begin_file(FILE),
    ),
    case(
        "tasks/" + FILED + "…; the run is finished, and the code after the loop does not run again",
        values(),
        end_file,
        r"read the weights with holdfast\.open_checkpoint",
        fixed(is_finished=True),
    ),
    setting(
        "an own loop computes each replica on one device",
        ["layout.dp_shard=2"],
        r"use 1, or write a Task \(docs/python\.md\)",
    ),
    setting("an own loop has no adapters", ["lora.rank=4"], r"use 0"),
    setting("an own loop is not compiled by Holdfast", ["train.compile=true"], r"use false"),
    setting(
        "an own loop runs its own passes",
        ["train.recompute=full"],
        r"use none, and torch\.utils\.checkpoint in the loop",
    ),
    setting(
        "an own loop keeps what its own passes need",
        ["train.memory.activations=host"],
        r"use device, and torch\.autograd\.graph\.save_on_cpu in the loop",
    ),
    case(
        "cli/run.py: there is no such script",
        values(script="train.py"),
        name_script,
        r"name a Python file",
        lambda lab, found: lab.settings.update(script=str(lab.write("loop.py", SCRIPT))),
    ),
]
