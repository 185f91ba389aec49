"""A user's script as a task: it is run in a thread up to its loop, and asked from there.

`holdfast.tasks.script:Script` is the task of a run that `holdfast run` starts. The describing child
and the audit run the script up to its first `step.batches(dataset)`, and leave it there.
"""

from __future__ import annotations

import logging
import os
import shlex
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from holdfast.config.run import RunConfig
from holdfast.core.devices import device_kind
from holdfast.core.seeds import key_seed
from holdfast.errors import ScriptError, TaskError
from holdfast.tasks.scripts.own_loop import (
    Answer,
    DataNamed,
    LoopReached,
    NamedData,
    OpenStep,
    Order,
    Run,
    ScriptEnded,
    Turns,
    enter_run,
)
from holdfast.tasks.task.importing import importing
from holdfast.tasks.task.loading import load_task
from holdfast.tasks.task.module import seed_generators
from holdfast.tasks.task.task import Batch, Samples, Task, stacked_batch
from holdfast.training.engine.precision import Precision

logger = logging.getLogger(__name__)

_OF_LAUNCHERS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
"""Variables of torchrun and accelerate. With them a library would wait for ranks of its own."""


class Script(Task):
    """script: the file's name in the task's folder. arguments: what it finds in `sys.argv`."""

    def __init__(self, script: str, arguments: Sequence[str] = ()) -> None:
        self.file, self._arguments = script, [str(argument) for argument in arguments]
        self._config: RunConfig | None = None
        self._run: Run | None = None
        self.awaits_share = False  # it has named its data, and waits for microbatches

    @property
    def run(self) -> Run:
        """Raises RuntimeError before `begin`."""
        if self._run is None:
            raise RuntimeError("begin() comes first")
        return self._run

    @property
    def turns(self) -> Turns:
        return self.run._turns

    @property
    def open_weights(self) -> Mapping[int, float]:
        """Microbatch -> weight, of the step that is open."""
        return self.run._weights

    def enter_alone(self, config: RunConfig) -> None:
        """Make a run of this process for the present thread. Raises TaskError."""
        self._make_run(config, torch.device(device_kind(config.device).device(0)))
        enter_run(self.run)

    def _make_run(self, config: RunConfig, device: torch.device) -> None:
        _refuse_settings(config)
        compute, task = Precision.of(config.train.precision).compute, config.task
        self._config = config
        self._run = Run(device, compute, task.samples, task.data, config.seed)

    def begin(self, config: RunConfig, device: torch.device) -> None:
        """Run the script up to its loop. Raises TaskError; ScriptError for the script's own."""
        self._make_run(config, device)
        if gone := [name for name in _OF_LAUNCHERS if os.environ.pop(name, None) is not None]:
            self.run.note(f"not given to the script: {', '.join(gone)}; the run deals its work")
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # so that initial values are the same in each process
        said = StringIO()
        try:
            with redirect_stderr(said):
                answer = self.run._turns.start(self.execute)
        finally:
            torch.set_num_threads(threads)
            sys.stderr.write(said.getvalue())
        if not isinstance(answer, LoopReached):
            self.raise_for(answer, said.getvalue().strip().rpartition("\n")[2])

    def give(self, order: Order) -> Answer:
        """Give the script its turn. Raises ScriptError if it ends there."""
        answer = self.turns.give(order)
        self.awaits_share = isinstance(answer, DataNamed)
        if isinstance(answer, ScriptEnded):
            self.raise_for(answer)
        return answer

    def planned_values(self) -> dict[str, Any]:
        """The keys of the run file that the script gives."""
        kept = self.run.kept
        given: dict[str, Any] = self.run._sizes | {"train.optimizer.clip_norm": kept.clip_norm}
        if (named := self.run.named_validation) is not None:
            given |= {"train.evaluate.every": named.every, "train.evaluate.samples": named.samples}
        fixed = {"train.schedule.kind": "constant", "train.schedule.warmup_steps": 0}
        given |= kept.optimizers.planned_values | fixed
        return {key: value for key, value in given.items() if value is not None}

    # --- as a task ------------------------------------------------------------------------------
    def model(self) -> nn.Module:
        return self.run.kept.on_meta()

    def data(self) -> ScriptSamples:
        return ScriptSamples(self)

    def validation(self) -> Samples | None:
        named = self.run.named_validation
        return None if named is None else cast(Samples, named.dataset)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        raise RuntimeError("the script computes its losses")

    def weight(self, batch: Batch) -> int:
        """The script says it later, with its loss."""
        return 0

    def collate(self, items: Sequence[Mapping[str, Any]]) -> Batch:
        return (self.named_data().collate or stacked_batch)(items)

    def initial(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self.run.kept.values[name]

    def decays(self, name: str, shape: tuple[int, ...]) -> bool:
        return self.run.kept.optimizers.decays(name)

    def named_data(self) -> NamedData:
        """The dataset, for which a script that only reads is run up to its first batch."""
        if self.run._data is None:
            answer = self.give(OpenStep(1))
            assert isinstance(answer, DataNamed), answer  # `Step.apply` refuses to come first
        data = self.run._data
        assert data is not None, "the script has named it"
        return data

    # --- the script's thread --------------------------------------------------------------------
    def execute(self) -> None:
        """Run the script in the present thread. Raises what it raises."""
        config = self._config
        assert config is not None
        path = Path(config.task.folder, self.file)
        with importing():
            enter_run(self.run)
            module = ModuleType("__main__")
            module.__file__ = str(path)
            sys.modules["__main__"], sys.argv = module, [str(path), *self._arguments]
            seed_generators(key_seed(config.seed, "task"))
            code = compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
            exec(code, vars(module))

    def raise_for(self, answer: Answer, last_words: str = "") -> NoReturn:
        """Raise what the end of the script means. last_words: the last line of its stderr."""
        error = answer.error if isinstance(answer, ScriptEnded) else None
        if isinstance(error, SystemExit) and error.code not in (None, 0):
            raise ScriptError(
                f"the script exited with status {error.code}{self._in_step}"
                + (last_words and f": {last_words}"),
                where=self._line_of(error),
                remedy=self._debug if self._in_step else "correct the arguments after --",
            )
        if (error is None or isinstance(error, SystemExit)) and not self.run._sizes:
            raise ScriptError(
                "the script ended, and has no loop over run.steps()",
                where=self.file,
                remedy="let it train by such a loop (docs/guide/python.md), or start it by: python "
                f"{self.file}",
            )
        if error is None or isinstance(error, SystemExit):
            raise ScriptError(
                f"the script ended{self._in_step}, before the last step of the run",
                where=self.file if error is None else self._line_of(error),
                remedy="let the loop over run.steps() run to its end; a run is ended early with "
                "holdfast down, or by train.steps",
            )
        raise self.error_of(error) from error

    def error_of(self, error: BaseException) -> ScriptError:
        """One sentence with the line of the script; the traceback is logged."""
        logger.error("%s", "".join(traceback.format_exception(error)).rstrip())
        where = self._line_of(error)
        if isinstance(error, TaskError):
            named = f"{error.where}: " if error.where and error.where != "task" else ""
            return ScriptError(f"{named}{error.message}", where=where, remedy=error.remedy)
        text, remedy = " ".join(str(error).split())[:300], self._debug
        if "signal only works in main thread" in text:
            remedy = "remove the handler: a run saves and leaves at SIGTERM and SIGINT"
        what = f"{type(error).__name__}: {text}{self._in_step}"
        return ScriptError(what, where=where, remedy=remedy)

    @property
    def _in_step(self) -> str:
        step = 0 if self._run is None or self._run.is_over else self._run._open_step
        return f", in step {step}" if step else ""

    @property
    def _debug(self) -> str:
        arguments = shlex.join(self._arguments)
        return f"look at it with: holdfast run {self.file} --debug" + (
            f" -- {arguments}" if arguments else ""
        )

    def _line_of(self, error: BaseException) -> str:
        """Return the script's file, with the line of it that was running."""
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if Path(frame.filename).name == self.file]
        return f"{self.file}:{lines[-1]}" if lines else self.file

    def check_end(self, answer: Answer) -> None:
        """Raise ScriptError if the code after the loop has failed."""
        if not isinstance(answer, ScriptEnded):
            self.raise_for(answer)
        error = answer.error
        if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
            return
        if isinstance(error, SystemExit):
            what = f"the script exited with status {error.code}"
            found = ScriptError(what, where=self._line_of(error))
        else:
            found = self.error_of(error)
        raise ScriptError(
            f"{found.message}; the run is finished, and the code after the loop does not run again",
            where=found.where,
            remedy="read the weights with holdfast.open_checkpoint",
        ) from error


class ScriptSamples:
    """The script's dataset, which it names in its first step. Its version and length are those that
    the run was begun with."""

    def __init__(self, script: Script) -> None:
        self._script = script

    @property
    def version(self) -> str:
        return self._script.run._version or self._script.named_data().version

    def __len__(self) -> int:
        return self._script.run._samples or len(self._script.named_data().dataset)

    def __getitem__(self, index: int) -> Any:
        return self._script.named_data().dataset[index]


def load_run_task(config: RunConfig, device: torch.device | str = "cpu") -> Task:
    """Import and make the run's task, and run a script up to its loop. Raises TaskError."""
    task = load_task(config.task)
    if isinstance(task, Script):
        task.begin(config, torch.device(device))
    return task


def _refuse_settings(config: RunConfig) -> None:
    """Raises TaskError for what an own loop cannot do."""
    if any(degrees.dp_shard > 1 for _, degrees in config.layout.kinds):
        raise TaskError(
            "an own loop computes each replica on one device",
            where="layout.dp_shard",
            remedy="use 1, or write a Task (docs/guide/python.md)",
        )
    if config.lora.rank:
        raise TaskError("an own loop has no adapters", where="lora.rank", remedy="use 0")
    if config.train.compile:
        raise TaskError(
            "an own loop is not compiled by Holdfast", where="train.compile", remedy="use false"
        )
    if config.train.recomputes:
        raise TaskError(
            "an own loop runs its own passes",
            where="train.recompute",
            remedy="use none, and torch.utils.checkpoint in the loop",
        )
    if config.train.memory.moves_activations:
        raise TaskError(
            "an own loop keeps what its own passes need",
            where="train.memory.activations",
            remedy="use device, and torch.autograd.graph.save_on_cpu in the loop",
        )
