"""The configuration that torchtitan writes with `debug.save_config_file`, as a run file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.config.other_trainers.translation import LAYOUT, Translation

HARMLESS = frozenset(
    {"metrics", "profiler", "debug", "comm", "compile", "dump_folder", "override"}
    | {"training.gc_freq", "training.gc_debug", "training.disable_cuda_graphs", "loss"}
    | {"training.mixed_precision_reduce", "training.enable_cpu_offload", "checkpoint"}
)
KNOWN = {
    "parallelism": LAYOUT,
    "activation_checkpoint": "see train.recompute",
    "dataloader": "name your data in data.sources",
    "validator": "see train.evaluate",
    "tokenizer": "name it in data.tokenizer.path",
    "hf_assets_path": "name its tokenizer in data.tokenizer.path",
}


def is_torchtitan(job: Mapping[str, Any]) -> bool:
    return "model_spec" in job and "lr_scheduler" in job


def translate(job: Mapping[str, Any]) -> Translation:
    source = dict(job)
    for section in ("training", "lr_scheduler"):
        inside = source.pop(section)
        source |= {f"{section}.{key}": value for key, value in inside.items()}
    there = Translation("torchtitan", source)
    _take_model(there, there.take("model_spec")["model"])
    there.take("training.seq_len", "data.sequence_length")
    steps = there.take("training.steps", "train.steps")
    local = there.take("training.local_batch_size")
    batch = there.take("training.global_batch_size")
    if batch is None or batch < 0:
        batch = local
        there.notes.append("train.batch_size is that of one rank there; multiply it by its ranks")
    there.values |= {"train.batch_size": batch, "train.microbatch_size": local}
    there.take("training.max_norm", "train.optimizer.clip_norm")
    mixed, dtype = there.take("training.mixed_precision_param"), there.take("training.dtype")
    half = "bfloat16" in (mixed, dtype)
    there.values["train.precision"] = "bf16" if half else "fp32"
    if dtype == "bfloat16":
        there.leave("training.dtype", "a run keeps its weights in fp32")
    _take_optimizer(there)
    _take_schedule(there, steps)
    checkpoint = job.get("checkpoint", {})
    if checkpoint.get("interval"):
        there.values["checkpoint.every_steps"] = checkpoint["interval"]
    if seed := job.get("debug", {}).get("seed"):
        there.values["seed"] = seed
    there.finish(HARMLESS, KNOWN)
    return there


def _take_model(there: Translation, model: Mapping[str, Any]) -> None:
    blocks = model["layers"]
    first = (list(blocks.values()) if isinstance(blocks, dict) else blocks)[0]
    attention, qkv = first["attention"], first["attention"]["qkv_linear"]
    heads, rope = attention["n_heads"], attention["rope"]
    own = {
        "preset": None,
        "layers": len(blocks),
        "dim": model["dim"],
        "heads": heads,
        "kv_heads": attention.get("n_kv_heads") or qkv.get("n_kv_heads") or heads,
        "head_dim": qkv.get("head_dim") or rope["dim"],
        "ffn_dim": first["feed_forward"]["w1"]["out_features"],
        "vocab_size": model["vocab_size"],
        "max_position": rope["max_seq_len"],
        "rope_theta": float(rope["theta"]),
        "norm_eps": model["norm"]["eps"],
        "tied_embeddings": bool(model.get("enable_weight_tying")),
        "qk_norm": bool(attention.get("qk_norm")),
    }
    if rope.get("scaling") == "llama":
        own["rope_scaling"] = {
            "factor": rope["scaling_factor"],
            "low_freq_factor": rope["low_freq_factor"],
            "high_freq_factor": rope["high_freq_factor"],
            "original_max_position": rope["original_max_position_embeddings"],
        }
    elif rope.get("scaling") not in (None, "none"):
        there.left_out["model_spec.rope.scaling"] = f"{rope['scaling']}: see model.rope_scaling"
    there.values |= {f"model.{key}": value for key, value in own.items()}


def _take_optimizer(there: Translation) -> None:
    groups = there.take("optimizer")["param_groups"]
    last = groups[-1]
    if last["optimizer_name"] != "AdamW":
        there.leave("optimizer", f"{last['optimizer_name']} is not train.optimizer.name adamw")
        return
    given = last["optimizer_kwargs"]
    there.values["train.optimizer.learning_rate"] = float(given["lr"])
    for key in ("eps", "weight_decay"):
        if key in given:
            there.values[f"train.optimizer.{key}"] = float(given[key])
    if "betas" in given:
        there.values["train.optimizer.betas"] = [float(beta) for beta in given["betas"]]
    decay = float(given.get("weight_decay", 0.01))
    there.values["train.optimizer.groups"] = [{"match": "*", "weight_decay": decay}]
    for number, group in enumerate(groups[:-1]):
        key = f"optimizer.param_groups.{number}"
        there.left_out[key] = f"{group['pattern']}: see train.optimizer.groups"


def _take_schedule(there: Translation, steps: int) -> None:
    """torchtitan holds the peak for one step more than its numbers say."""
    names = ("warmup_steps", "total_steps", "decay_ratio", "decay_type", "min_lr_factor")
    given = {name: there.take(f"lr_scheduler.{name}") for name in names}
    total = given["total_steps"] or steps
    warmup = min(given["warmup_steps"] or 0, total)
    decay = total - warmup
    if given["decay_ratio"] is not None:
        decay = min(decay, round(total * given["decay_ratio"]))
    there.values |= {
        "train.schedule.kind": "wsd" if decay else "constant",
        "train.schedule.warmup_steps": warmup,
        "train.schedule.steps": total + 1,
    }
    if decay:
        there.values["train.schedule.decay_steps"] = decay
        there.values["train.schedule.final_ratio"] = given["min_lr_factor"] or 0.0
    if given["decay_type"] not in (None, "linear"):
        reason = f"{given['decay_type']} has no train.schedule.kind; a linear decay is written"
        there.leave("lr_scheduler.decay_type", reason)
