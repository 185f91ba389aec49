"""Jobs, teams, and the rules of a queue: what the admission study is given. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True)
class Job:
    """One training job in its fixed decomposition: pods of a node or of a part of one.

    Tensor parallelism stays inside a pod, and data parallelism spans the pods. Their gradients are
    summed once a step, by one ring for each device of a pod.

    submit_s: seconds from the start of the study. pods, devices: of the job, and of one pod.
    seconds: that it trains on all pods in the best place, with no slow node. compute_s: of a step
    on all pods. gradient_bytes: that one ring sums. microbatches: of one pod in a step, if all
    pods run. min_pods: an elastic job can train on so few; `pods` for a rigid one. priority: the
    larger goes first. estimate_s: what its owner says of `seconds`; never less.
    """

    name: str
    team: str
    submit_s: float
    pods: int
    devices: int
    seconds: float
    estimate_s: float
    priority: int = 0
    min_pods: int = 0
    compute_s: float = 1.0
    gradient_bytes: float = 0.0
    microbatches: int = 4

    @property
    def least_pods(self) -> int:
        return self.min_pods or self.pods

    @property
    def size(self) -> int:
        """Devices of all pods."""
        return self.pods * self.devices


@dataclass(frozen=True)
class Team:
    """A queue of its own, with a nominal quota of devices. borrow: devices above the quota that it
    may use while other teams leave theirs idle (Kueue: borrowingLimit)."""

    name: str
    quota: int
    borrow: float = inf


@dataclass(frozen=True)
class Rules:
    """What every admission policy is subject to, in seconds.

    save_s: between two checkpoints; an eviction loses what came after the last. start_s: from
    the last pod's place to the first step. resize_s: pause of an elastic job that changes its pods.
    group_timeout_s: pods of an incomplete group give their devices back after it (600: the
    join_timeout of torch's rendezvous). backoff_s, max_backoff_s: until such a job may try again,
    doubled each time (Kueue: waitForPodsReady, 60 s to 3,600 s). evicted_save: whether an evicted
    job saves before it ends, so that it loses nothing. reclaims: a team within its quota takes
    borrowed devices back. Without it, the team waits until they are free.
    """

    save_s: float = 1800.0
    start_s: float = 120.0
    resize_s: float = 15.0
    group_timeout_s: float = 600.0
    backoff_s: float = 60.0
    max_backoff_s: float = 3600.0
    evicted_save: bool = False
    reclaims: bool = True
