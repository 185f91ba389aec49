"""A file as a user writes it, with every public name. `make test` runs mypy on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

import holdfast
from holdfast_platform.pods.controller import Controller


class Points:
    """Samples by number."""

    version = "points-1"

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return {"x": torch.full((2,), float(index)), "y": index % 2}


class Line(holdfast.Task):
    """Every method of a task."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))

    def data(self) -> holdfast.Samples:
        return Points()

    def validation(self) -> Points:
        return Points()

    def loss(self, model: nn.Module, batch: holdfast.Batch) -> Tensor:
        return nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")

    def weight(self, batch: holdfast.Batch) -> float:
        return 0.5 * len(batch["x"])

    def collate(self, items: Sequence[Mapping[str, Any]]) -> holdfast.Batch:
        return super().collate(items)

    def initial(
        self, name: str, shape: tuple[int, ...]
    ) -> holdfast.Normal | holdfast.Zeros | holdfast.Ones | Tensor | None:
        if name == "0.bias":
            return holdfast.Zeros()
        return holdfast.Ones() if name == "1.weight" else holdfast.Normal(0.1)

    def weights(self) -> Mapping[str, Tensor]:
        return {"1.bias": torch.zeros(2)}

    def decays(self, name: str, shape: tuple[int, ...]) -> bool:
        return super().decays(name, shape)

    def merge(self, buffer: str) -> Literal["mean", "sum"] | None:
        return "sum" if buffer.endswith("num_batches_tracked") else "mean"

    def casts(self, buffer: str) -> bool:
        return True

    def vocabulary(self) -> int | None:
        return None

    def flops(self) -> float | None:
        return 6.0 * (2 * 2 + 2)

    def exported(self, name: str) -> str | None:
        return f"line.{name}"

    def files(self) -> Sequence[Path]:
        return []

    def sharding(self) -> Mapping[str, str | tuple[str, int]]:
        return {"0": "colwise_gather_output"}

    def start_notes(self) -> Sequence[str]:
        return ["two samples"]

    def units(self, model: nn.Module) -> Sequence[nn.Module]:
        return list(model.children())


def train_and_read(path: Path) -> dict[str, Tensor]:
    """Every function, and every type that one returns."""
    run_file: holdfast.RunFile = holdfast.load_run_file(path, ("train.steps=20",))
    try:
        result: holdfast.TrainingResult = holdfast.train(
            Line, run_file.changed({"train.steps": 9}), ["layout.workers=2"], args={}, fresh=True
        )
    except holdfast.TaskError as error:
        print(error, run_file.origin("train.steps"))
        raise
    except holdfast.UserError as error:
        raise SystemExit(str(error)) from error
    run: Path = result.folder
    kinds: list[str] = [record["kind"] for record in holdfast.journal(run)]
    for record in holdfast.follow(run, wait=5.0):
        kinds.append(str(record["kind"]))
    losses: dict[str, Any] = holdfast.summary(run, curve=True)
    first: list[dict[str, Tensor]] = holdfast.batches(run, step=1)
    print(kinds, losses["loss"], [len(batch["x"]) for batch in first], result.exit_code)
    opened: holdfast.Checkpoint = holdfast.open_checkpoint(run, result.step)
    moments: Tensor = opened[opened.names[-1]]
    return opened.parameters() | {"moments": moments}


class Row(holdfast.PipelineTask):
    """Blocks that `layout.pp` shares out."""

    def model(self) -> nn.Module:
        return nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(2, 2)]), "head": nn.Linear(2, 1)})

    def pipeline(self) -> holdfast.PipelineTask.Parts:
        return self.Parts("blocks", after=["head"])

    def before(self, model: nn.Module, batch: holdfast.Batch) -> Tensor:
        return batch["x"]

    def after(self, model: nn.Module, x: Tensor, batch: holdfast.Batch) -> Tensor:
        out: Tensor = model.get_submodule("head")(x)
        return nn.functional.mse_loss(out, batch["y"], reduction="sum")


def own_loop(points: holdfast.Samples) -> None:
    """A script's loop, as `holdfast run` starts it."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = holdfast.run()
    run.keep(model, optimizer, clip_norm=1.0)
    for step in run.steps(9, batch_size=8, microbatch_size=4):
        for batch in step.batches(points):
            loss = nn.functional.mse_loss(model(batch["x"]), batch["y"], reduction="sum")
            step.backward(loss, weight=len(batch["x"]))
        if step.apply():
            print(step.number, run.device)


def gangs(secret: Path) -> str:
    with Controller(secret_file=secret) as controller:
        first = controller.submit(["true"], on={"big": 2})
        return controller.submit(["echo", first], on={"small": 1}, after=[first]).text
