"""A task's module: its rows for the run's table, what may not be in it, and how it gets memory.

`TaskObjective` has the module and its loss in one module, as FSDP2 and the executor need it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from holdfast.core.seeds import key_seed
from holdfast.core.sharding.parameters import Own, Parameter
from holdfast.core.sharding.run_table import MERGES, row_text
from holdfast.errors import TaskError
from holdfast.tasks.task.loading import user_code
from holdfast.tasks.task.task import Task


def seed_generators(key: int) -> None:
    """Begin the generators of torch, Python and numpy, from which a user's code draws, from a seed.
    So what is drawn depends on no process and no time."""
    torch.manual_seed(key)
    random.seed(key)
    np.random.seed(key % 2**32)


def meta_module(task: Task) -> nn.Module:
    """The module without memory. Raises TaskError for what cannot be trained."""
    with (
        user_code("model() failed on the meta device, where no tensor has values"),
        torch.device("meta"),
    ):
        module = task.model()
    if not isinstance(module, nn.Module):
        raise TaskError(
            f"model() returned {type(module).__name__}, no module",
            remedy="return a torch.nn.Module",
        )
    for name, part in module.named_modules():
        for key, value in vars(part).items():
            if isinstance(value, Tensor) and value.is_meta:
                raise TaskError(
                    f"{_joined(name, key)} is a plain tensor of the module",
                    remedy="register it as a buffer, or as a parameter",
                )
    return module


def module_rows(task: Task, module: nn.Module) -> tuple[str, ...]:
    """The rows of the run's table (`task.parameters`). Raises TaskError."""
    rows: list[str] = []
    for name, parameter in module.named_parameters():
        if problem := _problem(name, parameter):
            raise TaskError(f"parameter {name} {problem[0]}", remedy=problem[1])
        shape, is_frozen = tuple(parameter.shape), not parameter.requires_grad
        decays = not is_frozen and task.decays(name, shape)
        rows.append(row_text(Parameter(name, shape, decays, Own()), is_frozen=is_frozen))
    if all(not parameter.requires_grad for parameter in module.parameters()):
        raise TaskError(
            "the module has no parameter that is trained", remedy="set requires_grad of one"
        )
    for name, merge in merged_buffers(task, module).items():
        shape = table_shape(module.get_buffer(name))
        rows.append(row_text(Parameter(name, shape, False, Own(), merge=merge), is_frozen=False))
    return tuple(rows)


def _problem(name: str, parameter: nn.Parameter) -> tuple[str, str] | None:
    """What keeps a parameter out of the table, and a remedy."""
    if isinstance(parameter, UninitializedParameter):
        return "has no shape yet", "give the size where the module is made, not later (no Lazy...)"
    if not parameter.is_floating_point():
        return f"is {parameter.dtype}", "use floating-point parameters"
    if not parameter.shape:
        return "is a scalar", "give it the shape [1]"
    return ("has a space in its name", "use another name") if " " in name else None


def table_shape(buffer: Tensor) -> tuple[int, ...]:
    """The shape of a merged buffer in the table, where a scalar has one element."""
    return tuple(buffer.shape) or (1,)


def merged_buffers(task: Task, module: nn.Module) -> dict[str, str]:
    """Name -> "mean" or "sum" of the buffers that forward passes change. Raises TaskError."""
    with user_code("merge() failed"):
        answers = {name: task.merge(name) for name, _ in module.named_buffers()}
    for name, answer in answers.items():
        if answer is not None and answer not in MERGES:
            raise TaskError(
                f"merge() returned {answer!r} for {name}", remedy='return "mean", "sum" or None'
            )
    return {name: answer for name, answer in answers.items() if answer is not None}


def known_flops(task: Task) -> float:
    """FLOPs for a weight of 1; 0: not known. Raises TaskError."""
    with user_code("flops() failed"):
        given = task.flops()
    if given is None:
        return 0.0
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given < inf:
        raise TaskError(
            f"flops() returned {given!r}",
            remedy="return a number above 0, or None if it is not known",
        )
    return float(given)


def refuse_other_rows(expected: Sequence[str], found: Sequence[str]) -> None:
    """Raises TaskError, naming the first row that differs."""
    if tuple(expected) == tuple(found):
        return
    both = list(zip(expected, found, strict=False))
    at = next((i for i, (a, b) in enumerate(both) if a != b), len(both))
    was, now = (rows[at] if at < len(rows) else "nothing" for rows in (expected, found))
    raise TaskError(
        f"the module does not fit its table: row {at + 1} is {now!r}, and the table has {was!r}",
        remedy="let model() make the same module in each call",
    )


@dataclass(frozen=True)
class ModuleValues:
    """The values that a module gave its parameters and buffers when it was made, in float32."""

    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]


def own_values(task: Task, seed: int) -> ModuleValues:
    """Make the module on the CPU from torch's generator with a seed of the run's, on one thread.
    So the values are the same in each process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]), user_code("model() failed"):
            seed_generators(key_seed(seed, "task"))
            module = task.model()
    finally:
        torch.set_num_threads(threads)
    return ModuleValues(
        {name: parameter.detach() for name, parameter in module.named_parameters()},
        dict(module.named_buffers(remove_duplicate=False)),
    )


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Evaluation mode for a while. Each module gets its own mode back: a user may have frozen some
    in evaluation mode."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, is_training in modes:
            part.training = is_training


def tied_names(module: nn.Module) -> list[list[str]]:
    """Groups of names of one and the same parameter, each with the table's name first."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def tie_again(module: nn.Module, groups: Sequence[Sequence[str]]) -> None:
    """Let the names of each group be one parameter. (Giving memory made each a new one.)"""
    for first, *others in groups:
        shared = module.get_parameter(first)
        for name in others:
            owner, key = _owner(module, name)
            owner._parameters[key] = shared


def set_buffers(
    module: nn.Module,
    values: Mapping[str, Tensor],
    device: torch.device,
    dtype: torch.dtype,
    dtypes: Mapping[str, torch.dtype],
) -> None:
    """Give the module's buffers their values; floating-point ones in `dtype`, and those of `dtypes`
    in the dtype there."""
    for name, value in values.items():
        cast = dtype if value.is_floating_point() else value.dtype
        put_buffer(module, name, value.to(device, dtypes.get(name, cast), copy=True))


def put_buffer(module: nn.Module, name: str, value: Tensor) -> None:
    """Let a buffer be this tensor."""
    owner, key = _owner(module, name)
    owner._buffers[key] = value


def usable_units(module: nn.Module, units: Sequence[nn.Module]) -> list[nn.Module]:
    """The units that can be gathered one by one: those without a parameter that is also used
    outside of them."""
    users = _uses(module)
    return [u for u in units if (inside := _uses(u)) and inside.items() <= users.items()]


def _uses(module: nn.Module) -> Counter[int]:
    """How often the module uses each of its parameters, by id."""
    return Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))


def names_outside(module: nn.Module, units: Sequence[nn.Module]) -> list[str]:
    """The trained parameters that are in none of the units."""
    inside = {id(parameter) for unit in units for parameter in unit.parameters()}
    return [
        name
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and id(parameter) not in inside
    ]


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, key = name.rpartition(".")
    return module.get_submodule(path), key


def _joined(*names: str) -> str:
    return ".".join(name for name in names if name)


RunStage = Callable[[nn.Module, Mapping[str, Tensor], int, Tensor | None], Tensor]
"""(model, batch, seed, what came in) -> what goes out, or the loss."""
BufferVersions = Mapping[str, tuple[Tensor, int]]


class TaskObjective(nn.Module):
    """From a microbatch to its loss sum, a float64 scalar.

    Each forward pass draws its random numbers from a seed of its own. So they do not depend on
    the rank that computes it, nor on the time.

    compute: dtype of the parameters in the pass, and of the batch's floating-point tensors.
    merged: memory of the buffers that the pass changes, with a dim for a scalar. Each pass begins
        with the values before the step, and leaves its changes in `grad` here, from where they are
        summed as gradients are. The owner sets it, once there is memory.
    stage: what runs the parts of a `PipelineTask`, of which this rank may have some alone.
    always_used: parameters that get a gradient in each pass, which may be zero. FSDP2 reduces those
        that have one, and its shards must do so alike.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        compute: torch.dtype,
        always_used: Collection[str] = (),
        stage: RunStage | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.merged: dict[str, Tensor] = {}
        self.is_last = True  # its forward gives a loss
        self._task, self._compute, self._stage = task, compute, stage
        self._always_used = tuple(always_used)

    def forward(
        self,
        batch: Mapping[str, Tensor],
        key: int,
        incoming: Tensor | None = None,
        part: object = None,
    ) -> Tensor:
        """batch: empty for a microbatch that is skipped. incoming: from the stage before. A stage
        that is not the last returns what goes to the next. Raises TaskError."""
        if not batch and self._stage is not None:
            return self._stage(self.model, batch, key, incoming)
        if not batch:
            device = next(self.parameters()).device
            return torch.zeros((), dtype=torch.float64, device=device, requires_grad=True)
        before = buffer_versions(self.model)
        for name in self.merged:
            put_buffer(self.model, name, before[name][0].clone())
        seed_generators(key)
        try:
            given = {name: self._cast(t) for name, t in batch.items()}
            if self._stage is None:
                loss = self._task.loss(self.model, given)
            else:
                loss = self._stage(self.model, given, key, incoming)
            if self.is_last:
                self._check(loss)
            if torch.is_grad_enabled():
                self._keep_changes()
        finally:
            for name in self.merged:
                put_buffer(self.model, name, before[name][0])
        if name := changed_buffer(self.model, before):
            raise changed_buffer_error(name)
        if not self.is_last:
            return loss + torch.as_tensor(self._zero()).to(loss.dtype)
        return loss.to(torch.float64) + self._zero()

    def _zero(self) -> Tensor | float:
        """A zero that depends on the parameters that are always used."""
        nothing = [self.model.get_parameter(n).reshape(-1)[:0] for n in self._always_used]
        return torch.cat(nothing).sum().to(torch.float64) if nothing else 0.0

    def _keep_changes(self) -> None:
        """Add what the pass changed in merged buffers to their `grad`."""
        for name, held in self.merged.items():
            change = self.model.get_buffer(name).detach().view(held.shape) - held
            held.grad = change if held.grad is None else held.grad + change

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._compute) if tensor.is_floating_point() else tensor

    def _check(self, loss: Tensor) -> None:
        if not isinstance(loss, Tensor) or loss.shape != ():
            what = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise TaskError(f"loss() returned {what}", remedy="return a scalar")
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise TaskError(
                "the loss depends on no parameter that is trained",
                remedy="compute it from the output of the module that loss() is given",
            )


def buffer_versions(module: nn.Module) -> BufferVersions:
    """The buffers, and how often each was changed in place."""
    return {name: (buffer, buffer._version) for name, buffer in module.named_buffers()}


def changed_buffer(module: nn.Module, before: BufferVersions) -> str:
    """Return the name of a buffer that was changed or replaced since then; "" for none."""
    for name, buffer in module.named_buffers():
        was, version = before.get(name, (None, -1))
        if buffer is not was or buffer._version != version:
            return name
    return ""


def changed_buffer_error(name: str) -> TaskError:
    """A buffer that a forward pass changes."""
    return TaskError(
        f"the forward pass changes buffer {name}, so the state would depend on which rank computes "
        "what",
        remedy="keep it unchanged, or let merge() say how its changes are put together",
    )
