"""What an actor asks for completions: a decoder of its own, or a server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator

from holdfast.rollout.messages import Completion, CompletionRequest


class CompletionSource(ABC):
    """Generates completions, several at a time."""

    @property
    @abstractmethod
    def slots(self) -> int:
        """Completions that it generates at a time."""

    @property
    @abstractmethod
    def free(self) -> int:
        """Slots without a completion."""

    @abstractmethod
    def start(self, request: CompletionRequest, run_seed: int) -> Completion | None:
        """Begin a completion in a free slot. Return it if it has ended. Raises UserError for a
        request that cannot be generated."""

    @abstractmethod
    def step(self) -> list[Completion]:
        """Work on the completions under way for a moment. Return those that ended."""

    @abstractmethod
    def cancel(self) -> None:
        """Drop the completions that are under way."""

    def generate(
        self, requests: Iterable[CompletionRequest], run_seed: int
    ) -> Iterator[Completion]:
        """Yield the completion of each request, in the order in which they end. Requests are taken
        as slots become free."""
        waiting = iter(requests)
        try:
            more = True
            while True:
                while more and self.free:
                    request = next(waiting, None)
                    more = request is not None
                    if request is not None and (ended := self.start(request, run_seed)):
                        yield ended
                if self.free == self.slots:
                    return
                yield from self.step()
        finally:
            self.cancel()
