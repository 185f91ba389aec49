"""The origin of a NaN or an infinity: the first microbatch, rank and parameter.

A summed gradient only says that something is wrong. So every rank computes its own share once
more without any reduction. It looks at the outputs of modules in forward order and then at the
gradients in backward order. The ranks agree on the first finding, in this order:

- the lowest microbatch
- in it the earliest moment: the forward passes of the stages in order, then their backward passes
  in reverse
- in that the first parameter to be used, and the lowest rank for that

Nothing is changed: parameters keep the state before the step.

A finding that does not recur was caused by the device. Then the rank is named whose own part of
the sum was not finite, which every rank reports too.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from math import isfinite
from operator import or_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from holdfast.core.sharding.parameters import Parameter
from holdfast.errors import NonFiniteError
from holdfast.parallel.comm.transport import exchange
from holdfast.parallel.torch_compat import local_tensor
from holdfast.training.engine.executors import Executor

if TYPE_CHECKING:
    from holdfast.training.engine.engine import StepEngine

_TAG = 2
_NO_FINDING = 2**62
_BITS_PER_WORD = 62  # of a mask, in one word
SUM_OF_GRADIENTS = "the sum of all gradients"


def find_non_finite(engine: StepEngine, is_share_finite: bool) -> NonFiniteError:
    """Compute my share again without reduction. Return the error that every rank raises, with the
    microbatches that may have caused it; collective. is_share_finite: all that this rank gave to
    the sum was finite.

    The suspects are the microbatches that were found. If there are none, they are the microbatches
    with a loss that is not finite. If there are none either, they are all microbatches of the
    replicas whose part of the sum is not finite. If every part is finite and only the sum
    overflowed, the parameter is called `SUM_OF_GRADIENTS`. Raises PeerLostError.
    """
    groups, account, shares = engine.groups, engine.status.account, engine.dealt_shares
    assert account is not None, "no rank votes without it"
    leaves = len(account.losses)
    finding = [_NO_FINDING, 0, 0]  # leaf, moment, place of the parameter in it
    named, mask = -1, 0
    for leaf, batch in zip(shares[groups.coordinate.replica], engine.batches, strict=True):
        found = _first_non_finite(engine.objective, engine.executor, leaf, batch)
        if found is not None:
            mask |= 1 << leaf
        if found is not None and finding[0] == _NO_FINDING:
            backward, index = found
            stage, stages = groups.coordinate.pp, groups.degree("pp")
            moment = 2 * stages - 1 - stage if backward else stage
            finding, named = [leaf, moment, -index if backward else index], index
        # no break here: the ranks of a replica compute in lockstep
    words = [mask >> at & (1 << _BITS_PER_WORD) - 1 for at in range(0, leaves, _BITS_PER_WORD)]
    said = [*finding, int(is_share_finite), *words, *_name_at(engine.parameters.table, named)]
    control = groups.control
    records = exchange(
        control, torch.tensor(said, dtype=torch.int64), [len(said)] * control.size, _TAG
    )
    findings = [record.tolist() for record in records]
    position = min(range(control.size), key=lambda p: (*findings[p][:3], p))
    masks = [
        functools.reduce(or_, column)
        for column in zip(*(f[4 : 4 + len(words)] for f in findings), strict=True)
    ]
    bad = tuple(
        leaf for leaf in range(leaves) if masks[leaf // _BITS_PER_WORD] >> leaf % _BITS_PER_WORD & 1
    )
    unsound = tuple(sorted(groups.positions[p] for p, f in enumerate(findings) if not f[3]))
    text = bytes(findings[position][4 + len(words) :]).rstrip(b"\0").decode()
    rank = groups.positions[position]
    if not bad:
        rank, text = (unsound[0], "a gradient") if unsound else (0, SUM_OF_GRADIENTS)
    suspects = bad or tuple(i for i, loss in enumerate(account.losses) if not isfinite(loss))
    if not suspects:
        replicas = {groups.topology.replica_of(odd).index for odd in unsound}
        suspects = tuple(sorted(leaf for r in replicas for leaf in shares[r]))
    return NonFiniteError(engine.step, rank, text, shares, suspects, bool(bad))


_NAME_BYTES = 128  # bytes of a parameter's name on the wire: another stage does not know mine


def _name_at(table: Sequence[Parameter], index: int) -> list[int]:
    name = table[index].name.encode()[:_NAME_BYTES] if index >= 0 else b""
    return list(name.ljust(_NAME_BYTES, b"\0"))


def _without_compilation() -> AbstractContextManager[Any]:
    """Turn compiled code off, which does not call hooks that are newer than itself. If the
    compiler has not been imported, there is none; its import would delay the other ranks."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    return torch.compiler.set_stance("force_eager")  # type: ignore[no-any-return]


class _IgnoreGradients:
    """Takes no gradients: they stay where autograd leaves them."""

    def start_leaf(self, leaf: int, part: object = None) -> None:
        """Nothing listens."""

    def give(self, parameter: Tensor, gradient: Tensor) -> None:
        """Let autograd carry it, which calls the parameter's hooks."""
        torch.autograd.backward(parameter, gradient)

    def end_leaf(self) -> None:
        """Nothing listens."""

    def check(self) -> None:
        """Nothing can have failed."""


def _first_non_finite(
    objective: nn.Module, executor: Executor, leaf: int, batch: Any
) -> tuple[bool, int] | None:
    """The first parameter of one microbatch whose use or gradient is not finite: whether it was
    found in the backward pass, and its index."""
    parameters = list(objective.parameters())
    order = {id(p): i for i, p in enumerate(parameters)}
    bad, losses = list[int](), list[Tensor]()

    # FSDP2 swaps full parameters in for the forward, so their owners are looked up beforehand.
    owners = {
        id(module): [order[id(p)] for p in module.parameters(recurse=False)]
        for module in objective.modules()
    }

    def look(module: nn.Module, _: Any, output: Any) -> None:
        if isinstance(output, Tensor) and not bool(torch.isfinite(output).all()):
            bad.extend(owners[id(module)])

    hooks = [m.register_forward_hook(look) for m in objective.modules() if owners[id(m)]]
    try:
        with _without_compilation():
            executor.train([(leaf, batch)], _IgnoreGradients(), losses)
    finally:
        for hook in hooks:
            hook.remove()
    gradients = [p.grad for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    if bad:
        return False, bad[0]
    if not all(bool(torch.isfinite(loss.flatten()[0])) for loss in losses):
        return False, len(parameters) - 1
    for index in reversed(range(len(parameters))):
        gradient = gradients[index]
        if gradient is not None and not bool(torch.isfinite(local_tensor(gradient)).all()):
            return True, index
    return None
