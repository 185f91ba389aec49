"""Where a NaN or an infinity came from: the first microbatch, rank and parameter.

A summed gradient only says that something is wrong. So every rank computes its own share once
more without any reduction, looks at the outputs of modules in forward order and then at the
gradients in backward order, and the ranks agree on the first finding: the lowest microbatch, and
the lowest rank for it. Nothing is changed: parameters keep the state before the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from holdfast.parallel.groups import Groups
from holdfast.parallel.shard import local
from holdfast.parallel.transport import exchange

_TAG = 2
_NONE = 2**62
SUM = "the sum of all gradients"


class Inputs(Protocol):
    """The part of a microbatch that is computed on."""

    @property
    def inputs(self) -> Tensor: ...

    @property
    def targets(self) -> Tensor: ...

    @property
    def documents(self) -> Tensor | None: ...


def find_non_finite(
    objective: nn.Module, groups: Groups, names: Sequence[str],
    share: Sequence[tuple[int, Inputs]],
) -> tuple[int, str]:  # fmt: skip
    """(rank, parameter) of the first finding over all ranks; collective.

    Where every part is finite and only the sum overflowed, the parameter is called `SUM`.
    Raises PeerLostError.
    """
    leaf, index = _NONE, -1
    for candidate, batch in share:
        found = _first_bad(objective, batch, len(names))
        if found is not None and leaf == _NONE:
            leaf, index = candidate, found  # go on: shards of a replica compute in lockstep
    record = torch.tensor([leaf, index], dtype=torch.int64)
    control = groups.control
    findings = [tuple(r.tolist()) for r in exchange(control, record, [2] * control.size, _TAG)]
    position = min(range(control.size), key=lambda p: (findings[p][0], p))
    first_leaf, parameter = findings[position]
    replica, mesh_rank = divmod(position, groups.replica_size)
    rank = groups.topology.replicas[replica].ranks[mesh_rank]
    return rank, SUM if first_leaf == _NONE else names[parameter]


def _first_bad(objective: nn.Module, batch: Inputs, count: int) -> int | None:
    """Index of the first parameter of one microbatch whose use or gradient is not finite."""
    parameters = list(objective.parameters())
    order = {id(p): i for i, p in enumerate(parameters)}
    bad: list[int] = []

    # FSDP2 swaps whole parameters in for the forward, so their owners are looked up beforehand.
    owners = {
        id(module): [order[id(p)] for p in module.parameters(recurse=False)]
        for module in objective.modules()
    }

    def look(module: nn.Module, _: Any, output: Any) -> None:
        if isinstance(output, Tensor) and not bool(torch.isfinite(output).all()):
            bad.extend(owners[id(module)])

    hooks = [m.register_forward_hook(look) for m in objective.modules() if owners[id(m)]]
    try:
        # Compiled code does not call hooks that are newer than itself.
        with torch.compiler.set_stance("force_eager"):
            loss = objective(batch.inputs, batch.targets, batch.documents)
            loss.backward()
    finally:
        for hook in hooks:
            hook.remove()
    gradients = [p.grad for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    if bad:
        return bad[0]
    for index in reversed(range(count)):
        gradient = gradients[index]
        if gradient is not None and not bool(torch.isfinite(local(gradient)).all()):
            return index
    return None if bool(torch.isfinite(loss)) else count - 1
