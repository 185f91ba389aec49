"""The sharding table of a user's task: which layers tensor parallelism cuts, and the run's rows
that follow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from holdfast.core.sharding.run_table import sharding_text
from holdfast.core.sharding.sharding_table import Sharding
from holdfast.errors import TaskError
from holdfast.parallel.axes.process_groups import ProcessGroups
from holdfast.parallel.axes.tensor_layers import SHARED_INSIDE, STYLES, TensorRegions, cut_layers
from holdfast.parallel.comm.collectives import Collectives
from holdfast.tasks.task.loading import user_code
from holdfast.tasks.task.task import Task

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
        cut = _read(pattern, entry)
        hit = [name for name in layers if _matches(pattern, name)]
        if not hit:
            raise TaskError(
                f"sharding() names {pattern}, and the module has no such layer",
                remedy=f"use names such as {', '.join(_near(pattern, list(layers)))}",
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


def _read(pattern: str, entry: Any) -> LayerCut:
    """An entry: a style, or a style and a number of parts. Raises TaskError."""
    style, parts = entry if isinstance(entry, tuple) and len(entry) == 2 else (entry, 0)
    if style not in (*STYLES, SHARED_INSIDE) or not isinstance(parts, int) or parts < 0:
        raise TaskError(
            f"sharding() returned {entry!r} for {pattern}",
            remedy=f"use one of {', '.join((*STYLES, SHARED_INSIDE))}, or a pair of it and a "
            "number of parts",
        )
    return LayerCut(style, parts)


def _matches(pattern: str, name: str) -> bool:
    """Whether a pattern fits a layer's name, part by part."""
    wanted, given = pattern.split("."), name.split(".")
    return len(wanted) == len(given) and all(map(fnmatchcase, given, wanted))


def _near(pattern: str, names: list[str]) -> list[str]:
    return get_close_matches(pattern, names, n=_SHOWN, cutoff=0.0)


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
