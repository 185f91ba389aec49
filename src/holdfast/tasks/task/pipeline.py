"""A user's task in stages: where its parameters are used, and what a stage keeps and runs.

A stage gets one tensor from the stage before it. All its ranks read the batch, so a block may look
at it, too. Each part draws its random numbers from a seed of its own. So they depend on no stage.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.config.sections.layout import LayoutConfig
from holdfast.core.seeds import key_seed
from holdfast.core.sharding.run_table import positions_text
from holdfast.errors import TaskError
from holdfast.parallel.axes.process_groups import ProcessGroups
from holdfast.tasks.task.loading import user_code
from holdfast.tasks.task.module import evaluation_mode, meta_module, seed_generators
from holdfast.tasks.task.task import Batch, PipelineTask, Task
from holdfast.training.engine.executors import PipelinedExecutor


@dataclass(frozen=True)
class TaskStage:
    """What a rank runs of a task."""

    task: PipelineTask
    is_first: bool = True
    is_last: bool = True

    def run(self, model: nn.Module, batch: Batch, key: int, incoming: Tensor | None) -> Tensor:
        """Return what goes to the next stage, or the loss. incoming: what came from the stage
        before. Raises TaskError."""
        if not batch:  # of a microbatch that is skipped; its gradient is zero
            like = next(model.parameters())
            zero = torch.zeros(1, dtype=like.dtype, device=like.device, requires_grad=True)
            x = zero if incoming is None else incoming
            return x.sum().to(torch.float64) * 0.0 if self.is_last else x * 0.0
        if incoming is None:
            seed_generators(key_seed(key, "before"))
            x = checked_tensor(self.task, self.task.before(model, batch))
        else:
            x = incoming
        for position, block in blocks_here(self.task, model):
            seed_generators(key_seed(key, "block", position))
            x = called_block(self.task, block, position, x, batch)
        if not self.is_last:
            return x
        seed_generators(key_seed(key, "after"))
        return self.task.after(model, x, batch)


def checked_tensor(task: PipelineTask, x: Any) -> Tensor:
    """What `before()` returned. Raises TaskError."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TaskError(
            f"before() of {type(task).__name__} returned {_kind(x)}, no floating-point tensor",
            remedy="return one; block() and after() get the batch, too",
        )
    return x


def called_before(task: PipelineTask, model: nn.Module, batch: Batch) -> Tensor:
    """What the first block gets. Raises TaskError, also for values that `before()` keeps."""
    was = values_on(task, model)
    x = task.before(model, batch)
    refuse_kept_values("before()", was, values_on(task, model))
    return checked_tensor(task, x)


def called_block(
    task: PipelineTask, block: nn.Module, position: int, x: Tensor, batch: Batch
) -> Tensor:
    """What a block gives. Raises TaskError for another shape or dtype than it got."""
    out = task.block(block, x, batch)
    if not isinstance(out, Tensor) or (out.shape, out.dtype) != (x.shape, x.dtype):
        raise TaskError(
            f"block() of {type(task).__name__} gave {_kind(out)} for block {position}, and got "
            f"{_kind(x)}",
            remedy="let each block return a tensor as it gets one",
        )
    return out


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{list(value.shape)} {value.dtype}"
    size = f" of {len(value)}" if isinstance(value, tuple | list) else ""
    return f"a {type(value).__name__}{size}"


def values_on(task: PipelineTask, model: nn.Module) -> dict[str, Any]:
    """The attributes of a task and of its module, by name."""
    found = {f"self.{name}": value for name, value in vars(task).items()}
    return found | {f"model.{name}": value for name, value in vars(model).items()}


def refuse_kept_values(part: str, was: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Raises TaskError for an attribute that a part has set: other stages do not have it."""
    for name, value in values.items():
        if name not in was or was[name] is not value:
            raise TaskError(
                f"{part} sets {name}, and the parts of other stages do not get it",
                remedy="compute it from the batch in each part that uses it, or return it in the "
                "tensor",
            )


def on_meta(batch: Batch, dtype: torch.dtype) -> Batch:
    """A batch without values. dtype: of its floating-point tensors."""
    return {
        name: t.to("meta", dtype if t.is_floating_point() else t.dtype) for name, t in batch.items()
    }


def _container(task: PipelineTask, model: nn.Module) -> nn.ModuleList:
    name = task.pipeline().blocks
    found = dict(model.named_modules()).get(name)
    if not isinstance(found, nn.ModuleList):
        lists = [n for n, part in model.named_modules() if isinstance(part, nn.ModuleList)]
        there = f"name one of {', '.join(lists)}" if lists else "put the blocks into a ModuleList"
        raise TaskError(
            f"pipeline() names {name!r} as the blocks, and that is no ModuleList of the module",
            remedy=there,
        )
    return found


def blocks_here(task: PipelineTask, model: nn.Module) -> Iterator[tuple[int, nn.Module]]:
    """The blocks that are here, with their positions. One module may be at several of them."""
    for name, block in _container(task, model)._modules.items():
        assert block is not None
        yield int(name), block


def stage_rows(task: Task, module: nn.Module) -> tuple[int, tuple[str, ...]]:
    """The number of blocks, and the rows of `task.positions`, of a complete module. Raises
    TaskError for parts that do not fit the module."""
    if not isinstance(task, PipelineTask):
        return 0, ()
    if type(task).loss is not PipelineTask.loss:
        raise TaskError(
            f"{type(task).__name__} has a loss() of its own, and training calls before(), block() "
            "and after()",
            remedy="move loss() into after(), or derive the class from holdfast.Task",
        )
    with user_code("pipeline() failed"):
        named = task.pipeline()
    if (
        not isinstance(named, PipelineTask.Parts)
        or isinstance(named.before, str)
        or (isinstance(named.after, str))
    ):
        raise TaskError(
            f"pipeline() returned {named!r}",
            remedy='return self.Parts("blocks", ["embed"], ["head"]): the blocks, and lists of the '
            "names before and after them",
        )
    count = len(_container(task, module))
    ends = {-1: named.before, count: named.after}
    names = [name for name, _ in module.named_modules()]
    names += [name for name, _ in module.named_parameters(remove_duplicate=False)]
    for entry in (*named.before, *named.after):
        if entry not in names:
            raise TaskError(
                f"pipeline() names {entry}, and the module has no such part",
                remedy="name modules or parameters as model().named_modules() gives them",
            )
        if _is_in(named.blocks, (entry,)) or _is_in(entry, (named.blocks,)):
            how = "lies in" if _is_in(entry, (named.blocks,)) else "contains"
            raise TaskError(
                f"pipeline() names {entry} in `before` or `after`, and it {how} {named.blocks}, "
                "the blocks",
                remedy="name modules and parameters next to the blocks, such as "
                f"{named.blocks.rpartition('.')[0] or 'encoder'}.embed",
            )
    found: dict[int, tuple[str, set[int]]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        positions = {at for at, entries in ends.items() if _is_in(name, entries)}
        if _is_in(name, (named.blocks,)):
            positions.add(int(name.removeprefix(f"{named.blocks}.").split(".")[0]))
        if not positions:
            raise TaskError(
                f"parameter {name} is in no part of pipeline()",
                remedy="name its module in `before` or `after`",
            )
        found.setdefault(id(parameter), (name, set()))[1].update(positions)
    return count, tuple(positions_text(name, sorted(at)) for name, at in found.values())


def _is_in(name: str, entries: Sequence[str]) -> bool:
    return any(name == entry or name.startswith(f"{entry}.") for entry in entries)


def keep_stage(
    task: PipelineTask, module: nn.Module, blocks: Collection[int], first: bool, last: bool
) -> None:
    """Drop in place what other ranks' stages hold. blocks: positions of those that stay."""
    container, named = _container(task, module), task.pipeline()
    for name in list(container._modules):
        if int(name) not in blocks:
            del container._modules[name]
    kept = {*(named.before if first else ()), *(named.after if last else ())}
    for entry in {*named.before, *named.after} - kept:
        slots, key = slot_of(module, entry)
        slots[key] = None


def slot_of(module: nn.Module, entry: str) -> tuple[dict[str, Any], str]:
    """Return the module that keeps a module or parameter, and its key there."""
    path, _, key = entry.rpartition(".")
    owner = module.get_submodule(path)
    return (owner._parameters if key in owner._parameters else owner._modules), key


class TaskPipelinedExecutor(PipelinedExecutor):
    """Runs one stage of a task. The shape of what passes between stages is that of `before()`."""

    def __init__(
        self,
        task: PipelineTask,
        objective: nn.Module,
        groups: ProcessGroups,
        layout: LayoutConfig,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._task, self._module = task, meta_module(task).to(dtype)
        self._shapes: dict[Any, tuple[tuple[int, ...], torch.dtype]] = {}
        arguments = attrgetter("arguments")
        super().__init__(objective, groups, layout, 0, dtype, device, arguments)

    def boundary(self, batch: Any) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of what passes between two stages. Raises TaskError."""
        tensors: Mapping[str, Tensor] = batch.tensors
        if not tensors:
            return (1,), self._dtype
        known = tuple((name, t.shape, t.dtype) for name, t in tensors.items())
        if known not in self._shapes:
            there = on_meta(tensors, self._dtype)
            what = "before() failed on the meta device, where no tensor has values"
            with user_code(what), torch.device("meta"), torch.no_grad():
                x = called_before(self._task, self._module, there)
            self._shapes[known] = tuple(x.shape), x.dtype
        return self._shapes[known]

    def evaluate(self, batches: Sequence[Any], on_progress: Callable[[], None]) -> list[Tensor]:
        """As `TaskExecutor.evaluate`, of a last stage."""
        with evaluation_mode(self._objective):
            losses = super().evaluate(batches, on_progress)
        return [
            loss if batch.counts else torch.zeros_like(loss)
            for loss, batch in zip(losses, batches, strict=bool(losses))
        ]

    def first_loss(self, batch: Any) -> float | None:
        """The loss of a batch in training mode; None if this is not the last stage."""
        losses = super().evaluate([batch], lambda: None)
        return float(losses[0]) if losses else None
