"""Fetches the shards of the coming steps into a node's cache, before a batch needs them.

The batch of each step is known in advance, so the files that it reads are. Threads fetch them in
the order of need: as many as the cache's limit allows, counted from the step that is read now. If
the address does not answer, they try again; training continues with what is here.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

from holdfast.data.stream.node_cache import NodeCache, total_bytes
from holdfast.data.stream.shards import ShardFile
from holdfast.errors import DataError, OutOfSpaceError, StoreError

FETCH_THREADS = 8
MAX_STEPS_AHEAD = 4096
"""Steps that are looked at beyond the one that is read."""
MAX_PAUSE_S = 10.0


class Prefetch:
    """Threads that fetch ahead, from the first call of `reach` on until the process ends.

    needs: the files of a step. last_step: of the run. always: files that are needed in any case.
    files: all files that can be needed.
    """

    def __init__(
        self,
        cache: NodeCache,
        needs: Callable[[int], Iterable[ShardFile]],
        last_step: int,
        always: Iterable[ShardFile],
        files: int,
    ):
        self._cache, self._needs, self._last_step = cache, needs, last_step
        self._last_need: dict[ShardFile, int] = dict.fromkeys(always, last_step)
        self._held = total_bytes(self._last_need)
        self._waiting = deque(file for file in self._last_need if not cache.has(file))
        self._files = files
        self._step = self._next_step = 0  # that is read; whose files are not known yet
        self._change = threading.Condition()
        self._planning = threading.Lock()

    def reach(self, step: int) -> None:
        """A batch of this step is read now."""
        with self._change:
            if step <= self._step:
                return
            is_first = not self._step
            self._step = step
            self._change.notify_all()
        for number in range(FETCH_THREADS if is_first else 0):
            threading.Thread(target=self._run, name=f"prefetch-{number}", daemon=True).start()

    def _run(self) -> None:
        pause = 0.5
        while (file := self._next_file()) is not None:
            try:
                self._cache.fetch(file, wait=False)
                pause = 0.5
            except StoreError:
                with self._change:
                    self._waiting.appendleft(file)
                    self._change.wait(pause)
                pause = min(2 * pause, MAX_PAUSE_S)
            except (DataError, OutOfSpaceError):
                pass  # the batch that needs the file says so

    def _next_file(self) -> ShardFile | None:
        """The file that is needed first and is not here. Waits while the cache has all that it has
        room for; None if no more files will be needed."""
        while True:
            with self._planning:
                with self._change:
                    if self._waiting:
                        return self._waiting.popleft()
                    current, step = self._step, max(self._next_step, self._step)
                if step > self._last_step or self._knows_all():
                    return None
                found = self._plan(current, step)
                with self._change:
                    if found is not None:
                        self._next_step = step + 1
                        self._waiting.extend(found)
                        continue
            with self._change:
                self._change.wait_for(partial(self._has_moved, current))

    def _has_moved(self, step: int) -> bool:
        return self._step != step or bool(self._waiting)

    def _knows_all(self) -> bool:
        return len(self._last_need) == self._files and self._held <= self._cache.limit

    def _plan(self, current: int, step: int) -> list[ShardFile] | None:
        """The files of a step that are not here; None if the cache has no room for them now."""
        if step > current + MAX_STEPS_AHEAD:
            return None
        files = list(self._needs(step))
        if self._held + self._new_bytes(files) > self._cache.limit:
            for file in [file for file, last in self._last_need.items() if last < current]:
                del self._last_need[file]
                self._held -= file.bytes
        added = self._new_bytes(files)
        if self._held + added > self._cache.limit:
            return None
        self._held += added
        self._last_need.update(dict.fromkeys(files, step))
        missing = [file for file in files if not self._cache.has(file)]
        for file in files:
            self._cache.touch(file)
        return missing

    def _new_bytes(self, files: Iterable[ShardFile]) -> int:
        return total_bytes(file for file in files if file not in self._last_need)
