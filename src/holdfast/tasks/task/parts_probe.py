"""Calls the parts of a `PipelineTask` before a run starts, on the meta device.

Tensors have no values there. A part that cannot run there is not judged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from holdfast.config.run import RunConfig
from holdfast.errors import TaskError
from holdfast.tasks.task.module import meta_module
from holdfast.tasks.task.pipeline import (
    blocks_here,
    called_before,
    called_block,
    on_meta,
    refuse_kept_values,
    slot_of,
    values_on,
)
from holdfast.tasks.task.task import Batch, PipelineTask, Task
from holdfast.training.engine.precision import Precision

_SAMPLES = 2
_T = TypeVar("_T")


def probe_parts(task: Task, config: RunConfig) -> None:
    """Raises TaskError for what a part returns, keeps, or uses although another part names it."""
    if not isinstance(task, PipelineTask):
        return
    dtype = Precision.of(config.train.precision).compute
    attributes = dict(vars(task))
    try:
        batch = _tried(lambda: on_meta(_first_batch(task, config), dtype))
        if batch:
            with torch.device("meta"), torch.no_grad():
                _probe(task, meta_module(task).to(dtype), batch)
    finally:
        vars(task).clear()
        vars(task).update(attributes)


def _probe(task: PipelineTask, model: nn.Module, batch: Batch) -> None:
    named = task.pipeline()
    x = _tried(lambda: called_before(task, model, batch))
    if x is None:
        return
    _refuse_use("before", named.after, named.before, model, partial(task.before, model, batch))
    was = values_on(task, model)
    first = next(blocks_here(task, model), None)
    if first is None:
        return
    position, block = first
    x = _tried(partial(called_block, task, block, position, x, batch))
    refuse_kept_values("block()", was, values_on(task, model))
    if x is None or _tried(after := partial(task.after, model, x, batch)) is None:
        return
    _refuse_use("after", named.before, named.after, model, after)


def _refuse_use(
    part: str,
    others: Sequence[str],
    named: Sequence[str],
    model: nn.Module,
    call: Callable[[], Any],
) -> None:
    """Raises TaskError if a call that worked fails without a module that only the other part
    names."""
    for entry in others:
        if entry in named:
            continue
        with _without(model, entry):
            fails = _tried(call) is None
        if fails:
            other = "after" if part == "before" else "before"
            raise TaskError(
                f"{part}() uses {entry}, which pipeline() names in `{other}` alone",
                remedy=f"name it in `{part}` too",
            )


@contextmanager
def _without(model: nn.Module, entry: str) -> Iterator[None]:
    slots, key = slot_of(model, entry)
    kept, slots[key] = slots[key], None
    try:
        yield
    finally:
        slots[key] = kept


def _tried(call: Callable[[], _T]) -> _T | None:
    """What a call returns; None if it fails in a user's code."""
    try:
        return call()
    except TaskError:
        raise
    except Exception:
        return None


def _first_batch(task: PipelineTask, config: RunConfig) -> Batch:
    """A batch of the first samples, or one with the names and shapes of prepared tokens."""
    if (samples := task.data()) is not None:
        return task.collate([samples[i] for i in range(min(_SAMPLES, len(samples)))])
    shape, data = (_SAMPLES, config.data.sequence_length), config.data
    found: dict[str, Tensor] = {
        name: torch.zeros(shape, dtype=torch.int64) for name in ("inputs", "targets")
    }
    if data.attention == "document":
        found["documents"] = torch.zeros(shape, dtype=torch.int32)
    if data.chat.weights:
        found["weights"] = torch.ones(shape)
    return found
