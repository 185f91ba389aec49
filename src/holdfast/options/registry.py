"""The options of the run file, and the one way to their files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from holdfast.config.run import RunConfig
    from holdfast.options.protocols import Apply, Cost, Keys

OPTIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "tp_by": ("keys", "cost", "apply"),
        "async_tp": ("keys", "cost", "apply"),
        "expert_copies": ("keys", "cost", "apply"),
        "asynchronous": ("keys", "cost", "apply"),
        "zero2_reduce": ("keys", "cost"),  # its effect is that of another stage of ZeRO
        "quantized": ("keys", "cost", "apply"),
        "short_state": ("keys", "apply"),
        "keep_zeros": ("keys", "apply"),
        "qat": ("keys", "apply"),
    }
)
"""The files of each folder, in the order in which refusals are looked for."""
Hook = TypeVar("Hook")


@cache
def option_keys() -> tuple[Keys, ...]:
    return tuple(_load(name, "keys", "OptionKeys")() for name in OPTIONS)


@cache
def option_costs() -> tuple[Cost, ...]:
    names = [name for name, files in OPTIONS.items() if "cost" in files]
    return tuple(_load(name, "cost", "OptionCost")() for name in names)


def hooks(section: str, values: Any, get: Callable[[Apply], Hook | None]) -> list[Hook]:
    """Load the effects of the options that a section asks for. Return the hooks that they have."""
    effects: list[Apply] = [_load(name, "apply", "APPLY") for name in _used({section: values})]
    return [hook for effect in effects if (hook := get(effect)) is not None]


def effect_modules(config: RunConfig) -> list[str]:
    """Return the modules that the workers of a run load for its options."""
    return [f"holdfast.options.{name}.apply" for name in _used(_sections(config))]


def run_hooks(config: RunConfig, get: Callable[[Apply], Hook | None]) -> list[Hook]:
    """Load the effects of all options that a run asks for. Return the hooks that they have."""
    effects: list[Apply] = [_load(name, "apply", "APPLY") for name in _used(_sections(config))]
    return [hook for effect in effects if (hook := get(effect)) is not None]


def used_option_keys(config: RunConfig) -> list[str]:
    """Return the keys of the options whose effects a run asks for."""
    used = _used(_sections(config))
    return [keys.key for name, keys in zip(OPTIONS, option_keys(), strict=True) if name in used]


def _sections(config: RunConfig) -> dict[str, Any]:
    train = config.train
    return {"layout": config.layout, "train": train, "train.optimizer": train.optimizer}


def unmodelled_option(config: RunConfig) -> str:
    """Return the first key that keeps the planner from predicting a step; "" if there is none."""
    return next((key for cost in option_costs() if (key := cost.unmodelled(config))), "")


def _used(sections: dict[str, Any]) -> list[str]:
    """Return the options with an effect that these sections, by name, ask for."""
    names = []
    for (name, files), keys in zip(OPTIONS.items(), option_keys(), strict=True):
        section = sections.get(keys.key.rpartition(".")[0])
        if "apply" in files and section is not None and keys.is_used(section):
            names.append(name)
    return names


def _load(option: str, file: str, name: str) -> Any:
    return getattr(import_module(f"holdfast.options.{option}.{file}"), name)
