"""Which nodes may compute one run together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.policy.membership.node_identity import (
    JoinVerdict,
    LikeProcessors,
    NodeIdentity,
    judge_joiner,
)

OURS = NodeIdentity(
    "c0de", "2.13.0 (build 1)", {"layout.reduction": "tree"}, {"vector units": "avx2"}, "beef"
)


def _judge(theirs: NodeIdentity, rule: LikeProcessors = "warn") -> JoinVerdict:
    return judge_joiner(OURS, theirs, "a", "b", rule)


def test_alike_nodes_join_without_a_word() -> None:
    assert _judge(OURS) == JoinVerdict()


@pytest.mark.parametrize(
    ("theirs", "both"),
    [
        (replace(OURS, code="beaf"), ("beaf", "c0de")),
        (replace(OURS, torch="2.12.1 (build 1)"), ("2.12.1", "2.13.0")),
        (replace(OURS, torch="2.13.0 (build 2)"), ("build 2", "build 1")),
        (replace(OURS, settings={"layout.reduction": "fast"}), ("fast on b", "tree on a")),
    ],
)
@pytest.mark.parametrize("rule", ["warn", "require", "ignore"])
def test_other_code_torch_or_settings_are_refused_with_both_values(
    theirs: NodeIdentity, both: tuple[str, str], rule: LikeProcessors
) -> None:
    refusal = _judge(theirs, rule).refusal
    assert all(value in refusal for value in both)


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        (replace(OURS, processor={"vector units": "avx2 avx512f"}), "avx2 avx512f"),
        (
            replace(OURS, processor={"vector units": "avx2", "MKL_CBWR": "SSE4_2"}),
            "MKL_CBWR SSE4_2, a with unset",
        ),
        (replace(OURS, reference="f00d"), "gives f00d there, beef here"),
    ],
)
def test_another_processor_is_for_the_run_file_to_judge(theirs: NodeIdentity, words: str) -> None:
    warned = _judge(theirs, "warn")
    assert not warned.refusal
    assert words in warned.warning
    assert words in _judge(theirs, "require").refusal
    assert _judge(theirs, "ignore") == JoinVerdict()


def test_an_older_agent_that_sends_nothing_joins() -> None:
    assert _judge(NodeIdentity.from_json({})) == JoinVerdict()
    assert NodeIdentity.from_json(OURS.to_json()) == OURS
