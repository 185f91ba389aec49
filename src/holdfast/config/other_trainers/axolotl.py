"""YAML of axolotl as a run file. Names are those of its documentation, July 2026."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.config.other_trainers.translation import (
    LAYOUT,
    Translation,
    source_name,
    take_lora,
    take_optimizer,
    take_saves,
    take_training,
)
from holdfast.errors import ConfigError

ROWS = {
    "alpaca": "instruction",
    "chat_template": "messages",
    "sharegpt": "sharegpt",
    "completion": "text",
    "pretrain": "text",
}
"""Beginning of a dataset's type -> word of `rows`."""
CHATS = ("instruction", "messages", "sharegpt")
TEMPLATES = ("chatml", "llama3", "alpaca")
PREFERENCES = ("dpo", "ipo", "simpo", "orpo", "kto")
HARMLESS = frozenset(
    {"base_model_config", "model_type", "tokenizer_type", "strict", "dataset_prepared_path"}
    | {"remove_unused_columns", "pad_to_sequence_len", "eval_sample_packing"}
    | {"attn_implementation", "flash_attention", "sdp_attention", "xformers_attention"}
    | {"gradient_checkpointing_kwargs", "logging_steps", "local_rank"}
    | {"dataset_processes", "dataloader_num_workers", "dataloader_pin_memory", "num_labels"}
    | {"save_safetensors", "ddp_timeout", "wandb_watch", "wandb_log_model", "trust_remote_code"}
)
KNOWN = {
    **dict.fromkeys(("deepspeed", "fsdp", "fsdp_config", "fsdp_version"), LAYOUT),
    **dict.fromkeys(("tensor_parallel_size", "context_parallel_size", "dp_shard_size"), LAYOUT),
    "group_by_length": "the order of samples follows from seed",
    "early_stopping_patience": "see train.stop",
    "tf32": "products of fp32 follow train.precision",
    "rl_beta": "objective.kind has no such strength",
    "special_tokens": "the tokenizer of model.from says them",
    "plugins": "no plugin of axolotl is run",
    "evals_per_epoch": "say the steps in train.evaluate.every",
    "saves_per_epoch": "say the steps in checkpoint.every_steps",
    "loss_watchdog_threshold": "see train.stop",
    "loss_watchdog_patience": "see train.stop",
    "resume_from_checkpoint": "see holdfast checkpoint import",
    "lora_model_dir": "name the adapter in lora.from",
}


def is_axolotl(source: Mapping[str, Any]) -> bool:
    return isinstance(source, Mapping) and "base_model" in source


def translate(source: Mapping[str, Any]) -> Translation:
    there = Translation("axolotl", source)
    there.take("base_model", "model.from")
    if there.take("reinit_weights"):
        there.leave("reinit_weights", "model.from begins with the folder's weights")
    take_training(there, "lr_scheduler", "micro_batch_size", "cosine_min_lr_ratio", "cosine")
    _take_warmup(there)
    if not {"bf16", "fp16"} & there.source.keys():
        there.values["train.precision"] = "bf16"
        there.notes.append("bf16: axolotl's default takes it if the device can; fp32 is exact")
    take_optimizer(there, "optimizer")
    if "train.steps" not in there.values:
        there.number("num_epochs", "train.epochs", default=1.0)
    else:
        there.leave("num_epochs", "max_steps says the length")
    there.take("sequence_len", "data.sequence_length", default=512)
    there.values["data.validation_fraction"] = 0.0
    share = there.number("val_set_size")
    if share is not None and share < 1:
        there.values["data.validation_fraction"] = share
    elif share is not None:
        there.leave("val_set_size", "say a share in data.validation_fraction")
    _take_places(there)
    objective = _take_objective(there)
    _take_adapter(there)
    _take_data(there, objective)
    there.finish(HARMLESS, KNOWN)
    return there


def _take_warmup(there: Translation) -> None:
    """Write axolotl's own warm-up if the file names none: 3 % of the steps, at most 100, never 1.
    A share of the steps is rounded down."""
    if there.source.get("warmup_steps") is not None:
        return
    steps = there.values.get("train.steps")
    if steps is None:
        if there.source.get("warmup_ratio") is None:
            there.notes.append(
                "warmup_steps: axolotl's default is 3 % of the steps, at most 100; say the number "
                "in train.schedule.warmup_steps"
            )
        return
    share = there.number("warmup_ratio")
    found = int(share * steps) if share is not None else min(int(0.03 * steps), 100)
    there.values["train.schedule.warmup_steps"] = 2 if found == 1 else found


def _take_places(there: Translation) -> None:
    there.take("output_dir", "folder")
    take_saves(there)
    if there.take("wandb_project", "logging.wandb.project"):
        there.values["logging.trackers"] = ["wandb"]
        there.take("wandb_entity", "logging.wandb.entity")
    there.leave("wandb_name", "the run's name is in name")


def _take_objective(there: Translation) -> str:
    """Return the kind: next_token, reward, or a preference loss."""
    kind = there.take("rl")
    if there.take("reward_model"):
        kind = "reward"
    elif kind is not None and kind not in PREFERENCES:
        there.leave("rl", f"{kind} has no objective.kind")
        kind = None
    if kind is None:
        return "next_token"
    there.values["objective.kind"] = kind
    there.number("orpo_alpha" if kind == "orpo" else "rl_beta", "objective.beta")
    if kind == "kto":
        there.number("kto_desirable_weight", "objective.desirable_weight")
        there.number("kto_undesirable_weight", "objective.undesirable_weight")
    if kind == "simpo":
        there.number("simpo_gamma", "objective.simpo_gamma")
        there.number("cpo_alpha", "objective.cpo_alpha")
    return str(kind)


def _take_adapter(there: Translation) -> None:
    adapter = there.take("adapter")
    if adapter not in (None, "lora", "qlora"):
        there.leave("adapter", f"{adapter} has no counterpart; the full model would be trained")
        return
    four, eight = there.take("load_in_4bit"), there.take("load_in_8bit")
    if adapter is None:
        return
    named = there.take("lora_target_modules")
    linear = there.take("lora_target_linear")
    targets = ["all-linear"] if linear or not named else named
    rank, alpha = there.number("lora_r", default=8), there.number("lora_alpha", default=16)
    take_lora(there, rank, alpha, there.number("lora_dropout", default=0.0), targets)
    if four:
        there.values["lora.base_dtype"] = "nf4"
    if eight:
        there.leave("load_in_8bit", "the base stays in train.precision; nf4 is in lora.base_dtype")


def _take_data(there: Translation, objective: str) -> None:
    there.values["data.deduplicate"] = False
    there.values["data.attention"] = "document"
    if there.take("sample_packing") is False:
        there.notes.append("sample_packing: rows are packed here, and see their own tokens alone")
    pretraining = there.take("pretraining_dataset") or []
    named = there.take("datasets") or []
    if not isinstance(named, list) or not all(isinstance(row, Mapping) for row in named):
        raise ConfigError(
            "it is no list of datasets", where="datasets", remedy="write it as [{path, type}]"
        )
    rows = [*named, *pretraining]
    rows = [{"path": row, "type": "pretrain"} if isinstance(row, str) else row for row in rows]
    sources = []
    for number, row in enumerate(rows):
        key = f"datasets.{number}"
        source, left = _source(row, objective, there)
        sources.append(source)
        there.left_out |= {f"{key}.{name}": reason for name, reason in left.items()}
    if sources:
        there.values["data.sources"] = sources
    template = there.take("chat_template")
    chats = [number for number, s in enumerate(sources) if s["rows"] in CHATS]
    alpaca = [number for number in chats if sources[number]["rows"] == ROWS["alpaca"]]
    if alpaca and alpaca == chats:  # these rows have a prompt of their own there
        there.values["data.chat.template"] = "alpaca"
        if template not in (None, "alpaca", "tokenizer_default"):
            there.leave("chat_template", "rows of type alpaca have alpaca's template there")
        template = None
    for number in alpaca if alpaca != chats else ():
        key = f"datasets.{number}.type"
        there.left_out[key] = "alpaca's template; data.chat.template is one for all sources"
    if template in TEMPLATES:
        there.values["data.chat.template"] = template
    elif template not in (None, "tokenizer_default"):
        there.leave("chat_template", "the folder's own template is used")
    if there.take("train_on_inputs") and any(s["rows"] not in ("text",) for s in sources):
        there.values["data.chat.train_on"] = ["system", "user", "assistant"]


def _source(
    row: Mapping[str, Any], objective: str, there: Translation
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a source of a run file, and the keys of `row` that are left out."""
    path, kind = str(row.get("path", "")), str(row.get("type") or "alpaca")
    source: dict[str, Any] = {"kind": "huggingface", "name": source_name(path), "path": path}
    if row.get("ds_type") in ("json", "jsonl") or path.endswith((".json", ".jsonl")):
        source["kind"] = "jsonl"
        source["path"] = row.get("data_files") or path
    left = {}
    begin = kind.split(".")[0].split(":")[0]
    if objective in ("next_token",):
        source["rows"] = ROWS.get(begin, "text")
        if begin not in ROWS:
            left["type"] = f"{kind}: bring the rows into a form of data.sources.rows"
    else:
        source["rows"] = "unpaired_preference" if objective == "kto" else "preference"
        if kind not in ("chat_template", "chat_template.default"):
            left["type"] = f"{kind} renames columns; rows need those of {source['rows']}"
    if row.get("split"):
        source["split"] = row["split"]
    field = row.get("field", row.get("text_column"))
    if field and source["rows"] == "text":
        source["field"] = field
    used = {"path", "type", "split", "ds_type", "data_files", "field", "text_column"}
    for name, value in row.items():
        if name not in used and value:
            left[name] = "columns have the names of data.sources.rows"
    return source, left
