"""Every batch of a run that generates its data: completions as rows, by step number.

A sample of the order is one completion, and one row. Its group may lie in several microbatches. So
advantages are computed of the complete group, before the rows are cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from holdfast.config.run import RunConfig
from holdfast.core.data.advantages import SOURCE as OF_SOURCE
from holdfast.core.data.group_order import Group, GroupAudit, GroupOrder
from holdfast.core.data.sample_order import BatchSchedule, SampleOrder
from holdfast.core.data.skips import Skips
from holdfast.data.stream.batch import MASKED_TARGET, Microbatch, ValidationSet, fed_hash
from holdfast.events import CompletionsShown, Event
from holdfast.rollout.messages import ScoredCompletion
from holdfast.rollout.roles.feed import CompletionFeed, DrawnGroup

if TYPE_CHECKING:  # the agent, which asks for places alone, has no torch
    from holdfast.rollout.roles.teacher import Teacher
    from holdfast.rollout.roles.texts import Texts

SOURCE = "prompts"
"""The name of the data in the ledger."""
GROUPS_KEY = "groups"
"""Key of a ledger entry: [pass, prompt, policy, draws, 1 if it was filtered] of each group."""


class RowValues(Protocol):
    """What the objective needs of rows, next to numbers of their tokens."""

    def of_group(
        self, rewards: NDArray[np.float64], kl: NDArray[np.float64], of_step: NDArray[np.float64]
    ) -> dict[str, NDArray[np.float64]]:
        """Rewards and log ratios to the reference [prompts, samples] -> side tensors by name, of
        the same shape. of_step: rewards of all rows of the step, if the objective needs them."""
        ...

    def of_step(
        self, rows: Sequence[ScoredCompletion], rewards: Sequence[float]
    ) -> dict[str, float]:
        """Return side tensors that have one number in all rows of the step."""
        ...


ROW_STEP = 64
"""Rows are as long as the longest text of their microbatch, rounded up to a multiple of it."""
SHOWN_REPLIES, SHOWN_CHARACTERS = 4, 400
"""Completions of an example, and characters of each text."""


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
        self._groups = GroupOrder(config.seed, rollout.count, rollout.samples)
        self.order: SampleOrder = self._groups
        self.dataset = PromptData(rollout.version)
        self.feed: CompletionFeed | None = None
        self._config, self._length = config, config.data.sequence_length
        self._plan: Callable[[int], Sequence[int]] = lambda step: ()
        self._row_values: RowValues | None = None
        self.texts: Texts | None = None  # of a process that reads completions
        self.teacher: Teacher | None = None  # of a trainer that distils
        self.emit: Callable[[Event], None] = lambda event: None
        """Writes examples into the journal."""

    def attach(
        self,
        feed: CompletionFeed,
        texts: Texts,
        plan: Callable[[int], Sequence[int]],
        row_values: RowValues,
    ) -> None:
        """Read completions from a feed. plan: this rank's microbatches of a step. row_values: what
        the objective needs of the rows of complete groups."""
        self.feed, self.texts = feed, texts
        self._plan, self._row_values = plan, row_values

    def detach(self) -> None:
        if self.feed is not None:
            self.feed.close()
            self.feed = None

    @property
    def group_audit(self) -> GroupAudit:
        """Return the check of the fates of completions, at its begin."""
        rollout = self._config.rollout
        return GroupAudit(self._groups, rollout.lag, rollout.draws)

    def microbatches(self, step: int) -> int:
        """Logical microbatches of a step."""
        return self.schedule.size(step) // self.microbatch_size

    def validation(self, samples: int) -> ValidationSet:
        """There is none: rewards of the completions are the measure."""
        return ValidationSet([], 0, 1.0)

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
        groups, of_step = self._drawn(step, start, stop, part, parts)
        entry[GROUPS_KEY] = [
            [g.epoch, g.prompt, g.policy, g.draws, int(g.is_filtered)] for g in groups.values()
        ]
        batch = self._rows(start, stop, groups, of_step)
        if parts == 1 and not self._config.train.compile:
            batch = _without_padding(batch)
        entry["hash"] = fed_hash(batch.inputs, batch.targets, batch.side)
        return replace(batch, entries=[entry])

    def hash_of(self, start: int, stop: int) -> str:
        """Unknown: only a policy that exists no more makes the same completions again."""
        return ""

    def blank_hash(self, samples: int) -> str:
        """The ledger hash of so many skipped rows."""
        blank = self._blank(samples, [])
        return fed_hash(blank.inputs, blank.targets)

    # --- parts ----------------------------------------------------------------------------------
    def _drawn(
        self, step: int, start: int, stop: int, part: int, parts: int
    ) -> tuple[dict[Group, DrawnGroup], list[DrawnGroup]]:
        """Wait for the groups of these positions, and for all of the step if the objective needs
        them. Those of the rank's further rows of this step and of the steps whose policy exists are
        made meanwhile. Return both."""
        assert self.feed is not None
        asked, every_one = self._groups.groups(start, stop), list[Group]()
        if self._config.objective.of_steps:
            first = self.schedule.position(step)
            every_one = self._groups.groups(first, first + self.schedule.size(step))
        last = min(step + self._config.rollout.lag, self._config.train.steps)
        ahead = [
            (later, group)
            for later in range(step, last + 1)
            for index in self._plan(later)
            if not self.skips.reason(later, index)
            for group in self._groups.groups(*self.positions(later, index, part, parts))
        ]
        self.feed.groups(step, every_one or asked, ahead)
        groups = {group: self.feed.drawn(step, group) for group in asked}
        every = self._config.rollout.show_every
        if every and (step - 1) % every == 0 and start == self.schedule.position(step):
            self._show(step, groups[asked[0]])
        return groups, [self.feed.drawn(step, group) for group in every_one]

    def _show(self, step: int, group: DrawnGroup) -> None:
        """Emit a group as an example."""
        assert self.texts is not None, "a feed is attached"
        shown = group.completions[:SHOWN_REPLIES]
        prompt = self.texts.prompts[group.prompt]
        self.emit(
            CompletionsShown(
                group.prompt,
                _cut(self.texts.tokenizer.decode(list(prompt.ids), skip_special_tokens=False)),
                [_cut(each.text) for each in shown],
                [self._total(each.rewards) for each in shown if each.rewards],
                group.is_filtered,
                step=step,
            )
        )

    def _rows(
        self,
        start: int,
        stop: int,
        groups: dict[Group, DrawnGroup],
        every_one: Sequence[DrawnGroup],
    ) -> Microbatch:
        """The rows of these positions, with what the objective needs of each. every_one: the groups
        of the step, if it needs them."""
        assert self.texts is not None, "a feed is attached"
        blank, size = self._blank(stop - start, []), self._config.rollout.samples
        inputs, targets, documents = blank.inputs, blank.targets, blank.documents
        assert documents is not None
        kept = [one for each in every_one if not each.is_filtered for one in each.completions]
        of_step = [self._total(one.rewards) for one in kept]
        same = self._row_values.of_step(kept, of_step) if kept and self._row_values else {}
        values = {group: self.values_of(drawn, of_step) for group, drawn in groups.items()}
        names = sorted({name for each in values.values() for name in each})
        first = next(iter(groups.values())).completions[0].completion
        every_name = {"old", *first.side, *same, *names}
        side: dict[str, NDArray[Any]] = {
            n: np.zeros(inputs.shape, dtype=np.float32) for n in sorted(every_name)
        }
        if self.teacher is not None:
            side |= self.teacher.blank(stop - start)
        _, epochs, samples = self.order.places(start, stop)
        for row, (epoch, sample) in enumerate(zip(epochs.tolist(), samples.tolist(), strict=True)):
            prompt, number = divmod(sample, size)
            group = groups[epoch, prompt]
            ids, made = self.texts.prompts[prompt].ids, group.completions[number].completion
            tokens = np.asarray([*ids, *made.tokens], dtype=np.int64)
            length = len(tokens) - 1
            inputs[row, :length], documents[row, :length] = tokens[:-1], 0
            if group.is_filtered:
                continue
            reply = slice(len(ids) - 1, length)
            targets[row, reply], side["old"][row, reply] = made.tokens, made.logps
            for name in names:
                side[name][row, reply] = values[epoch, prompt][name][number]
            for name, numbers in (*made.side.items(), *same.items()):
                side[name][row, reply] = numbers
            if self.teacher is not None:
                for name, read in self.teacher.read([*ids, *made.tokens], len(ids)).items():
                    side[name][row, reply] = read
        weight = int((targets != MASKED_TARGET).sum())
        return Microbatch(inputs, targets, documents, [], weight, side)

    def values_of(
        self, group: DrawnGroup, of_step: Sequence[float] = ()
    ) -> dict[str, NDArray[np.float64]]:
        """What the objective needs of each completion of a group: [samples] by name. of_step:
        rewards of all rows of the step."""
        assert self._row_values is not None, "a feed is attached"
        rewards = [self._total(each.rewards) for each in group.completions]
        rows: dict[str, NDArray[np.float64]] = {}
        if self._config.rollout.rewards:
            rows = self._row_values.of_group(
                np.asarray([rewards], dtype=np.float64),
                np.asarray([[log_ratio(each) for each in group.completions]]),
                np.asarray(of_step, dtype=np.float64),
            )
        clipped = [float(each.completion.finish == "length") for each in group.completions]
        of_group = {name: numbers[0] for name, numbers in rows.items()}
        found = of_group | {"completions/clipped_ratio": np.asarray(clipped)}
        for at, name in enumerate(self._config.rollout.reward_names):
            found[name] = np.asarray([each.rewards[at] for each in group.completions])
        if sources := self._config.rollout.sources:
            assert self.texts is not None, "a feed is attached"
            number = sources.index(self.texts.prompts[group.prompt].source)
            found[OF_SOURCE] = np.full(len(rewards), float(number))
        return found

    def _total(self, numbers: Sequence[float]) -> float:
        rewards = self._config.rollout.rewards
        return sum(r.weight * number for r, number in zip(rewards, numbers, strict=True))

    def _blank(self, rows: int, entries: list[dict[str, Any]]) -> Microbatch:
        """Rows without a target. What follows a row's end is a document of its own."""
        shape = (rows, self._length)
        inputs = np.zeros(shape, dtype=np.int64)
        targets = np.full(shape, MASKED_TARGET, dtype=np.int64)
        return Microbatch(inputs, targets, np.ones(shape, dtype=np.int32), entries, 0)


def log_ratio(one: ScoredCompletion) -> float:
    """Return the sum of a completion's log ratios to the reference; 0 without one."""
    made = one.completion
    read = made.side.get("reference", made.logps)
    return math.fsum(old - new for old, new in zip(made.logps, read, strict=True))


def _cut(text: str) -> str:
    """Return a text without what an example has no room for."""
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 3]}..."


def _without_padding(batch: Microbatch) -> Microbatch:
    """Cut the columns that no row reaches. A microbatch has the same rows in each layout, and so
    the same length. (Shares of one would differ, and a compiled block wants one length.)"""
    assert batch.documents is not None
    longest = int((batch.documents == 0).sum(1).max(initial=1))
    length = min(-(-longest // ROW_STEP) * ROW_STEP, batch.inputs.shape[1])
    return replace(
        batch,
        inputs=batch.inputs[:, :length],
        targets=batch.targets[:, :length],
        documents=batch.documents[:, :length],
        side={name: value[:, :length] for name, value in batch.side.items()},
    )
