"""Where a NaN or an infinity came from: the first microbatch, rank and parameter.

A summed gradient only says that something is wrong. So every rank computes its own share once
more without any reduction, looks at the outputs of modules in forward order and then at the
gradients in backward order, and the ranks agree on the first finding: the lowest microbatch, in
it the earliest moment (the forward passes of the stages in order, then their backward passes in
reverse), in that the first parameter to be used, and the lowest rank for that. Nothing is
changed: parameters keep the state before the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.parallel.groups import Groups
from holdfast.parallel.shard import local
from holdfast.parallel.transport import exchange
from holdfast.spec.parameters import Parameter
from holdfast.train.execute import Executor, Inputs
from holdfast.train.state import Parameters

_TAG = 2
_NONE = 2**62
SUM = "the sum of all gradients"


def find_non_finite(
    objective: nn.Module, executor: Executor, groups: Groups, parameters: Parameters,
    share: Sequence[tuple[int, Inputs]],
) -> tuple[int, str]:  # fmt: skip
    """(rank, parameter) of the first finding over all ranks; collective.

    Where every part is finite and only the sum overflowed, the parameter is called `SUM`.
    Raises PeerLostError.
    """
    finding = [_NONE, 0, 0]  # leaf, moment, place of the parameter in it
    named = -1
    for leaf, batch in share:
        found = _first_bad(objective, executor, leaf, batch, len(parameters.table))
        if found is not None and finding[0] == _NONE:
            backward, index = found
            stage, stages = groups.coordinate.pp, groups.degree("pp")
            moment = 2 * stages - 1 - stage if backward else stage
            finding, named = [leaf, moment, -index if backward else index], index
        # go on: the ranks of a replica compute in lockstep
    record = torch.tensor([*finding, *_name_at(parameters.table, named)], dtype=torch.int64)
    control = groups.control
    findings = [r.tolist() for r in exchange(control, record, [3 + _NAME] * control.size, _TAG)]
    position = min(range(control.size), key=lambda p: (*findings[p][:3], p))
    leaf, _, _, *name = findings[position]
    text = bytes(name).rstrip(b"\0").decode()
    return groups.positions[position], SUM if leaf == _NONE else text


_NAME = 128  # bytes of a parameter's name on the wire: another stage does not know mine


def _name_at(table: Sequence[Parameter], index: int) -> list[int]:
    name = table[index].name.encode()[:_NAME] if index >= 0 else b""
    return list(name.ljust(_NAME, b"\0"))


class _Nobody:
    """Takes no gradients: they stay where autograd leaves them."""

    def start_leaf(self, leaf: int) -> None:
        """Nothing listens."""

    def end_leaf(self) -> None:
        """Nothing listens."""

    def check(self) -> None:
        """Nothing can have failed."""


def _first_bad(
    objective: nn.Module, executor: Executor, leaf: int, batch: Inputs, count: int
) -> tuple[bool, int] | None:
    """The first parameter of one microbatch whose use or gradient is not finite: whether it was
    found in the backward pass, and its index."""
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
            losses = executor.train([leaf], [batch], _Nobody())
    finally:
        for hook in hooks:
            hook.remove()
    gradients = [p.grad for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    if bad:
        return False, bad[0]
    if not all(bool(torch.isfinite(loss)) for loss in losses):
        return False, count - 1
    for index in reversed(range(count)):
        gradient = gradients[index]
        if gradient is not None and not bool(torch.isfinite(local(gradient)).all()):
            return True, index
    return None
