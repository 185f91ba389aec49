"""Losses of preferences and of chat rows are those of TRL's trainers on equal tensors.

Each case runs the trainer's own loss method, given what its model returned."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.config.sections.objective import ObjectiveConfig
from holdfast.training.engine.objective import linear_cross_entropy
from holdfast.training.objectives.protocol import Loss
from holdfast.training.objectives.registry import make_objective

PAIRS, LENGTH, VOCABULARY = 5, 9, 13
METRICS = "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"
CLOSE = {"rel": 1e-9, "abs": 1e-12}


@pytest.fixture(scope="module")
def trl() -> Any:
    torch.set_num_threads(1)
    return pytest.importorskip("trl", reason="the reference of these losses")


@pytest.fixture(autouse=True)
def _new_tensors_are_float64() -> Iterator[None]:
    """Some of TRL's constants have the default dtype."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Answers:
    """Rows of answers in TRL's form (chosen, then rejected; a prompt of one token), and in ours.
    One pair is a sample, and a sample ends in padding. is_even: all answers are equally long."""

    def __init__(self, seed: int = 3, is_even: bool = False) -> None:
        made = torch.Generator().manual_seed(seed)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=made, dtype=torch.float64)

        rows = 2 * PAIRS
        self.lengths = torch.randint(3, LENGTH + 1, (rows,), generator=made)
        self.lengths = torch.full_like(self.lengths, LENGTH) if is_even else self.lengths
        self.ids = torch.randint(0, VOCABULARY, (rows, LENGTH), generator=made)
        self.logits = drawn(rows, LENGTH, VOCABULARY)
        self.attention = (torch.arange(LENGTH) < self.lengths[:, None]).long()
        self.completion = self.attention.clone()
        self.completion[:, 0] = 0  # the prompt
        self.labels = self.ids.masked_fill(self.completion == 0, -100)
        picked = F.log_softmax(self.logits[:, :-1], -1)
        self.logps = picked.gather(2, self.ids[:, 1:, None])[..., 0] * self.completion[:, 1:]
        self.reference = drawn(rows, LENGTH - 1) * self.completion[:, 1:] - 1.0
        self.reference *= self.completion[:, 1:]

    def packed(self, values: Tensor) -> Tensor:
        """[2 * pairs, LENGTH - 1] by targets -> [pairs, 2 * LENGTH + 1], pairs as neighbours"""
        chosen, rejected = F.pad(values, (0, 1)).chunk(2)
        return F.pad(torch.cat((chosen, rejected), 1), (0, 1))

    @property
    def targets(self) -> Tensor:
        return self.packed(self.labels[:, 1:] + 100) - 100

    @property
    def documents(self) -> Tensor:
        row = torch.tensor([0] * LENGTH + [1] * LENGTH + [2], dtype=torch.int32)
        return row.expand(PAIRS, -1)

    def loss(self, keys: dict[str, Any], **side: Tensor) -> Loss:
        objective = make_objective(ObjectiveConfig(**keys))
        assert objective is not None
        side = {"reference": self.packed(self.reference), **side}
        found = objective(self.packed(self.logps), self.targets, self.documents, side)
        documents, targets = self.documents.numpy(), self.targets.numpy()
        weight = objective.weigh(targets, documents, {n: t.numpy() for n, t in side.items()})
        sums = {name: total / count for name, (total, count) in found.sums.items()}
        return Loss(found.total / weight, sums)  # type: ignore[arg-type]


def _trainer(made_by: Any, **attributes: Any) -> Any:
    """A trainer without its `__init__`, which wants a model and data."""
    accelerator = SimpleNamespace(
        device=torch.device("cpu"), gather=lambda x: x, gather_for_metrics=lambda x: x
    )
    trainer = made_by.__new__(made_by)
    usual = {
        "model": SimpleNamespace(training=True),
        "accelerator": accelerator,
        "aux_loss_enabled": False,
        "_metrics": {"train": defaultdict(list)},
        "_total_train_tokens": 0,
        "_tp_size": 1,
        "is_encoder_decoder": False,
        "pad_token_id": 0,
    }
    for name, value in {**usual, **attributes}.items():
        setattr(trainer, name, value)
    return trainer


def _fused(logps: Tensor) -> Any:
    """What TRL's fused head returns. Its values except `log_probs` are for the journal."""
    same = dict.fromkeys(("entropy", "mean_logits", "log_sum_sq_probs"), torch.zeros_like(logps))
    is_top1 = torch.zeros_like(logps, dtype=torch.bool)
    return SimpleNamespace(log_probs=logps, is_top1=is_top1, label_mask=logps != 0, **same)


def _assert_metrics(found: Loss, said: dict[str, Any], names: tuple[str, ...]) -> None:
    for name in names:
        want = said[name][-1] if isinstance(said[name], list) else said[name]
        close = {"rel": 1e-6} if name.endswith("accuracies") else CLOSE  # TRL's are float32
        assert float(found.sums[name]) == pytest.approx(float(want), **close), name  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "keys",
    [
        {"kind": "dpo"},
        {"kind": "ipo", "beta": 0.3},
        *({"kind": "dpo", "loss_type": kind, "beta": 0.7} for kind in ("hinge", "nca_pair")),
        *({"kind": "dpo", "loss_type": kind} for kind in ("bco_pair", "sppo_hard", "apo_zero")),
        *({"kind": "dpo", "loss_type": kind} for kind in ("apo_down", "discopop")),
        {"kind": "dpo", "loss_type": "sigmoid_norm"},
        {"kind": "dpo", "loss_type": "robust", "label_smoothing": 0.2},
        {"kind": "dpo", "loss_type": "exo_pair", "label_smoothing": 0.2},
    ],
    ids=lambda keys: keys.get("loss_type", keys["kind"]),
)
def test_dpo_and_its_kin(trl: Any, keys: dict[str, Any]) -> None:
    answers, config = Answers(), ObjectiveConfig(**keys)
    loss_type = "ipo" if keys["kind"] == "ipo" else config.text("loss_type")
    ipo = keys["kind"] == "ipo"
    trainer = _trainer(
        trl.DPOTrainer,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=[loss_type],
        loss_weights=[1.0],
        beta=config.number("beta"),
        label_smoothing=0.0 if ipo else config.number("label_smoothing"),
        use_weighting=False,
        args=SimpleNamespace(discopop_tau=0.05),
    )
    chosen, rejected = answers.reference.sum(1).chunk(2)
    inputs = {
        "input_ids": answers.ids,
        "attention_mask": answers.attention,
        "completion_mask": answers.completion,
        "ref_chosen_logps": chosen,
        "ref_rejected_logps": rejected,
    }
    want = trainer._compute_loss(lambda **_: _fused(answers.logps), inputs, False)
    found = answers.loss(keys)
    assert float(found.total) == pytest.approx(float(want), **CLOSE)
    said = trainer._metrics["train"]
    _assert_metrics(found, said, (*METRICS, "logps/chosen", "logps/rejected"))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_smoothed_dpo_is_that_of_cpo_without_a_reference(trl: Any, smoothing: float) -> None:
    """TRL's DPO ignores `label_smoothing` with loss_type sigmoid; its CPO has the same formula."""
    cpo = pytest.importorskip("trl.experimental.cpo", reason="the reference of these losses")
    answers = Answers()
    answers.reference = torch.zeros_like(answers.reference)
    given = {"beta": 0.4, "label_smoothing": smoothing}
    trainer = _trainer(cpo.CPOTrainer, loss_type="sigmoid", alpha=0.0, **given)
    losses, *_ = trainer.cpo_loss(*answers.logps.sum(1).chunk(2))
    found = answers.loss({"kind": "dpo", **given})
    assert float(found.total) == pytest.approx(float(losses.mean()), **CLOSE)


def _pair_batch(answers: Answers) -> dict[str, Tensor]:
    names = {
        "input_ids": answers.ids,
        "attention_mask": answers.attention,
        "labels": answers.labels,
    }
    halves = {name: tensor.chunk(2) for name, tensor in names.items()}
    return {
        f"{side}_{name}": half[i]
        for name, half in halves.items()
        for i, side in enumerate(("chosen", "rejected"))
    }


@pytest.mark.parametrize("alpha", [0.0, 0.7])
def test_simpo(trl: Any, alpha: float) -> None:
    cpo = pytest.importorskip("trl.experimental.cpo", reason="the reference of these losses")
    answers = Answers(is_even=alpha > 0)  # else TRL weighs the cross entropy by tokens
    keys = {"beta": 2.5, "simpo_gamma": 0.8, "label_smoothing": 0.1, "cpo_alpha": alpha}
    trainer = _trainer(cpo.CPOTrainer, loss_type="simpo", alpha=0.0, **keys)
    model = lambda *_, **__: SimpleNamespace(logits=answers.logits)  # noqa: E731
    want, said = trainer.get_batch_loss_metrics(model, _pair_batch(answers))
    found = answers.loss({"kind": "simpo", **keys})
    assert float(found.total) == pytest.approx(float(want), **CLOSE)
    _assert_metrics(found, said, (*METRICS, "logps/chosen", *(["nll_loss"] if alpha else [])))


def test_orpo(trl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    orpo = pytest.importorskip("trl.experimental.orpo", reason="the reference of these losses")
    answers = Answers(is_even=True)
    trainer = _trainer(orpo.ORPOTrainer, beta=0.3, padding_value=0)
    model = lambda *_, **__: SimpleNamespace(logits=answers.logits)  # noqa: E731
    # TRL computes the odds in float32. In float64 the formulas can be compared.
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    want, said = trainer.get_batch_loss_metrics(model, _pair_batch(answers))
    found = answers.loss({"kind": "orpo", "beta": 0.3})
    assert float(found.total) == pytest.approx(float(want), **CLOSE)
    names = *METRICS, "logps/chosen", "nll_loss", "log_odds_ratio", "log_odds_chosen"
    _assert_metrics(found, said, names)


@pytest.mark.parametrize("shift", [4.0, -1.0], ids=["baseline", "baseline below 0"])
def test_kto(trl: Any, shift: float) -> None:
    """Half of the rows are rated; the rest, behind each, are those of the baseline."""
    answers = Answers()
    answers.reference[PAIRS:] -= shift * answers.completion[PAIRS:, 1:]
    wanted = torch.tensor([1, 0, 1, 1, 0])
    weights = {"beta": 0.6, "desirable_weight": 1.3, "undesirable_weight": 0.8}
    trainer = _trainer(
        trl.KTOTrainer, calculate_KL=True, precompute_ref_logps=True, loss_type="kto", **weights
    )
    rated, base = (
        {"input_ids": ids, "attention_mask": attention, "completion_mask": completion}
        for ids, attention, completion in zip(
            answers.ids.chunk(2),
            answers.attention.chunk(2),
            answers.completion.chunk(2),
            strict=True,
        )
    )
    logps, base_logps = answers.logps.chunk(2)
    reference, base_reference = answers.reference.sum(1).chunk(2)
    batch = {
        **rated,
        **{f"KL_{name}": tensor for name, tensor in base.items()},
        "label": wanted.bool(),
        "ref_logps": reference,
        "ref_KL_logps": base_reference,
    }

    def model(input_ids: Tensor, **_: Any) -> Any:
        return _fused(base_logps if input_ids is base["input_ids"] else logps)

    want = trainer._compute_loss(model, batch, False)
    label = torch.where(wanted == 1, 1.0, -1.0)[:, None].expand(-1, LENGTH - 1)
    packed = answers.packed(torch.cat((label, torch.zeros_like(label))))
    found = answers.loss({"kind": "kto", **weights}, label=packed)
    assert float(found.total) == pytest.approx(float(want), **CLOSE)
    names = "rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected", "kl"
    _assert_metrics(found, trainer._metrics["train"], names)
    assert (float(found.sums["kl"]) > 0) == (shift > 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("margin", [False, True])
@pytest.mark.parametrize("centre", [None, 0.2])
def test_reward(trl: Any, margin: bool, centre: float | None) -> None:
    answers = Answers()
    scores = torch.randn(2 * PAIRS, LENGTH, dtype=torch.float64)
    last = scores[:, -1]  # of padding rows too: TRL's model picks the last token that is none
    margins = torch.rand(PAIRS, dtype=torch.float64)
    trainer = _trainer(trl.RewardTrainer, args=SimpleNamespace(center_rewards_coefficient=centre))
    inputs = {"attention_mask": answers.attention, **({"margin": margins} if margin else {})}
    want = trainer.compute_loss(lambda **_: SimpleNamespace(logits=last[:, None]), inputs)
    chosen, rejected = scores.chunk(2)
    side = {"values": F.pad(torch.cat((chosen, rejected), 1), (0, 1))}
    if margin:
        side["margin"] = margins[:, None].expand(-1, 2 * LENGTH + 1)
    found = answers.loss({"kind": "reward", "center_rewards_coefficient": centre}, **side)
    assert float(found.total) == pytest.approx(float(want), **CLOSE)
    said = trainer._metrics["train"]
    _assert_metrics(
        found,
        {"rewards/accuracies": said["accuracy"], "rewards/margins": said["margin"]},
        ("rewards/accuracies", *(() if margin else ("rewards/margins",))),
    )


def test_supervised_rows(trl: Any) -> None:
    """The next token of chat rows, whose mask leaves out prompts and padding."""
    answers = Answers()
    hidden = torch.randn(2 * PAIRS, LENGTH, 8, dtype=torch.float64)
    head = torch.randn(VOCABULARY, 8, dtype=torch.float64)
    labels = answers.labels
    picked = F.log_softmax(hidden[:, :-1] @ head.T, -1).gather(2, labels[:, 1:, None].clamp_min(0))[
        ..., 0
    ]
    logps = picked * answers.completion[:, 1:]
    args = SimpleNamespace(loss_type="nll", average_tokens_across_devices=False, max_length=None)
    trainer = _trainer(trl.SFTTrainer, compute_loss_func=None, label_smoother=None, args=args)
    trainer.accelerator.parallelism_config = None
    inputs = {"input_ids": answers.ids, "labels": labels, "attention_mask": answers.attention}
    want = trainer.compute_loss(lambda **_: _fused(logps), inputs)
    ids = labels[:, 1:].flatten()
    total = linear_cross_entropy(hidden[:, :-1].flatten(0, 1), head, ids, 64)
    assert float(total / (ids != -100).sum()) == pytest.approx(float(want), **CLOSE)
