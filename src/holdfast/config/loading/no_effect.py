"""Finds the values of a run file that can never take effect in the run that it describes.

Such a value is no mistake that stops a run. It is often left from a longer run, or it stands where
another key switches it off. `holdfast train` says each of them at the start.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import lcm

from holdfast.config.loading.fields import as_path, field_at, value_at
from holdfast.config.loading.identity import SCHEDULE_STEPS
from holdfast.config.loading.load import LoadedConfig
from holdfast.config.sections.features import USED_KEYS
from holdfast.config.sections.logging import MlflowConfig, WandbConfig
from holdfast.config.sections.memory import DEVICE, FILE, MOVABLE
from holdfast.config.sections.server import ParameterServerConfig
from holdfast.config.sections.task import SCRIPT_TASK
from holdfast.config.sections.train import SCHEDULES_WITHOUT_FINAL_RATIO
from holdfast.options.registry import option_keys


def find_without_effect(loaded: LoadedConfig) -> list[str]:
    """One sentence for each value, with its place and a remedy."""
    found = [
        *_given_twice(loaded),
        *_optimizer(loaded),
        *_schedule(loaded),
        *_intervals(loaded),
        *_switched_off(loaded),
        *_recomputation(loaded),
        *_of_the_decoder(loaded),
    ]
    return [f"{loaded.where(key)}: {key} {what}; {remedy}" for key, what, remedy in found]


_TRACKER_KEYS = {
    "wandb": tuple(WandbConfig.model_fields),
    "mlflow": tuple(MlflowConfig.model_fields),
}
_OF_STAGES = ("balance", "balance_costs", "schedule", "virtual_stages")
_OF_PAUSES = ("column", "above", "below", "max_hours")
Finding = tuple[str, str, str]  # key, what is wrong, remedy


def _given(loaded: LoadedConfig, key: str) -> bool:
    """Return True for a value that was written and is not the default: a default that does nothing
    is no surprise."""
    if not _written(loaded, key):
        return False
    value, info = value_at(loaded.config, as_path(key)), field_at(as_path(key))
    return info is None or value != info.get_default(call_default_factory=True, validated_data={})


def _written(loaded: LoadedConfig, key: str) -> bool:
    origin = loaded.origins.get(key)
    return origin is not None and origin.kind in ("file", "command line")


def _given_twice(loaded: LoadedConfig) -> Iterator[Finding]:
    """Words of the command line that a later one replaces."""
    for index, word in enumerate(loaded.overrides):
        key = word.partition("=")[0]
        later = [each for each in loaded.overrides[index + 1 :] if each.startswith(f"{key}=")]
        if later and later[-1] != word:
            yield key, f"is given twice, and {word} has no effect", f"leave out {word}"


def _optimizer(loaded: LoadedConfig) -> Iterator[Finding]:
    """Options of another optimizer, with their defaults: other values are refused."""
    optimizer = loaded.config.train.optimizer
    for name in optimizer.unused_keys:
        key = f"train.optimizer.{name}"
        place = loaded.origins[key].place
        whole = "{" in place and not re.search(rf"\b{name}\b", place)  # a section, without it
        if _written(loaded, key) and not whole:
            yield key, f"has no effect on {optimizer.name}", "remove it"


def _schedule(loaded: LoadedConfig) -> Iterator[Finding]:
    train = loaded.config.train
    schedule, steps = train.schedule, train.steps
    if schedule.is_function:
        for key in ("warmup_steps", "decay_steps", "final_ratio", "counts_from"):
            if _given(loaded, f"train.schedule.{key}"):
                what = f"has no effect on schedule.kind {schedule.kind}"
                yield f"train.schedule.{key}", what, "remove it"
        return
    warmup, key = schedule.warmup_steps, "train.schedule.warmup_steps"
    shorter = steps // 10
    if warmup > steps:
        yield (
            key,
            f"{warmup} is longer than the run of {steps} steps, so the learning rate ends at "
            f"{steps / warmup:.0%} of train.optimizer.learning_rate",
            f"use {shorter}, or a longer run",
        )
    elif warmup == steps and schedule.kind != "constant":
        yield (
            key,
            f"{warmup} is the length of the run, so the {schedule.kind} decay never begins",
            f"use {shorter}, or a longer run",
        )
    if schedule.steps and schedule.kind == "constant":
        yield SCHEDULE_STEPS, "has no effect with schedule.kind constant", "remove it"
    steps = train.schedule_steps
    decay, key = schedule.decay_steps, "train.schedule.decay_steps"
    if schedule.kind != "wsd":
        if decay and _given(loaded, key):
            yield (
                key,
                f"{decay} is for schedule.kind wsd, and this is {schedule.kind}",
                "use train.schedule.kind wsd, or remove it",
            )
    elif decay > max(0, steps - min(warmup, steps - 1)):
        room = max(0, steps - warmup)
        yield (
            key,
            f"{decay} and the warm-up of {warmup} are longer than the schedule's {steps} steps, so "
            f"the decay is cut to {max(1, room)}",
            f"use {max(1, room)} or less",
        )
    key = "train.schedule.final_ratio"
    if schedule.kind in SCHEDULES_WITHOUT_FINAL_RATIO and _given(loaded, key):
        yield (
            key,
            f"has no effect with schedule.kind {schedule.kind}",
            "use train.schedule.kind linear, or remove it",
        )


def _intervals(loaded: LoadedConfig) -> Iterator[Finding]:
    config = loaded.config
    steps, save = config.train.steps, config.checkpoint
    for index, stage in enumerate(config.train.batch_warmup):
        if stage.from_step > steps:
            yield (
                f"train.batch_warmup.{index}.from_step",
                f"{stage.from_step} comes after the last step {steps}, so the batch of "
                f"{stage.batch_size} is never used",
                "remove the stage, or raise train.steps",
            )
    for index, mix in enumerate(config.data.mix):
        if mix.from_step > steps:
            yield (
                f"data.mix.{index}.from_step",
                f"{mix.from_step} comes after the last step {steps}, so these weights are never "
                "used",
                "remove the item, or raise train.steps",
            )
    every = config.train.evaluate.every
    if every > steps and _given(loaded, "train.evaluate.every"):
        yield (
            "train.evaluate.every",
            f"{every} is longer than the run of {steps} steps, so there is one evaluation, at the "
            "end",
            f"use {max(1, steps // 4)}, or 0 to ask for that",
        )
    for key, value in (
        ("checkpoint.every_steps", save.every_steps if save.interval == "fixed" else 0),
        ("checkpoint.memory_every_steps", save.memory_every_steps),
        ("checkpoint.keep_every", save.keep_every),
        ("cluster.check_every_steps", config.cluster.check_every_steps),
        ("layout.trace_every", config.layout.trace_every),
    ):
        if isinstance(value, int) and value > steps and _given(loaded, key):
            yield (
                key,
                f"{value} is longer than the run of {steps} steps, so it never comes",
                f"use {max(1, steps // 4)}, or remove it",
            )
    if save.keep_best and save.interval == "fixed" and save.every_steps and not save.every_seconds:
        shared = lcm(save.every_steps, every) if every else steps
        if shared > steps:
            yield (
                "checkpoint.keep_best",
                f"{save.keep_best} keeps checkpoints of validated steps, and before the end no "
                "step is both saved and validated",
                f"use train.evaluate.every={save.every_steps}",
            )
    if config.layout.exchange == "gathered" and config.layout.reduction == "fast":
        yield (
            "layout.exchange",
            "gathered has no effect with layout.reduction fast, which is the backend's all-reduce",
            "use layout.reduction=tree, or remove it",
        )
    if config.layout.trace_step > steps:
        yield (
            "layout.trace_step",
            f"{config.layout.trace_step} comes after the last step {steps}, so nothing is recorded",
            f"use {steps} or less",
        )
    profiled = config.train.profile.steps
    most = config.layout.workers
    far = [rank for rank in config.train.profile.ranks if most and rank >= most]
    if profiled is not None and far and not config.cluster.node:
        yield (
            "train.profile.ranks",
            f"names rank {far[0]}, and {most} workers have the ranks 0 to {most - 1}",
            f"use {[r for r in config.train.profile.ranks if r < most] or [0]}",
        )
    if profiled is not None and profiled[0] > steps:
        yield (
            "train.profile.steps",
            f"{list(profiled)} comes after the last step {steps}, so nothing is profiled",
            f"use {steps} or less",
        )
    elif profiled is not None and profiled[1] > steps:
        yield (
            "train.profile.steps",
            f"{list(profiled)} ends after the last step {steps}, so the profile has fewer steps",
            f"use {[profiled[0], steps]}",
        )


def _of_the_decoder(loaded: LoadedConfig) -> Iterator[Finding]:
    """Keys of the built-in decoder and its tokens, where a task is trained."""
    task = loaded.config.task
    if not task.name:
        return
    unused = ("model",) if not task.data and task.parameters else ("model", "data")
    for key in loaded.origins:
        if key.split(".")[0] in unused and _given(loaded, key):
            yield key, f"has no effect on {task.label}", "remove it"
    if task.has_own_data and not task.validation and _given(loaded, "train.evaluate.every"):
        problem = f"has no effect, as {task.label} has no validation samples"
        remedy = "return samples from validation()"
        if task.name == SCRIPT_TASK:
            remedy = "call run.validate() in it"
        yield "train.evaluate.every", problem, f"remove it, or {remedy}"


def _recomputation(loaded: LoadedConfig) -> Iterator[Finding]:
    config = loaded.config
    train, key = config.train, "train.recompute_keep"
    if "selective" not in train.recompute_words and _given(loaded, key):
        words = ", ".join(train.recompute_words)
        yield (
            key,
            f"has no effect with train.recompute {words}",
            "use train.recompute selective, or remove it",
        )
    key = "train.partition_activations"
    if not train.partition_activations or not _given(loaded, key):
        return
    reasons = {
        "train.recompute none": not train.recomputes,
        "layout.tp 1": all(degrees.tp == 1 for _, degrees in config.layout.kinds),
        "layout.sequence_parallel true, which cuts inputs of blocks anyway": (
            config.layout.sequence_parallel
        ),
        "a task": not config.has_decoder,
        f"train.memory.activations {train.memory.activations}, which moves inputs of blocks": (
            train.memory.activations != DEVICE
        ),
    }
    if reason := next((words for words, holds in reasons.items() if holds), ""):
        yield key, f"has no effect with {reason}", "remove it"


Rule = tuple[str, bool, str]
"""(key, whether it has no effect, because of what)"""


def _of_learners(loaded: LoadedConfig) -> Iterator[Rule]:
    outer, codec = loaded.config.outer, loaded.config.outer.codec
    for key in loaded.origins:
        if key.startswith("outer.") and key != "outer.learners":
            yield key, not outer.is_on, "outer.learners 0"
    if not outer.is_on:
        return
    yield "outer.codec.share", codec.name != "topk", f"outer.codec.name {codec.name}"
    yield "outer.codec.rank", codec.name != "powersgd", f"outer.codec.name {codec.name}"
    yield "outer.codec.error_feedback", not codec.is_on, "outer.codec.name none"
    yield "outer.trust.on_mismatch", not outer.trust.checks, "outer.trust.checks 0"
    yield "outer.trust.limit", not outer.trust.is_on, "no other key of outer.trust"
    yield "outer.overlap_alpha", not outer.overlap_steps, "outer.overlap_steps 0"
    yield "outer.faulty", not outer.counts_faulty, f"outer.average {outer.average}"
    for name in type(outer.free).model_fields:
        yield f"outer.free.{name}", not outer.is_free, "outer.mode fixed"
    late = outer.free.late
    yield "outer.free.discount", late != "discount", f"outer.free.late {late}"


def _of_servers(server: ParameterServerConfig) -> Iterator[Rule]:
    used = {
        "update_microbatches": server.is_on,
        "staleness": server.may_be_stale,
        "rate_scaling": server.may_be_stale or server.grows,
        "max_update_microbatches": server.mode == "synchronous",
        "noise_decay": server.mode == "synchronous",
        "straggling": server.mode == "switching",
    }
    for name, has_effect in used.items():
        yield f"server.{name}", not has_effect, f"server.mode {server.mode}"
    if server.mode == "synchronous":
        yield "server.noise_decay", not server.grows, "server.max_update_microbatches 0"


def _switched_off(loaded: LoadedConfig) -> Iterator[Finding]:
    """Values that another key switches off."""
    config = loaded.config
    save, cluster, data, layout = config.checkpoint, config.cluster, config.data, config.layout
    memory, kinds = config.train.memory, [degrees for _, degrees in layout.kinds]
    no_stages = all(degrees.pp == 1 for degrees in kinds)
    are_named = any(d.stages for d in kinds) and all(d.pp == 1 or d.stages for d in kinds)
    method = f"layout.cp_method {layout.cp_method}"
    in_files = any(getattr(memory, key) == FILE for key in MOVABLE)
    adaptive = save.interval == "adaptive"
    no_peers = not save.peers
    rules = [
        ("train.memory.folder", not in_files, "no state in a file"),
        ("train.memory.piece_mb", not memory.moves_state, "all state on the device"),
        ("train.memory.update", not memory.moves_state, "all state on the device"),
        ("checkpoint.every_steps", adaptive, "checkpoint.interval adaptive"),
        ("checkpoint.every_seconds", adaptive, "checkpoint.interval adaptive"),
        ("checkpoint.min_seconds", not adaptive, "checkpoint.interval fixed"),
        ("checkpoint.max_seconds", not adaptive, "checkpoint.interval fixed"),
        ("checkpoint.bucket_every_seconds", not save.bucket, "no checkpoint.bucket"),
        ("checkpoint.bucket_keep_last", not save.bucket, "no checkpoint.bucket"),
        ("checkpoint.peer_every_steps", no_peers, "no checkpoint.peers"),
        ("checkpoint.peer_copies", no_peers, "no checkpoint.peers"),
        *((f"layout.{name}", no_stages, "layout.pp 1") for name in _OF_STAGES),
        ("layout.balance", are_named, "the stages that the file names"),
        ("layout.balance_costs", are_named, "the stages that the file names"),
        ("layout.cp_method", all(degrees.cp == 1 for degrees in kinds), "layout.cp 1"),
        ("layout.cp_ring", layout.cp_method != "ulysses-ring", method),
        *(rule for option in option_keys() for rule in option.without_effect(layout)),
        *((f"pause.{n}", not config.pause.file, "no pause.file") for n in _OF_PAUSES),
        ("data.curriculum.by", config.rollout.is_on, "rollout.prompts"),
        ("cluster.notices_at", cluster.notices == "none", "cluster.notices none"),
        ("cluster.below_minimum", cluster.min_nodes == 1, "cluster.min_nodes 1"),
        *(
            (f"logging.{name}.{key}", name not in config.logging.trackers, f"no tracker {name}")
            for name, keys in _TRACKER_KEYS.items()
            for key in keys
        ),
        ("data.tokenizer.vocab_size", data.tokenizer.path is not None, "data.tokenizer.path"),
        ("data.tokenizer.sample_bytes", data.tokenizer.path is not None, "data.tokenizer.path"),
    ]
    chat = data.chat
    rules += [
        (f"data.chat.{name}", not data.has_chat, "no chat data") for name in type(chat).model_fields
    ]
    kind = data.features.kind
    rules += [
        (f"data.features.{name}", name not in USED_KEYS[kind], f"data.features.kind {kind}")
        for name in type(data.features).model_fields
        if name != "kind"
    ]
    lora = type(config.lora).model_fields
    rules += [(f"lora.{n}", not config.lora.rank, "lora.rank 0") for n in lora if n != "rank"]
    rules += [*_of_learners(loaded), *_of_servers(config.server)]
    rules.append(("train.profile.ranks", not config.train.profile.steps, "no train.profile.steps"))
    if data.has_chat:
        rules.append(("data.chat.template", bool(chat.template_file), "data.chat.template_file"))
        other = bool(chat.template_file) or chat.template != "folder"
        rules.append(("data.chat.template_name", other, "data.chat.template or template_file"))
    for index, source in enumerate(data.sources):
        key = f"data.sources.{index}"
        whole = source.kind in ("text", "python-stdlib")
        rules += [
            (f"{key}.field", whole, f"kind {source.kind}"),
            (f"{key}.field", source.rows in ("instruction", "prompt"), f"rows {source.rows}"),
            (f"{key}.split", source.kind != "huggingface", f"kind {source.kind}"),
            (f"{key}.path", source.kind == "python-stdlib", f"kind {source.kind}"),
            (f"{key}.media", not data.features.is_on, "data.features.kind none"),
            (f"{key}.media", source.kind == "files", f"kind {source.kind}"),
        ]
    if len(data.sources) == 1:
        rules.append(("data.sources.0.weight", True, "one source"))
    for key, off, why in rules:
        if off and _given(loaded, key):
            yield key, f"has no effect with {why}", "remove it"
