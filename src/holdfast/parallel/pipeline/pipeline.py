"""Execute a pipeline schedule over direct messages between the ranks of one pipeline.

The table (`core/schedule/table.py`) says which actions a rank runs, in order. The messages follow
from it. The activation of a forward goes to the rank of the next stage, the gradient of a
backward to the rank of the stage before. Between stages of one rank a value is handed over.

Nothing can wait forever that the table did not make wait. A send is started and never waited for.
In each of the two directions, the receive of the next message is posted one ahead of its use.
So a message finds its buffer ready while the action before it still computes. A rank holds at
most one activation and one gradient more than the table keeps. Over pipes receives are posted in
the order in which each peer sends, so a rank may hold more (`PipelinePipes`).

When may the buffer of a send be dropped? Gloo moves data only once its receiver has posted, and a
send that is dropped earlier is lost. A send has arrived once its receiver has sent back anything
that it computed after using it. For an activation that is the gradient of the same microbatch at
the latest; for most gradients of 1F1B it is a later activation. Which message proves which follows
from the table alone. Some messages are proved by nothing: a forward-only run, the last gradients.
A receipt of eight bytes closes them when the last of them has been used. The sender waits for it
where that costs nothing, before the next run begins. Hence between two runs nothing of the first
is under way, and every tag can be used again.

The receipt's own send is kept until its receiver sends again, which it does only after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from holdfast.core.schedule.check import check_schedule
from holdfast.core.schedule.table import Action, ActionKind, Schedule, Value
from holdfast.core.spans import COMPUTE
from holdfast.errors import LayoutError, PeerLostError
from holdfast.parallel.comm.device_group import PipelinePipes
from holdfast.parallel.comm.trace import RECEIVE, SEND, SpanRecorder
from holdfast.parallel.comm.transport import PeerGroup
from holdfast.parallel.pipeline.pipeline_plan import (
    FIRST_TAG,
    Message,
    PipelinePlan,
    PlannedAction,
    make_pipeline_plan,
)
from holdfast.parallel.torch_compat import Work, is_peer_loss


class StageWork(Protocol):
    """The computation of one rank's stages. `microbatch` counts from 0 within the schedule.

    Tensors that are returned must stay as they are: they may be on their way for a while.
    What is handed in belongs to the work, except for a tensor from a stage of the same rank,
    which is read only. Neither requires a gradient.
    """

    def boundary(self, stage: int, microbatch: int) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of the activation that enters `stage` (never asked for stage 0), and
        of its gradient. Both neighbours must give the same answer."""
        ...

    def forward(self, stage: int, microbatch: int, incoming: Tensor | None) -> Tensor | None:
        """Run a stage. `incoming` is None for stage 0; the last stage returns None."""
        ...

    def backward(self, stage: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        """Run the full backward. `gradient`: of what forward returned, None for the last stage.

        Returns the gradient of what came in; None for stage 0."""
        ...


@runtime_checkable
class SplitStageWork(StageWork, Protocol):
    """Stages whose backward comes in two, for the schedules that fill bubbles with the second."""

    def backward_input(self, stage: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        """The gradient of what came in, as `backward` returns it; weights get nothing yet."""
        ...

    def backward_weight(self, stage: int, microbatch: int) -> None:
        """The rest of the backward of a microbatch whose `backward_input` has run."""
        ...


class PipelineInterpreter:
    """Runs schedules over `peers`: the bare peers of one pipeline, numbered by index on `pp`.

    A run that fails closes every connection of the line, so that its peers stop too. The line and
    this interpreter are then of no more use, and nothing of them can reach a line built later.
    pipes: carry activations and gradients between devices; None: the line does, through the host.
    It keeps what was sent until it has arrived, so it must live as long as its line is used.
    Only one thread may call.
    """

    def __init__(
        self,
        peers: PeerGroup,
        device: torch.device,
        *,
        recorder: SpanRecorder | None = None,
        pipes: PipelinePipes | None = None,
    ):
        self.peers, self.device, self.recorder, self.pipes = peers, device, recorder, pipes
        self._plans: deque[PipelinePlan] = deque(maxlen=8)
        self._unconfirmed_sends: dict[int, list[tuple[Tensor, Work]]] = {}
        self._receipts_due: list[tuple[int, Tensor, Work]] = []
        self._receipts_sent: dict[int, tuple[Tensor, Work]] = {}
        self._is_closed = False

    def run(
        self, schedule: Schedule, work: StageWork, carried: dict[Value, Tensor] | None = None
    ) -> None:
        """Execute this rank's row of `schedule`; every rank of the line runs the same table.

        carried: the values that earlier windows have left for this one. When the run ends, it holds
        those that this window leaves for later ones.

        On return all actions have run; what they sent may still be on its way (`wait_until_sent`).
        Raises PeerLostError when a peer is lost, and whatever the work raises. Raises
        LayoutError, before anything starts, for a table that cannot be executed here.
        """
        plan = self.plan_for(schedule)
        try:
            self._wait_for_receipts()
            PipelineRun(self, plan, work, {} if carried is None else carried).execute()
        except BaseException as error:
            self._fail(error)
            raise

    def wait_until_sent(self) -> None:
        """Return when everything that was sent has arrived. Raises PeerLostError.

        Each run begins with it. To be called by a rank that goes away after a run without
        another exchange in between.
        """
        try:
            self._wait_for_receipts()
        except BaseException as error:
            self._fail(error)
            raise

    def plan_for(self, schedule: Schedule) -> PipelinePlan:
        """Return this rank's part of `schedule`. It is made once for each of the last few
        tables."""
        for plan in self._plans:
            if plan.schedule == schedule:
                return plan
        if schedule.ranks != self.peers.size:
            raise LayoutError(
                f"the schedule {schedule.name} is for {schedule.ranks} ranks, "
                f"the pipeline has {self.peers.size}",
                where="layout.schedule",
            )
        check_schedule(schedule)
        plan = make_pipeline_plan(schedule, self.peers.rank)
        self._plans.append(plan)
        return plan

    @contextmanager
    def span(self, track: str, name: str) -> Iterator[None]:
        """A span of the recorder, if there is one. A wait is counted as exposed."""
        traffic = self.peers.traffic if track != COMPUTE else None
        with (
            self.recorder.span(track, name) if self.recorder else nullcontext(),
            traffic.exposed("pp") if traffic else nullcontext(),
        ):
            yield

    def post_receipts(self, plan: PipelinePlan) -> None:
        """Post the receives of the receipts that this run will be owed."""
        for peer in plan.receipt_senders:
            record = torch.empty(1, dtype=torch.int64)
            work = self.peers.receive(record, peer, FIRST_TAG)
            self._receipts_due.append((peer, record, work))

    def keep_send(self, peer: int, tensor: Tensor, work: Work) -> None:
        """Keep a send that nothing of its run will prove."""
        self._unconfirmed_sends.setdefault(peer, []).append((tensor, work))

    def send_receipt(self, peer: int) -> None:
        """Tell `peer` that everything it sent in this run has been used.

        It has just sent in this run, so it had waited for the receipt of the run before.
        """
        record = torch.zeros(1, dtype=torch.int64)
        self.peers.count(record.nbytes, "control")
        self._receipts_sent[peer] = (record, self.peers.group.send([record], peer, FIRST_TAG))

    def _wait_for_receipts(self) -> None:
        if self._is_closed:
            raise PeerLostError("an earlier run of this pipeline failed, its line is closed")
        for peer, _, work in self._receipts_due:
            with self.span(SEND, f"to {peer}"):
                work.wait()
            self._unconfirmed_sends.pop(peer, None)
        self._receipts_due.clear()

    def _fail(self, error: BaseException) -> None:
        """Close the line, so that no peer waits for this rank."""
        self._is_closed = True
        if self.pipes is not None:
            self.pipes.abort()
        self.peers.abort()
        if is_peer_loss(error):
            raise PeerLostError(f"a peer of the pipeline was lost: {error}") from error


class PipelineRun:
    """One execution of a plan: what is posted, handed over and on its way."""

    def __init__(
        self,
        interpreter: PipelineInterpreter,
        plan: PipelinePlan,
        work: StageWork,
        carried: dict[Value, Tensor],
    ):
        self._interpreter, self._plan, self._work = interpreter, plan, work
        self._peers, self._device = interpreter.peers, interpreter.device
        self._pipes = interpreter.pipes
        self._expected: dict[int, Iterator[Message]]  # by way, see `_way_of`
        if self._pipes is None:
            self._expected = {gradient: plan.receives(gradient) for gradient in (False, True)}
        else:
            self._expected = {peer: iter(messages) for peer, messages in plan.arrivals.items()}
        self._newest: dict[int, Value] = {}  # posted last, by way
        self._posted: dict[Value, tuple[Tensor, Work]] = {}
        self._sends: dict[Value, tuple[int, Tensor, Work]] = {}
        self._local_values = carried

    def execute(self) -> None:
        """All actions of this rank, in the order of the table."""
        self._interpreter.post_receipts(self._plan)
        for way in self._expected:
            self._post_receive(way)
        for step in self._plan.steps:
            incoming = self._take(step)
            with self._interpreter.span(COMPUTE, str(step.action)):
                out = self._compute(step.action, incoming)
            self._give(step, out)
        for step in self._plan.collected:
            incoming = self._take(step)
            if incoming is not None and step.incoming is not None:
                self._local_values[step.incoming.value] = incoming
        for peer, tensor, work in self._sends.values():
            self._interpreter.keep_send(peer, tensor, work)

    def _compute(self, action: Action, incoming: Tensor | None) -> Tensor | None:
        work, stage, microbatch = self._work, action.stage, action.microbatch
        match action.kind:
            case ActionKind.FORWARD:
                return work.forward(stage, microbatch, incoming)
            case ActionKind.BACKWARD:
                return work.backward(stage, microbatch, incoming)
        assert isinstance(work, SplitStageWork)
        if action.kind is ActionKind.BACKWARD_INPUT:
            return work.backward_input(stage, microbatch, incoming)
        work.backward_weight(stage, microbatch)
        return None

    def _way_of(self, message: Message) -> int:
        """Return what names the messages that are posted in one order: with tags whether gradients
        travel, over pipes the peer."""
        return message.value.gradient if self._pipes is None else message.peer

    def _post_receive(self, way: int) -> None:
        """Post the next receive of one way, if there is one."""
        message = next(self._expected[way], None)
        if message is not None:
            self._newest[way] = message.value
            shape, dtype = self._work.boundary(message.boundary, message.value.microbatch)
            if self._pipes is None:
                buffer = torch.empty(shape, dtype=dtype)
                work = self._peers.receive(buffer, message.peer, message.tag)
            else:
                buffer = torch.empty(shape, dtype=dtype, device=self._device)
                work = self._pipes.receive(buffer, message.peer)
            self._posted[message.value] = (buffer, work)

    def _take(self, step: PlannedAction) -> Tensor | None:
        """Return the action's input from another stage, on the device; None if it has none."""
        if step.local_input is not None:
            return self._local_values.pop(step.local_input)
        if step.incoming is None:
            return None
        value, way = step.incoming.value, self._way_of(step.incoming)
        while value not in self._posted:  # over pipes, more is sent before it
            self._post_receive(way)
        if self._newest[way] == value:
            self._post_receive(way)
        buffer, work = self._posted.pop(value)
        with self._interpreter.span(RECEIVE, str(step.action)):
            work.wait()
        for proved in step.proven_values:
            self._sends.pop(proved)
        if step.receipt_to is not None:
            self._interpreter.send_receipt(step.receipt_to)
        return buffer.to(self._device)

    def _give(self, step: PlannedAction, out: Tensor | None) -> None:
        """Hand on what the action produced, without the graph that produced it."""
        value = step.local_output or (step.outgoing.value if step.outgoing else None)
        if value is None:
            return
        message = step.outgoing
        boundary = value.stage if value.gradient else value.stage + 1
        expected = self._work.boundary(boundary, value.microbatch)
        if out is None or (tuple(out.shape), out.dtype) != expected:
            found = "nothing" if out is None else f"{tuple(out.shape)} {out.dtype}"
            raise ValueError(f"{step.action} gave {found}, the boundary {boundary} is {expected}")
        out = out.detach()
        if message is None:
            self._local_values[value] = out
            return
        if self._pipes is not None:
            wire = out.contiguous()
            work = self._pipes.send(wire, message.peer)
        else:
            wire = out.cpu().contiguous()
            self._peers.count(wire.nbytes, "pp")
            work = self._peers.group.send([wire], message.peer, message.tag)
        self._sends[value] = (message.peer, wire, work)
