"""GRPO and its kin, RLOO and PPO against the functions of TRL and verl, on equal tensors."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from holdfast.config.sections.objective import ObjectiveConfig
from holdfast.config.sections.rewards import PromptsConfig, RewardConfig
from holdfast.config.sections.rollout import RolloutConfig
from holdfast.core.data.advantages import group_advantages, group_std, leave_one_out, row_values
from holdfast.training.objectives.policy import estimate_advantages, moments_of_advantages
from holdfast.training.objectives.registry import make_objective, means_of, sum_names
from holdfast.training.objectives.rows import Rows

LENGTHS = (5, 1, 7, 3, 4, 6)  # targets of each row
PROMPT = 2  # tokens before them, without a target
LONGEST = 9
TOLERANCE = 1e-9


class Batch:
    """The same completions twice: padded, [rows, LONGEST], and packed in two samples, [2, S]."""

    def __init__(self, seed: int = 0):
        draw = torch.Generator().manual_seed(seed)

        def noise(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw, dtype=torch.float64)

        shape = len(LENGTHS), LONGEST
        self.mask = torch.zeros(shape, dtype=torch.float64)
        for row, length in enumerate(LENGTHS):
            self.mask[row, :length] = 1
        self.logps = -noise(*shape).abs() * self.mask
        self.old = self.logps + 0.3 * noise(*shape) * self.mask
        self.reference = self.logps + 0.3 * noise(*shape) * self.mask
        self.values, self.old_values = noise(*shape), noise(*shape)
        self.entropies = noise(*shape).abs()
        self.advantages = noise(len(LENGTHS))
        self.score = noise(len(LENGTHS))

    def pack(self, values: Tensor) -> Tensor:
        """[rows, LONGEST] or [rows] -> [2, S], with gradients"""
        if values.dim() == 1:
            values = values[:, None].expand(-1, LONGEST)
        samples, half = [], len(LENGTHS) // 2
        for rows in (range(half), range(half, 2 * half)):
            parts = [
                torch.cat([values.new_zeros(PROMPT), values[row, : LENGTHS[row]]]) for row in rows
            ]
            sample = torch.cat(parts)
            samples.append(torch.cat([sample, values.new_zeros(self.size - len(sample))]))
        return torch.stack(samples)

    @property
    def size(self) -> int:
        half = len(LENGTHS) // 2
        return max(sum(LENGTHS[:half]), sum(LENGTHS[half:])) + half * PROMPT + 3

    @property
    def targets(self) -> Tensor:
        return torch.where(self.pack(self.mask) > 0, 1, -100)

    @property
    def documents(self) -> Tensor:
        half, out = len(LENGTHS) // 2, []
        for rows in (LENGTHS[:half], LENGTHS[half:]):
            numbers = [n for n, length in enumerate(rows) for _ in range(length + PROMPT)]
            out.append(numbers + [half] * (self.size - len(numbers)))
        return torch.tensor(out, dtype=torch.int32)

    def side(self, *names: str) -> dict[str, Tensor]:
        return {name: self.pack(getattr(self, name)) for name in names}

    def ours(self, config: ObjectiveConfig, *names: str) -> tuple[Tensor, dict[str, float], Tensor]:
        """-> loss, metrics, gradient of the log-probabilities [rows, LONGEST]"""
        objective = make_objective(config)
        assert objective is not None
        assert {*names} >= {*objective.needs}
        logps = self.logps.clone().requires_grad_()
        side = self.side(*names)
        found = objective(self.pack(logps), self.targets, self.documents, side)
        weight = objective.weigh(
            self.targets.numpy(),
            self.documents.numpy(),
            {k: v.detach().numpy() for k, v in side.items()},
        )
        loss = found.total / weight
        (gradient,) = torch.autograd.grad(loss, logps)
        assert set(found.sums) == set(objective.names)
        sums = [float(one) for name in objective.names for one in found.sums[name]]
        return loss.detach(), means_of(objective.names, sums), gradient


class OneProcess:
    """What the trainers ask of accelerate."""

    num_processes, sync_gradients = 1, False

    def reduce(self, value: Tensor, reduction: str) -> Tensor:
        return value

    def gather(self, value: Tensor) -> Tensor:
        return value


def theirs(trainer: Any, batch: Batch, **settings: Any) -> tuple[Tensor, dict[str, float], Tensor]:
    """The same of a trainer of TRL, whose model gives the batch's log-probabilities."""
    logps = batch.logps.clone().requires_grad_()
    own: dict[str, Any] = {
        "args": SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1),
        "accelerator": OneProcess(),
        "model": SimpleNamespace(training=True),
        "_metrics": {"train": defaultdict(list)},
        "_get_per_token_logps_and_entropies": lambda *_, **__: (logps, batch.entropies, None),
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "beta": 0.0,
        "use_vllm": False,
        "current_gradient_accumulation_steps": 1,
        "_entropy_bonus_enabled": False,
        "aux_loss_enabled": False,
        "max_completion_length": 32,
    }
    stub = SimpleNamespace(**own | settings)
    ids = torch.ones(len(LENGTHS), LONGEST, dtype=torch.long)
    inputs = {
        "prompt_ids": ids,
        "prompt_mask": ids,
        "completion_ids": ids,
        "completion_mask": batch.mask,
        "advantages": batch.advantages,
        "old_per_token_logps": batch.old,
        "old_logps": (batch.old * batch.mask).sum(1),
        "ref_per_token_logps": batch.reference,
        "num_items_in_batch": batch.mask.sum(),
    }
    loss = trainer._compute_loss(stub, None, inputs)
    (gradient,) = torch.autograd.grad(loss, logps)
    metrics = {name: float(np.mean(seen)) for name, seen in stub._metrics["train"].items()}
    return loss.detach(), metrics, gradient


@pytest.mark.slow
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo"])
def test_grpo_is_that_of_trl(loss_type: str, level: str) -> None:
    trl = pytest.importorskip("trl", reason="it has the losses that these are compared with")
    of_tokens = loss_type in ("bnpo", "dapo")  # TRL means entropy over tokens, whatever the loss
    for beta, low, high in ((0.0, 0.2, 0.2), (0.3, 0.1, 0.28)):
        keys: dict[str, Any] = {"loss_type": loss_type, "beta": beta, "epsilon": low}
        keys["entropy_coef"] = bonus = beta if of_tokens else 0.0
        if loss_type == "dr_grpo":
            keys["max_completion_length"] = 32
        config = ObjectiveConfig(
            kind="grpo", importance_sampling_level=level, epsilon_high=high, **keys
        )
        batch = Batch()
        sides = ("old", "advantages", "entropies", *(["reference"] if beta else []))
        loss, metrics, gradient = batch.ours(config, *sides)
        expected, others, other_gradient = theirs(
            trl.GRPOTrainer,
            batch,
            loss_type=loss_type,
            importance_sampling_level=level,
            beta=beta,
            epsilon_low=low,
            epsilon_high=high,
            entropy_coef=bonus,
            _entropy_bonus_enabled=bonus > 0,
            use_adaptive_entropy=False,
        )
        assert abs(loss - expected) < TOLERANCE
        assert (gradient - other_gradient).abs().max() < TOLERANCE
        assert gradient.abs().max() > 1e-3
        for name in {*metrics} & {*others}:
            assert metrics[name] == pytest.approx(others[name], abs=1e-6), name
        named = {"entropy", "clip_ratio/low_mean", "clip_ratio/region_mean"}
        assert named | ({"kl"} if beta else set()) <= {*metrics} & {*others}


@pytest.mark.slow
def test_rloo_is_that_of_trl() -> None:
    trl = pytest.importorskip("trl", reason="it has the losses that these are compared with")
    batch = Batch(7)
    config = ObjectiveConfig(kind="rloo", epsilon=0.1, epsilon_high=0.2)
    loss, metrics, gradient = batch.ours(config, "old", "advantages", "entropies")
    settings = {"epsilon_low": 0.1, "epsilon_high": 0.2}
    expected, others, other_gradient = theirs(trl.RLOOTrainer, batch, **settings)
    assert abs(loss - expected) < TOLERANCE
    assert (gradient - other_gradient).abs().max() < TOLERANCE
    for name in ("entropy", "clip_ratio/low_mean", "clip_ratio/high_mean"):
        assert metrics[name] == pytest.approx(others[name], abs=1e-6), name
    assert 0 < metrics["clip_ratio/region_mean"] < 1


@pytest.fixture
def float64() -> Iterator[None]:
    """TRL divides counts, which then have the default precision."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def executed(function: Any, begin: str, end: str, **names: Any) -> dict[str, Any]:
    """Run the lines of a function of TRL from one to another; return its names."""
    source = inspect.getsource(function)
    lines = textwrap.dedent(" " * 8 + source[source.index(begin) : source.index(end)])
    scope = {**vars(inspect.getmodule(function)), **names}
    exec(lines, scope)
    return scope


@pytest.mark.slow
def test_advantages_are_those_of_trl(float64: None) -> None:
    trl = pytest.importorskip("trl", reason="it has the formulas that these are compared with")
    draw = torch.Generator().manual_seed(3)
    rewards, old, reference = (
        torch.randn(3, 4, *more, generator=draw, dtype=torch.float64)
        for more in ((), (LONGEST,), (LONGEST,))
    )
    rewards[1] = 0.5
    for scale in ("group", "batch", "none"):
        settings = {"multi_objective_aggregation": "sum_then_normalize", "scale_rewards": scale}
        found = executed(
            trl.GRPOTrainer._generate_and_score_completions,
            "if self.multi_objective_aggregation ==",
            "elif self.multi_objective_aggregation ==",
            self=SimpleNamespace(**settings, reward_weights=torch.ones(1, dtype=torch.float64)),
            rewards_per_func=rewards.reshape(-1, 1),
            unscorable_mask=torch.zeros(12, dtype=torch.bool),
            device="cpu",
            num_generations=4,
        )
        config = ObjectiveConfig(kind="grpo", scale_rewards=scale)
        ours = row_values(config, rewards.numpy(), of_step=rewards.numpy().ravel())
        assert np.abs(ours["advantages"].ravel() - found["advantages"].numpy()).max() < TOLERANCE
    found = executed(
        trl.RLOOTrainer._generate_and_score_completions,
        "# Include the KL penalty in the reward",
        "# Normalize advantages",
        self=SimpleNamespace(beta=0.3),
        rewards=rewards.flatten(),
        old_per_token_logps=old.flatten(0, 1),
        ref_per_token_logps=reference.flatten(0, 1),
        completion_mask=torch.ones(12, LONGEST, dtype=torch.float64),
        gather=lambda value: value,
        num_generations=4,
    )
    kl = (old - reference).sum(-1).numpy()
    ours = row_values(ObjectiveConfig(kind="rloo", beta=0.3), rewards.numpy(), kl)
    assert np.abs(ours["advantages"].ravel() - found["advantages"].numpy()).max() < TOLERANCE
    assert (ours["reward"] == rewards.numpy()).all()


_VERL = """
import sys
import torch
from omegaconf import OmegaConf
from verl.trainer.ppo import core_algos
from verl.utils import torch_functional as F
given = torch.load(sys.argv[1])
mask, old, logps = given["mask"], given["old"], given["logps"].requires_grad_()
values = given["values"].requires_grad_()
rewards = torch.zeros_like(mask)
last = mask.sum(1).long() - 1
rewards[torch.arange(len(mask)), last] = given["score"]
rewards = (rewards - given["beta"] * core_algos.kl_penalty(old, given["reference"], "kl")) * mask
found, returns = core_algos.compute_gae_advantage_return(
    rewards, given["old_values"], mask, given["gamma"], given["lam"]
)
# The losses get advantages before they are whitened: that takes all tokens of a batch.
advantages = (returns - given["old_values"]) * mask
config = OmegaConf.create(
    {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.3, "clip_ratio_c": 1e9,
     "global_batch_info": {}}
)
loss, metrics = core_algos.compute_policy_loss_vanilla(
    old, logps, advantages, mask, "token-mean", config
)
of_values, clipped = core_algos.compute_value_loss(
    values, returns, given["old_values"], mask, given["reach"]
)
total = loss + given["vf_coef"] * of_values
of_tokens = core_algos.agg_loss(given["entropies"], mask, "token-mean")
of_rows = core_algos.agg_loss(given["entropies"], mask, "seq-mean-token-mean")
white_loss, _ = core_algos.compute_policy_loss_vanilla(
    old, logps, found, mask, "token-mean", config
)
gradients = torch.autograd.grad(total, [logps, values])
white = F.masked_whiten(advantages, mask)
torch.save(
    {"advantages": advantages, "returns": returns * mask, "total": total.detach(),
     "of_values": of_values.detach(), "clipped": float(clipped), "gradients": gradients,
     "whitened": (found - white).mul(mask).abs().max(), "of_tokens": of_tokens,
     "of_rows": of_rows, "white_total": (white_loss + given["vf_coef"] * of_values).detach()},
    sys.argv[2],
)
"""


@pytest.mark.slow
def test_ppo_is_that_of_verl(tmp_path: Path) -> None:
    """HOLDFAST_VERL is a folder with verl, if it is not installed (`make test-verl`)."""
    environment = {**os.environ, "PYTHONPATH": os.environ.get("HOLDFAST_VERL", "")}
    probe = [sys.executable, "-c", "import verl.trainer.ppo.core_algos"]
    if subprocess.run(probe, env=environment, capture_output=True, check=False).returncode:
        pytest.skip("verl is not installed: make test-verl")
    batch = Batch()
    keys = {"gamma": 0.97, "lam": 0.9, "vf_coef": 0.7, "beta": 0.2}
    given = {
        "mask": batch.mask,
        "old": batch.old,
        "logps": batch.logps,
        "reference": batch.reference,
        "values": batch.values,
        "old_values": batch.old_values,
        "score": batch.score,
        "entropies": batch.entropies,
        "reach": 0.4,
        **keys,
    }
    files = tmp_path / "given", tmp_path / "found"
    torch.save(given, files[0])
    command = [sys.executable, "-c", _VERL, *map(str, files)]
    subprocess.run(command, env=environment, check=True)
    verl = torch.load(files[1])

    config = ObjectiveConfig(kind="ppo", epsilon=0.2, epsilon_high=0.3, cliprange_value=0.4, **keys)
    values = batch.values.clone().requires_grad_()
    batch.values = values
    sides = ("old", "score", "values", "reference", "old_values", "entropies")
    loss, metrics, gradient = batch.ours(config, *sides)
    assert abs(loss - verl["total"]) < TOLERANCE
    assert (gradient - verl["gradients"][0]).abs().max() < TOLERANCE
    assert metrics["value_loss"] == pytest.approx(float(verl["of_values"]), abs=TOLERANCE)
    assert metrics["value_clip_ratio"] == pytest.approx(verl["clipped"], abs=1e-6)
    assert verl["whitened"] < TOLERANCE  # verl's own advantages are these, whitened

    arrays = {n: getattr(batch, n).detach().numpy() for n in ("old", "reference", "old_values")}
    arrays["score"] = batch.score[:, None].expand(-1, LONGEST).numpy()
    numbers = config.model_dump(exclude_none=True, exclude={"reference"})
    config = ObjectiveConfig(**numbers, whiten_advantages=True, entropy_coef=0.2)
    moments = moments_of_advantages(config, arrays, LENGTHS)
    for name, value in moments.items():
        setattr(batch, name, torch.full((len(LENGTHS),), value, dtype=torch.float64))
    loss, _, _ = batch.ours(config, *sides, *moments)
    assert abs(loss - (verl["white_total"] - 0.2 * verl["of_tokens"])) < TOLERANCE
    for kind, more in (("grpo", {"loss_type": "grpo"}), ("rloo", {})):
        losses = [
            batch.ours(
                ObjectiveConfig(kind=kind, entropy_coef=c, **more), "old", "advantages", "entropies"
            )[0]
            for c in (0.0, 0.2)
        ]
        assert abs(losses[0] - losses[1] - 0.2 * verl["of_rows"]) < TOLERANCE


def test_advantages_of_groups() -> None:
    rewards = np.array([[1.0, 0.0, 0.0, 1.0], [2.0, 2.0, 2.0, 2.0]])
    found = group_advantages(rewards, "group")
    std = np.sqrt(1 / 3)
    assert found[0] == pytest.approx([x / (std + 1e-4) for x in (0.5, -0.5, -0.5, 0.5)], abs=1e-12)
    assert (found[1] == 0).all()
    assert group_std(rewards)[1].max() == 0
    assert group_advantages(rewards, "none")[0] == pytest.approx([0.5, -0.5, -0.5, 0.5])
    assert leave_one_out(rewards)[0] == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3])
    assert leave_one_out(np.ones((2, 1))).tolist() == [[0.0], [0.0]]
    rows = row_values(ObjectiveConfig(kind="grpo"), rewards)
    assert (rows["advantages"] == found).all()
    assert rows["frac_reward_zero_std"].tolist() == [[0.0] * 4, [1.0] * 4]
    for kind, name in (("rloo", "advantages"), ("ppo", "score")):
        objective = make_objective(ObjectiveConfig(kind=kind))
        assert objective is not None
        assert name in {*row_values(ObjectiveConfig(kind=kind), rewards)} & {*objective.needs}


@pytest.mark.parametrize("kind", ["grpo", "rloo", "ppo"])
def test_a_row_counts_the_same_in_any_microbatch(kind: str) -> None:
    """Neither packing nor the cut into microbatches changes sums and weights."""
    config = ObjectiveConfig(kind=kind, beta=0.1, entropy_coef=0.1)
    objective, batch = make_objective(config), Batch(3)
    assert objective is not None
    names = ("old", "advantages", "score", "values", "reference", "entropies")
    side = batch.side(*names)
    whole = objective(batch.pack(batch.logps), batch.targets, batch.documents, side)
    total, weight, sums = 0.0, 0, defaultdict(float)
    for row, length in enumerate(LENGTHS):
        one = {name: getattr(batch, name)[row : row + 1] for name in names}
        one = {
            k: v[:, :length] if v.dim() == 2 else v[:, None].expand(1, length)
            for k, v in one.items()
        }
        targets = torch.ones(1, length, dtype=torch.long)
        documents = torch.zeros(1, length, dtype=torch.int32)
        found = objective(batch.logps[row : row + 1, :length], targets, documents, one)
        total += float(found.total)
        weight += objective.weigh(targets.numpy(), documents.numpy(), {})
        for name, (value, _) in found.sums.items():
            sums[name] += float(value)
    assert total == pytest.approx(float(whole.total), abs=1e-12)
    assert weight == objective.weigh(batch.targets.numpy(), batch.documents.numpy(), {})
    for name, (value, _) in whole.sums.items():
        assert sums[name] == pytest.approx(float(value), abs=1e-12), name


def test_rewards_are_reported_by_source_and_one_by_one() -> None:
    batch, config = Batch(2), ObjectiveConfig(kind="grpo")
    batch.source = torch.tensor([0.0, 1, 0, 1, 1, 0], dtype=torch.float64)  # type: ignore[attr-defined]
    rewards = RewardConfig(kind="exact_match"), RewardConfig(kind="exact_match")
    rollout = RolloutConfig(
        prompts=(PromptsConfig(path="x"),), rewards=rewards, sources=("easy", "hard", "never")
    )
    objective = make_objective(config, rollout=rollout)
    assert objective is not None
    side = batch.side("old", "advantages", "source")
    named = {"reward": batch.score, "rewards/exact_match_2/mean": 2 * batch.score}
    side |= {name: batch.pack(values) for name, values in named.items()}
    found = objective(batch.pack(batch.logps), batch.targets, batch.documents, side)
    sums = [float(one) for name in objective.names for one in found.sums[name]]
    means, score = means_of(objective.names, sums), batch.score
    assert sum_names(config, rollout) == objective.names
    assert means["reward/easy"] == pytest.approx(float(score[[0, 2, 5]].mean()), abs=1e-12)
    assert means["reward/hard"] == pytest.approx(float(score[[1, 3, 4]].mean()), abs=1e-12)
    assert "reward/never" not in means
    assert means["rewards/exact_match_2/mean"] == pytest.approx(2 * means["reward"], abs=1e-12)


def test_advantages_of_a_row_are_the_returns_of_its_own_tokens() -> None:
    """With lambda 1 an advantage is the discounted reward to come, minus the value."""
    batch = Batch(1)
    rows = Rows.of(batch.targets, batch.documents)
    values, rewards = batch.pack(batch.values), batch.pack(batch.old_values)
    advantages, returns = estimate_advantages(rewards, values, rows, 0.9, 1.0)
    for row, length in enumerate(LENGTHS):
        sample, number = divmod(row, len(LENGTHS) // 2)
        here = (batch.documents[sample] == number) & (batch.targets[sample] != -100)
        to_come = [
            sum(
                0.9**ahead * float(batch.old_values[row, at + ahead])
                for ahead in range(length - at)
            )
            for at in range(length)
        ]
        assert returns[sample][here].tolist() == pytest.approx(to_come, abs=1e-12)
        assert (returns - advantages)[sample][here].tolist() == pytest.approx(
            batch.values[row, :length].tolist(), abs=1e-12
        )
