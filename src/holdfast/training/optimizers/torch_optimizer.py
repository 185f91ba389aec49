"""Runs classes of `torch.optim` on state that the run owns.

At step 1 a class makes its state itself. From then on its state lies in the slots that a checkpoint
holds, and its step count is the step before. A CPU applies the update on one thread. So no sum of
a norm depends on how many threads a worker has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from holdfast.config.sections.optimizer import COUNT, SCALAR, STEP, OptimizerConfig, Slot
from holdfast.core.sharding.optimizer_state import ParameterSettings, slot_shape
from holdfast.core.sharding.parameters import Parameter
from holdfast.training.optimizers.lion import Lion
from holdfast.training.optimizers.optimizer import (
    AdamW,
    SlotTensors,
    group_by_settings,
    merge_buffers,
)

MakeOptimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
"""From parameter groups with the keys params and, as a rule, lr and weight_decay."""
Groups = list[tuple[Sequence[int], Mapping[str, Any]]]
"""For each group, the indices of its parameters, and its options."""
GroupsOfStep = Callable[[int, float], Groups]
"""From a step and its learning rate."""


class TorchOptimizer:
    """One class of `torch.optim` on some of a rank's parameters.

    rows: of all parameters of the rank, as `parameters`. indices: those that it updates.
    groups: of these. slots: what the class keeps, see `config.optimizer.Slot`.
    """

    def __init__(
        self,
        make: MakeOptimizer,
        parameters: Sequence[Tensor],
        rows: Sequence[Parameter],
        groups: GroupsOfStep,
        indices: Sequence[int],
        slots: Sequence[Slot],
        config: OptimizerConfig,
    ) -> None:
        self._make = make
        self._made: torch.optim.Optimizer | None = None
        self._held = [i for i in indices if parameters[i].numel()]
        # Tensors of their own: no other code uses their `grad`, and the storage is the parameter's.
        self._handles = {i: parameters[i].detach() for i in self._held}
        self._groups_of, self._rows = groups, rows
        self._counts = [slot for slot in slots if slot.rule in (STEP, COUNT)]
        self.slots: list[SlotTensors] = []
        for slot in slots:
            if slot.rule not in (STEP, COUNT):
                found = [
                    _slot_tensor(config, slot, row, parameter)
                    for row, parameter in zip(rows, parameters, strict=True)
                ]
                self.slots.append(SlotTensors(slot, found))

    @torch.no_grad()
    def apply(self, step: int, learning_rate: float, gradients: Sequence[Tensor | None]) -> None:
        """Update `step` with divided gradients, one for each parameter of the rank. None: the
        parameter and its state stay as they are."""
        if not self._held:
            return
        groups = self._groups(step, learning_rate)
        if step == 1 or self._made is None:
            self._made = self._make(
                [{"params": [self._handles[i] for i in own], **options} for own, options in groups]
            )
        made = self._made
        if step > 1:
            for index, handle in self._handles.items():
                made.state[handle] = self._state_of(index, step - 1)
        for group, (_, options) in zip(made.param_groups, groups, strict=True):
            group.update(options)
        for index, handle in self._handles.items():
            handle.grad = gradients[index]
        try:
            made.step()
        finally:
            for handle in self._handles.values():
                handle.grad = None
        self._take_new_state(made)

    def gradients_of(self, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """Those of the parameters that it updates."""
        return [gradient for i in self._held if (gradient := gradients[i]) is not None]

    def _groups(self, step: int, learning_rate: float) -> Groups:
        """Those with a parameter that this rank has a part of."""
        found = [
            ([i for i in indices if i in self._handles], options)
            for indices, options in self._groups_of(step, learning_rate)
        ]
        return [(indices, options) for indices, options in found if indices]

    def _state_of(self, index: int, updates: int) -> dict[str, Any]:
        """What the class finds as the state of a parameter after so many updates."""
        state: dict[str, Any] = {
            slot.name: torch.tensor(float(updates)) if slot.rule == STEP else updates
            for slot in self._counts
            if slot.is_of(self._rows[index].name)
        }
        for slots in self.slots:
            tensor = slots.tensors[index]
            if tensor is not None:
                state[slots.slot.name] = tensor.view(()) if slots.slot.rule == SCALAR else tensor
        return state

    def _take_new_state(self, made: torch.optim.Optimizer) -> None:
        """Copy what the class made or replaced into the slots."""
        for slots in self.slots:
            for index, handle in self._handles.items():
                tensor = slots.tensors[index]
                found = made.state[handle].get(slots.slot.name)
                if tensor is None or found is None:
                    continue
                if found.data_ptr() != tensor.data_ptr():
                    tensor.copy_(found.view(tensor.shape))
                    made.state[handle][slots.slot.name] = tensor


def groups_of_settings(
    settings: Sequence[ParameterSettings], indices: Sequence[int]
) -> GroupsOfStep:
    """Groups of parameters with equal settings."""
    found = group_by_settings(indices, settings)

    def groups(step: int, learning_rate: float) -> Groups:
        return [
            (own, {"lr": learning_rate * s.rate_scale, "weight_decay": s.weight_decay})
            for s, own in found
        ]

    return groups


class OptimizerParts:
    """All parameters of a rank, each updated by one part.

    parts: each with its indices. AdamW takes undivided gradients, and merges buffers.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        parts: Sequence[TorchOptimizer],
        rest: AdamW | None,
        merges: Mapping[int, str],
    ) -> None:
        self._parameters, self._gradients = list(parameters), list(gradients)
        self._parts, self._rest, self._merges = list(parts), rest, dict(merges)
        self.only: frozenset[int] | None = None  # what `parts` update of a step; None: all

    @property
    def slots(self) -> list[SlotTensors]:
        found = [slots for part in self._parts for slots in part.slots]
        return found + (self._rest.slots if self._rest else [])

    def set_gradients(self, gradients: Sequence[Tensor]) -> None:
        self._gradients = list(gradients)
        if self._rest:
            self._rest.set_gradients(gradients)

    @torch.no_grad()
    def apply(self, step: int, learning_rate: float, divisor: float, microbatches: int = 1) -> None:
        """As `train.optimizer.Optimizer.apply`."""
        merge_buffers(self._parameters, self._gradients, self._merges, microbatches)
        if self._rest:
            self._rest.apply(step, learning_rate, divisor)
        only, gradients = self.only, list[Tensor | None](self._gradients)
        if only is not None:
            gradients = [g if i in only else None for i, g in enumerate(gradients)]
        divided = [g for part in self._parts for g in part.gradients_of(gradients)]
        torch._foreach_div_(divided, divisor)
        with _one_thread(self._parameters[0].device):
            for part in self._parts:
                part.apply(step, learning_rate, gradients)


@contextmanager
def _one_thread(device: torch.device) -> Iterator[None]:
    """On a CPU, sums depend on the number of threads, and that on the number of workers."""
    threads = torch.get_num_threads()
    if device.type != "cpu" or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _slot_tensor(
    config: OptimizerConfig, slot: Slot, row: Parameter, parameter: Tensor
) -> Tensor | None:
    """Zeros for one slot. A slot of the parameter's shape is cut as the parameter is."""
    shape = slot_shape(config, slot, row.name, row.shape)
    if shape is None:
        return None
    return torch.zeros_like(parameter) if shape == row.shape else parameter.new_zeros(shape)


def built_in_class(config: OptimizerConfig) -> MakeOptimizer:
    """The class of a built-in optimizer, with the run file's options.

    sgd: SGD with momentum (Sutskever et al., 2013, section 2), whose weight decay is added to the
        gradient. adafactor: Shazeer and Stern (2018), sections 3 to 8. muon: Jordan et al. (2024),
        with the rates of Liu et al. (2025, section 2.2) unless `adjust_rate` is original.
        lion: Chen et al. (2023), algorithm 2.
    """
    optim, options = torch.optim, dict[str, Any]()
    if config.name == "sgd":
        options = {"momentum": config.momentum or 0.0, "nesterov": bool(config.nesterov)}
        return lambda groups: optim.SGD(groups, **options)
    if config.name == "lion":
        return lambda groups: Lion(groups, betas=config.betas)
    if config.name == "adafactor":
        options = {
            "beta2_decay": config.beta2_decay,
            "d": config.clip_threshold,
            "eps": (None, config.smallest_scale),
        }
        return lambda groups: optim.Adafactor(groups, **options)
    assert config.name == "muon", config.name
    options = {
        "momentum": config.momentum,
        "nesterov": config.nesterov,
        "ns_steps": config.newton_schulz_steps,
        "adjust_lr_fn": config.adjust_rate,
    }
    return lambda groups: optim.Muon(groups, **options)
