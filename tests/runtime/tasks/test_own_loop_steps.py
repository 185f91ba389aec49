"""The loop of a script, driven by a test in the place of the runner: attempts, rates, mistakes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.errors import PeerLostError, TaskError
from holdfast.tasks.scripts.own_loop import (
    Answer,
    ComputeShare,
    DataNamed,
    EndLoop,
    LoopReached,
    OpenStep,
    Run,
    ScriptEnded,
    ShareDone,
    Step,
    current_run,
    enter_run,
)
from holdfast.tasks.task.batches import TaskMicrobatch
from holdfast.training.engine.loss_scale import NOT_SCALED


class Data:
    version = "one"

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        raise AssertionError("the runner reads the samples")


class Listener:
    """Notes its leaves; fails after `dies_after` of them."""

    def __init__(self, dies_after: int = 99) -> None:
        self.leaves: list[int] = []
        self._dies_after = dies_after

    def start_leaf(self, leaf: int) -> None:
        self.leaves.append(leaf)

    def end_leaf(self) -> None: ...

    def check(self) -> None:
        if len(self.leaves) >= self._dies_after:
            raise PeerLostError("a peer was lost")


class Runner:
    """Starts a script in a thread, and gives it orders."""

    def __init__(self, script: Callable[[Run], None]) -> None:
        self.run = Run(torch.device("cpu"), torch.float32, 0, "")
        self.losses: list[Tensor] = []
        self.first = self.run._turns.start(lambda: self._execute(script))

    def _execute(self, script: Callable[[Run], None]) -> None:
        enter_run(self.run)
        assert current_run() is self.run
        script(self.run)

    def open(self, step: int) -> Answer:
        return self.run._turns.give(OpenStep(step))

    def share(self, leaves: Sequence[int], listener: Listener, skipped: int = -1) -> Answer:
        batches = [
            TaskMicrobatch(
                {} if leaf == skipped else {"x": torch.full((2, 3), 1.0 + leaf)}, 7, [], 0
            )
            for leaf in leaves
        ]
        share = ComputeShare(leaves, batches, listener, self.losses, NOT_SCALED)
        return self.run._turns.give(share)

    def end(self) -> Answer:
        return self.run._turns.give(EndLoop())


def kept_model(current: Run) -> tuple[nn.Linear, torch.optim.Optimizer]:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    current.keep(model, optimizer)
    return model, optimizer


def test_a_lost_rank_ends_an_attempt_and_the_loop_gets_another_one() -> None:
    seen: list[tuple[int, list[float], bool]] = []

    def script(current: Run) -> None:
        model, _ = kept_model(current)
        data = Data()
        for step in current.steps(3, batch_size=8, microbatch_size=2):
            fed = []
            for batch in step.batches(data):
                fed.append(float(batch["x"][0, 0]))
                step.backward(model(batch["x"]).square().sum(), weight=2)
            seen.append((step.number, fed, step.apply()))

    runner = Runner(script)
    assert runner.first == LoopReached()
    assert runner.open(1) == DataNamed()
    assert runner.share([0, 2], Listener()) == ShareDone()
    assert (len(runner.losses), runner.run._weights) == (2, {0: 2, 2: 2})
    assert runner.open(2) == DataNamed()
    lost = runner.share([1, 3], dying := Listener(dies_after=1))
    assert isinstance(lost, ShareDone)
    assert isinstance(lost.error, PeerLostError)
    assert (dying.leaves, runner.run._weights) == ([1], {1: 2})
    assert runner.open(2) == DataNamed()  # the same step again, with what is left of it
    assert runner.run._weights == {1: 2}
    assert runner.share([3], Listener()) == ShareDone()
    assert runner.open(2) == DataNamed()  # lost in the vote
    assert runner.open(3) == DataNamed()  # which came to its end elsewhere
    assert runner.share([], Listener()) == ShareDone()
    assert runner.end() == ScriptEnded()
    assert seen == [
        (1, [1.0, 3.0], True),
        (2, [2.0], False),
        (2, [4.0], False),
        (2, [], True),
        (3, [], True),
    ]


def test_a_skipped_microbatch_is_not_yielded() -> None:
    fed: list[float] = []
    data = Data()

    def body(step: Step, model: nn.Linear, _: object) -> None:
        for batch in step.batches(data):
            fed.append(float(batch["x"][0, 0]))
            step.backward(model(batch["x"]).sum(), weight=2)
        step.apply()

    runner = Runner(looped(body))
    runner.open(1)
    listener = Listener()
    assert runner.share([0, 1, 2], listener, skipped=1) == ShareDone()
    assert (fed, listener.leaves, runner.run._weights) == (
        [1.0, 3.0],
        [0, 1, 2],
        {0: 2, 1: 0, 2: 2},
    )
    assert float(runner.losses[1]) == 0.0


def test_a_scheduler_gives_the_rate_of_each_step_wherever_the_run_continues() -> None:
    def script(current: Run) -> None:
        model = nn.Linear(3, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 1 / (1 + done))
        current.keep(model, optimizer, scheduler)
        data = Data()
        for step in current.steps(9):
            for batch in step.batches(data):
                step.backward(model(batch["x"]).sum(), weight=2)
            step.apply()

    runner = Runner(script)
    for step in (5, 6, 3, 6):
        runner.open(step)
        runner.share([0], Listener())
        assert runner.run.kept.optimizers.rate(step) == 0.5 / step
    planned = runner.run.kept.optimizers.planned_values
    assert planned["train.optimizer.learning_rate"] == 0.5


def test_schedulers_give_all_options_of_each_step() -> None:
    """One changes betas, one the rates of two groups by the rate before."""
    found: list[object] = []

    def script(current: Run) -> None:
        model = nn.Linear(3, 1)
        first = torch.optim.AdamW([model.weight], lr=0.1, amsgrad=True)
        second = torch.optim.SGD([model.bias], lr=1.0)
        cycle = torch.optim.lr_scheduler.OneCycleLR(first, 0.1, total_steps=9)
        halving = torch.optim.lr_scheduler.StepLR(second, 1, gamma=0.5)
        current.keep(model, [first, second], [cycle, halving])
        data = Data()
        for step in current.steps(9):
            for batch in step.batches(data):
                step.backward(model(batch["x"]).sum(), weight=2)
            group = first.param_groups[0]
            found.append((step.number, group["lr"], group["betas"], second.param_groups[0]["lr"]))
            step.apply()

    def run_steps(*steps: int) -> list[object]:
        found.clear()
        runner = Runner(script)
        for step in steps:
            runner.open(step)
            runner.share([0], Listener())
        return list(found)

    straight = run_steps(1, 2, 3, 4, 5, 6)
    assert run_steps(4, 2, 6) == [straight[3], straight[1], straight[5]]
    assert len({str(betas) for _, _, betas, _ in straight}) > 1  # type: ignore[misc]


Body = Callable[[Step, nn.Linear, torch.optim.Optimizer], object]


def looped(body: Body) -> Callable[[Run], None]:
    """A script that keeps a model, and whose loop does this in each step."""

    def script(current: Run) -> None:
        model, optimizer = kept_model(current)
        for step in current.steps(2):
            body(step, model, optimizer)

    return script


def computed(
    loss_of: Callable[[Tensor], Tensor] = Tensor.sum, weight: float = 2, dataset: Any = None
) -> Callable[[Run], None]:
    """A script whose steps compute this loss, and are not applied."""

    def body(step: Step, model: nn.Linear, _: object) -> None:
        for batch in step.batches(Data() if dataset is None else dataset):
            step.backward(loss_of(model(batch["x"])), weight)

    return looped(body)


def _early_apply(step: Step, model: object, optimizer: object) -> None:
    next(step.batches(Data()))
    step.apply()


def _changed_buffer(current: Run) -> None:
    model = nn.BatchNorm1d(3)
    current.keep(model, torch.optim.AdamW(model.parameters()))
    for step in current.steps(1):
        for batch in step.batches(Data()):
            step.backward(model(batch["x"]).sum(), weight=2)


class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


LOADER: Any = torch.utils.data.DataLoader(Data())  # type: ignore[arg-type]


def _stepped_scheduler(current: Run) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    current.keep(model, optimizer, scheduler)
    scheduler.step()
    next(current.steps(1))


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (lambda current: next(current.steps(1)), "run.keep() was not called"),
        (looped(lambda step, *_: list(step.batches(Data()))), "a batch had no step.backward()"),
        (looped(_early_apply), "step.apply() was called before all batches were computed"),
        (computed(), "step 1 had no step.apply()"),
        (
            looped(lambda step, _, own: [own.step() for _ in step.batches(Data())]),
            "AdamW.step() was called",
        ),
        (_changed_buffer, "the forward pass changes buffer"),
        (computed(lambda out: out), "step.backward() was given shape [2, 1]"),
        (computed(weight=-0.5), "the weight -0.5"),
        (computed(Tensor.mean), "was given a mean, with the weight 2"),
        (computed(lambda out: F.mse_loss(out, torch.ones(2, 1))), "was given a mean"),
        (computed(dataset=LOADER), "the dataset is a DataLoader, which has an order"),
        (computed(dataset=Stream()), "the dataset (Stream) has no length and no index"),
        (computed(dataset=[{}]), "the dataset (list) has no version"),
        (_stepped_scheduler, "scheduler.step() was called"),
    ],
)
def test_a_mistake_in_the_loop_is_named(script: Callable[[Run], None], words: str) -> None:
    runner = Runner(script)
    answer = runner.first
    for order in (OpenStep(1), None):
        if isinstance(answer, ScriptEnded):
            break
        answer = runner.open(1) if order else runner.share([0, 1], Listener())
    assert isinstance(answer, ScriptEnded)
    assert isinstance(answer.error, TaskError), answer.error
    assert words in str(answer.error)


def test_a_mean_of_a_weight_of_one_and_a_weight_of_a_tensor_are_taken() -> None:
    def script(current: Run) -> None:
        model, _ = kept_model(current)
        for step in current.steps(1):
            batches = step.batches(Data())
            next(batches)
            step.backward(model(torch.ones(2, 3)).mean(), weight=1)
            batch = next(batches)
            step.backward(model(batch["x"]).mean() * 2, torch.ones(2).sum())  # type: ignore[arg-type]
            next(batches, None)
            step.apply()

    runner = Runner(script)
    runner.open(1)
    assert runner.share([0, 1], Listener()) == ShareDone()
    assert runner.run._weights == {0: 1, 1: 2}
