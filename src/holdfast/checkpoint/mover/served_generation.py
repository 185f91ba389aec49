"""The generation that a mover serves, and the lock of what belongs to it."""

from __future__ import annotations

import threading

from holdfast.checkpoint.format.save_context import SaveContext
from holdfast.errors import FencedError, HoldfastError


class ServedGeneration:
    """One generation at a time. `change` guards what belongs to it, in the mover's other objects
    too, and is notified when that changes."""

    def __init__(self) -> None:
        self.change = threading.Condition()
        self.context: SaveContext | None = None

    def notify(self) -> None:
        """Wake the threads that wait for a change."""
        with self.change:
            self.change.notify_all()

    def begin(self, context: SaveContext) -> SaveContext:
        """Serve a generation from now on; return its context, the older one if it is said again.
        Raises FencedError for a generation that is not newer than the present."""
        with self.change:
            present = self.context
            if present is not None and context.generation <= present.generation:
                if (present.generation, present.topology) == (context.generation, context.topology):
                    return present
                raise FencedError(f"generation {present.generation} has begun already")
            self.context = context
            self.change.notify_all()
            return context

    def has_begun(self, generation: int) -> bool:
        """Return True if the generation, or a newer one, is served."""
        return self.context is not None and self.context.generation >= generation

    def require(self, generation: int) -> SaveContext:
        """Return the context of a generation. Raises FencedError when another one is served, and
        HoldfastError before the first."""
        plan = self.context
        if plan is None:
            raise HoldfastError("no generation has begun: the agent sends `expect` first")
        if generation != plan.generation:
            raise FencedError(
                f"generation {plan.generation} is served, the request is of {generation}"
            )
        return plan
