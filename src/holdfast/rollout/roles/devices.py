"""Which devices of a node its actors compute on. No torch."""

from __future__ import annotations

from holdfast.config.run import RunConfig
from holdfast.core.devices import device_kind
from holdfast.machine.hardware import detect_hardware
from holdfast.rollout.decode.server import NOT_PROMISED


def actor_devices(config: RunConfig, places: int) -> tuple[str, ...]:
    """Return the devices that the node's trainers leave free, or all if they use every one. places:
    devices that trainers may use."""
    kind = device_kind(config.device)
    if not kind.has_index:
        return (config.device,)
    count = max(1, len(detect_hardware().accelerators))
    free = range(places, count) if places < count else range(count)
    return tuple(f"{config.device}:{index}" for index in free)


def describe_roles(config: RunConfig, places: int) -> str:
    """Return a line about the roles of a node; "" for a run that trains on a dataset."""
    rollout = config.rollout
    if not rollout.is_on:
        return ""
    if not rollout.actors:
        return "roles: the trainers generate completions and rate them (rollout.actors 0)"
    devices = actor_devices(config, places)
    if rollout.server.url:
        return (
            f"roles of each node: {places} trainers, {rollout.actors} actors that ask "
            f"{rollout.server.url}, {rollout.scorers} scorers; lag {rollout.lag}. {NOT_PROMISED}"
        )
    where = f"on {', '.join(devices)}" if device_kind(config.device).has_index else "on cpu"
    shared = places >= len(devices) and device_kind(config.device).has_index
    with_whom = ", which trainers use too" if shared else ""
    return (
        f"roles of each node: {places} trainers, {rollout.actors} actors {where}{with_whom}, "
        f"{rollout.scorers} scorers; lag {rollout.lag}"
    )
