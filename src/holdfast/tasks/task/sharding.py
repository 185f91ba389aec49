"""The sharding table of a user's task: which layers tensor parallelism cuts, and the run's rows
that follow. A check before the first step compares gradients with those of the complete module.

A table that leaves out a layer, or a module that views its heads by a fixed number, computes
something else without an error. So one worker computes one sample with the complete module on the
CPU, too. What is in the module is in evaluation mode, so it has no dropout. The module itself is
not, because `Task.loss` may return something else then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from holdfast.config.run import RunConfig
from holdfast.core.sharding.parameters import Parameter
from holdfast.core.sharding.run_table import (
    run_parameter_table,
    run_parameters,
    sharding_of_text,
    sharding_text,
)
from holdfast.core.sharding.sharding_table import Sharding
from holdfast.core.sharding.state_table import MIXED, mesh_box
from holdfast.errors import TaskError
from holdfast.parallel.axes.process_groups import ProcessGroups
from holdfast.parallel.axes.tensor_layers import SHARED_INSIDE, STYLES, TensorRegions, cut_layers
from holdfast.parallel.comm.collectives import Collectives
from holdfast.parallel.torch_compat import local_tensor
from holdfast.tasks.task.loading import user_code
from holdfast.tasks.task.module import (
    TaskObjective,
    evaluation_mode,
    own_values,
    set_buffers,
    tie_again,
    tied_names,
)
from holdfast.tasks.task.task import Task
from holdfast.training.engine.precision import Precision

_SHOWN = 5  # names in a message


@dataclass(frozen=True)
class LayerCut:
    """How a layer is cut. parts: of the dim that is cut, which stay in one piece each; 0: each
    index is one."""

    style: str
    parts: int


def layer_cuts(task: Task, module: nn.Module) -> dict[str, LayerCut]:
    """The layers of the module that the task's table names, in the module's order. Raises
    TaskError for a table that does not fit the module."""
    with user_code("sharding() failed"):
        given = dict(task.sharding())
    layers = {name: layer for name, layer in module.named_modules() if name}
    found: dict[str, LayerCut] = {}
    for pattern, entry in given.items():
        # An entry: a style, or a style and a number of parts. Raises TaskError.
        style, parts = entry if isinstance(entry, tuple) and len(entry) == 2 else (entry, 0)
        if style not in (*STYLES, SHARED_INSIDE) or not isinstance(parts, int) or parts < 0:
            raise TaskError(
                f"sharding() returned {entry!r} for {pattern}",
                remedy=f"use one of {', '.join((*STYLES, SHARED_INSIDE))}, or a pair of it and a "
                "number of parts",
            )
        cut = LayerCut(style, parts)
        hit = [name for name in layers if _matches(pattern, name)]
        if not hit:
            near = get_close_matches(pattern, layers, n=_SHOWN, cutoff=0.0)
            raise TaskError(
                f"sharding() names {pattern}, and the module has no such layer",
                remedy=f"use names such as {', '.join(near)}",
            )
        for name in hit:
            if found.setdefault(name, cut) != cut:
                raise TaskError(
                    f"sharding() names layer {name} twice: {found[name].style} and {cut.style}",
                    remedy="let one pattern fit it",
                )
    for name, cut in found.items():
        _check_layer(name, layers[name], cut)
    _check_shared(module, found)
    return {name: found[name] for name in layers if name in found}


def sharding_rows(task: Task, module: nn.Module) -> tuple[str, ...]:
    """The rows of the run's table (`task.sharding`). Raises TaskError."""
    rows: dict[str, str] = {}
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for name, cut in layer_cuts(task, module).items():
        for key, parameter in module.get_submodule(name).named_parameters():
            row = names[id(parameter)]
            sharding = _parameter_cut(key, parameter, cut)
            if sharding is not None:
                rows[row] = sharding_text(row, sharding)
    return tuple(rows.values())


def cut_module(task: Task, module: nn.Module, groups: ProcessGroups) -> None:
    """Cut the module for this rank's place along tp. Raises TaskError."""
    styles = {name: cut.style for name, cut in layer_cuts(task, module).items()}
    collectives = Collectives(groups.axis("tp"), groups.traffic)
    cut_layers(module, styles, TensorRegions(collectives))


def _matches(pattern: str, name: str) -> bool:
    """Whether a pattern fits a layer's name, part by part."""
    wanted, given = pattern.split("."), name.split(".")
    return len(wanted) == len(given) and all(map(fnmatchcase, given, wanted))


def _check_layer(name: str, layer: nn.Module, cut: LayerCut) -> None:
    """Raises TaskError for a layer that the style cannot cut."""
    if cut.style == SHARED_INSIDE:
        return
    how = STYLES[cut.style]
    limits = ("max_norm", "scale_grad_by_freq", "sparse")
    if type(layer) is not how.of or any(getattr(layer, limit, None) for limit in limits):
        raise TaskError(
            f"sharding() says {cut.style} for layer {name}, which is a {type(layer).__name__}",
            remedy=f"{cut.style} is for a plain torch.nn.{how.of.__name__}: name no other layer",
        )
    sizes = {key: layer.get_parameter(key).shape[dim] for key, dim in _present(layer, how.dims)}
    if wrong := [size for size in sizes.values() if cut.parts and size % cut.parts]:
        raise TaskError(
            f"sharding() says {cut.parts} parts for layer {name}, and its size is {wrong[0]}",
            remedy="name a number of parts that divides it",
        )


def _check_shared(module: nn.Module, cuts: Mapping[str, LayerCut]) -> None:
    """Raises TaskError for a parameter of several layers that are not all cut in the same way."""
    ways: dict[int, tuple[str, Sharding | None]] = {}
    for name, layer in module.named_modules(remove_duplicate=False):
        for key, parameter in layer.named_parameters(recurse=False):
            way = _parameter_cut(key, parameter, cuts[name]) if name in cuts else None
            first, other = ways.setdefault(id(parameter), (f"{name}.{key}", way))
            if other != way:
                raise TaskError(
                    f"{name}.{key} is also {first}, and sharding() does not cut both in one way",
                    remedy="name both (embedding_rowwise and colwise_gather_output), or none",
                )


def _parameter_cut(key: str, parameter: nn.Parameter, cut: LayerCut) -> Sharding | None:
    """The cut of a layer's parameter; None: complete, with its complete gradient on each rank."""
    if cut.style == SHARED_INSIDE:
        return Sharding(None, 1, (), per_token=False)
    dim = STYLES[cut.style].dims.get(key)
    if dim is None:
        return None
    return Sharding(dim, cut.parts or parameter.shape[dim], (), per_token=False)


def _present(layer: nn.Module, dims: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    for key, dim in dims.items():
        if getattr(layer, key, None) is not None:
            yield key, dim


@dataclass(frozen=True)
class _Rounding:
    """How far two gradients of a parameter may be apart. near: relative distance within which they
    are equal. nothing: part of the complete gradient below which one is rounding."""

    near: float
    nothing: float


_ROUNDING = _Rounding(near=1e-2, nothing=1e-3)
"""Some modules compute norms in float32, whatever the precision."""
_ROUNDING_OF_HALF = _Rounding(near=0.25, nothing=0.1)
"""Of a pass in two bytes: differences of attention's weights cancel."""

ValueOf = Callable[[Parameter], Tensor]


def refuse_wrong_table(
    task: Task,
    config: RunConfig,
    groups: ProcessGroups,
    objective: TaskObjective,
    named: Mapping[str, Tensor],
    batch: Mapping[str, Tensor],
    value_of: ValueOf,
) -> None:
    """Raises TaskError on the first rank if the gradients of `batch`, a sample on the CPU, are not
    those of the complete module. Collective over a replica, whose ranks have the same batch.

    named: the objective's parameters by their names in the table. value_of: first values."""
    key, device = 0, next(objective.parameters()).device
    with _without_dropout(objective.model):
        objective({name: tensor.to(device) for name, tensor in batch.items()}, key).backward()
    found = {name: _gradient(parameter) for name, parameter in named.items()}
    for parameter in objective.parameters():
        parameter.grad = None
    place = groups.coordinate
    if (place.replica, place.dp_shard, place.tp) != (0, 0, 0):
        return
    sums_shards = groups.degree("dp_shard") > 1 and config.layout.zero_in_memory > 1
    expected = _complete_gradients(task, config, batch, key, value_of)
    total = float(torch.stack([g.norm() for g in expected.values()]).norm())
    rounding = _ROUNDING_OF_HALF if config.train.precision in MIXED else _ROUNDING
    partial = {
        name for name, cut in map(sharding_of_text, config.task.sharding) if cut.tp_dim is None
    }
    for spec in run_parameter_table(config):
        if spec.name in partial or spec.name not in expected:
            continue
        ours = found[spec.name] / (groups.degree("dp_shard") if sums_shards else 1)
        whole = expected[spec.name]
        # This rank's part of a complete gradient.
        row = spec if sums_shards else replace(spec, shard_dim=None)
        box = mesh_box(row, groups.replica, groups.coordinate)
        theirs = whole[tuple(slice(a, b) for a, b in zip(box.offsets, box.stops, strict=True))]
        distance = float((ours.to(theirs) - theirs).norm())
        if distance > rounding.near * (float(theirs.norm()) + rounding.nothing * total):
            raise TaskError(
                f"with layout.tp {groups.degree('tp')} the gradient of {spec.name} is not that of "
                "the complete module",
                remedy="read the rules for sharding() in docs/guide/python.md",
            )


@contextmanager
def _without_dropout(module: nn.Module) -> Iterator[None]:
    """All that is in the module in evaluation mode. Random numbers are alike on all ranks."""
    found = (getattr(part, "regions", None) for part in module.modules())
    regions = [one for one in found if isinstance(one, TensorRegions)]
    with ExitStack() as modes:
        for part in module.children():
            modes.enter_context(evaluation_mode(part))
        for one in regions:
            one.has_own_numbers = False
        try:
            yield
        finally:
            for one in regions:
                one.has_own_numbers = True


def _gradient(parameter: Tensor) -> Tensor:
    """What a backward pass left at this rank's part, in float64 on the CPU."""
    gradient = parameter.grad
    whole = torch.zeros_like(parameter) if gradient is None else gradient
    return local_tensor(whole).detach().to("cpu", torch.float64)


def _complete_gradients(
    task: Task, config: RunConfig, batch: Mapping[str, Tensor], key: int, value_of: ValueOf
) -> dict[str, Tensor]:
    """Name -> gradient of each trained parameter, of the complete module on the CPU."""
    dtype = Precision.of(config.train.precision).state
    with torch.device("meta"):
        module = task.model()
    ties = tied_names(module)
    rows = {row.name: row for row in run_parameters(config)}
    for name, parameter in list(module.named_parameters()):
        value = value_of(rows[name]).detach().to(dtype, copy=True)
        owner, _, last = name.rpartition(".")
        made = nn.Parameter(value, requires_grad=parameter.requires_grad)
        module.get_submodule(owner)._parameters[last] = made
    tie_again(module, ties)
    if next(module.buffers(), None) is not None:
        buffers = own_values(task, config.seed).buffers
        kept = {name: value.dtype for name, value in buffers.items() if not task.casts(name)}
        set_buffers(module, buffers, torch.device("cpu"), dtype, kept)
    complete = TaskObjective(task, module, dtype)
    with _without_dropout(module):
        complete(batch, key).backward()
    trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
    return {name: _gradient(parameter) for name, parameter in trained.items()}
