"""One run that is disturbed, from the first step to the last.

    gate opens to the step that is due --> a worker reaches the named point, says so --> it happens
        ^                                                                                   |
        |                                                                                   v
        '---- steps in between, nodes come back <---- steps are done in a new generation <--'

Workers wait at a gate before each step (`elastic/worker/fault_injection.py`). So a fault finds the
step for which it was drawn, and runs need no more steps than faults require. A process that ends is
started again by the same command, as a scheduler would. Nothing else is done for the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from holdfast.chaos.actions import DEEDS, Deed, NotNowError, Scene
from holdfast.chaos.catalog import FAULTS, Part
from holdfast.chaos.layouts import Shape
from holdfast.chaos.progress import View, Watcher
from holdfast.chaos.schedule import Draw, unfit
from holdfast.checkpoint.restore.catalog import listing
from holdfast.elastic.protocol.fault_orders import RECOVERY, Armoury, Order
from holdfast.errors import HoldfastError
from holdfast.events import FaultInjected, NonFinite, WorkerLost
from holdfast.wire.journal import JournalWriter
from holdfast.wire.store.run_store import FolderStore

POLL = 0.02
HIT_SECONDS = 20.0
"""Seconds within which the chosen worker has to reach its point."""
RECOVERED_SECONDS = 90.0
"""Without a step or a generation: the run is stuck."""
ENDLESS = 6
"""Times as long that the run may continue without reaching what is waited for."""
BACK_SECONDS = 60.0
SHOWN_SECONDS = 5.0
"""Seconds within which the journal shows a fault's result, once the run continues."""
STRIDE = 5.0
"""Seconds after which the run may do one more step, while something stays bad for long."""
TAIL = 4
"""Steps after the last fault."""
LOST = "not recovered from"
"""The outcome of a fault that a run did not survive."""
IN_VAIN = 1000
"""Draws rejected in a row, after which no more are made."""
_REFUSES = 2  # the exit code of what a person has to mend
_FINISHING = 5.0  # seconds that an agent may end before the run's end is in the journal
_ENOUGH = 20  # agents that ended although no fault touched them
_ENDS = ("kill", "exit", "stop", "hang", "hang inside", "hold the GIL")
_PARTS = 10  # numbers of a fault's orders


class StuckError(HoldfastError):
    """The run does not get further."""


@dataclass
class Done:
    """One fault that hit, and its result. seconds: until a step was done after it. named: True if
    the journal names the very process as lost, or the very rank as a NaN's source. None: neither is
    expected."""

    number: int
    fault: str
    point: str
    step: int
    target: str
    generation: int
    outcome: str = ""
    seconds: float = 0.0
    named: bool | None = None


@dataclass
class Story:
    """The record of a disturbed run. rejected: draws that did not apply, and why. ends: agents that
    ended although no fault touched them: node, exit code. cut: why it got fewer faults than
    planned. notes: other remarks."""

    faults: list[Done] = field(default_factory=list)
    rejected: list[dict[str, Any]] = field(default_factory=list)
    ends: list[list[Any]] = field(default_factory=list)
    problem: str = ""
    cut: str = ""
    notes: list[str] = field(default_factory=list)


@dataclass
class _Bad:
    """Something that is to be made good. gate: up to which step the run could go when it began."""

    deed: Deed
    begun: float
    gate: int


class Disturbance:
    """Drives one run. steps: of the run, saves_every: from one durable state to the next (0: by
    time); wanted: faults that are to count."""

    def __init__(
        self, scene: Scene, armoury: Armoury, shape: Shape, nodes: list[str], steps: int,
        say: Callable[[str], None], saves_every: int = 0,
    ) -> None:  # fmt: skip
        self._scene, self._armoury, self._shape = scene, armoury, shape
        self._nodes, self._steps, self._say = nodes, steps, say
        self._saves_every = max(1, saves_every)
        self._watcher = Watcher(FolderStore(scene.real))
        self._away: set[str] = set()  # nodes that are to come back
        self._bad: list[_Bad] = []
        self._gate = 0
        self._left: list[tuple[str, float]] = []  # who has ended well, and when
        self._writers: dict[int, JournalWriter] = {}
        self.story = Story()

    @property
    def view(self) -> View:
        return self._watcher.view

    # --- one run ----------------------------------------------------------------------------------
    def run(self, draws: Iterator[Draw], wanted: int, deadline: float) -> Story:
        """Disturb the run until it is over. Problems are noted in the story."""
        try:
            self._open(1)
            self._scene.fleet.start(*self._nodes)
            self._until(lambda: self.view.step >= 1, "the first step")
            self._disturb(draws, wanted, deadline)
            self._await_nodes()
            self._open(self._steps)
            self._until(self._over, "the end of the run", 2 * RECOVERED_SECONDS)
        except StuckError as error:
            self.story.problem = str(error)
        self._look_who_was_named()
        return self.story

    def _disturb(self, draws: Iterator[Draw], wanted: int, deadline: float) -> None:
        """Fault after fault, as long as there is room."""
        story, vain = self.story, 0
        for number, draw in enumerate(draws, 1):
            if len(story.faults) >= wanted:
                return
            rejected = len(story.rejected)
            if time.monotonic() > deadline:
                story.cut = "its time was over"
            elif vain >= IN_VAIN:
                story.cut = f"{vain} draws in a row were rejected"
            elif not self._one(number, draw):
                story.cut = "its steps were used up"
            if story.cut:
                self._say(f"     no more faults: {story.cut}")
                return
            vain = vain + 1 if len(story.rejected) > rejected else 0
        if len(story.faults) < wanted:
            story.cut = "nothing was left to draw"

    def _look_who_was_named(self) -> None:
        """At the end: who lost a worker tells of it when it comes to that."""
        records = self._watcher.look().records
        lost = {  # workers killed because they did not halt on request were not named
            r.event.pid
            for r in records
            if isinstance(r.event, WorkerLost) and r.event.noticed_by != "halt"
        }
        bad = {(r.event.step, r.event.rank) for r in records if isinstance(r.event, NonFinite)}
        for done in self.story.faults:
            hit = self._armoury.hit(done.number * _PARTS)
            deed = FAULTS[done.fault].parts[0].deed
            if hit is not None and deed in _ENDS:
                done.named = hit.pid in lost
            elif hit is not None and deed == "not finite":
                done.named = (hit.step, hit.rank) in bad

    def _over(self) -> bool:
        return self.view.finished and not self._scene.fleet.alive

    def _one(self, number: int, draw: Draw) -> bool:
        """Whether there is room for another fault."""
        network = None if self._scene.network is not None else "the nodes have no network"
        if why := unfit(draw.fault, self._shape, network) or self._await_room(draw):
            self._reject(number, draw, why)
            return True
        step = self._step_for(draw)
        if step > self._steps - TAIL:
            return False
        if step <= max(self.view.step, self._gate):
            self._reject(number, draw, "its step had begun")
            return True
        self._open(step - 1)
        self._until(lambda: self.view.step >= step - 1, f"step {step - 1}")
        done = self._bring_about(number, draw, step)
        if done is None:
            return True
        self.story.faults.append(done)
        try:
            self._settle(number, draw, done)
        except StuckError:
            done.outcome = LOST
            raise
        finally:
            self._tell(done)
        if draw.patient:
            self._await_nodes()
        return True

    def _step_for(self, draw: Draw) -> int:
        if draw.step:
            return draw.step
        step = max(self.view.step + draw.gap, self._gate + 1)
        every = self._saves_every if draw.fault.saves else 1
        return -(-step // every) * every

    def _tell(self, done: Done) -> None:
        count = len(self.story.faults)
        self._say(f"{count:3d}  {done.fault:<17} {done.point:<10} step {done.step:<4} "
                  f"{done.target:<22} {done.outcome} {done.seconds:.2f} s")  # fmt: skip

    def _await_room(self, draw: Draw) -> str | None:
        """Wait for returning nodes until the fault applies; return why it does not, or None."""
        end = time.monotonic() + HIT_SECONDS
        while (why := self._not_now(draw)) and time.monotonic() < end:
            self._tick()
        return why

    def _not_now(self, draw: Draw) -> str | None:
        alive = [node for node in self._scene.fleet.alive if node in self.view.nodes]
        if len(alive) < draw.fault.nodes:
            return f"it needs {draw.fault.nodes} nodes, and {len(alive)} take part"
        if self.view.world < draw.fault.ranks:
            return f"it needs {draw.fault.ranks} ranks, and there are {self.view.world}"
        deeds = [part.deed for part in draw.fault.parts]
        last = "everything" in deeds or (deeds.count("agent") > 1 and self._shape.shared)
        if last and not listing(FolderStore(self._scene.real)):
            return "whoever holds a part may go with all of it, and there is no checkpoint yet"
        return None

    def _reject(self, number: int, draw: Draw, why: str) -> None:
        self.story.rejected.append(
            {"number": number, "fault": draw.fault.name, "points": list(draw.points), "why": why}
        )

    # --- a fault ----------------------------------------------------------------------------------
    def _bring_about(self, number: int, draw: Draw, step: int) -> Done | None:
        """None: its moment never came."""
        view, first = self.view, number * _PARTS
        generation = view.generation
        for index, (part, point) in enumerate(zip(draw.fault.parts, draw.points, strict=True)):
            late = point in RECOVERY
            if index and part.outside and not late:
                continue  # done with the first
            self._armoury.arm(Order(
                first + index, draw.fault.name, "wait" if part.outside else part.deed, point,
                0 if late else step, draw.pick + index,
                generation if late or part.later else 0,
            ))  # fmt: skip
        self._open(step)
        hit = self._when_hit(first, step)
        if hit is None:
            for index in range(len(draw.points)):
                self._armoury.disarm(first + index)
            self._reject(number, draw, f"no rank came to {draw.points[0]} in step {step}")
            return None
        done = Done(number, draw.fault.name, draw.points[0], step, hit, generation)
        for index, (part, point) in enumerate(zip(draw.fault.parts, draw.points, strict=True)):
            later = first + index if point in RECOVERY else first
            if part.outside and (later == first or self._comes(later)):
                self._do(part, draw, later, index, done)
        return done

    def _comes(self, number: int) -> bool:
        """Whether the moment of a second part comes."""
        with suppress(StuckError):
            self._until(lambda: self._armoury.hit(number) is not None, "it", HIT_SECONDS)
            return True
        return False

    def _when_hit(self, number: int, step: int) -> str | None:
        """Return the process that was about to break, as the journal names it; None if there was
        none."""
        begun = time.monotonic()

        def due() -> bool:
            return self._armoury.hit(number) is not None or self.view.step > step

        with suppress(StuckError):
            self._until(due, "the fault", HIT_SECONDS)
        hit = self._armoury.hit(number)
        if hit is None:
            return None
        if self._shown(number, begun + 1.0):
            record = self.view.injected[number]
            assert isinstance(record.event, FaultInjected)
            return record.event.target
        self._write(number, "", f"rank {hit.rank}", "", hit.step, hit.generation)
        return f"rank {hit.rank}"

    def _shown(self, number: int, until: float) -> bool:
        """Return True if the worker's own record comes into the journal in time. Otherwise the copy
        written next to its order is put there."""
        while time.monotonic() < until:
            if number in self._watcher.look().injected:
                return True
            time.sleep(POLL)
        return False

    def _do(self, part: Part, draw: Draw, number: int, index: int, done: Done) -> None:
        hit = self._armoury.hit(number)
        alive = sorted(set(self._scene.fleet.alive) & set(self.view.nodes) - self._away)
        aimed = "" if index else draw.target
        try:
            if not (aimed or alive):
                raise NotNowError("no node is there")
            node = aimed or alive[draw.pick % len(alive)]
            deed = DEEDS[part.deed](self._scene, node)
        except (NotNowError, KeyError, OSError) as error:
            done.outcome = f"not done: {error}"
        else:
            self._away |= set(deed.gone)
            if deed.heal is not None:
                self._bad.append(_Bad(deed, time.monotonic(), self._gate))
            done.target = f"{done.target}, {deed.target}" if index else deed.target
            if hit is not None and not part.deed.startswith("run-store"):
                point = done.point if number == done.number * _PARTS else draw.points[index]
                self._write(number, draw.fault.name, deed.target, point, hit.step,
                            hit.generation)  # fmt: skip
        finally:
            self._armoury.done(number)

    def _write(
        self, number: int, fault: str, target: str, point: str, step: int, generation: int
    ) -> None:
        """Into the journal, as a writer of our own."""
        writer = self._writers.get(generation)
        if writer is None:
            writer = JournalWriter(FolderStore(self._scene.real), "chaos", generation)
            self._writers[generation] = writer
        writer.emit(FaultInjected(number, fault, target, point, step=step))
        writer.flush()

    # --- what comes of it -------------------------------------------------------------------------
    def _settle(self, number: int, draw: Draw, done: Done) -> None:
        """Wait until the run continues after the fault."""
        if done.outcome:
            return
        view = self.view
        when = self._armoury.when(number * _PARTS)

        def recovered() -> bool:
            reached = max(
                (step for g, step in view.reached.items() if g > done.generation), default=0
            )
            if draw.fault.again:
                return view.generation > done.generation and (
                    reached >= done.step or (reached == 0 and view.start >= done.step)
                )
            return view.step >= done.step

        if not draw.fault.again:  # something is to be done while it lasts
            self._open(min(done.step + 2, self._steps - TAIL))
        self._until(recovered, f"recovery from fault {number}, {done.fault} at {done.point} of "
                    f"step {done.step} ({done.target})")  # fmt: skip
        done.seconds = round(time.time() - when, 3)
        last = draw.points[-1]
        second = len(draw.points) > 1 and (not draw.fault.parts[1].outside or last in RECOVERY)
        if second and self._armoury.hit(number * _PARTS + 1) is None:
            self._armoury.disarm(number * _PARTS + 1)
            done.outcome = f"second part missed ({last})"
        elif draw.fault.shows and not self._has_shown(number, draw.fault.shows):
            done.outcome = f"came to nothing (no {' or '.join(draw.fault.shows)})"
        else:
            done.outcome = "recovered"
        while self._bad:
            self._tick()

    def _has_shown(self, number: int, kinds: Sequence[str]) -> bool:
        """Whether the journal comes to say what such a fault makes it say."""
        with suppress(StuckError):
            self._until(
                lambda: self.view.since(number * _PARTS, lambda event: event.kind in kinds),
                "it", SHOWN_SECONDS,
            )  # fmt: skip
            return True
        return False

    def _await_nodes(self) -> None:
        """Until all nodes take part."""
        end = time.monotonic() + BACK_SECONDS
        while away := sorted(set(self._nodes) - set(self.view.nodes)):
            if time.monotonic() > end:
                note = (f"{', '.join(away)} had not come back after {BACK_SECONDS:.0f} s, at step "
                        f"{self.view.step}")  # fmt: skip
                self.story.notes.append(note)
                self._say(f"     {note}")
                return
            self._tick()

    def _open(self, step: int) -> None:
        if step > self._gate:
            self._gate = step
            self._armoury.open_gate(step)

    # --- time passes ------------------------------------------------------------------------------
    def _until(
        self, due: Callable[[], bool], what: str, seconds: float = RECOVERED_SECONDS
    ) -> None:
        """Wait until `due`. Raises StuckError if the run makes no step for so many seconds, or
        continues for `ENDLESS` times as many without reaching it. A fault in force meanwhile may
        hide its steps."""
        seconds += max((bad.deed.seconds for bad in self._bad), default=0.0)
        begun = since = time.monotonic()
        at = (self.view.generation, self.view.step)
        while not due():
            self._tick()
            now = time.monotonic()
            if at != (self.view.generation, self.view.step):
                at, since = (self.view.generation, self.view.step), now
            if now - since > seconds or now - begun > ENDLESS * seconds:
                raise StuckError(f"no sign of {what} within {now - begun:.0f} s, in generation "
                                 f"{at[0]} after step {at[1]}")  # fmt: skip

    def _tick(self) -> None:
        time.sleep(POLL)
        self._watcher.look()
        if self.view.failed is not None and not self.view.finished:
            raise StuckError(f"the run has failed: {self.view.failed}")
        self._heal()
        self._bring_back()

    def _heal(self) -> None:
        for bad in list(self._bad):
            since = time.monotonic() - bad.begun
            if since >= bad.deed.seconds:
                self._bad.remove(bad)
                assert bad.deed.heal is not None
                bad.deed.heal()
                continue
            if bad.deed.tick is not None:
                bad.deed.tick(since)
            self._open(min(bad.gate + int(since / STRIDE), self._steps - TAIL))

    def _bring_back(self) -> None:
        """While the run is not over, start ended nodes again by the same command."""
        for node, code, expected in self._scene.fleet.ended():
            if self.view.finished:
                continue
            if code == 0 and not expected and self._gate >= self._steps:
                self._left.append((node, time.monotonic()))  # its end may be known before the run's
                continue
            if not expected:
                self.story.ends.append([node, code])
                if code == _REFUSES or len(self.story.ends) > _ENOUGH:
                    raise StuckError(f"{node} ended with {code}: {self._scene.fleet.said(node)}")
            self._start_again(node)
        for node, when in list(self._left):
            if time.monotonic() - when > _FINISHING and not self.view.finished:
                self._left.remove((node, when))
                self.story.ends.append([node, 0])
                self._start_again(node)

    def _start_again(self, node: str) -> None:
        (self._scene.notices / node).unlink(missing_ok=True)
        self._away.discard(node)
        self._scene.fleet.start(node)
