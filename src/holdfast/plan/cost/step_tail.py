"""Seconds of a step after its passes: sums of gradients that no backward hides, and the update.

Gradients travel in buckets while the backward computes. The last bucket is ready only at its end,
so no backward hides it. Experts are shared by `copies` ranks of a replica, all else by all of
dp_shard.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from holdfast.plan.cost.choice import Choice, ReplicaChoice
from holdfast.plan.cost.collectives import allreduce_s, gather_s
from holdfast.plan.cost.group_links import GroupLinks
from holdfast.plan.cost.workload import StateBytes, Workload
from holdfast.plan.hardware.devices import DeviceType
from holdfast.plan.memory.stage_bytes import (
    Held,
    expert_parameters,
    layer_parameters,
    moved_to_host,
    rank_parameters,
)


def step_tail(
    workload: Workload,
    choice: Choice,
    group: ReplicaChoice,
    device: DeviceType,
    links: GroupLinks,
    layers: Held,
    *,
    hidden: float,
    bucket_bytes: float,
    update: float | None,
) -> dict[str, float]:
    """Return the seconds by part, for the ranks with these layers.

    Args:
        hidden: seconds of a backward that hides sums; inf: it hides all of them.
        bucket_bytes: of gradients that travel together; 0: all do.
        update: measured seconds of the update of all parameters; None: from bytes.
    """
    state, costs, host_bytes_s = workload.state, device.steps, device.host_bytes_s
    shards, number = group.dp_shard, choice.number_of_replicas
    # how many times the shards of a replica sum their gradients
    scatters = group.microbatches if workload.scatters_each and choice.zero == 2 else 1
    experts = expert_parameters(layers, group.tp, choice.ep)
    copies = max(1, shards * group.cp // choice.ep) if experts else 1
    dense = rank_parameters(layers, group.tp, choice.ep) - experts
    own = dense / shards + experts / copies
    of = _Sums(state, choice, group, links, bucket_bytes / state.gradients)
    sums, gathers = of.all_s(dense), 0.0
    sums += _same_parts_s(layers, state, group, links)
    before = (scatters - 1) * max(0.0, of.scatters_s(dense) - hidden)  # behind earlier backwards
    if experts:
        sums += allreduce_s(links.replicas, experts / copies * state.gradients, number)
    if choice.zero < 3:
        gathers = gather_s(links.shards, dense * state.weights, shards)
        if experts:
            sums += gather_s(links.copies, experts * state.gradients, copies)
            gathers += gather_s(links.copies, experts * state.weights, copies)
    first = layer_parameters(layers[0][0], group.tp, choice.ep)  # its gradient comes last
    last = 0.0 if hidden == inf else of.all_s(max(min(first, dense), min(dense, of.bucket)))
    touched_a_second = device.touched_a_second(workload.precision)
    moved_s = costs.update_moves * own * state.updated / touched_a_second
    moved = own * moved_to_host(state, choice, group)  # from the host's memory, and back
    copied = 2 * moved / host_bytes_s if moved and host_bytes_s else 0.0
    return {
        "gradients": before + max(last, sums - hidden),
        "parameters": gathers,
        "update": costs.step_s + copied + (moved_s if update is None else update / shards),
    }


def _same_parts_s(
    layers: Held, state: StateBytes, group: ReplicaChoice, links: GroupLinks
) -> float:
    """Seconds in which ranks of tp that hold the same of a part add up its gradients."""
    seconds = 0.0
    for layer, number in layers:
        for part in (0, 1) if layer.part_tp else ():
            degree = layer.degree(part, group.tp)
            own = layer.part_parameters(part) / degree / group.dp_shard
            size, link = own * state.gradients, links.parts[part][1]
            seconds += number * allreduce_s(link, size, group.tp // degree)
    return seconds


@dataclass(frozen=True, slots=True)
class _Sums:
    """Sums of gradients of dense parameters. bucket: parameters that travel together."""

    state: StateBytes
    choice: Choice
    group: ReplicaChoice
    links: GroupLinks
    bucket: float

    def _in_buckets(self, parameters: float) -> tuple[int, float]:
        pieces = max(1, round(parameters / self.bucket)) if self.bucket else 1
        return pieces, parameters * self.state.gradients / pieces

    def scatters_s(self, parameters: float) -> float:
        """Of one microbatch, between the shards of a replica."""
        pieces, size = self._in_buckets(parameters)
        if self.choice.zero == 3:
            return 0.0
        return pieces * gather_s(self.links.shards, size, self.group.dp_shard)

    def all_s(self, parameters: float) -> float:
        pieces, size = self._in_buckets(parameters)
        ranks = self.choice.number_of_replicas * self.group.cp
        reduced = allreduce_s(self.links.replicas, size / self.group.dp_shard, ranks)
        return pieces * reduced + self.scatters_s(parameters)
