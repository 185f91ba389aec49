"""The run's progress that this agent has learnt of."""

from __future__ import annotations

from holdfast.elastic.event_log import EventLog
from holdfast.events import CheckpointCommitted, Event, Record, StepDone


class LearntProgress:
    """The newest generation and the newest committed step that are known on this node."""

    def __init__(self, event_log: EventLog) -> None:
        self.newest_generation = 0
        self.has_stepped = False
        """True once a step was done in this session."""
        self._restored_step = 0
        self._committed_step = 0
        self._event_log = event_log

    @property
    def committed_step(self) -> int:
        """The newest committed step that this agent knows of."""
        return max(self._committed_step, self._restored_step)

    def on_restored(self, step: int) -> None:
        """Note the step of a checkpoint that a generation of this agent begins from."""
        self._restored_step = step

    def begin_generation(self, generation: int) -> None:
        """Refuse requests of generations older than this one from here on."""
        if generation > self.newest_generation:
            self.newest_generation = generation
            self._event_log.begin_generation(generation)

    def observe(self, record: Record) -> None:
        self.has_stepped = self.has_stepped or isinstance(record.event, StepDone)

    def on_mover_event(self, event: Event) -> None:
        """Note what the mover has committed, and emit its event."""
        if isinstance(event, CheckpointCommitted):
            self._committed_step = max(self._committed_step, event.step)
        if self.newest_generation:
            self._event_log.emit("mover", event)

    def emit_once_begun(self, event: Event) -> None:
        """Emit an event of the agent, once any generation has begun."""
        if self.newest_generation:
            self._event_log.emit("agent", event)
