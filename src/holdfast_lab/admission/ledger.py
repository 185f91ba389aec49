"""Device-seconds of a job by label; together they are all that the job has held. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast_lab.admission.step_time import PARTS, StepTime

GROUP_WAIT, START, LOST = "group_wait", "start", "lost"
LABELS = (*PARTS, GROUP_WAIT, START, LOST)
"""group_wait: pods wait for the rest of their group. start: start-up and changes of an elastic
job. lost: training since the last checkpoint, which an eviction made worthless."""


@dataclass
class JobLedger:
    """seconds: device-seconds by label. The `unsaved` parts came after the last checkpoint."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LABELS, 0.0))
    unsaved_s: float = 0.0
    unsaved_steps: float = 0.0
    _unsaved: list[float] = field(default_factory=lambda: [0.0] * len(PARTS))

    @property
    def held(self) -> float:
        return sum(self.seconds.values())

    @property
    def unsaved_device_s(self) -> float:
        return sum(self._unsaved)

    def train(self, seconds: float, step: StepTime, devices: int, save_s: float) -> float:
        """Count training; return the steps that were done."""
        scale = devices * seconds / step.seconds
        for label, part in zip(PARTS, step.parts, strict=True):
            self.seconds[label] += scale * part
        since = self.unsaved_s + seconds
        if since >= save_s:
            self.save()
            since %= save_s
            seconds = min(since, seconds)
        rest = devices * seconds / step.seconds
        self._unsaved = [a + rest * part for a, part in zip(self._unsaved, step.parts, strict=True)]
        self.unsaved_s = since
        self.unsaved_steps += seconds / step.seconds
        return scale / devices

    def save(self) -> None:
        """All training so far is safe."""
        self.unsaved_s, self.unsaved_steps = 0.0, 0.0
        self._unsaved = [0.0] * len(PARTS)

    def lose(self) -> float:
        """Count what came after the last checkpoint as lost; return its steps."""
        steps = self.unsaved_steps
        for label, part in zip(PARTS, self._unsaved, strict=True):
            self.seconds[label] -= part
            self.seconds[LOST] += part
        self.save()
        return steps
