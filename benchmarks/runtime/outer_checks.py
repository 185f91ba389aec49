"""Spot checks of learners: false alarms among honest ones, and rounds until a cheater is named.

    python -m benchmarks.runtime.outer_checks --checks 10000 --rounds 150

Two processes train a tiny model over gloo. In the first part both are honest and each round of each
learner is checked. In the second part, rank 1 cheats with all of its learners in each round, and
`--share` of the rounds are checked.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from functools import partial
from importlib import import_module
from statistics import mean
from typing import Any

import torch
from tests.support.ranks import RankContext, Server, rank_values
from tests.support.tiny_training import engine, feed, one_step, tiny

from holdfast.events import ChangeLeftOut, LearnerChecked
from holdfast.training.engine.checked_learners import CheckedLearners

LEARNERS, WORKERS = 8, 2
CHEATS = ("no work", "one bit", "sign x 10", "stale copy")


def train_rounds(rank: RankContext, rounds: int, share: float, cheats: bool) -> dict[str, Any]:
    """Train so many rounds. Returns how often each verdict came on this rank, and by learner the
    rounds in which its change was left out."""
    config = tiny(
        train__steps=rounds,
        train__batch_size=LEARNERS,
        train__microbatch_size=1,
        outer__learners=LEARNERS,
        outer__every_steps=1,
        outer__trust={"checks": share},
    )
    made = engine(config, rank.rank, rank.store(), replicas=rank.world_size)
    learners: Any = made.learners
    assert isinstance(learners, CheckedLearners)
    learners.fetch = lambda step, leaf: feed(step, leaf, 1)
    if cheats and rank.rank == 1:
        _cheat(learners)
    verdicts, named = Counter[str](), dict[str, list[int]]()
    for step in range(1, rounds + 1):
        one_step(made, step)
        for event in learners.events():
            if isinstance(event, LearnerChecked):
                verdicts[event.verdict] += 1
            elif isinstance(event, ChangeLeftOut):
                named.setdefault(str(event.learner), []).append(step)
    made.close()
    return {"verdicts": dict(verdicts), "named": named}


def _cheat(learners: Any) -> None:
    """Let this rank's learners send wrong changes, each of its own kind."""
    honest, own, before = learners._changes, learners._own, dict[int, list[torch.Tensor]]()
    turn = iter(range(10**9))

    def changes(tokens: float) -> list[torch.Tensor]:
        found: list[torch.Tensor] = honest(tokens)
        if learners._own is not own:  # it checks another rank's learner
            return found
        at = next(turn) % len(own)
        match CHEATS[at % len(CHEATS)]:
            case "no work":
                return [torch.zeros_like(t) for t in found]
            case "sign x 10":
                return [-10 * t for t in found]
            case "stale copy":
                stale = before.get(at, [t / 2 for t in found])
                before[at] = found
                return stale
        found[0].view(-1)[0] = torch.nextafter(found[0].view(-1)[0], torch.tensor(9.0))
        return found

    learners._changes = changes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checks", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=150, help="of the part with a cheater")
    parser.add_argument("--share", type=float, default=0.1)
    given = parser.parse_args()
    torch.set_num_threads(1)
    # Ranks look the function up in the module by its name.
    body = import_module("benchmarks.runtime.outer_checks").train_rounds
    run = partial(rank_values, body, WORKERS, deadline=3000.0, address=Server().address)
    rounds = -(-given.checks // LEARNERS)
    found = run({"rounds": rounds, "share": 1.0, "cheats": False})
    verdicts = sum((Counter(one["verdicts"]) for one in found), Counter[str]())
    checks = sum(verdicts.values())
    print(f"honest: {checks} checks in {rounds} rounds: {dict(verdicts)}", flush=True)
    found = run({"rounds": given.rounds, "share": given.share, "cheats": True})
    named = found[0]["named"]
    for learner, steps in sorted(named.items()):
        print(f"learner {learner}: left out {len(steps)} times, first in round {steps[0]}")
    cheaters = {str(learner) for learner in range(LEARNERS // WORKERS, LEARNERS)}
    gap = given.rounds / mean(len(steps) for steps in named.values())
    print(f"named {sorted(named)} in {given.rounds} rounds, each once in {gap:.1f} rounds")
    return int(named.keys() != cheaters or set(verdicts) != {"equal"})


if __name__ == "__main__":
    sys.exit(main())
