"""A round that a run has not done is refused in the words of its command."""

from __future__ import annotations

import pytest

from holdfast.api.replay_record import PublicRecord, plan_stretches
from holdfast.core.data.skips import Skips
from holdfast.errors import RunFolderError
from holdfast.events import StepDone


@pytest.mark.parametrize("word", ["step", "round"])
def test_a_step_that_was_not_done_names_its_option(word: str) -> None:
    record = PublicRecord([], {}, Skips(), first_step=1)
    record.done = {n: (1, StepDone(n, 1.0, 1.0, 1.0, 1.0, 1.0)) for n in (1, 2)}
    record.rounds = {n: {"0"} for n in record.done} if word == "round" else {}
    with pytest.raises(RunFolderError, match=f"{word} 3 is none of this run") as caught:
        plan_stretches(record, [3], "here", to_checkpoint=False)
    assert f"--{word}" in str(caught.value.remedy)
