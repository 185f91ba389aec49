"""The rewards of a run: what rates a completion, as the entries of `rollout.rewards` say.

A rating is a function of prompt and completion. So any scorer gives the same numbers, and one that
is lost is replaced. docs/guide/rewards.md is the user's page.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, Protocol

from holdfast.config.sections.rewards import RewardConfig, numbered_labels
from holdfast.data.read.files import canonical_json
from holdfast.errors import RewardError
from holdfast.rollout.prompts import Prompt
from holdfast.rollout.rewards.function import FunctionReward
from holdfast.rollout.rewards.program import ProgramReward

_DIGEST_BYTES = 16
_MODEL = "holdfast.rollout.rewards.model"


class Reward(Protocol):
    """What one entry rates with."""

    @property
    def source(self) -> str:
        """Digest of the files that decide its numbers; "" if there are none."""
        ...

    def rate(self, prompt: Prompt, text: str, ids: Sequence[int]) -> Any:
        """Return the number of a completion. Raises RewardError."""
        ...

    def close(self) -> None: ...


class Rewards:
    """All entries of a run, in order. Not for several threads at once.

    Args:
        entries: of `rollout.rewards`.
        folder: where modules of functions lie: `task.folder`.

    Raises RewardError for an entry that cannot be made.
    """

    def __init__(self, entries: Sequence[RewardConfig], folder: str = ""):
        self.entries = tuple(entries)
        self._asked_twice: set[int] = set()
        self._parts: list[Reward] = []
        try:
            for number, entry in enumerate(entries):
                self._parts.append(_open(entry, folder, f"rollout.rewards.{number}"))
        except BaseException:
            self.close()
            raise
        digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        for entry, part in zip(self.entries, self._parts, strict=True):
            digest.update(canonical_json([entry.model_dump(exclude={"path"}), part.source]))
        self.version = digest.hexdigest()
        """Digest of keys and of the files behind them."""

    @property
    def labels(self) -> tuple[str, ...]:
        """A name of each entry for metrics."""
        return numbered_labels(self.entries)

    def check(self, prompts: Iterable[Prompt]) -> None:
        """Rate a probe, which is a prompt's own answer, before a run begins. Raises RewardError
        for a reward that cannot rate it, and for a prompt that lacks what a reward needs."""
        for place, prompt in enumerate(prompts):
            for number, entry in enumerate(self.entries):
                self._require(prompt, entry, f"rollout.rewards.{number}")
            if place == 0:
                self.rate(prompt, prompt.answer or "", ())

    def rate(self, prompt: Prompt, text: str, ids: Sequence[int]) -> tuple[float, ...]:
        """Return the number of each entry for a completion.

        Args:
            text: the completion without end tokens.
            ids: its tokens.

        Raises RewardError for a reward that fails, or that is not the same twice.
        """
        return tuple(self._rate(number, prompt, text, ids) for number in range(len(self._parts)))

    def total(self, numbers: Sequence[float]) -> float:
        """Return the reward of a completion: the sum of weight times number."""
        return sum(e.weight * n for e, n in zip(self.entries, numbers, strict=True))

    def close(self) -> None:
        """End the processes behind the entries."""
        for part in self._parts:
            part.close()

    def __enter__(self) -> Rewards:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def _rate(self, number: int, prompt: Prompt, text: str, ids: Sequence[int]) -> float:
        part, where = self._parts[number], f"rollout.rewards.{number}"
        rated = _as_number(part.rate(prompt, text, ids), prompt, where)
        if number not in self._asked_twice:
            again = _as_number(part.rate(prompt, text, ids), prompt, where)
            if again != rated:
                raise RewardError(
                    f"the same completion of prompt {prompt.number} gets {rated:g}, then {again:g}",
                    where=where,
                    remedy="make the reward a function of its arguments, without random numbers, "
                    "a clock or a counter",
                )
            self._asked_twice.add(number)
        return rated

    def _require(self, prompt: Prompt, entry: RewardConfig, where: str) -> None:
        compares = entry.kind == "exact_match" or (entry.kind == "code" and not entry.tests)
        if compares and prompt.answer is None:
            raise RewardError(
                f"prompt {prompt.number} ({prompt.where}) has no answer, which kind: {entry.kind} "
                "compares with",
                where=where,
                remedy="write the answer, or name its column with answer in rollout.prompts",
            )
        if entry.tests and not isinstance(prompt.columns.get(entry.tests), str):
            raise RewardError(
                f"prompt {prompt.number} ({prompt.where}) has no text in the column "
                f"{entry.tests!r}",
                where=where,
                remedy="set tests to the column of Python that tests a program",
            )


def _open(entry: RewardConfig, folder: str, where: str) -> Reward:
    if entry.kind == "function":
        return FunctionReward(entry, folder, where)
    if entry.kind == "code":
        return ProgramReward(entry, where)
    if entry.kind == "model":
        # By name: it imports torch, and the agent's side, which asks for versions alone, may not.
        reward: Reward = import_module(_MODEL).ModelReward(entry, where)
        return reward
    return _Match(entry)


class _Match:
    """exact_match and regex."""

    source = ""

    def __init__(self, entry: RewardConfig):
        self._is_exact, self._fold = entry.kind == "exact_match", entry.ignore_case
        flags = re.IGNORECASE if entry.ignore_case else 0
        self._pattern = None if entry.pattern is None else re.compile(entry.pattern, flags)

    def rate(self, prompt: Prompt, text: str, ids: Sequence[int]) -> float:
        if self._pattern is not None:
            found = list(self._pattern.finditer(text))
            if not found or not self._is_exact:
                return float(bool(found))
            text = found[-1][1 if self._pattern.groups else 0] or ""
        said, answer = text.strip(), (prompt.answer or "").strip()
        return float(said.casefold() == answer.casefold() if self._fold else said == answer)

    def close(self) -> None:
        pass


def _as_number(value: Any, prompt: Prompt, where: str) -> float:
    with suppress(OverflowError):  # of a whole number without end
        if isinstance(value, int | float) and math.isfinite(value):
            return float(value)
    what = repr(value)
    raise RewardError(
        f"the reward of prompt {prompt.number} ({prompt.where}) is "
        f"{what if len(what) <= 60 else what[:57] + '...'}, and not a finite number",
        where=where,
        remedy="return a number for each completion; 0 for one that cannot be rated",
    )
