"""YAML of LLaMA-Factory as a run file. Names are those of its examples, August 2026."""

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

STAGES = {"pt": "next_token", "sft": "next_token", "dpo": "dpo", "kto": "kto", "rm": "reward"}
LOSSES = {"sigmoid": "dpo", "hinge": "dpo", "ipo": "ipo", "orpo": "orpo", "simpo": "simpo"}
TEMPLATES = {"llama3": "llama3", "chatml": "chatml", "alpaca": "alpaca"}
HARMLESS = frozenset(
    {"do_train", "do_eval", "overwrite_cache", "overwrite_output_dir", "preprocessing_num_workers"}
    | {"dataloader_num_workers", "logging_steps", "plot_loss", "ddp_timeout", "trust_remote_code"}
    | {"flash_attn", "per_device_eval_batch_size", "include_num_input_tokens_seen", "cache_dir"}
    | {"eval_strategy", "save_only_model", "enable_liger_kernel", "use_unsloth"}
    | {"ddp_find_unused_parameters"}
)
KNOWN = {
    **dict.fromkeys(("deepspeed", "fsdp", "fsdp_config"), LAYOUT),
    "template": "the folder's own template is used",
    "max_samples": "all rows are used; cut the file",
    "quantization_method": "lora.base_dtype nf4 is Holdfast's own",
    "loraplus_lr_ratio": "B and A have one rate; see train.optimizer.groups",
    "resume_from_checkpoint": "see holdfast checkpoint import",
    "adapter_name_or_path": "name the adapter in lora.from",
    "neat_packing": "samples are packed, and see their own tokens alone",
}


def is_llama_factory(source: Mapping[str, Any]) -> bool:
    return isinstance(source, Mapping) and "model_name_or_path" in source


def translate(source: Mapping[str, Any], tables: Mapping[str, Any] | None = None) -> Translation:
    """tables: `dataset_info.json`, if it was found; it says what each dataset is."""
    there = Translation("LLaMA-Factory", source)
    there.take("model_name_or_path", "model.from")
    take_training(
        there, "lr_scheduler_type", "per_device_train_batch_size", "min_lr_rate", "linear"
    )
    there.values["train.recompute"] = "full"  # its default
    if there.take("disable_gradient_checkpointing"):
        there.values["train.recompute"] = "none"
    take_optimizer(there, "optim")
    if there.take("use_muon"):
        there.values["train.optimizer.name"] = "muon"
    if "train.steps" in there.values:
        there.leave("num_train_epochs", "max_steps says the length")
    else:
        there.number("num_train_epochs", "train.epochs", default=3.0)
    there.take("cutoff_len", "data.sequence_length", default=2048)
    there.values["data.validation_fraction"] = 0.0
    share = there.number("val_size")
    if share is not None and share < 1:
        there.values["data.validation_fraction"] = share
    elif share is not None:
        there.leave("val_size", "say a share in data.validation_fraction")
    there.take("output_dir", "folder")
    take_saves(there)
    _take_trackers(there)
    objective = _take_objective(there)
    _take_adapter(there)
    _take_data(there, objective, tables or {})
    there.finish(HARMLESS, KNOWN)
    return there


def _take_trackers(there: Translation) -> None:
    to = there.take("report_to", default="none")
    names = [to] if isinstance(to, str) else list(to)
    known = [name for name in names if name in ("wandb", "tensorboard", "mlflow")]
    if known:
        there.values["logging.trackers"] = known
    if others := [name for name in names if name not in (*known, "none")]:
        there.leave("report_to", f"no tracker is called {others[0]}; see logging.trackers")


def _take_objective(there: Translation) -> str:
    stage = str(there.take("stage", default="sft"))
    kind = STAGES.get(stage, "next_token")
    if stage not in STAGES:
        there.leave("stage", f"{stage} has no objective.kind here; see rollout")
    loss = there.take("pref_loss", default="sigmoid") if kind == "dpo" else "sigmoid"
    if loss not in LOSSES:
        there.leave("pref_loss", f"{loss} has no objective.kind; dpo is written")
    if kind == "dpo":
        kind = LOSSES.get(loss, "dpo")
        if loss == "hinge":
            there.values["objective.loss_type"] = "hinge"
    if kind == "next_token":
        return kind
    there.values["objective.kind"] = kind
    if kind != "reward":
        there.number("pref_beta", "objective.beta", default=0.1)
    if kind == "simpo":
        there.number("simpo_gamma", "objective.simpo_gamma")
    if kind == "kto":
        there.number("kto_chosen_weight", "objective.desirable_weight")
        there.number("kto_rejected_weight", "objective.undesirable_weight")
    return kind


def _take_adapter(there: Translation) -> None:
    kind = there.take("finetuning_type", default="lora")
    if kind not in ("lora", "full"):
        there.leave(
            "finetuning_type", f"{kind} has no counterpart; the full model would be trained"
        )
    bits = there.take("quantization_bit")
    if kind != "lora":
        return
    rank = there.number("lora_rank", default=8) or 8
    target = there.take("lora_target", default="all")
    named = target.split(",") if isinstance(target, str) else list(target)
    targets = ["all-linear"] if target == "all" else [str(t).strip() for t in named]
    alpha = there.number("lora_alpha", default=2 * rank)
    take_lora(there, rank, alpha, there.number("lora_dropout", default=0.0), targets)
    if bits == 4:
        there.values["lora.base_dtype"] = "nf4"
    elif bits:
        there.leave("quantization_bit", "the base stays in train.precision; 4 bits are nf4")


def _take_data(there: Translation, objective: str, tables: Mapping[str, Any]) -> None:
    there.values["data.deduplicate"] = False
    there.values["data.attention"] = "document"
    if there.source.get("packing") is False:
        there.notes.append("packing: rows are packed here, and see their own tokens alone")
    there.take("packing")
    folder = str(there.take("dataset_dir", default="data"))
    given = there.take("dataset", default="")
    names = given.split(",") if isinstance(given, str) else list(given)
    sources = []
    for name in (name.strip() for name in names if name):
        about = tables.get(name)
        sources.append(_source(name, about or {}, folder, objective, there))
        if about is None:
            there.notes.append(f"{name}: dataset_info.json says which file it is, and its columns")
    if sources:
        there.values["data.sources"] = sources
    template = there.source.get("template")
    if template in TEMPLATES:
        there.take("template")
        there.values["data.chat.template"] = TEMPLATES[template]
    if there.take("train_on_prompt"):
        there.values["data.chat.train_on"] = ["system", "user", "assistant"]


def _source(
    name: str, about: Mapping[str, Any], folder: str, objective: str, there: Translation
) -> dict[str, Any]:
    if hub := about.get("hf_hub_url"):
        source: dict[str, Any] = {"kind": "huggingface", "name": name, "path": hub}
    else:
        path = f"{folder}/{about.get('file_name', f'{name}.json')}"
        source = {"kind": "jsonl", "name": source_name(name), "path": path}
    if about.get("split"):
        source["split"] = about["split"]
    shares = about.get("formatting", "alpaca") == "sharegpt"
    if objective == "next_token":
        is_text = there.source.get("stage") == "pt"
        source["rows"] = "text" if is_text else "sharegpt" if shares else "instruction"
    else:
        source["rows"] = "unpaired_preference" if objective == "kto" else "preference"
    left = set(about) - {"hf_hub_url", "file_name", "split", "formatting", "ranking"}
    for key in sorted(left):
        there.left_out[f"{name}.{key}"] = "columns have the names of data.sources.rows"
    return source
