"""Every refusal in `src` has a place and a remedy, and what a remedy names exists."""

from __future__ import annotations

import pytest

from tests.runtime.cli.remedies.rules import EXEMPT, complaints
from tests.runtime.cli.remedies.sites import SOURCES, all_refusals, refusals_of


def test_refusals_keep_the_rules() -> None:
    refusals = all_refusals()
    assert len(refusals) > 900
    assert [f"{one.module}: {said}" for one in refusals for said in complaints(one)] == []


def test_what_is_exempt_is_there() -> None:
    for name in " ".join(EXEMPT.values()).split():
        module, _, function = name.partition(":")
        [path] = SOURCES.glob(f"*/{module}")
        assert f"def {function}" in path.read_text("utf-8"), name


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        ("UserError('it failed', where=path)", "no remedy"),
        ("UserError('it failed', where=path, remedy=None)", "no remedy"),
        ("UserError('it failed', remedy='try again')", "names no place"),
        ("UserError('bad', where=p, remedy='use train.stepz=3')", "train.stepz is no key"),
        ("UserError('bad', where=p, remedy=f'set trian.steps to {n}')", "trian.steps is no key"),
        ("UserError('bad', where=p, remedy=f'use {n} or layout.workerz={n}')", "workerz is no key"),
        ("UserError('bad', where=p, remedy=f'use fodler={n}')", "fodler is no key"),
        ("UserError('bad', where='layout.wrkers', remedy='use 3')", "layout.wrkers is no key"),
        ("UserError('bad', where=p, remedy=f'run holdfast trian {n}')", "no command trian"),
        ("UserError('bad', where=p, remedy='run holdfast data prepar')", "no command prepar"),
        ("UserError('bad', where=p, remedy='see holdfast init --forse')", "--forse"),
        ("UserError('bad', where=p, remedy='run holdfast branch RUN --at')", "--at"),
        ("UserError('bad', where=p, remedy='leave out --wekers')", "--wekers is no option"),
        ("UserError('bad', where=p, remedy=R)", "train.stepz is no key"),
        ("UserError('bad', where=p, remedy=remedy_of(p))", "train.stepz is no key"),
        ("refuse('bad', 'use train.stepz')", "train.stepz is no key"),
    ],
)
def test_a_planted_fault_is_found(call: str, complaint: str) -> None:
    text = f"""
R = "use train.stepz"

def remedy_of(path):
    return R if path else ""

def refuse(message, remedy):
    raise UserError(message, where="train.steps", remedy=remedy)

def check(path, n, p):
    raise {call}
"""
    said = [said for one in refusals_of(text, "holdfast/x.py") for said in complaints(one)]
    assert any(complaint in one for one in said), said
