"""Checkpoint folders of DeepSpeed: ZeRO 1, 2 and 3, and its universal form.

    latest                                              names the folder of the newest step
    STEP/mp_rank_00_model_states.pt                     names and shapes, in order; ZeRO 1 and 2
    STEP/zero_pp_rank_R_mp_rank_00_model_states.pt      the same, of each rank; ZeRO 3
    STEP/[bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt   flat parts of fp32 weights and moments
    STEP_universal/zero/NAME/fp32.pt exp_avg.pt exp_avg_sq.pt step.pt

ZeRO 1 and 2 cut the flat vector of a group into one part a rank. ZeRO 3 cuts each parameter. Both
are put together as DeepSpeed's own `zero_to_fp32.py` does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.checkpoint.interop.hf_trainer import MOMENTS, ForeignState, optimizer_settings
from holdfast.checkpoint.interop.torch_files import TorchState, load_tensors, refuse_unknown
from holdfast.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

    Flat = dict[str, list[Tensor]]  # kind (fp32, exp_avg, ...) -> a part of each group

STAND_INS = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)
"""Classes of DeepSpeed whose objects stand in its files next to the tensors."""
FP32 = "fp32"
_OPTIMIZER = re.compile(r"(bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_UNIVERSAL = "zero"


def step_folder(folder: Path) -> Path | None:
    """Return the folder of a step in a checkpoint of DeepSpeed; None if it is none."""
    latest = folder / "latest"
    if latest.is_file():
        folder = folder / latest.read_text("utf-8").strip()
    is_universal = (folder / _UNIVERSAL).is_dir() and any(folder.glob("mp_rank_*_model_states.pt"))
    has_parts = any(_OPTIMIZER.fullmatch(path.name) for path in folder.glob("*_optim_states.pt"))
    return folder if is_universal or has_parts else None


def read_deepspeed(folder: Path, *, weights_only: bool = False) -> ForeignState:
    """Read a checkpoint of DeepSpeed. Raises CheckpointError."""
    where = step_folder(folder)
    if where is None:
        raise _error(folder, "there is no file of optimizer states here")
    if (where / _UNIVERSAL).is_dir():
        model = _load(_one(where, "mp_rank_00_model_states.pt"))
        state = TorchState()
        _read_universal(where / _UNIVERSAL, state, weights_only)
        return _state(model, state)
    parts = sorted(
        (int(match[2]), path)
        for path in where.glob("*_optim_states.pt")
        if (match := _OPTIMIZER.fullmatch(path.name))
    )
    if {rank for rank, _ in parts} != set(range(len(parts))):
        raise _error(where, f"of the ranks there are only {[rank for rank, _ in parts][:8]}")
    of_stage_3 = where / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    model = _load(of_stage_3 if of_stage_3.is_file() else _one(where, "mp_rank_00_model_states.pt"))
    _refuse_layout(model, where)
    state = TorchState()
    found = _state(model, state)
    optimizers = [_load(path)["optimizer_state_dict"] for _, path in parts]
    flats = [_flat(optimizer, parts[0][1]) for optimizer in optimizers]
    if len(flats) != int(model.get("dp_world_size", len(flats))):
        raise _error(
            where, f"{model['dp_world_size']} ranks saved, and {len(flats)} files are here"
        )
    by_rank = _cut_by_parameter if of_stage_3.is_file() else _cut_by_group
    for name, kinds in by_rank(model, optimizers, flats, where):
        state.add({name: kinds.pop(FP32)})
        if not weights_only:
            state.add_moments(name, kinds)
    found.settings = optimizer_settings(_base(optimizers[0])["param_groups"][0])
    return found


def _load(path: Path) -> Any:
    return load_tensors(path, STAND_INS)


def _one(folder: Path, name: str) -> Path:
    if not (folder / name).is_file():
        raise _error(folder, f"{name} is missing")
    return folder / name


def _error(folder: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"this is not a checkpoint of DeepSpeed that can be imported: {what}",
        where=str(folder),
        remedy="make a universal one of it with DeepSpeed's ds_to_universal",
    )


def _refuse_layout(model: Mapping[str, Any], where: Path) -> None:
    """Raises CheckpointError for what only the universal form has put together."""
    if int(model.get("mp_world_size") or 1) > 1:
        raise _error(where, f"mp_world_size is {model['mp_world_size']}, so tensors are cut")
    zero = (model.get("ds_config") or {}).get("zero_optimization") or {}
    if zero.get("round_robin_gradients"):
        raise _error(where, "round_robin_gradients puts parameters into another order")
    if model.get("frozen_param_shapes"):
        raise _error(where, f"it has {len(model['frozen_param_shapes'])} frozen parameters")


def _state(model: Mapping[str, Any], state: TorchState) -> ForeignState:
    steps, samples = model.get("global_steps"), model.get("global_samples")
    said = f"it had used {samples} samples in {steps} steps" if samples else ""
    found = ForeignState("DeepSpeed", state, int(steps or 0), position=said)
    scheduler = (model.get("ds_config") or {}).get("scheduler")
    if scheduler:
        found.left_out = (f"lr_scheduler {scheduler.get('type')} (say it in train.schedule)",)
    return found


def _read_universal(folder: Path, state: TorchState, weights_only: bool) -> None:
    for path in sorted(folder.iterdir()):
        kinds = {file.stem: file for file in path.glob("*.pt")}
        if FP32 not in kinds:
            continue  # of no parameter
        refuse_unknown(tuple(kinds), MOMENTS | {FP32}, path.name, path)
        if lacks := sorted(MOMENTS - set(kinds)):
            raise _error(path, f"{lacks[0]}.pt is missing")
        found = {kind: _load(file) for kind, file in kinds.items()}
        tensors = {k: v["param"] if isinstance(v, dict) else v for k, v in found.items()}
        state.add({path.name: tensors.pop(FP32)})
        if not weights_only:
            state.add_moments(path.name, tensors)


# --- flat parts -----------------------------------------------------------------------------
def _base(optimizer: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state of the optimizer inside: torch's, of flat parts."""
    base = optimizer.get("base_optimizer_state", optimizer.get("optimizer_state_dict"))
    return base if isinstance(base, dict) else {"state": {}, "param_groups": [{}]}


def _flat(optimizer: Mapping[str, Any], path: Path) -> Flat:
    """A rank's part of each group, by kind; `step` is the count of its update."""
    found: Flat = {}
    weights = optimizer.get("fp32_flat_groups", optimizer.get("single_partition_of_fp32_groups"))
    if not isinstance(weights, list):
        raise _error(path, "its parts of the weights are missing")
    found[FP32] = weights
    rows = [row for _, row in sorted(_base(optimizer)["state"].items())]
    for row in rows:
        refuse_unknown(tuple(row), MOMENTS, "the optimizer's state", path)
    for kind in sorted(MOMENTS if rows else ()):
        if any(kind not in row for row in rows):
            raise _error(path, f"the optimizer's state has no {kind}")
        found[kind] = [row[kind] for row in rows]
    return found


def _cut_by_group(
    model: Mapping[str, Any],
    optimizers: Sequence[Mapping[str, Any]],
    flats: Sequence[Flat],
    where: Path,
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """ZeRO 1 and 2: yield each parameter with its kinds."""
    import torch

    paddings = optimizers[0].get("param_alignment_paddings")
    for group, shapes in enumerate(model["param_shapes"]):
        whole = {
            kind: torch.cat([flat[kind][group] for flat in flats])
            for kind in flats[0]
            if kind != "step"
        }
        at = 0
        for number, (name, shape) in enumerate(shapes.items()):
            size = prod(shape)
            if at + size > whole[FP32].numel():
                raise _error(where, f"its flat parts end before {name}")
            kinds = {kind: flat[at : at + size].view(shape) for kind, flat in whole.items()}
            if "step" in flats[0]:
                kinds["step"] = flats[0]["step"][group]
            yield name, kinds
            at += size + (paddings[group][number] if paddings else 0)


def _cut_by_parameter(
    model: Mapping[str, Any],
    optimizers: Sequence[Mapping[str, Any]],
    flats: Sequence[Flat],
    where: Path,
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """ZeRO 3: yield each parameter with its kinds."""
    import torch

    whole = [
        {kind: torch.cat(parts) for kind, parts in flat.items() if kind != "step"} for flat in flats
    ]
    at, ranks = 0, len(flats)
    for name, shape in (row for shapes in model["param_shapes"] for row in shapes.items()):
        size = prod(shape)
        part = -(-size // ranks)
        if at + part > whole[0][FP32].numel():
            raise _error(where, f"its flat parts end before {name}")
        kinds = {
            kind: torch.cat([flat[kind][at : at + part] for flat in whole])[:size].view(shape)
            for kind in whole[0]
        }
        if "step" in flats[0]:
            kinds["step"] = flats[0]["step"][0]
        yield name, kinds
        at += part
