"""A checkpoint of torchtitan: a DCP folder with optimizer, schedule, step and data loaders.

    layers.0.attention.qkv_linear.wq.weight                  a parameter
    optimizer.state.layers.0.attention.qkv_linear.wqkv.weight.exp_avg
    optimizer.param_groups.layers.0.attention.qkv_linear.wqkv.weight.lr
    lr_scheduler.last_epoch, train_state.step, train_state.ntokens_seen
    dataloader.dp_rank_0                                     a pickle of plain values

Since 0.3 the model fuses q, k and v. It saves weights taken apart, and moments fused. Any other DCP
folder is read the same way, and lacks some of these names.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.checkpoint.interop.dcp import DcpFolder
from holdfast.checkpoint.interop.hf_trainer import MOMENTS, ForeignState, optimizer_settings
from holdfast.checkpoint.interop.row_views import RowView, ViewedFolder, qkv_ranges, row_view
from holdfast.checkpoint.interop.torch_files import refuse_unknown
from holdfast.config.sections.model import ModelConfig
from holdfast.config.sections.optimizer import OptimizerConfig
from holdfast.core.format.flat_names import SCHEMES, recognise_scheme
from holdfast.core.sharding.boxes import whole_box
from holdfast.core.sharding.optimizer_state import parameter_settings
from holdfast.core.sharding.parameters import decoder_parameters
from holdfast.errors import CheckpointError

_FUSED = ".qkv_linear.wqkv."
_STATE = re.compile(r"(?:optimizer\.|optim\.)?state\..+\.(\w+)")
_GROUP = re.compile(r"(?:optimizer\.|optim\.)?param_groups\.(.+)\.(\w+)")
_IMPLEMENTATION = frozenset({"fused", "foreach", "capturable", "differentiable"})
"""Settings of torch's AdamW that change no result."""
_NEEDED = {"amsgrad": False, "maximize": False, "decoupled_weight_decay": True}
"""Settings that AdamW of a run has; no other value continues there."""
_USED = frozenset({"lr", "initial_lr", "betas", "eps", "weight_decay"})

_USED_VALUES = frozenset(
    {"train_state.step", "train_state.ntokens_seen", "lr_scheduler.last_epoch"}
    | {"dataloader.world_size"}
)

Groups = dict[str, dict[str, Any]]  # parameter's name there -> its settings


def read_dcp(
    folder: Path, model: ModelConfig, optimizer: OptimizerConfig, *, weights_only: bool = False
) -> ForeignState:
    """Read a checkpoint of torchtitan, or another folder of DCP. model, optimizer: the run's.

    Raises CheckpointError."""
    stored = DcpFolder.open(folder)
    state = ViewedFolder(stored, dict(_views(stored, model)))
    values = stored.values
    step = values.get("train_state.step")
    trainer = "torchtitan" if "train_state.ntokens_seen" in values else "DCP"
    found = ForeignState(trainer, state, step if isinstance(step, int) else 0)
    groups, used = _groups(stored.values)
    if not weights_only:
        kinds = [match[1] for name in stored.tensors if (match := _STATE.fullmatch(name))]
        refuse_unknown(kinds, MOMENTS, "the optimizer's state", folder)
        for name, settings in groups.items():
            _refuse_setting(name, settings, folder)
    if groups:
        common = _common(groups)
        found.settings, found.rate = optimizer_settings(common), common.get("lr")
        found.differences = tuple(_other_groups(groups, common, state, model, optimizer))
    found.position = _position(values)
    used |= _USED_VALUES & set(values)
    used |= {
        name for name, value in values.items() if _is_loader(name) and _sample(value) is not None
    }
    state.non_tensors = tuple(name for name in stored.non_tensors if name not in used)
    return found


def _views(stored: DcpFolder, model: ModelConfig) -> Iterator[tuple[str, RowView]]:
    """Yield q, k and v of each fused tensor. Raises CheckpointError for another model's."""
    ranges = qkv_ranges(model.heads, model.kv_heads, model.head_size)
    rows = (model.heads + 2 * model.kv_heads) * model.head_size
    for name, tensor in stored.tensors.items():
        if _FUSED not in name:
            continue
        if tensor.shape and tensor.shape[0] != rows:
            raise CheckpointError(
                f"{name} has {tensor.shape[0]} rows, and the run's model needs {rows}",
                where=str(stored.folder),
                remedy="name a checkpoint of the model in the run file",
            )
        for part in ranges:
            view = RowView(tensor.dtype, (), (whole_box(name, ()),))
            if tensor.shape:
                view = row_view(name, tensor.dtype, tensor.shape, ranges[part])
            yield name.replace(_FUSED, f".qkv_linear.w{part}."), view


def _groups(values: Mapping[str, Any]) -> tuple[Groups, set[str]]:
    """Return the optimizer's settings by parameter, and the names that held them."""
    groups: Groups = {}
    used = set()
    for name, value in values.items():
        match = _GROUP.fullmatch(name)
        if match and match[2] in _USED | _IMPLEMENTATION | set(_NEEDED):
            groups.setdefault(match[1], {})[match[2]] = value
            used.add(name)
    return groups, used


def _refuse_setting(name: str, settings: Mapping[str, Any], folder: Path) -> None:
    for key, needed in _NEEDED.items():
        value = settings.get(key, needed)
        if value != needed and (key in ("amsgrad", "maximize") or settings.get("weight_decay")):
            raise CheckpointError(
                f"the optimizer has {key}={value} for {name}, and AdamW of a run {needed}",
                where=str(folder),
                remedy="import the weights alone, with --weights-only",
            )


def _common(groups: Groups) -> dict[str, Any]:
    """The value of each setting that most parameters have."""
    common = {}
    for key in _USED:
        given = [str(settings[key]) for settings in groups.values() if key in settings]
        if given:
            text = Counter(given).most_common(1)[0][0]
            common[key] = next(s[key] for s in groups.values() if str(s.get(key)) == text)
    return common


def _other_groups(
    groups: Groups,
    common: Mapping[str, Any],
    state: ViewedFolder,
    model: ModelConfig,
    optimizer: OptimizerConfig,
) -> Iterator[str]:
    """Name the parameters that the run would treat in another way."""
    choice = recognise_scheme(model, state.tensors)
    if isinstance(choice, str):
        return  # the import says what is missing
    theirs = {row.ours: row.theirs for row in SCHEMES[choice[0]](model)}
    decay: list[str] = []
    others: dict[str, list[str]] = {}
    for row in decoder_parameters(model):
        name = theirs[row.name]
        settings = groups.get(name) or groups.get(re.sub(r"\.w[qkv]\.", ".wqkv.", name), {})
        own = parameter_settings(optimizer, row)
        if settings.get("weight_decay", own.weight_decay) != own.weight_decay:
            decay.append(f"{row.name}: {settings['weight_decay']} there, {own.weight_decay} here")
        for key in _USED - {"weight_decay", "lr"}:
            if settings.get(key, common.get(key)) != common.get(key):
                others.setdefault(key, []).append(row.name)
    if decay:
        yield (
            f"the weight decay of {len(decay)} parameters differs ({decay[0]}); say it in "
            "train.optimizer.groups"
        )
    for key, names in others.items():
        yield f"{key} of {len(names)} parameters is another one there ({names[0]})"


def _position(values: Mapping[str, Any]) -> str:
    step, tokens = values.get("train_state.step"), values.get("train_state.ntokens_seen")
    if not isinstance(step, int):
        return ""
    said = f"it was at step {step}"
    if isinstance(tokens, int):
        said += f", with {tokens} tokens a rank"
    loaders = [
        f"{name.removeprefix('dataloader.')} at sample {at}"
        for name, value in sorted(values.items())
        if _is_loader(name) and (at := _sample(value)) is not None
    ]
    return said + "".join(f", {loader}" for loader in loaders[:4])


def _is_loader(name: str) -> bool:
    return name.startswith("dataloader.dp_rank_")


def _sample(value: Any) -> Any:
    """The position of a loader: what torchtitan's dataset counts, or the loader itself."""
    if not isinstance(value, dict):
        return None
    fetcher = value.get("fetcher_state") or {}
    inner = value.get("dataset_state") or fetcher.get("dataset_iter_state") or {}
    return inner.get("sample_idx", value.get("_num_yielded"))


def group_names(names: Sequence[str]) -> list[str]:
    """Return names with their numbers replaced by `*`, and how often each occurs."""
    counts = Counter(re.sub(r"(?<=[._])\d+(?=[._]|$)", "*", name) for name in names)
    return [f"{name} ({count} times)" if count > 1 else name for name, count in counts.items()]
