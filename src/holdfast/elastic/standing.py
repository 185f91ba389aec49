"""Where a run stands, and what the journal and the person are told when it ends."""

from __future__ import annotations

from holdfast.elastic.board import Board, Say
from holdfast.events import RunFailed, RunFinished, RunStopped
from holdfast.policy.restart import RunState, advance


class Standing:
    """The run's state machine. Every end of a run is written here, and nowhere else."""

    def __init__(self, board: Board, say: Say, resume: str) -> None:
        """`resume` is the command that takes the run up again."""
        self.state = RunState.OPENING
        self._board, self._say, self._resume = board, say, resume
        self._written: str | None = None  # why the run stopped, as the journal has it

    def become(self, state: RunState) -> None:
        self.state = advance(self.state, state)

    def finished(self, step: int) -> None:
        self.become(RunState.FINISHED)
        self._board.emit("agent", RunFinished(step=step))

    def stopped(self, step: int, reason: str) -> None:
        self.write_stopped(step, reason)
        self._say(f"stopped after step {step} ({reason}); resume with: {self._resume}")

    def write_stopped(self, step: int, reason: str) -> None:
        """Again with more to say, where the bucket was waited for: the last one counts."""
        if self.state is not RunState.STOPPED:
            self.become(RunState.STOPPED)
        if reason != self._written:
            self._written = reason
            self._board.emit("agent", RunStopped(reason, step=step))

    def failed(self, sentence: str, step: int, journal: bool) -> None:
        """`journal` is False once another trainer has taken over, which has the journal for its
        own then, and before there is one."""
        self.become(RunState.FAILED)
        if journal:
            self._board.emit("agent", RunFailed(sentence, step=step))
