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
from holdfast.elastic.run_result import EndedError
from holdfast.events import Blamed, Event
from holdfast.layout import Topology
from holdfast.policy.detection.bad_steps import Bad, Device, Do, Found, Retry, Trials
from holdfast.policy.recovery.survivors import BadStep, Held

Worker = tuple[str, int]
"""A node and one of its processes."""

_HINT = (
    "the state before that step is unharmed: look at its data, or try a lower "
    "train.optimizer.learning_rate"
)


class Doubting:
    """The bad steps of one term."""

    def __init__(self) -> None:
        self._trials = Trials()
        self._heard = 0  # the newest generation of which a bad step is known
        self._workers: dict[Device, frozenset[Worker]] = {}
        self._news: list[Event] = []

    @property
    def skips(self) -> Skips:
        return self._trials.skips

    def found(self, record: GenerationRecord) -> None:
        """Take over the skips of the newest generation, at the beginning of a term."""
        self._trials = Trials(record.skips)

    def news(self) -> list[Event]:
        """Return the events for the journal, each once."""
        out, self._news = self._news, []
        return out

    # --- reports --------------------------------------------------------------------------------
    def hear(
        self, before: Topology | None, held: Mapping[int, Held], keys: Mapping[int, Worker]
    ) -> None:
        """Take the reports of the stopped processes; called each time a generation is planned.

        `held`: the state of each process, by key. keys: node and process of each key.
        Raises EndedError if the run cannot continue."""
        self._trials.passed(max((one.applied for one in held.values() if not one.torn), default=0))
        if before is None or before.generation <= self._heard:
            return
        stood = {
            one.rank: keys[key] for key, one in held.items() if one.generation == before.generation
        }
        said = (held[key] for key in sorted(held))
        bad = next((o.bad for o in said if o.bad and o.generation == before.generation), None)
        if bad is None:
            return
        self._heard = before.generation
        decision = self._trials.bad(self._bad(bad, before, stood))
        if decision.found is not None:
            self._news.append(_event(decision.found))
        if decision.do is Do.GIVE_UP:
            raise EndedError(f"{decision.why}; {_HINT}")

    def _bad(self, bad: BadStep, before: Topology, stood: Mapping[int, Worker]) -> Bad:
        where: dict[int, Device] = {}
        for replica, share in zip(before.replicas, bad.dealt, strict=True):
            workers = [stood.get(rank, (before.nodes[rank], 0)) for rank in replica.ranks]
            device = _named(workers)
            self._workers[device] = frozenset(workers)
            where.update(dict.fromkeys(share, device))
        suspects = frozenset(bad.suspects)
        return Bad(bad.step, bad.what, where, suspects, bad.again, bad.bearable)

    # --- consequences ---------------------------------------------------------------------------
    @property
    def sick(self) -> frozenset[Worker]:
        """Workers that must not be used any more."""
        decision = self._trials.pending
        devices = () if decision is None else decision.leave_out
        return frozenset(worker for device in devices for worker in self._workers[device])

    def retry(self, topology: Topology, seated: Mapping[int, Worker]) -> Retry | None:
        """Return the step that the next generation repeats, None for none. seated: the process of
        each rank."""
        if (decision := self._trials.pending) is None:
            return None
        avoid = {}
        for leaf, device in decision.avoid.items():
            workers = self._workers[device]
            at = [
                replica.index for replica in topology.replicas
                if workers & {seated[rank] for rank in replica.ranks if rank in seated}
            ]  # fmt: skip
            if at:
                avoid[leaf] = tuple(at)
        return Retry(decision.step, avoid, decision.do is Do.ACCEPT, decision.if_passed)


def _named(workers: list[Worker]) -> Device:
    """Return a name: "process 12 on a", "processes 12, 13 on a and process 7 on b"."""
    nodes: dict[str, list[int]] = {}
    for node, pid in workers:
        nodes.setdefault(node, []).append(pid)
    return " and ".join(
        f"process{'es' if len(pids) > 1 else ''} {', '.join(map(str, pids))} on {node}"
        for node, pids in nodes.items()
    )


def _event(found: Found) -> Blamed:
    return Blamed(
        found.blame, list(found.microbatches), list(found.devices), found.why, step=found.step
    )
