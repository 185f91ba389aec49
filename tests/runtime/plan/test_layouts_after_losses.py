"""The layouts that the planner chooses after losses, and every other one, executed by processes.

The complete form is `python -m benchmarks.runtime.plan_losses layouts`.
"""

from __future__ import annotations

from itertools import islice

import pytest
from benchmarks.runtime.plan_losses import WITHIN, alternatives, losses, measured, words


@pytest.mark.slow
@pytest.mark.parametrize("number", range(2))
def test_the_chosen_layout_is_close_to_the_best_that_is_measured(number: int) -> None:
    loss = next(islice(losses(), number, None))
    times = {words(each): measured(loss, each) for each in alternatives(loss)}
    assert times[words(loss.chosen)] <= (1 + WITHIN) * min(times.values()), times
