"""A worker's loop if its agent sends commands: generation after generation in one process.

    .--> take part --> train --> finished, left: report it, end
    |        |           |
    |        '---.-------'  a peer is lost, an exception, a halt, a pause, ...
    |            v
    '---------- hold: stop, keep session and state, report what is held, wait --> end

A failure within a generation does not end the process. The exception is a UserError on the way into
a generation that begins from a checkpoint or from nothing: the user must correct it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from holdfast.elastic.protocol import exit_codes
from holdfast.elastic.protocol.worker_spec import WorkerBoot
from holdfast.elastic.worker.commands import End, HaltedError, Held, Orders
from holdfast.elastic.worker.restore import RottenError
from holdfast.errors import FencedError, JumpError, NonFiniteError, PeerLostError, UserError
from holdfast.policy.recovery.survivors import BadStep

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from holdfast.elastic.worker.worker import Worker


def live(worker: Worker, boot: WorkerBoot, orders: Orders) -> int:
    """Run generations until the run or the agent ends the process; return the exit code.

    A standby first waits for a place. Raises UserError, and any BaseException that is no
    `Exception`.
    """
    held: Held | None = None
    if boot.rank < 0:
        worker.prepare()
        orders.start()  # its first question says that it is ready
    else:
        orders.start()
        held = _generation(worker, orders, worker.begin, fresh=True)
        if held is None:
            return _done(worker)
    while True:
        order = orders.next(held)
        if isinstance(order, End):
            return _done(worker)
        fresh = order.came_from is None
        held = _generation(worker, orders, lambda order=order: worker.take(order), fresh=fresh)  # type: ignore[misc]
        if held is None:
            return _done(worker)


def _done(worker: Worker) -> int:
    worker.close()
    return exit_codes.DONE


def _generation(
    worker: Worker, orders: Orders, enter: Callable[[], None], *, fresh: bool
) -> Held | None:
    """Run one generation; return the state held after it, or None at the end of the run.

    is_fresh: it begins from a checkpoint or initial weights, so the user must correct an error
    there.
    """
    try:
        enter()
        outcome = worker.train()
        if outcome.kind == "paused":
            return _hold(worker, "paused", f"paused after step {outcome.step}", orderly=True)
        if worker.tell(outcome):
            return None
        return _hold(worker, "halt", "a newer generation began at the end of this one")
    except (HaltedError, FencedError) as error:
        return _hold(worker, "halt", str(error))
    except PeerLostError as error:
        kind = "halt" if orders.halted(worker.generation) else "peer"
        return _hold(worker, kind, str(error), orderly=worker.training)
    except NonFiniteError as error:
        logger.error("%s: %s", type(error).__name__, error)
        return _hold(worker, "non_finite", str(error), orderly=True, bad=_bad(error))
    except JumpError as error:
        logger.error("%s: %s", type(error).__name__, error)
        return _hold(worker, "loss_jump", str(error), orderly=True, bad=_jumped(error))
    except RottenError as error:
        logger.error("%s: %s", type(error).__name__, error)
        return _hold(worker, "rotten", str(error))
    except Exception as error:
        if fresh and isinstance(error, UserError):
            raise
        if orders.halted(worker.generation):  # whatever it was woken with
            return _hold(worker, "halt", f"{type(error).__name__}: {error}")
        logger.exception("the step failed")
        return _hold(worker, "error", f"{type(error).__name__}: {error}")


def _hold(
    worker: Worker, kind: str, text: str, *, orderly: bool = False,
    bad: BadStep | None = None,
) -> Held:  # fmt: skip
    """Stop and report the held state.

    is_orderly: all ranks stop alike, or the engine has released the ranks that wait for this one.
    """
    worker.stop(orderly)
    held = worker.held(kind, text, None if bad is None else bad.to_json())
    state = "no state" if held.torn else f"the state after step {held.applied}"
    logger.info("holds %s (%s): %s", state, kind, text)
    return held


def _bad(error: NonFiniteError) -> BadStep:
    """Return the report of a step that was not applied, for the coordinator."""
    what = f"is not finite ({error.parameter} on rank {error.rank})"
    dealt = tuple(tuple(share) for share in error.dealt)
    return BadStep(error.step, what, dealt, tuple(error.suspects), error.again)


def _jumped(error: JumpError) -> BadStep | None:
    """Return the report of a loss jump, or None on a rank that did not judge it."""
    if error.limit is None:
        return None
    what = f"has a loss of {error.loss:.4g}, where up to {error.limit:.4g} were to be expected"
    dealt = tuple(tuple(share) for share in error.dealt)
    return BadStep(error.step, what, dealt, tuple(error.suspects), None, bearable=True)
