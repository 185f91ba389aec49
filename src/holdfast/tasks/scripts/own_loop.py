"""The user's script and the runner are two threads that take turns: only one runs at a time.

The runner gives an order and waits for the answer. The script answers and waits for the next order.
So neither sees half of what the other one does, and each wait has one thread that ends it. The
script's last answer is `ScriptEnded`. A script that gets no further order waits until its process
ends.

    runner                             script
    start            ------------->    begins
                     <-------------    LoopReached      at `run.steps(n)`
    OpenStep         ------------->    yields the step
                     <-------------    DataNamed        at the first `step.batches(dataset)`
    ComputeShare     ------------->    yields the batches
                     <-------------    ShareDone        at `step.apply()`, or at an engine's error
    OpenStep ...     ------------->    `apply` returns
    EndLoop          ------------->    leaves the loop, and runs to its end
                     <-------------    ScriptEnded

A `Step` is one attempt at a step. If a rank is lost, the attempt is over: `batches` ends, `apply`
returns False, and `run.steps` yields another attempt. That may be the same step with what is left
to compute of it, or another step. So a plain loop is right without knowing of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from holdfast.core.weights import read_weight
from holdfast.errors import START_OVER, TaskError
from holdfast.tasks.named.kept_optimizers import KeptOptimizers, KeptState
from holdfast.tasks.task.batches import TaskMicrobatch, sample_count
from holdfast.tasks.task.module import buffer_versions, changed_buffer, seed_generators
from holdfast.tasks.task.task import Batch, Collate
from holdfast.training.engine.loss_scale import LossScale
from holdfast.training.engine.stage_work import GradientListener

_ALIVE_EVERY_S = 0.5
"""Seconds after which a runner that waits for the script's end reports that it is alive."""


@dataclass(frozen=True)
class OpenStep:
    """The runner is at this step, for the first time or again."""

    step: int


@dataclass(frozen=True)
class ComputeShare:
    """Compute these microbatches. losses: takes the loss of each, as it comes. loss_scale: what the
    backward passes begin with."""

    leaves: Sequence[int]
    batches: Sequence[TaskMicrobatch]
    listener: GradientListener
    losses: list[Tensor]
    loss_scale: LossScale


@dataclass(frozen=True)
class EndLoop:
    """The last step is applied."""


@dataclass(frozen=True)
class EngineFailed:
    """A script that trains alone gets what its engine has raised."""

    error: BaseException


@dataclass(frozen=True)
class LoopReached:
    """The script is ready for its first step."""


@dataclass(frozen=True)
class DataNamed:
    """The script has named its dataset, and waits for microbatches."""


@dataclass(frozen=True)
class ShareDone:
    """The script has computed its share. error: why the engine could not take it, or None."""

    error: Exception | None = None


@dataclass(frozen=True)
class ScriptEnded:
    """The script has ended. error: what it raised, or None."""

    error: BaseException | None = None


Order = OpenStep | ComputeShare | EndLoop | EngineFailed
Answer = LoopReached | DataNamed | ShareDone | ScriptEnded


class Turns:
    """`start` and `give` belong to the runner's thread, `answer` to the script's."""

    def __init__(self) -> None:
        self._orders: SimpleQueue[tuple[Order, int]] = SimpleQueue()
        self._answers: SimpleQueue[Answer] = SimpleQueue()

    def start(self, script: Callable[[], None]) -> Answer:
        """Run the script in a thread of its own; return its first answer."""

        def run() -> None:
            try:
                script()
            except BaseException as error:
                self._answers.put(ScriptEnded(error))
            else:
                self._answers.put(ScriptEnded())

        threading.Thread(target=run, name="script", daemon=True).start()
        return self._answers.get()

    def give(self, order: Order, on_wait: Callable[[], None] = lambda: None) -> Answer:
        """Give the script its turn; return its answer. on_wait: called now and then meanwhile."""
        self._orders.put((order, torch.get_num_threads()))
        while True:
            try:
                return self._answers.get(timeout=_ALIVE_EVERY_S)
            except Empty:
                on_wait()

    def wait(self) -> Answer:
        """Return the first answer of a script that is not run in a thread of its own."""
        return self._answers.get()

    def end(self) -> None:
        """Let the script leave its loop, and wait for nothing more."""
        self._orders.put((EndLoop(), torch.get_num_threads()))

    def fail(self, error: BaseException) -> None:
        """Have the script raise `error` where it waits."""
        self._orders.put((EngineFailed(error), torch.get_num_threads()))

    def answer(self, answer: Answer) -> Order:
        """End the script's turn; return the order that begins the next one."""
        self._answers.put(answer)
        order, threads = self._orders.get()
        if isinstance(order, EngineFailed):
            raise order.error
        if threads != torch.get_num_threads():  # which torch counts for each thread
            torch.set_num_threads(threads)
        return order


class MapDataset(Protocol):
    """A map-style dataset: the same index gives the same sample in each process."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class NamedData:
    """The dataset that a script has named. collate: None for that of `Task`."""

    dataset: MapDataset
    version: str
    collate: Collate | None


@dataclass(frozen=True)
class NamedValidation:
    """The arguments of `run.validate`; None: what the run file says, and the collate of `Task`."""

    dataset: MapDataset
    loss: Callable[[Batch], tuple[Tensor, float]]
    every: int | None
    samples: int | None
    collate: Collate | None


class Run:
    """The run that a script takes part in, as `holdfast.run()` returns it.

    device: of the module and of the batches. seed: of the order of samples and of dropout.
    """

    def __init__(
        self, device: torch.device, compute: torch.dtype, samples: int, version: str, seed: int = 0
    ):
        """compute: dtype of the batches' floating-point tensors. samples, version: of the data that
        the run was begun with; 0 and "" if that is not known yet. seed: of the run file."""
        self.device, self.seed = device, seed
        self._compute, self._samples, self._version = compute, samples, version
        self._turns = Turns()
        self._kept: KeptState | None = None
        self._data: NamedData | None = None
        self._sizes: dict[str, int | None] = {}  # key of the run file -> argument of `steps`
        self.named_validation: NamedValidation | None = None
        self.notes: list[str] = []  # lines for the user, before the start
        self.is_over = False  # the loop has ended
        self._weights: dict[int, float] = {}  # microbatch -> weight, of the open step
        self._open_step = 0

    def keep(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
        *,
        clip_norm: float = 0.0,
    ) -> None:
        """Say what the run's state is; call it once, before `steps`.

        Args:
            model: all parameters of it are kept.
            optimizer: of torch or a class of your own; or several, each with parameters of its own.
                `step.apply` updates in its place.
            scheduler: gives the rates of each step; or several. `run.steps` moves it. Without one,
                the rates are what the optimizer's groups say at `step.apply`, and must be a
                function of the step.
            clip_norm: largest global norm of the gradient; 0: no clipping.
        """
        if self._kept is not None:
            raise TaskError(
                "run.keep() was called twice", where="run.keep", remedy="keep one module"
            )
        optimizers = optimizer if isinstance(optimizer, Sequence) else [optimizer]
        schedulers = scheduler if isinstance(scheduler, Sequence) else [scheduler]
        self._kept = KeptState(
            model,
            KeptOptimizers(model, optimizers),
            [one for one in schedulers if one is not None],
            clip_norm,
        )

    def validate(
        self,
        dataset: MapDataset,
        loss: Callable[[Batch], tuple[Tensor, float]],
        *,
        every: int | None = None,
        samples: int | None = None,
        collate: Collate | None = None,
    ) -> None:
        """Say how the model is validated; call it before `steps`, at most once.

        The journal and the report get the loss every `every` steps, and at the end: the same number
        for any number of workers. A value of the run file or the command line comes first.

        Args:
            loss: returns the sum over a batch, a scalar, and its weight. It is called in evaluation
                mode and without gradients, between two steps.
            samples: of the dataset, evenly spread; the same each time.
            collate: as in `step.batches`.
        """
        if self.named_validation is not None or self._sizes:
            raise TaskError(
                "run.validate() was called twice, or after run.steps()",
                where="run.validate",
                remedy="call it once, before the loop",
            )
        self.named_validation = NamedValidation(dataset, loss, every, samples, collate)

    def steps(
        self, n: int, *, batch_size: int | None = None, microbatch_size: int | None = None
    ) -> Iterator[Step]:
        """Yield the steps up to step `n`, from where the run continues.

        batch_size: samples of a step, over all workers. microbatch_size: of one batch. A value of
        the run file or the command line comes first, also for `n`.
        """
        kept = self.kept
        if self._sizes:
            raise TaskError(
                "run.steps() was called twice", where="run.steps", remedy="use one loop"
            )
        self._sizes = {
            "train.steps": n,
            "train.batch_size": batch_size,
            "train.microbatch_size": microbatch_size,
        }
        order = self._turns.answer(LoopReached())
        while isinstance(order, OpenStep):
            if order.step != self._open_step:
                self._open_step = order.step
                self._weights.clear()
            kept.begin_step(order.step)
            step = Step(self, order.step)
            yield step
            order = step._close()
        self.is_over = True

    def note(self, line: str) -> None:
        """Tell the user a line before the start, once for all workers."""
        self.notes.append(line)

    # --- for the runner ---------------------------------------------------------------------
    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._compute) if tensor.is_floating_point() else tensor

    @property
    def kept(self) -> KeptState:
        """Raises TaskError before `keep`."""
        if self._kept is None:
            raise TaskError(
                "run.keep() was not called",
                where="run.steps",
                remedy="call run.keep(model, optimizer) before the loop",
            )
        return self._kept

    def _bind(self, dataset: MapDataset, version: str | None, collate: Collate | None) -> None:
        """Take the dataset that the script names. Raises TaskError for another one than before."""
        if self._data is not None:
            if dataset is not self._data.dataset:
                raise TaskError(
                    "step.batches() was given another dataset than before",
                    where="step.batches",
                    remedy="make one dataset before the loop",
                )
            return
        length = sample_count(dataset, "the dataset")
        if length < 1:
            raise TaskError(
                "the dataset has no samples", where="step.batches", remedy="give it one"
            )
        named = version or getattr(dataset, "version", None)
        if not isinstance(named, str) or not named:
            raise TaskError(
                f"the dataset ({type(dataset).__name__}) has no version",
                where="step.batches",
                remedy="give step.batches(..., version=...) a text that changes with the content",
            )
        if self._samples and (length, named) != (self._samples, self._version):
            raise TaskError(
                f"the dataset had {self._samples} samples of version {self._version!r}, and now "
                f"has {length} of version {named!r}",
                where="step.batches",
                remedy=f"go back to that data, or {START_OVER}",
            )
        self._data = NamedData(dataset, named, collate)


class Step:
    """One attempt at a step. number: of the step, from 1 on."""

    def __init__(self, run: Run, number: int) -> None:
        self.number = number
        self._run = run
        self._share: ComputeShare | None = None
        self._position = 0  # in the share
        self._next: Order | None = None  # what comes after this attempt, once it is over
        self._has_open_batch = False

    def batches(
        self, dataset: MapDataset, *, version: str | None = None, collate: Collate | None = None
    ) -> Iterator[Batch]:
        """Yield the logical microbatches that this rank computes in this attempt: perhaps none.

        Random generators are seeded for each, so that dropout depends on no rank.
        version: names the dataset's content, if it has no attribute `version`. collate: makes a
        dict of tensors of samples; without it the tensors of each name are stacked.
        """
        if self._share is None and self._next is None:
            self._run._bind(dataset, version, collate)
            self._receive(self._run._turns.answer(DataNamed()))
        while self._share is not None and self._position < len(self._share.leaves):
            batch = self._share.batches[self._position]
            if not batch.tensors:
                self._skip()
                continue
            buffers = buffer_versions(self._run.kept.module)
            seed_generators(batch.key)
            self._has_open_batch = True
            yield {name: self._run._cast(tensor) for name, tensor in batch.tensors.items()}
            if self._has_open_batch:
                raise TaskError(
                    "a batch had no step.backward()",
                    where="step.batches",
                    remedy="call step.backward(loss, weight) once for each batch",
                )
            if name := changed_buffer(self._run.kept.module, buffers):
                raise TaskError(
                    f"the forward pass changes buffer {name}, so the state would depend on which "
                    "rank computes what",
                    where="step.batches",
                    remedy="keep it unchanged, or write a Task with merge() (docs/guide/python.md)",
                )

    def backward(self, loss: Tensor, weight: float) -> None:
        """Add the gradient of a batch to the step's.

        loss: the sum over the batch, a scalar. weight: what the batch adds to the divisor of the
        step's loss and gradient: its samples or tokens, or the sum of their weights.
        """
        if self._next is not None:
            return
        share = self._share
        if share is None or not self._has_open_batch:
            raise TaskError(
                "step.backward() was called without a batch",
                where="step.backward",
                remedy="call it once for each batch of step.batches()",
            )
        counted = _checked_weight(loss, weight)
        self._has_open_batch = False
        leaf = share.leaves[self._position]
        self._run._weights[leaf] = counted
        summed = loss.to(torch.float64)
        if not self._call_engine(lambda: share.listener.start_leaf(leaf)):
            return
        torch.autograd.backward(summed, share.loss_scale.seed(summed))
        self._end_leaf(share, summed.detach())

    def apply(self) -> bool:
        """Vote and update. Return True if the step was applied, and False if this attempt is over
        and `run.steps` yields another one."""
        if self._next is None:
            if self._share is None or self._position < len(self._share.leaves):
                raise TaskError(
                    "step.apply() was called before all batches were computed",
                    where="step.apply",
                    remedy="call it after the loop over step.batches()",
                )
            self._run.kept.optimizers.use_options(self.number)
            self._receive(self._run._turns.answer(ShareDone()))
        following = self._next
        return isinstance(following, EndLoop) or (
            isinstance(following, OpenStep) and following.step > self.number
        )

    def _close(self) -> Order:
        """Return what comes after this attempt. Raises TaskError if the script left it open."""
        if self._next is None:
            raise TaskError(
                f"step {self.number} had no step.apply()",
                where="run.steps",
                remedy="call it once in each pass of the loop",
            )
        return self._next

    def _receive(self, order: Order) -> None:
        if isinstance(order, ComputeShare):
            self._share, self._position = order, 0
        else:
            self._share, self._next = None, order

    def _call_engine(self, call: Callable[[], None]) -> bool:
        """Call the engine; if it raises, this attempt is over. Return whether it continues."""
        try:
            call()
        except Exception as error:
            self._receive(self._run._turns.answer(ShareDone(error)))
        return self._next is None

    def _skip(self) -> None:
        """Compute a microbatch that the run leaves out: its loss and its gradient are zero."""
        share = self._share
        assert share is not None
        leaf = share.leaves[self._position]
        self._run._weights[leaf] = 0
        if self._call_engine(lambda: share.listener.start_leaf(leaf)):
            self._end_leaf(share, torch.zeros((), dtype=torch.float64, device=self._run.device))

    def _end_leaf(self, share: ComputeShare, loss: Tensor) -> None:
        self._position += 1

        def end() -> None:
            share.listener.end_leaf()
            share.losses.append(loss)
            share.listener.check()

        self._call_engine(end)


_CURRENT: ContextVar[Run | None] = ContextVar("the run of this script", default=None)


def current_run() -> Run | None:
    """Return the run of the present thread's script; None without one."""
    return _CURRENT.get()


def enter_run(current: Run) -> None:
    """Let `run` return this run in the present thread."""
    _CURRENT.set(current)


def _checked_weight(loss: Any, weight: Any) -> float:
    if not isinstance(loss, Tensor) or loss.shape != () or not loss.requires_grad:
        what = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise TaskError(
            f"step.backward() was given {what}",
            where="step.backward",
            remedy="give it a scalar that depends on trained parameters: the sum over the batch",
        )
    counted = read_weight(weight)
    if counted is None:
        raise TaskError(
            f"step.backward() was given the weight {weight!r}",
            where="step.backward",
            remedy="give it a number from 0 on: the samples or tokens of the batch, or the sum of "
            "their weights",
        )
    if counted > 1 and _is_mean(loss):
        raise TaskError(
            f"step.backward() was given a mean, with the weight {counted}",
            where="step.backward",
            remedy='give it the sum over the batch (reduction="sum"), or the mean times the weight',
        )
    return counted


def _is_mean(loss: Tensor) -> bool:
    """Return True if the last operation was a mean; one further back is not seen."""
    last = loss.grad_fn
    if last is None:
        return False
    reduced_by = getattr(last, "_saved_reduction", None)  # of torch's losses; 1: "mean"
    return last.name().startswith("MeanBackward") or reduced_by == 1
