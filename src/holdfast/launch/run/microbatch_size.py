"""`train.microbatch_size: auto`: chosen once, when a run begins, and then a value of the run."""

from __future__ import annotations

from holdfast.config.loading.load import LoadedConfig, PlannedValues
from holdfast.errors import ConfigError
from holdfast.launch.start.facts import Facts
from holdfast.options.registry import keys_without_formula
from holdfast.plan.memory.activations import has_estimate
from holdfast.plan.memory.microbatch_size import choose_microbatch_size
from holdfast.report.formatting import format_bytes, format_plural

KEY = "train.microbatch_size"


def by_microbatch_size(loaded: LoadedConfig, facts: Facts) -> PlannedValues:
    """Return a microbatch if the run file leaves it open: that of the run that continues, or the
    largest that fits. Samples of a step are dealt in microbatches, so a run keeps its size.

    The vocabulary must be known. Raises ConfigError if nothing says how much memory there is, if no
    formula says how much is needed, or if none fits."""
    config = loaded.config
    if config.train.microbatch_size:
        return {}
    if size := stored_microbatch_size(facts):
        return {KEY: (size, "that of the run")}
    if not has_estimate(config):
        raise ConfigError(
            f"{KEY} auto needs a formula of the memory, and none covers this model, precision, "
            f"mask, task, {keys_without_formula()} or layout.ep",
            where=loaded.where(KEY),
            remedy=f"name a number: {KEY}=2",
        )
    if not config.model.vocab_size:
        raise ConfigError(
            f"{KEY} auto needs the vocabulary, and the dataset is not prepared",
            where=loaded.where(KEY),
            remedy="name it with model.vocab_size=32000, or prepare: holdfast data prepare",
        )
    limit = _limit(loaded, facts)
    found, least = choose_microbatch_size(config, limit)
    if found is None:
        raise ConfigError(
            f"no microbatch fits: one of {format_plural(least.size, 'sample')} needs "
            f"{format_bytes(least.peak)} on a rank, and there are {format_bytes(limit)}",
            where=loaded.where(KEY),
            remedy=f"use train.memory.device_gb={-(-least.peak // 10**5) / 10**4:g} or more",
        )
    reason = f"{format_bytes(found.peak)} of {format_bytes(limit)} on a rank, by the estimate"
    return {KEY: (found.size, reason)}


def describe_microbatch(loaded: LoadedConfig) -> list[str]:
    """A line for a size that was chosen."""
    origin = loaded.origins.get(KEY)
    if origin is None or origin.kind != "planned":
        return []
    return [f"{KEY} is {loaded.config.train.microbatch_size}: {origin.place}"]


def stored_microbatch_size(facts: Facts) -> int:
    """Return that of the run that continues; 0 if there is none."""
    size = facts.stored_config.get("train", {}).get("microbatch_size")
    return size if isinstance(size, int) else 0


def _limit(loaded: LoadedConfig, facts: Facts) -> int:
    """Bytes that a rank may use. Raises ConfigError if nothing says it."""
    limit = loaded.config.train.memory.limit
    if not limit and loaded.config.device not in ("cpu", "auto"):
        limit = min((each.memory_bytes for each in facts.hardware.accelerators), default=0)
    if not limit:
        raise ConfigError(
            f"{KEY} auto needs a limit, and the device {loaded.config.device} has none that is "
            "known",
            where=loaded.where(KEY),
            remedy=f"name one with train.memory.device_gb=4, or a number: {KEY}=2",
        )
    return limit
