"""A worker's loop: generation after generation in one process.

    .--> take part --> train --> finished, left: report it, end
    |        |           |
    |        '---.-------'  a peer is lost, an exception, a halt, a pause, ...
    |            v
    '---------- hold: stop, keep session and state, report what is held, wait --> end

A failure within a generation does not end the process. The exception is a UserError of a process
that brings no state, on its way into a generation: the user must correct it. So does a
StateMemoryError in any case: the state has no place. A ScriptError ends the run, as a script cannot
be run twice in a process. If it comes in the loop, the process first saves the state that it holds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from holdfast.elastic.protocol import exit_codes
from holdfast.elastic.protocol.worker_commands import End
from holdfast.elastic.protocol.worker_spec import WorkerSpec
from holdfast.elastic.worker.commands import CommandClient, HaltedError
from holdfast.elastic.worker.restore import CorruptCheckpointError
from holdfast.errors import (
    DeviceStuckError,
    FencedError,
    JumpError,
    MismatchError,
    NonFiniteError,
    PeerLostError,
    RewardError,
    ScriptError,
    StateMemoryError,
    UserError,
)
from holdfast.parallel.torch_compat import is_device_loss
from holdfast.policy.recovery.survivors import HeldState, RejectedStep

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from holdfast.elastic.worker.worker import Worker
    from holdfast.training.engine.runner import TrainingOutcome


def run_generations(worker: Worker, spec: WorkerSpec, commands: CommandClient) -> int:
    """Run generations until the run or the agent ends the process; return the exit code.

    A standby first waits for a place. If the device does not end what a lost group had begun, this
    process exits: only a new one can use the device.

    Raises UserError, and any BaseException that is no `Exception`.
    """
    try:
        return _run_until_end(worker, spec, commands)
    except DeviceStuckError as error:
        logger.error("exiting: %s", error)
        return exit_codes.PEER_LOST


def _run_until_end(worker: Worker, spec: WorkerSpec, commands: CommandClient) -> int:
    held: HeldState | None = None
    if spec.rank < 0:
        worker.prepare()
        commands.start()  # its first question says that it is ready
    else:
        commands.start()
        held = _run_generation(worker, commands, worker.begin_generation, is_fresh=True)
        if held is None:
            return _close_worker(worker)
    while True:
        order = commands.wait_for_command(held)
        if isinstance(order, End):
            return _close_worker(worker)
        # a newcomer has no state that another generation could need
        fresh = order.came_from is None or order.came_from[order.spec.rank] is None
        held = _run_generation(
            worker, commands, partial(worker.apply_command, order), is_fresh=fresh
        )
        if held is None:
            return _close_worker(worker)


def _close_worker(worker: Worker) -> int:
    worker.close()
    return exit_codes.DONE


def _run_generation(
    worker: Worker, commands: CommandClient, enter: Callable[[], None], *, is_fresh: bool
) -> HeldState | None:
    """Run one generation; return the state held after it, or None at the end of the run.

    is_fresh: this process brings no state, so the user must correct an error on the way in.
    """
    outcome: TrainingOutcome | None = None
    try:
        enter()
        outcome = worker.train()
        if outcome.kind == "paused":
            return _stop_and_hold(
                worker, "paused", f"paused after step {outcome.step}", is_orderly=True
            )
        if worker.report_outcome(outcome):
            worker.finish_task(outcome)
            return None
        return _stop_and_hold(worker, "halt", "a newer generation began at the end of this one")
    except (HaltedError, FencedError) as error:
        return _stop_and_hold(worker, "halt", str(error))
    except PeerLostError as error:
        kind = "halt" if commands.is_halted(worker.generation) else "peer"
        return _stop_and_hold(worker, kind, str(error), is_orderly=worker.is_training)
    except NonFiniteError as error:
        logger.error("%s: %s", type(error).__name__, error)
        return _stop_and_hold(
            worker, "non_finite", str(error), is_orderly=True, bad_step=_nonfinite_step(error)
        )
    except JumpError as error:
        logger.error("%s: %s", type(error).__name__, error)
        return _stop_and_hold(
            worker, "loss_jump", str(error), is_orderly=True, bad_step=_loss_jump_step(error)
        )
    except DeviceStuckError:
        raise
    except CorruptCheckpointError as error:
        logger.error("%s: %s", type(error).__name__, error)
        return _stop_and_hold(worker, "rotten", str(error))
    except Exception as error:
        if is_device_loss(error):
            raise DeviceStuckError(f"the device has failed: {error}") from error
        if isinstance(error, ScriptError) and worker.is_training and outcome is None:
            error.__traceback__ = None
            return _stop_and_hold(worker, "script", str(error))
        is_final = isinstance(error, MismatchError | RewardError | ScriptError | StateMemoryError)
        if is_final or (is_fresh and isinstance(error, UserError)):
            raise
        is_halted = commands.is_halted(worker.generation)  # whatever it was woken with
        if not is_halted:
            logger.exception("the step failed")
        error.__traceback__ = None  # the engine keeps the error: `engine._known_error`
        kind = "halt" if is_halted else "error"
        return _stop_and_hold(worker, kind, f"{type(error).__name__}: {error}")


def _stop_and_hold(
    worker: Worker,
    kind: str,
    text: str,
    *,
    is_orderly: bool = False,
    bad_step: RejectedStep | None = None,
) -> HeldState:
    """Stop and report the held state.

    is_orderly: all ranks stop alike, or the engine has released the ranks that wait for this one.
    """
    worker.stop_generation(is_orderly, is_planned=kind == "paused")
    held = worker.held_state(kind, text, bad_step)
    if worker.is_worn:
        raise DeviceStuckError(
            "older groups have used up what this process may take of its device; another process "
            "takes the place"
        )
    state = "no state" if held.torn else f"the state after step {held.applied}"
    logger.info("holds %s (%s): %s", state, kind, text)
    return held


def _nonfinite_step(error: NonFiniteError) -> RejectedStep:
    """Return the report of a step that was not applied, for the coordinator."""
    what = f"is not finite ({error.parameter} on rank {error.rank})"
    dealt = tuple(tuple(share) for share in error.dealt)
    return RejectedStep(error.step, what, dealt, tuple(error.suspects), error.again)


def _loss_jump_step(error: JumpError) -> RejectedStep | None:
    """Return the report of a loss jump, or None on a rank that did not judge it."""
    if error.limit is None:
        return None
    what = f"has a loss of {error.loss:.4g}, where up to {error.limit:.4g} were to be expected"
    dealt = tuple(tuple(share) for share in error.dealt)
    return RejectedStep(error.step, what, dealt, tuple(error.suspects), None, bearable=True)
