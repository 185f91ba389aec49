"""Which of the other nodes this one does not reach, though both may be heard by the coordinator.

A link between two switches can fail and leave every agent's way to its coordinator whole; then no
node is lost, and workers wait for each other in vain. So when a generation is ended because all
wait, each agent sees whom of the others' agents its machine reaches, before it says that its
workers hold. Whoever is missed is told with every question from then on, and tried again behind it,
until it is reached. (Partial partitions: Alquraan et al., "An analysis of network-partitioning
failures in cloud systems", OSDI 2018, section 4.)

Any answer of the machine will do, also that nobody listens: what has ended is found out elsewhere
(`liveness_probe`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from itertools import islice

from holdfast.elastic.coordinator.liveness_probe import Answer, answer

SECONDS = 1.5
"""Long enough for a lost packet to be sent once more by the kernel."""
LATE = 0.5
"""An agent that wakes so much later has heard nothing that came meanwhile: it tries again."""
TRIES = 3
MOST = 64
"""So many of the others are tried: each agent those that follow it by name, so that of two at least
one tries the other as long as there are not more than twice as many."""


class Reaching:
    """Of one agent; lives in one event loop."""

    def __init__(self) -> None:
        self._missed: dict[str, str] = {}  # with their addresses: newer generations may lack them
        self._trying: asyncio.Task[None] | None = None
        self._first = False

    @property
    def missed(self) -> tuple[str, ...]:
        return tuple(self._missed)

    @property
    def looking(self) -> bool:
        """Whether `look` has not ended."""
        return self._first and self._trying is not None and not self._trying.done()

    def look(self, own: str, agents: Mapping[str, str], ended: Callable[[], None]) -> None:
        """Try all the others, behind whoever asks. agents: name -> "host:port", `own` among them.
        ended: called in the end."""
        names = sorted(agents)
        after = [name for name in names if name > own] + [name for name in names if name < own]
        self._start({name: agents[name] for name in islice(after, MOST)}, first=True)
        assert self._trying is not None
        self._trying.add_done_callback(lambda _: ended())

    def again(self, agents: Mapping[str, str]) -> None:
        """Try those that were missed. agents: as in `look`, where some may listen elsewhere now."""
        if self._missed and (self._trying is None or self._trying.done()):
            self._start({n: agents.get(n, old) for n, old in self._missed.items()}, first=False)

    def close(self) -> None:
        if self._trying is not None:
            self._trying.cancel()

    def _start(self, agents: Mapping[str, str], *, first: bool) -> None:
        self.close()
        self._first = first
        self._trying = asyncio.create_task(self._try(agents))

    async def _try(self, agents: Mapping[str, str]) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(TRIES):
            begun = loop.time()
            found = await asyncio.gather(*(answer(a, SECONDS) for a in agents.values()))
            if loop.time() - begun < SECONDS + LATE:
                named = zip(agents.items(), found, strict=True)
                self._missed = dict(agent for agent, came in named if came is Answer.SILENT)
                return
