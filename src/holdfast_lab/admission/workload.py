"""A workload of several teams, drawn from a seed. Every parameter has its source. Pure.

    durations   10^x minutes, x even in [1.5, 3] for four jobs in five, else in [3, 4]
                (Gavel, Narayanan et al., OSDI 2020, section 7.1)
    sizes       70 % of the jobs have one worker, 10 % two, 15 % four, 5 % eight (Gavel's
                generator, after Microsoft's Philly trace). Here a worker is a pod of a complete
                node. A part of the jobs has one pod of one, two or four devices, by the same
                weights
    models      of 1.3, 2.7, 6.7 and 13 billion parameters on 1, 2, 4 and 8 pods (Brown et al.,
                2020, table 2.1); 65,536 tokens a pod and step at 54 % of 312 TFLOP/s (the median
                of the published A100-80 rows of LLM Foundry), gradients in 16 bits
    estimates   even between one and three times the duration (the f-model with f = 2; Mu'alem and
                Feitelson, IEEE TPDS 2001)
    slow nodes  one in 48, as BLOOM's; by a factor even in its logarithm between 1.05 (BLOOM) and
                1.5. The upper end is assumed

Teams, quotas, priorities, the swing of their demand over a day and the shares of small and elastic
jobs are assumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log, pi, sin
from random import Random

from holdfast_lab.admission.fabric import Fabric
from holdfast_lab.admission.jobs import Job, Team

_DAY = 86400.0
_PODS = ((1, 0.70), (2, 0.10), (4, 0.15), (8, 0.05))
_SMALL_DEVICES = ((1, 0.70), (2, 0.10), (4, 0.15))
_PARAMETERS = {1: 1.3e9, 2: 2.7e9, 4: 6.7e9, 8: 13e9}
_TOKENS_A_POD = 65536
_FLOPS_A_DEVICE = 0.54 * 312e12
_TEAMS = (("red", 0.5, 0.35), ("green", 0.3, 0.30), ("blue", 0.2, 0.35))
"""Name, share of the devices as quota, share of the demand: one team has more quota than work, and
one less."""


@dataclass(frozen=True)
class Workload:
    """load: devices that the jobs would keep busy on average, over all there are. days: in which
    jobs are submitted. small: share of the jobs that need a part of a node. swing: of each team's
    demand over a day, 0 to 1, each at another hour. high: share of the jobs with high priority.
    elastic: share of the jobs of several pods that can train on a quarter of them."""

    load: float = 0.9
    days: float = 7.0
    small: float = 0.3
    swing: float = 0.8
    high: float = 0.15
    elastic: float = 0.5


def example_teams(fabric: Fabric) -> tuple[Team, ...]:
    """Three teams, whose quotas are all devices together."""
    quotas = [round(share * fabric.devices) for _, share, _ in _TEAMS]
    quotas[-1] = fabric.devices - sum(quotas[:-1])
    return tuple(Team(name, quota) for (name, *_), quota in zip(_TEAMS, quotas, strict=True))


def make_jobs(
    workload: Workload, fabric: Fabric, seed: int, teams: Sequence[str] = ()
) -> tuple[Job, ...]:
    """Jobs in the order of their submission. teams: names, with equal demand; without, those of
    `example_teams`."""
    draw = Random(f"{seed}/admission jobs")
    shares = {name: 1 / len(teams) for name in teams} if teams else {n: d for n, _, d in _TEAMS}
    full = max(node.devices for node in fabric.nodes)
    small = workload.small
    devices = small * _mean(_SMALL_DEVICES) + (1 - small) * full * _mean(_PODS)
    rate = workload.load * fabric.devices / (devices * _mean_seconds())
    # The most pods of complete nodes: as many as there are such nodes, of the numbers drawn.
    room = sum(node.devices == full for node in fabric.nodes)
    size = full, max(pods for pods, _ in _PODS if pods <= room)
    jobs: list[Job] = []
    for place, (team, share) in enumerate(shares.items()):
        at = 0.0
        phase = 2 * pi * place / len(shares)
        peak = rate * share * (1 + workload.swing)
        while (at := at + draw.expovariate(peak)) < workload.days * _DAY:
            now = 1 + workload.swing * sin(2 * pi * at / _DAY + phase)
            if draw.random() * (1 + workload.swing) < now:
                jobs.append(_job(f"{team}-{len(jobs)}", team, at, workload, draw, size))
    return tuple(sorted(jobs, key=lambda job: job.submit_s))


def slow_nodes(fabric: Fabric, seed: int, share: float = 1 / 48) -> dict[int, float]:
    """Factor of each slow node."""
    draw = Random(f"{seed}/admission slow nodes")
    return {
        node.number: exp(draw.uniform(log(1.05), log(1.5)))
        for node in fabric.nodes
        if draw.random() < share
    }


def _job(
    name: str, team: str, at: float, load: Workload, draw: Random, size: tuple[int, int]
) -> Job:
    """One job. size: devices of a complete node, and the most pods of complete nodes."""
    full, largest = size
    seconds = 60.0 * 10 ** (draw.uniform(1.5, 3) if draw.random() < 0.8 else draw.uniform(3, 4))
    is_small = draw.random() < load.small
    pods = 1 if is_small else min(_weighted(_PODS, draw), largest)
    devices = min(_weighted(_SMALL_DEVICES, draw), full) if is_small else full
    parameters = _PARAMETERS[pods]
    is_elastic = pods > 1 and draw.random() < load.elastic
    return Job(
        name,
        team,
        at,
        pods,
        devices,
        seconds,
        estimate_s=seconds * draw.uniform(1.0, 3.0),
        priority=int(draw.random() < load.high),
        min_pods=max(1, pods // 4) if is_elastic else 0,
        compute_s=6 * parameters * _TOKENS_A_POD / (devices * _FLOPS_A_DEVICE),
        gradient_bytes=2 * parameters / devices if pods > 1 else 0.0,
    )


def _weighted(weights: Sequence[tuple[int, float]], draw: Random) -> int:
    return draw.choices([value for value, _ in weights], [weight for _, weight in weights])[0]


def _mean(weights: Sequence[tuple[int, float]]) -> float:
    return sum(value * weight for value, weight in weights) / sum(w for _, w in weights)


def _mean_seconds() -> float:
    def mean(low: float, high: float) -> float:
        return float((10**high - 10**low) / ((high - low) * log(10)))

    return 60.0 * (0.8 * mean(1.5, 3) + 0.2 * mean(3, 4))
