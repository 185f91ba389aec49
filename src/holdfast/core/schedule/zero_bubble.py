"""Schedules that split the backward, and fill the bubbles with the gradients of weights.

`I` is the gradient of a stage's input, which the stage before waits for. `W` is the gradient of its
weights, for which no stage waits (Qi et al. 2023, arXiv 2401.10241).

In a placement that is a V, rank r of p has the stages r and 2 p - 1 - r. So the first rank has both
ends of the model.
"""

from __future__ import annotations

from collections import deque

from holdfast.core.schedule.table import (
    Action,
    ActionKind,
    OverlappedActions,
    Schedule,
    ScheduleCell,
    first_microbatches,
    loop_stages,
    v_stages,
)


class _Row:
    """The row of one rank, in the making: the next microbatch of each (stage, kind)."""

    def __init__(self) -> None:
        self.cells: list[ScheduleCell] = []
        self._due: dict[tuple[int, ActionKind], int] = {}
        self._weights: deque[Action] = deque()

    def next(self, stage: int, kind: ActionKind) -> Action:
        """The next action of this kind. A backward counts as the gradient of the input."""
        counted = stage, ActionKind.BACKWARD_INPUT if kind is ActionKind.BACKWARD else kind
        microbatch = self._due.get(counted, 0)
        self._due[counted] = microbatch + 1
        return Action(stage, kind, microbatch)

    def run(self, stage: int, kind: ActionKind) -> None:
        """Append the next action of this kind."""
        action = self.next(stage, kind)
        if kind is ActionKind.BACKWARD_INPUT:
            self._weights.append(Action(stage, ActionKind.BACKWARD_WEIGHT, action.microbatch))
        self.cells.append(action)

    def run_together(self, forward: int, backward: int) -> None:
        """Append a forward and a backward of two stages as one cell."""
        pair = self.next(forward, ActionKind.FORWARD), self.next(backward, ActionKind.BACKWARD)
        self.cells.append(OverlappedActions(pair))

    def run_weights(self, stage: int | None = None) -> None:
        """Append the oldest gradient of weights that is due, if there is one (of a stage)."""
        found = next((w for w in self._weights if stage in (None, w.stage)), None)
        if found is not None:
            self._weights.remove(found)
            self.cells.append(found)


def zb_h1(ranks: int, microbatches: int, virtual: int = 1) -> Schedule:
    """ZB-H1 (arXiv 2401.10241, section 2 and figure 3): 1F1B whose gradients of weights wait.

    Rank r keeps r of them back, so no rank keeps more than the p activations of 1F1B's first rank.
    The bubble is a third of 1F1B's if F, I and W take equally long.
    """
    full = max(microbatches, ranks)
    rows = []
    for rank in range(ranks):
        row, ahead = _Row(), ranks - rank - 1
        for _ in range(ahead):
            row.run(rank, ActionKind.FORWARD)
        for done in range(full):
            if done < full - ahead:
                row.run(rank, ActionKind.FORWARD)
            row.run(rank, ActionKind.BACKWARD_INPUT)
            if done >= rank:
                row.run_weights()
        for _ in range(rank):
            row.run_weights()
        rows.append(tuple(row.cells))
    return first_microbatches(
        Schedule("zb-h1", full, loop_stages(ranks, virtual), tuple(rows)), microbatches
    )


def zbv(ranks: int, microbatches: int, virtual: int = 2) -> Schedule:
    """ZBV (Qi et al. 2024, arXiv 2405.15362, section 3 and figure 5). Its placement is a V.

    It keeps as much as the first rank of 1F1B. If F, I and W take equally long, the ranks wait only
    at the beginning and the end.
    """
    full = max(microbatches, 2 * ranks - 1)
    rows = tuple(_zbv_row(rank, ranks, full) for rank in range(ranks))
    return first_microbatches(Schedule("zbv", full, v_stages(ranks), rows), microbatches)


def _zbv_row(rank: int, ranks: int, microbatches: int) -> tuple[ScheduleCell, ...]:
    down, up = rank, 2 * ranks - 1 - rank
    row = _Row()

    def whole(stage: int) -> None:
        row.run(stage, ActionKind.BACKWARD_INPUT)
        row.run_weights(stage)

    for _ in range(2 * (ranks - rank) - 1):
        row.run(down, ActionKind.FORWARD)
    for _ in range(rank):
        row.run(up, ActionKind.FORWARD)
        row.run(down, ActionKind.FORWARD)
    for _ in range(ranks - rank):
        row.run(up, ActionKind.FORWARD)
        whole(up)
    forwards = 2 * (ranks - rank) - 1 + rank  # of the way down; `ranks` of the way up
    for turn in range(microbatches - ranks):
        if forwards + turn < microbatches:
            row.run(down, ActionKind.FORWARD)
        whole(down)
        row.run(up, ActionKind.FORWARD)
        whole(up)
    for _ in range(rank):
        row.run(down, ActionKind.BACKWARD_INPUT)
        row.run(up, ActionKind.BACKWARD_INPUT)
    for _ in range(ranks - rank):
        row.run(down, ActionKind.BACKWARD_INPUT)
        row.run_weights(down)
    for stage in (up, down):
        for _ in range(rank):
            row.run_weights(stage)
    return tuple(row.cells)


def dualpipev(ranks: int, microbatches: int, virtual: int = 2) -> Schedule:
    """DualPipeV: one half of DualPipe (DeepSeek-AI 2024, arXiv 2412.19437, section 3.2.1).

    No stage is on two ranks, as in DualPipe. Its placement is a V.

    A forward of one direction and a backward of the other are one cell. So transfers of the one
    can hide behind the arithmetic of the other. DeepSeek's own `dualpipev.py` has these phases.
    """
    full = max(microbatches, 2 * ranks)
    rows = tuple(_dualpipev_row(rank, ranks, full) for rank in range(ranks))
    return first_microbatches(Schedule("dualpipev", full, v_stages(ranks), rows), microbatches)


def _dualpipev_row(rank: int, ranks: int, microbatches: int) -> tuple[ScheduleCell, ...]:
    down, up, behind = rank, 2 * ranks - 1 - rank, ranks - rank - 1
    row = _Row()
    for _ in range(2 * behind):
        row.run(down, ActionKind.FORWARD)
    for _ in range(rank + 1):
        row.run(down, ActionKind.FORWARD)
        row.run(up, ActionKind.FORWARD)
    for _ in range(behind):
        row.run(up, ActionKind.BACKWARD_INPUT)
        row.run_weights()
        row.run(up, ActionKind.FORWARD)
    for turn in range(microbatches - 2 * ranks + rank + 1):
        if turn == 0 and behind == 0:  # the turn of the V: its forward feeds this backward
            row.run(down, ActionKind.FORWARD)
            row.run(up, ActionKind.BACKWARD)
        else:
            row.run_together(down, up)
        row.run_together(up, down)
    for _ in range(behind):
        row.run(up, ActionKind.BACKWARD)
        row.run_together(up, down)
    # The second half of these leave their gradients of weights for the last bubble.
    late = [number >= rank + 1 for number in range(2 * (rank + 1))]
    for stage, is_late in zip((up, down) * (rank + 1), late, strict=True):
        row.run(stage, ActionKind.BACKWARD_INPUT if is_late else ActionKind.BACKWARD)
    for _ in range(behind):
        row.run_weights()
        row.run(down, ActionKind.BACKWARD_INPUT)
    for _ in range(rank + 1):
        row.run_weights()
    return tuple(row.cells)
