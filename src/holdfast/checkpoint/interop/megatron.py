"""A checkpoint of Megatron in its `torch_dist` form: a DCP folder, and `common.pt` next to it.

    latest_checkpointed_iteration.txt              names the newest iter_NNNNNNN
    iter_0000010/metadata.json                     sharded_backend: torch_dist
    iter_0000010/common.pt                         args, iteration, schedule, optimizer's groups
    iter_0000010/.metadata, __0_0.distcp, ...      tensors, put together from all ranks' parts:
        decoder.layers.self_attention.linear_qkv.weight     [layers, rows, D]: q, k and v by group
        decoder.layers.mlp.linear_fc1.weight                [layers, 2 * ffn, D]: gate, then up
        optimizer.state.exp_avg.decoder.layers...           the same of a moment

Layers may also be numbered (`decoder.layers.0.`). `optimizer.state.fp32_param.` has the weights of
a model in bf16. The tensors are shown by Hugging Face's names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from holdfast.checkpoint.interop.dcp import DcpFolder, DcpTensor
from holdfast.checkpoint.interop.hf_trainer import ForeignState
from holdfast.checkpoint.interop.megatron_settings import differences, settings_of
from holdfast.checkpoint.interop.row_views import RowView, ViewedFolder, qkv_ranges, row_view
from holdfast.checkpoint.interop.torch_files import Fields, load_tensors
from holdfast.config.huggingface.folder import read_json_object
from holdfast.config.sections.model import ModelConfig
from holdfast.core.format.flat_names import MOMENTS, huggingface_names
from holdfast.errors import CheckpointError

COMMON, ABOUT, LATEST = "common.pt", "metadata.json", "latest_checkpointed_iteration.txt"
ENUMS = (
    *("megatron.core.enums.ModelType", "megatron.core.transformer.enums.AttnBackend"),
    *(f"megatron.core.rerun_state_machine.Rerun{kind}" for kind in ("Mode", "State", "Diagnostic")),
    *("megatron.core.transformer.enums.CudaGraphScope", "signal.Signals", "pathlib.PosixPath"),
    "megatron.core.optimizer.optimizer_config.OptimizerConfig",
)
"""Classes of `common.pt` whose objects are of no use here."""
NAMESPACES = ("argparse.Namespace", "types.SimpleNamespace")

_OUTSIDE = {
    "embed.weight": "embedding.word_embeddings.weight",
    "head.weight": "output_layer.weight",
    "norm.weight": "decoder.final_layernorm.weight",
}
_BLOCK = {
    "attention_norm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "attention.q_norm.weight": "self_attention.q_layernorm.weight",
    "attention.k_norm.weight": "self_attention.k_layernorm.weight",
    "attention.o.weight": "self_attention.linear_proj.weight",
    "ffn_norm.weight": "mlp.linear_fc1.layer_norm_weight",
    "ffn.down.weight": "mlp.linear_fc2.weight",
}
_QKV = re.compile(r"attention\.([qkv])\.(weight|bias)")
_GATED = ("ffn.gate.weight", "ffn.up.weight")
_MASTER = "optimizer.state.fp32_param."
_HARMLESS = re.compile(r".*\._extra_state(/shard_\d+_\d+)?")
_USED = {"args", "iteration", "optimizer", "opt_param_scheduler"}
_REASONS = {
    "checkpoint_version": "",
    "content_metadata": "",
    "num_floating_point_operations_so_far": "",
    "rerun_state_machine": "Megatron's own checks of a restart",
}


def iteration_folder(folder: Path) -> Path | None:
    """Return the folder of an iteration in a checkpoint of Megatron; None if it is none."""
    if (folder / LATEST).is_file():
        folder = folder / f"iter_{int((folder / LATEST).read_text('utf-8')):07}"
    about = folder / ABOUT
    is_theirs = about.is_file() and b'"sharded_backend"' in about.read_bytes()
    return folder if is_theirs else None


def read_common(folder: Path) -> dict[str, Any]:
    """Return what `common.pt` holds, `args` as a dict. Raises CheckpointError."""
    about = read_json_object(folder / ABOUT)
    if about.get("sharded_backend") != "torch_dist":
        raise _error(folder, f"sharded_backend is {about.get('sharded_backend')}, not torch_dist")
    if not (folder / COMMON).is_file():
        raise CheckpointError(
            "this file of a Megatron checkpoint is missing, and it holds the iteration",
            where=str(folder / COMMON),
            remedy="copy it from the place where the checkpoint was written",
        )
    common = load_tensors(folder / COMMON, ENUMS, NAMESPACES)
    if not isinstance(common, dict) or "iteration" not in common:
        raise _error(folder / COMMON, "it has no iteration")
    args = common.get("args")
    return common | {"args": dict(args.values) if isinstance(args, Fields) else {}}


def read_megatron(folder: Path, model: ModelConfig, *, weights_only: bool = False) -> ForeignState:
    """Read a checkpoint of Megatron. model: the run's. Raises CheckpointError."""
    where = iteration_folder(folder)
    if where is None:
        raise _error(folder, f"{ABOUT} is missing, or names no sharded_backend")
    common, stored = read_common(where), DcpFolder.open(where)
    iteration, optimizer = int(common["iteration"]), common.get("optimizer") or {}
    views: dict[str, RowView] = {}
    numbers: dict[str, float] = {}
    step = None if weights_only else _adam_step(optimizer, iteration, where)
    for row in huggingface_names(model):
        weight = _view(stored, _MASTER, row.ours, row.shape, model) or _view(
            stored, "", row.ours, row.shape, model
        )
        if weight is not None:
            views[row.theirs] = weight
        for moment in MOMENTS:
            prefix = f"optimizer.state.{moment}."
            found_moment = _view(stored, prefix, row.ours, row.shape, model)
            if found_moment is not None and step is not None:
                views[row.state_name(moment)] = found_moment
                numbers[row.state_name("step")] = step
    if not (weights_only or numbers) and any(n.startswith("optimizer.") for n in stored.tensors):
        raise _error(where, "its optimizer's state is cut by data-parallel ranks")
    state = ViewedFolder(stored, views, numbers)
    masters = {f"{_MASTER}{name}" for name in stored.tensors}
    if masters & set(stored.tensors):  # the weights in bf16 next to the masters
        for name in [name for name in state.tensors if f"{_MASTER}{name}" in stored.tensors]:
            del state.tensors[name]
    state.non_tensors = tuple(n for n in stored.non_tensors if not _HARMLESS.fullmatch(n))
    found = ForeignState("Megatron", state, iteration)
    groups, schedule = optimizer.get("param_groups") or [], common.get("opt_param_scheduler") or {}
    found.settings = settings_of(groups, schedule, iteration)
    found.rate = next((float(g["lr"]) for g in groups if g.get("default_config", True)), None)
    found.differences = tuple(differences(groups, schedule))
    samples = common["args"].get("consumed_train_samples") or schedule.get("num_steps")
    found.position = f"it was at iteration {iteration}, with {samples} samples used"
    found.left_out = tuple(_left_out(common))
    return found


def _view(
    stored: DcpFolder, prefix: str, ours: str, shape: tuple[int, ...], model: ModelConfig
) -> RowView | None:
    """Return the part of a stored tensor that is one parameter; None if it is not there."""
    inside = ours
    at: tuple[int, ...] = ()
    qkv = None
    if ours in _OUTSIDE:
        name = prefix + _OUTSIDE[ours]
    else:
        _, layer, inside = ours.split(".", 2)
        qkv = _QKV.fullmatch(inside)
        there = _BLOCK.get(inside, "mlp.linear_fc1.weight" if inside in _GATED else "")
        there = f"self_attention.linear_qkv.{qkv[2]}" if qkv else there
        name = f"{prefix}decoder.layers.{layer}.{there}"
        if name not in stored.tensors:
            name, at = f"{prefix}decoder.layers.{there}", (int(layer),)
    tensor: DcpTensor | None = stored.tensors.get(name)
    if tensor is None or (at and tensor.shape[0] != model.layers):
        return None
    rows = tensor.shape[len(at)]
    if qkv:
        ranges = qkv_ranges(model.heads, model.kv_heads, model.head_size)[qkv[1]]
        needed = (model.heads + 2 * model.kv_heads) * model.head_size
    elif inside in _GATED:
        ranges, needed = [(shape[0] * _GATED.index(inside), shape[0])], 2 * shape[0]
    else:  # Megatron pads its vocabulary
        needed = shape[0] if inside in ("embed.weight", "head.weight") and rows > shape[0] else rows
        ranges = [(0, needed)]
        rows = needed
    if rows != needed:
        raise CheckpointError(
            f"{name} has {rows} rows, and the run's model needs {needed}",
            where=str(stored.folder),
            remedy="name a checkpoint of the model in the run file",
        )
    return row_view(name, tensor.dtype, tensor.shape, ranges, *at)


def _adam_step(optimizer: Mapping[str, Any], iteration: int, where: Path) -> float:
    groups = optimizer.get("param_groups") or []
    for group in groups:
        for key, needed in (("amsgrad", False), ("maximize", False)):
            if group.get(key, needed) != needed:
                raise _error(where, f"the optimizer has {key}={group[key]}")
    state = optimizer.get("state") or {}
    step = state.get("common_step", next((g["step"] for g in groups if "step" in g), iteration))
    return float(step)


def _left_out(common: Mapping[str, Any]) -> Iterator[str]:
    if common["args"]:
        yield f"args ({len(common['args'])} settings of the job)"
    for name in common:
        if name not in _USED and (reason := _REASONS.get(name, "not known")):
            yield f"{name} ({reason})"


def _error(folder: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"this is not a checkpoint of Megatron that can be imported: {what}",
        where=str(folder),
        remedy="save it with Megatron's options --ckpt-format torch_dist and "
        "--dist-ckpt-optim-fully-reshardable, or import the weights alone with --weights-only",
    )
