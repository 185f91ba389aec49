"""A loaded run file and facts -> planned values, each with its reason.

A stage asks first (`gather`) and then plans (`resolvers`). The stages have an order, because a
later question needs an earlier answer. The caller validates the result once, at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from holdfast.config.loading.load import LoadedConfig, PlannedValues
from holdfast.launch.start.facts import Facts
from holdfast.launch.start.screen import Screen

Resolver = Callable[[LoadedConfig, Facts], PlannedValues]
"""A pure function. Raises UserError for values that do not go with the facts."""
Gather = Callable[[LoadedConfig, Facts, Screen], Facts]


@dataclass(frozen=True)
class Stage:
    """One question to the world, and what follows from its answer."""

    gather: Gather
    resolvers: tuple[Resolver, ...]


def resolve(loaded: LoadedConfig, facts: Facts, resolvers: Sequence[Resolver]) -> LoadedConfig:
    """Fill in what the resolvers plan, in their order. Raises UserError."""
    for resolver in resolvers:
        loaded = loaded.with_values(resolver(loaded, facts))
    loaded.refuse_broken_rules()
    return loaded


def run_stages(
    loaded: LoadedConfig, facts: Facts, stages: Sequence[Stage], screen: Screen
) -> tuple[LoadedConfig, Facts]:
    """Ask and resolve stage by stage. Raises UserError."""
    for stage in stages:
        facts = stage.gather(loaded, facts, screen)
        loaded = resolve(loaded, facts, stage.resolvers)
    return loaded, facts
