"""Every private or version-dependent part of torch that the parallel room uses, in one place.

torch 2.11 to 2.13 are supported. An unknown version is refused with a sentence, because what is
wrapped here may have changed its meaning without an error.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from functools import _lru_cache_wrapper
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store
from torch.utils import _python_dispatch

from holdfast.errors import UserError

__all__ = ["PrefixStore", "Store"]

SUPPORTED_VERSIONS = ((2, 11), (2, 12), (2, 13))

_PEER_LOSS_PATTERN = re.compile(
    r"gloo|NCCL|Connection (closed|reset|refused)|Broken pipe|Application timeout|Socket", re.I
)


def check_version(version: str = torch.__version__) -> None:
    """Raises UserError unless this torch is one that Holdfast was written for."""
    found = tuple(int(n) for n in re.findall(r"\d+", version)[:2])
    if found not in SUPPORTED_VERSIONS:
        raise UserError(
            f"torch {version} is not supported: its private interfaces were not checked",
            remedy="install torch 2.11, 2.12 or 2.13",
        )


def is_peer_loss(error: BaseException) -> bool:
    """Return True if an error from a collective means that a peer or its connection is lost.

    torch raises plain RuntimeError with gloo's or NCCL's text; there is no type to ask for.
    """
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and bool(_PEER_LOSS_PATTERN.search(str(error)))


def is_device_loss(error: BaseException) -> bool:
    """Return True if an error is the device's own. Every later call of this process ends with it,
    such as after an access to memory of a peer that is lost."""
    kind: Any = getattr(torch, "AcceleratorError", None)
    return kind is not None and isinstance(error, kind)


MakeMemory = Callable[[Sequence[tuple[int, ...]], torch.dtype], list[Tensor]]
"""Returns memory for tensors of these shapes."""


class Work(Protocol):
    """An operation of a process group that was started."""

    def wait(self, timeout: timedelta = ...) -> object:
        """Return when it is done. Raises RuntimeError when it failed."""
        ...


class GlooGroup(Protocol):
    """The part of ProcessGroupGloo that the reducer uses."""

    def send(self, tensors: list[Tensor], peer: int, tag: int, /) -> Work: ...

    def recv(self, tensors: list[Tensor], peer: int, tag: int, /) -> Work: ...

    def allreduce(self, tensors: list[Tensor], /) -> Work: ...

    def alltoall_base(
        self, out: Tensor, tensor: Tensor, out_sizes: list[int], sizes: list[int], /
    ) -> Work: ...

    def _allgather_base(self, out: Tensor, part: Tensor, /) -> Work: ...


def memory_store() -> Store:
    """The store of a rank that is alone."""
    module: Any = dist  # its stubs do not name the class
    store: Store = module.HashStore()
    return store


def file_store(path: Path, ranks: int) -> Store:
    """The store of ranks that meet in a file."""
    module: Any = dist  # its stubs do not name the class
    store: Store = module.FileStore(str(path), ranks)
    return store


def gloo_device(interface: str) -> object:
    """The device that connects a gloo group; it listens on a port of its own."""
    kind: Any = ProcessGroupGloo
    device: object = kind.create_device(interface=interface)
    return device


def gloo_group(
    store: Store, name: str, rank: int, size: int, *, device: object, seconds: float
) -> GlooGroup:
    """A bare gloo group under `name` in `store`, unknown to torch's registry. Collective."""
    kind: Any = ProcessGroupGloo
    options = kind._Options()
    options._devices = [device]
    options._timeout = timedelta(seconds=seconds)
    options._threads = 2
    group: GlooGroup = kind(PrefixStore(name, store), rank, size, options)
    return group


def nameless_backend(group: dist.ProcessGroup, rank: int, size: int) -> None:
    """Give a group that is written in Python the backend in which torch keeps its name. Operations
    come to the methods of the group's class."""
    from torch._C._distributed_c10d import FakeProcessGroup

    private: Any = group
    nameless = FakeProcessGroup._create_internal(rank, size)
    private._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, nameless)


class BulkGroup(GlooGroup, Protocol):
    """The part of a device's backend that we use. No operation makes its caller wait."""

    def abort(self) -> None: ...


def bulk_group(backend: str, store: Store, rank: int, size: int, seconds: float) -> BulkGroup:
    """A bare group of a device's backend, unknown to torch's registry. It connects at its first
    collective."""
    kind: Any = dist.Backend
    timeout = timedelta(seconds=seconds)
    plugin = kind._plugins.get(backend.upper())
    if plugin is not None:
        return plugin.creator_fn(store, rank, size, timeout)  # type: ignore[no-any-return]
    group_class: Any = getattr(dist.distributed_c10d, f"ProcessGroup{backend.upper()}")
    options = group_class.Options()
    options._timeout = timeout
    if hasattr(options, "config"):
        options.config.blocking = 0  # an abort reaches a communicator that is being made
    found = group_class(store, rank, size, options)
    found._set_sequence_number_for_group()
    return found  # type: ignore[no-any-return]


def set_group_timeout(group: BulkGroup, seconds: float) -> None:
    """Bound what a group's calls wait from now on, its abort included."""
    found: Any = group
    setter = getattr(found, "_set_default_timeout", None) or getattr(found, "set_timeout", None)
    if setter is not None:
        setter(timedelta(seconds=seconds))


def registered_groups() -> list[BulkGroup]:
    """Every group in torch's registry, the newest first."""
    world: Any = dist.distributed_c10d._world
    return sorted(world.pg_names, key=lambda group: str(world.pg_names[group]), reverse=True)


def forget_registered_groups() -> None:
    """Take all groups, which were aborted, out of torch's registry. The orderly way waits for the
    peers."""
    private: Any = dist.distributed_c10d
    world = private._world
    private._update_default_pg(None)
    for name in (
        *("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config"),
        *("pg_to_tag", "tags_to_pg", "pg_coalesce_state"),
    ):
        getattr(world, name).clear()
    private._unregister_all_process_groups()
    world.group_count = 0


def reset_group_count() -> None:
    """Reset torch's count of groups after a default group could not be made. All ranks have to
    come to the same number to meet. Destroying the default group resets the count. If it was
    never made, the count continues, in this process alone."""
    if not dist.is_initialized():
        dist.distributed_c10d._world.group_count = 0


def gather_parts(
    out: Tensor, part: Tensor, group: dist.ProcessGroup, async_op: bool = False
) -> dist.Work | None:
    """torch's all-gather of equal parts, under the name it has.

    part: [t, ...] -> out: [ranks * t, ...]
    """
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work | None = gather(out, part, group=group, async_op=async_op)
    return work


def chosen_attention(q: Tensor, k: Tensor, *, scale: float | None, is_masked: bool) -> str:
    """Return the name of the kernel that torch takes for attention of such tensors, as
    `torch.nn.attention.SDPBackend` spells it; "" if torch does not say. is_masked: by a mask, and
    not causal.

    q: [B, H, S, h]; k: [B, K, S, h], of which v has the shape
    """
    from torch.nn.attention import SDPBackend

    choose: Any = getattr(torch, "_fused_sdp_choice", None)
    if choose is None:
        return ""
    mask = q.new_ones((q.shape[2], q.shape[2]), dtype=torch.bool) if is_masked else None
    is_grouped = q.shape[1] != k.shape[1]
    number = choose(q, k, k, mask, 0.0, not is_masked, scale=scale, enable_gqa=is_grouped)
    members: Any = SDPBackend.__members__
    names: dict[int, str] = {each.value: name.lower() for name, each in members.items()}
    return names.get(number, "")


def cpu_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """torch's attention on a CPU, with the logarithms of the sums of exponentials.

    q: [B, H, L, h]; k, v: [B, H, M, h]; bias: added to scores -> [B, H, L, h], [B, H, L]
    """
    attend: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, logs = attend(q, k, v, 0.0, is_causal, attn_mask=bias, scale=scale)
    return out, logs


def cpu_attention_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    merged: tuple[Tensor, Tensor],
    bias: Tensor | None,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v. merged: a result and its logarithms, of these and more keys."""
    out, logs = merged
    backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    dq, dk, dv = backward(gradient, q, k, v, out, logs, 0.0, is_causal, attn_mask=bias, scale=scale)
    return dq, dk, dv


def fused_adamw(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    step: Tensor,
    *,
    learning_rate: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    gradient_scale: Tensor | None,
) -> None:
    """One fused AdamW update in place (Loshchilov and Hutter, 2019, algorithm 2).

    step: float32 scalar, the number of this update counted from 1; it is read, not written.
    gradient_scale: float32 scalar that every gradient is divided by inside the kernel, so that
        scaling costs no pass over memory of its own. The gradients may be overwritten.
    """
    torch._fused_adamw_(  # type: ignore[call-overload]
        parameters,
        gradients,
        exp_avgs,
        exp_avg_sqs,
        [],
        [step] * len(parameters),
        amsgrad=False,
        lr=learning_rate,
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=weight_decay,
        eps=eps,
        maximize=False,
        grad_scale=gradient_scale,
        found_inf=None,
    )


def local_tensor(tensor: Tensor) -> Tensor:
    """Return what this rank holds: the local part of a DTensor, or a plain tensor unchanged. The
    tensor itself is asked, because importing the class takes a second. Only ranks that shard by
    FSDP2 need it.
    """
    to_local = getattr(tensor, "to_local", None)
    found: Tensor = tensor if to_local is None else to_local()
    return found.detach()


def is_plain(tensor: Tensor) -> bool:
    """Return True for a tensor that FSDP2 has not made a DTensor."""
    return not hasattr(tensor, "to_local")


def give_memory(module: nn.Module, device: torch.device) -> None:
    """Memory without values for a module of the meta device that holds plain tensors.

    As `to_empty`, which asks for something *like* each of its tensors. On the meta device that is
    worked out in Python, with sympy, which takes half a second to import.
    """
    apply: Any = module._apply
    apply(lambda t: torch.empty(t.shape, dtype=t.dtype, device=device))


def give_shards_memory(module: nn.Module, device: torch.device) -> None:
    """The same for a module whose parameters FSDP2 has made DTensors. DTensor works out the calls
    of `to_empty` operation by operation, again with each mesh; here only the shards are asked."""
    from torch.distributed.tensor import DTensor

    def given(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        mine = torch.empty(tensor.to_local().shape, dtype=tensor.dtype, device=device)
        return DTensor.from_local(
            mine,
            tensor.device_mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )

    apply: Any = module._apply
    with torch.no_grad():
        apply(given)


def unobserved() -> AbstractContextManager[object]:
    """Inside, no dispatch mode sees what operations make."""
    found: AbstractContextManager[object] = _python_dispatch._disable_current_modes()
    return found


def place_shards(module: nn.Module, allocate: MakeMemory) -> None:
    """Move the shards of a module that FSDP2 has sharded along dim 0 into other memory, padded as
    FSDP2 pads them. It gathers from there afterwards. Their values are lost."""
    from torch.distributed.fsdp import FSDPModule

    groups: Any = [
        each._get_fsdp_state()._fsdp_param_group
        for each in module.modules()
        if isinstance(each, FSDPModule)
    ]
    members = [member for group in groups if group is not None for member in group.fsdp_params]
    if not members:
        return
    shapes = [tuple(member.padded_sharded_param_size) for member in members]
    homes = allocate(shapes, members[0].sharded_param.dtype)
    for member, home in zip(members, homes, strict=True):
        local = member.sharded_param._local_tensor
        member._sharded_param_data = home.view(-1)
        member.sharded_param._local_tensor = home.narrow(
            0, 0, local.shape[0] if local.numel() else 0
        )


def forget_meshes() -> None:
    """Clear what torch keeps by mesh. Call when the groups of a generation are closed.

    DTensor's caches outlive a process group, with two consequences:

    - A new mesh may compare equal to an old one, as equality ignores this process's rank. It is
      then given what was worked out for the old: shards of another rank, without an error.
    - Every cached mesh keeps its process groups, each of which keeps three threads of gloo and
      its sockets. These caches own what torch seems to leak after FSDP2. If mesh axes are
      named by generation, each generation would stay. The caches are the sharding propagator's
      (one in Python, one in C++), the redistribute planner's, the collective cost model's.

    Meshes are also in reference cycles with the modules that were sharded over them: their
    threads end when those have been dropped and collected.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return  # nothing was sharded
    from torch.distributed.tensor import _redistribute, debug

    private: Any = debug
    private._clear_sharding_prop_cache()
    planners: Any = getattr(_redistribute, "_planner_cache", {})  # not in every release
    planners.clear()
    for cached in _cached_functions():
        cached.cache_clear()


def _cached_functions() -> Iterator[Any]:
    """Every function and method of DTensor that is wrapped by `functools.lru_cache`.

    Looked for instead of listed: releases add some, and a forgotten one gives wrong shards.
    """
    kinds = (staticmethod, classmethod)
    seen: set[int] = set()
    for name, module in list(sys.modules.items()):
        if not name.startswith("torch.distributed.tensor") or module is None:
            continue
        for value in list(vars(module).values()):
            theirs = isinstance(value, type) and value.__module__.startswith("torch.distributed")
            inside = vars(value).values() if theirs else ()
            for found in (value, *inside):
                function = found.__func__ if isinstance(found, kinds) else found
                if not isinstance(function, _lru_cache_wrapper) or id(function) in seen:
                    continue  # as nearly everything here: asked first
                if str(function.__module__).startswith("torch.distributed"):
                    seen.add(id(function))
                    yield function


@dataclass(frozen=True)
class ShardedParameter:
    """One parameter in the flat output of FSDP2's reduce-scatter.

    flat_size: elements it takes there, padding of an uneven cut included; its own come first.
    """

    parameter: nn.Parameter
    flat_size: int


def fsdp_parameters(module: nn.Module) -> tuple[ShardedParameter, ...]:
    """The parameters that `fully_shard(module)` reduces together, in the order of its buffer.

    Empty for a module whose parameters all belong to wrapped children.
    """
    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    group = state._fsdp_param_group
    if group is None:
        return ()
    return tuple(
        ShardedParameter(p.sharded_param, p.padded_sharded_param_size.numel())
        for p in group.fsdp_params
    )
