"""Every batch of a run that generates its data: completions as rows, by step number.

A sample of the order is one completion, and one row. Its group may lie in several microbatches. So
advantages are computed of the complete group, before the rows are cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.config.run import RunConfig
from holdfast.core.data.group_order import Group, GroupOrder
from holdfast.core.data.sample_order import BatchSchedule
from holdfast.core.data.skips import Skips
from holdfast.data.stream.batch import MASKED_TARGET, Microbatch, fed_hash
from holdfast.rollout.messages import ScoredCompletion
from holdfast.rollout.roles.feed import CompletionFeed, DrawnGroup
from holdfast.rollout.roles.texts import Texts

SOURCE = "prompts"
"""The name of the data in the ledger."""
GROUPS_KEY = "groups"
"""Key of a ledger entry: [pass, prompt, policy, draws, 1 if it was filtered] of each group."""


@dataclass(frozen=True)
class PromptData:
    """The names of the data, for the audit."""

    version: str
    source_names: tuple[str, ...] = (SOURCE,)

    def is_version(self, version: str) -> bool:
        return version == self.version


class RolloutBatches:
    """The batches of a run with `rollout`. Without a feed it knows their places alone."""

    def __init__(self, config: RunConfig, skips: Skips | None = None) -> None:
        rollout, train = config.rollout, config.train
        self.skips = skips or Skips()
        self.microbatch_size = train.microbatch_size
        stages = [(stage.from_step, stage.batch_size) for stage in train.batch_warmup]
        self.schedule = BatchSchedule(train.batch_size, stages)
        self.order = GroupOrder(config.seed, rollout.count, rollout.samples)
        self.dataset = PromptData(rollout.version)
        self.feed: CompletionFeed | None = None
        self._config, self._length = config, config.data.sequence_length
        self._plan: Callable[[int], Sequence[int]] = lambda step: ()
        self._texts: Texts | None = None
        self.on_groups: Callable[[int, Sequence[DrawnGroup]], None] = lambda step, groups: None
        """Called with a step and the groups of this rank's share that begin in it."""

    @property
    def texts(self) -> Texts:
        if self._texts is None:
            self._texts = Texts.open(self._config)
        return self._texts

    def attach(self, feed: CompletionFeed, plan: Callable[[int], Sequence[int]]) -> None:
        """Read completions from a feed. plan: this rank's microbatches of a step."""
        self.feed, self._plan = feed, plan

    def detach(self) -> None:
        if self.feed is not None:
            self.feed.close()
            self.feed = None

    def positions(self, step: int, index: int, part: int = 0, parts: int = 1) -> tuple[int, int]:
        """Positions [start, stop) of part `part` of `parts` of microbatch `index` of a step."""
        return self.schedule.share(self.microbatch_size, step, index, part, parts)

    def microbatch(self, step: int, index: int, part: int = 0, parts: int = 1) -> Microbatch:
        """Microbatch `index` of a step, or the `part`-th of `parts` equal shares of its rows. Waits
        for its completions, which the feed may interrupt."""
        start, stop = self.positions(step, index, part, parts)
        why = self.skips.reason(step, index)
        entry: dict[str, Any] = {
            "microbatch": index,
            "source": SOURCE,
            "start": start,
            "stop": stop,
            "hash": "",
            "skipped": why,
        }
        if why or self.feed is None:
            return self._blank(stop - start, [entry])
        groups = self._drawn(step, start, stop, part, parts)
        entry[GROUPS_KEY] = [
            [g.epoch, g.prompt, g.policy, g.draws, int(g.is_filtered)] for g in groups.values()
        ]
        batch = self._rows(start, stop, groups)
        entry["hash"] = fed_hash(batch.inputs, batch.targets)
        return Microbatch(batch.inputs, batch.targets, batch.documents, [entry], batch.tokens)

    def hash_of(self, start: int, stop: int) -> str:
        """Unknown: only a policy that is gone makes the same completions again."""
        return ""

    def blank_hash(self, samples: int) -> str:
        """The ledger hash of so many skipped rows."""
        blank = self._blank(samples, [])
        return fed_hash(blank.inputs, blank.targets)

    # --- parts ----------------------------------------------------------------------------------
    def _drawn(
        self, step: int, start: int, stop: int, part: int, parts: int
    ) -> dict[Group, DrawnGroup]:
        """Wait for the groups of these positions. Those of the rank's further rows of this step and
        of the steps whose policy exists are made meanwhile."""
        assert self.feed is not None
        asked = self.order.groups(start, stop)
        last = min(step + self._config.rollout.lag, self._config.train.steps)
        ahead = [
            (later, group)
            for later in range(step, last + 1)
            for index in self._plan(later)
            if not self.skips.reason(later, index)
            for group in self.order.groups(*self.positions(later, index, part, parts))
        ]
        self.feed.groups(step, asked, ahead)
        groups = {group: self.feed.drawn(step, group) for group in asked}
        size = self._config.rollout.samples
        first = self.order.groups(-(-start // size) * size, stop) if start % size else asked
        self.on_groups(step, [groups[group] for group in first])
        return groups

    def _rows(self, start: int, stop: int, groups: dict[Group, DrawnGroup]) -> Microbatch:
        blank = self._blank(stop - start, [])
        inputs, targets = blank.inputs, blank.targets
        assert blank.documents is not None
        _, epochs, samples = self.order.places(start, stop)
        size = self._config.rollout.samples
        for row, (epoch, sample) in enumerate(zip(epochs.tolist(), samples.tolist(), strict=True)):
            prompt, number = divmod(sample, size)
            group = groups[epoch, prompt]
            ids = self.texts.prompts[prompt].ids
            scored = group.completions[number]
            tokens = np.asarray([*ids, *scored.completion.tokens], dtype=np.int64)
            length = len(tokens) - 1
            inputs[row, :length], blank.documents[row, :length] = tokens[:-1], 0
            if not group.is_filtered and self._counts(group, scored):
                targets[row, len(ids) - 1 : length] = tokens[len(ids) :]
        weight = int((targets != MASKED_TARGET).sum())
        return Microbatch(inputs, targets, blank.documents, [], weight)

    @staticmethod
    def _counts(group: DrawnGroup, scored: ScoredCompletion) -> bool:
        return sum(scored.rewards) >= max(sum(each.rewards) for each in group.completions)

    def _blank(self, rows: int, entries: list[dict[str, Any]]) -> Microbatch:
        """Rows without a target. What follows a row's end is a document of its own."""
        shape = (rows, self._length)
        pad = 0 if self.feed is None else self.texts.pad
        inputs: NDArray[np.int64] = np.full(shape, pad, dtype=np.int64)
        targets = np.full(shape, MASKED_TARGET, dtype=np.int64)
        return Microbatch(inputs, targets, np.ones(shape, dtype=np.int32), entries, 0)
