"""The coordinator's tracker of bad steps, and their consequences for the next generation.

All ranks detect a bad step alike, do not apply it, and hold. Each rank then reports the same:
which microbatches may have caused it, and how they were assigned. This module maps the replicas to
devices for `policy.detection.bad_steps`. A device is the processes of a replica, whose numbers stay
while ranks change. The decision goes into the object of the next generation:

    skips   All microbatches that the run leaves out, each with its reason. The list only grows.
            Every object repeats it, so that the next coordinator knows it.
    again   The step to repeat, and which replicas must not compute which microbatches.
"""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.core.data.skips import Skips
from holdfast.elastic.protocol.generation_record import GenerationRecord
from holdfast.elastic.run_result import RunEndedError
from holdfast.events import Blamed, Event
from holdfast.layout import Topology
from holdfast.policy.detection.bad_steps import (
    BadStep,
    BadStepAction,
    BadStepPolicy,
    DeviceName,
    Finding,
    StepRetry,
)
from holdfast.policy.recovery.survivors import HeldState, RejectedStep

WorkerId = tuple[str, int]
"""A node and one of its processes."""

_GIVE_UP_HINT = (
    "the state before that step is unharmed: look at its data, or try a lower "
    "train.optimizer.learning_rate"
)


class BadStepTracker:
    """The bad steps of one term."""

    def __init__(self) -> None:
        self._policy = BadStepPolicy()
        self._newest_judged_generation = 0  # the newest generation of which a bad step is known
        self._workers_of_device: dict[DeviceName, frozenset[WorkerId]] = {}
        self._pending_events: list[Event] = []

    @property
    def skips(self) -> Skips:
        return self._policy.skips

    def load_record(self, record: GenerationRecord) -> None:
        """Take over the skips of the newest generation, at the beginning of a term."""
        self._policy = BadStepPolicy(record.skips)

    def take_events(self) -> list[Event]:
        """Return the events for the journal, each once."""
        out, self._pending_events = self._pending_events, []
        return out

    # --- reports --------------------------------------------------------------------------------
    def observe(
        self,
        previous: Topology | None,
        held_states: Mapping[int, HeldState],
        worker_ids: Mapping[int, WorkerId],
    ) -> None:
        """Take the reports of the stopped processes; called each time a generation is planned.

        `held_states`: the state of each process, by key. worker_ids: node and process of each key.
        Raises RunEndedError if the run cannot continue."""
        self._policy.step_passed(
            max((one.applied for one in held_states.values() if not one.torn), default=0)
        )
        if previous is None or previous.generation <= self._newest_judged_generation:
            return
        stood = {
            one.rank: worker_ids[key]
            for key, one in held_states.items()
            if one.generation == previous.generation
        }
        said = (held_states[key] for key in sorted(held_states))
        bad = next((o.bad for o in said if o.bad and o.generation == previous.generation), None)
        if bad is None:
            return
        self._newest_judged_generation = previous.generation
        decision = self._policy.step_failed(self._to_bad_step(bad, previous, stood))
        if decision.finding is not None:
            self._pending_events.append(_to_event(decision.finding))
        if decision.action is BadStepAction.GIVE_UP:
            raise RunEndedError(f"{decision.reason}; {_GIVE_UP_HINT}")

    def _to_bad_step(
        self, rejected: RejectedStep, previous: Topology, worker_by_rank: Mapping[int, WorkerId]
    ) -> BadStep:
        where: dict[int, DeviceName] = {}
        for replica, share in zip(previous.replicas, rejected.dealt, strict=True):
            workers = [
                worker_by_rank.get(rank, (previous.nodes[rank], 0)) for rank in replica.ranks
            ]
            # A name: "process 12 on a", "processes 12, 13 on a and process 7 on b".
            nodes: dict[str, list[int]] = {}
            for node, pid in workers:
                nodes.setdefault(node, []).append(pid)
            device = " and ".join(
                f"process{'es' if len(pids) > 1 else ''} {', '.join(map(str, pids))} on {node}"
                for node, pids in nodes.items()
            )
            self._workers_of_device[device] = frozenset(workers)
            where.update(dict.fromkeys(share, device))
        suspects = frozenset(rejected.suspects)
        return BadStep(
            rejected.step, rejected.what, where, suspects, rejected.again, rejected.bearable
        )

    # --- consequences ---------------------------------------------------------------------------
    @property
    def faulty_workers(self) -> frozenset[WorkerId]:
        """Workers that must not be used any more."""
        decision = self._policy.pending_decision
        devices = () if decision is None else decision.excluded_devices
        return frozenset(worker for device in devices for worker in self._workers_of_device[device])

    def retry(self, topology: Topology, seated: Mapping[int, WorkerId]) -> StepRetry | None:
        """Return the step that the next generation repeats, None for none. seated: the process of
        each rank."""
        if (decision := self._policy.pending_decision) is None:
            return None
        avoid = {}
        for leaf, device in decision.avoided_devices.items():
            workers = self._workers_of_device[device]
            at = [
                replica.index
                for replica in topology.replicas
                if workers & {seated[rank] for rank in replica.ranks if rank in seated}
            ]
            if at:
                avoid[leaf] = tuple(at)
        return StepRetry(
            decision.step,
            avoid,
            decision.action is BadStepAction.ACCEPT,
            decision.finding_if_passed,
        )


def _to_event(finding: Finding) -> Blamed:
    return Blamed(
        finding.blame,
        list(finding.microbatches),
        list(finding.devices),
        finding.why,
        step=finding.step,
    )
