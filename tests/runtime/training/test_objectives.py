"""Objectives of log-probabilities: gradients are autograd's, and each layout has one worker's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.config.loading.load import resolve_config
from holdfast.data.read.weight_files import weights_checksum
from holdfast.data.stream.batch import ValidationSet
from holdfast.data.stream.loader import TensorMicrobatch
from holdfast.errors import ConfigError, DataError
from holdfast.training.engine.lora_task import LoraTask
from holdfast.training.engine.objective import NextTokenObjective
from holdfast.training.engine.task import DecoderTask
from holdfast.training.objectives.protocol import Loss, Side
from holdfast.training.objectives.registry import make_objective
from tests.support.adapters import write_base
from tests.support.layouts import (
    VOCABULARY,
    assert_all_state,
    case,
    config_of,
    engine_for,
    load_complete,
    of_one_model,
    pieces,
    save_pieces,
)
from tests.support.marks import in_campaign
from tests.support.models import decoder as made_decoder
from tests.support.preferences import loaded, preference_rows
from tests.support.ranks import RankContext, rank_values, run_ranks
from tests.support.step_recovery import DIES, LAST, Deadly, Survivor, topology_for
from tests.support.tiny_training import digest

STEPS, LENGTH = 3, 24
KINDS = ["dpo", "ipo", "simpo", "orpo", "kto", "reward"]


class Both:
    """A loss of log-probabilities and of values, as an actor and its critic have."""

    names: tuple[str, ...] = ("entropies",)
    needs = frozenset({"values", "reference"})
    needs_entropy = True
    trains_entropy = False

    def __call__(self, logps: Tensor, targets: Tensor, documents: Tensor, side: Side) -> Loss:
        carried = (targets != -100).double()
        error = (side["values"] - side["reference"]).square()
        total = ((logps.exp() * side["values"].detach() + error) * carried).sum()
        return Loss(total, {"entropies": (side["entropies"].double().sum(), carried.sum())})

    def weigh(self, targets: Any, documents: Any, side: Any) -> int:
        return int((targets != -100).sum())


class WithEntropy(Both):
    """The same with a bonus for entropy."""

    trains_entropy = True

    def __call__(self, logps: Tensor, targets: Tensor, documents: Tensor, side: Side) -> Loss:
        plain = super().__call__(logps, targets, documents, side)
        weights = torch.where(targets != -100, logps.detach().square() + 0.1, 0.0)
        return replace(plain, total=plain.total - (weights * side["entropies"]).sum())


OF_VALUES: dict[str, type[Both]] = {"both": Both, "entropy": WithEntropy}


def _config(kind: str, **changes: Any) -> Any:
    same = {"objective__kind": kind, "data__attention": "document"}
    if kind == "reward":
        same["model__score_head"] = "only"
    return config_of({**same, "data__sequence_length": LENGTH, **changes})


@pytest.mark.parametrize("kind", [*KINDS, *OF_VALUES])
def test_gradients_are_those_of_complete_logits(kind: str) -> None:
    torch.set_num_threads(1)
    config = _config("dpo" if kind in OF_VALUES else kind)
    heads = {**dict.fromkeys(OF_VALUES, "also"), "reward": "only"}
    changes = {"logit_softcap": 5.0, "score_head": heads.get(kind, "none")}
    model = config.model.model_copy(update=changes)
    task = DecoderTask(config)
    batch = loaded(preference_rows(1, 0, 4, VOCABULARY, LENGTH), task)
    loss = OF_VALUES[kind]() if kind in OF_VALUES else make_objective(config.objective)
    made = NextTokenObjective(made_decoder(model, dtype=torch.float64), chunk=64, loss=loss)
    out = made(*task.arguments(batch))
    out.backward(torch.ones_like(out))
    found = {name: p.grad for name, p in made.named_parameters()}
    made.zero_grad()
    hidden, side = made.decoder.hidden(batch.inputs, batch.documents), dict(batch.side)
    logps = torch.zeros_like(batch.targets, dtype=torch.float64)
    if made.decoder.score is not None:
        side["values"] = F.linear(hidden, made.decoder.score.weight)[..., 0]
    if model.has_language_head:
        every = F.log_softmax(made.decoder.unembed(hidden), -1)
        entropies = -(every.exp() * every).sum(-1)
        side["entropies"] = entropies.masked_fill(batch.targets == -100, 0.0)
        logps = every.gather(2, batch.targets.clamp_min(0)[..., None])[..., 0]
        logps = logps.masked_fill(batch.targets == -100, 0.0)
    assert made.loss is not None
    assert batch.documents is not None
    want = made.loss(logps, batch.targets, batch.documents, side)
    want.total.backward()
    words = [want.total, *(word for name in made.loss.names for word in want.sums[name])]
    assert out.tolist() == pytest.approx([float(word.detach()) for word in words], rel=1e-12)
    for name, parameter in made.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-9, atol=1e-12)
    masked = TensorMicrobatch(
        batch.inputs, torch.full_like(batch.targets, -100), torch.zeros_like(batch.documents), [], 0
    )
    made.zero_grad()
    nothing = made(*task.arguments(masked))
    nothing.backward(torch.ones_like(nothing))
    assert not nothing.any()
    assert all(p.grad is None or not p.grad.any() for p in made.parameters())


def _task(rank: RankContext, name: str, kind: str) -> DecoderTask:
    """That of the kind. "lora-dpo" is of adapters, over a base that the first process writes;
    "lora-dpo-still" is that without dropout, which shards draw otherwise."""
    changes, (first, *words) = case(name).changes, kind.split("-")
    if first != "lora":
        return DecoderTask(_config(kind, **changes))
    base, dropout = rank.folder / "base", 0.0 if "still" in words else 0.2
    lora = {"rank": 4, "alpha": 8, "dropout": dropout, "base": str(base)}
    changes |= {f"lora__{key}": value for key, value in lora.items()}
    if not base.exists():
        write_base(base, _config("dpo", **changes).model)
    changes["lora__base_checksum"] = weights_checksum(base)
    return LoraTask(_config(words[0], **changes))


def _curve(rank: RankContext, name: str, kind: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    task = _task(rank, name, kind)
    config, is_lora = task._config, kind.startswith("lora-")
    made = engine_for(rank, name, config, task=task)
    place, shards = made.groups.coordinate, made.groups.degree("dp_shard")
    verdicts = []
    for step in range(1, STEPS + 1):
        fed = [
            preference_rows(step, leaf, 4, VOCABULARY, LENGTH, place.dp_shard, shards)
            for leaf in made.begin(step)
        ]
        if is_lora:  # the base is the reference
            fed = [replace(each, side={}) for each in fed]
        made.compute([loaded(each, task, step if is_lora else None) for each in fed])
        verdicts.append(made.reduce())
        made.apply(verdicts[-1])
    save_pieces(rank.folder / f"{rank.rank}.npz", pieces(made))
    out = {
        "losses": [v.mean_loss for v in verdicts],
        "weights": [v.tokens for v in verdicts],
        "metrics": [made.metrics(v) for v in verdicts],
        "digest": digest(made),
    }
    made.close()
    return out


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("dp2", "dpo"),
        ("pp2-tp2", "dpo"),
        ("shard2", "kto"),
        ("pp2-tp2", "reward"),
        ("pp2-tp2", "lora-dpo"),
        in_campaign("pp2-tp2", "lora-reward"),
        in_campaign("shard2", "lora-reward-still"),
        *(in_campaign(n, "lora-dpo") for n in ("dp2", "tp2", "pp2", "zbv.pp2", "interleaved.pp2")),
        *(in_campaign(n, "lora-dpo-still") for n in ("shard2", "zero1.2")),
        *(in_campaign(n, "dpo") for n in ("tp2", "pp2", "shard2", "zero1.2", "zbv.pp2", "dp3")),
        *(in_campaign("pp2-tp2", kind) for kind in KINDS[1:-1]),
        in_campaign("compiled.tp2", "dpo"),
        *(in_campaign(n, "reward") for n in ("tp2", "shard2", "zero1.2", "zbv.pp2", "dp2-tp2")),
        *(in_campaign(n, "reward") for n in ("plain.tp2", "untied.pp2", "interleaved.pp2")),
    ],
)
def test_each_layout_gives_the_curve_of_one_worker(tmp_path: Path, name: str, kind: str) -> None:
    (name,) = of_one_model(name)
    arguments = {"kind": kind}
    flags = "shallow." if "shallow" in name else ""
    (want,) = rank_values(_curve, 1, {**arguments, "name": f"{flags}one"}, folder=tmp_path)
    whole, size = load_complete(tmp_path / "0.npz"), case(name).world_size
    for got in rank_values(_curve, size, {**arguments, "name": name}, folder=tmp_path):
        if name.removeprefix(flags) in ("dp2", "dp3"):  # replicas alone change no bit
            assert got == want
        assert got["weights"] == want["weights"]
        assert got["losses"] == pytest.approx(want["losses"], rel=1e-10)
        for here, there in zip(got["metrics"], want["metrics"], strict=True):
            assert here == pytest.approx(there, rel=1e-10)
    assert_all_state(whole, [tmp_path / f"{rank}.npz" for rank in range(size)], 1e-10)
    assert len(set(want["losses"])) == STEPS
    if kind.startswith("lora-dpo"):  # B begins at zero, so the policy is the base
        assert want["losses"][0] == pytest.approx(np.log(2), rel=1e-12)
    assert "rewards/chosen" in want["metrics"][0]
    assert np.isfinite(want["losses"]).all()


class PreferenceData:
    """What a session asks of `Batches`."""

    def __init__(self, task: DecoderTask) -> None:
        self._task = task

    def microbatch(self, step: int, leaf: int, part: int = 0, parts: int = 1) -> TensorMicrobatch:
        read = preference_rows(step, leaf, 4, VOCABULARY, LENGTH, part, parts)
        return loaded(read, self._task)

    def validation(self, samples: int) -> ValidationSet:
        return ValidationSet([], 0, 1.0)


class PreferenceSurvivor(Survivor):
    """A process that trains on preferences."""

    def configured(self, name: str, microbatches: int) -> Any:
        size = {"train__batch_size": 4 * microbatches, "train__steps": 50}
        config = _config("dpo", **{"model__layers": 2, **case(name).changes, **size})
        self.data = PreferenceData(DecoderTask(config))
        return config


def _survive(rank: RankContext, victim: int, when: str) -> dict[str, Any]:
    made = PreferenceSurvivor(rank, "dp3")
    made.begin(topology_for("dp3", 1))
    Deadly(made, victim, DIES, when)
    made.lose(LAST)
    made.recover(topology_for("dp2", 2), [r for r in range(3) if r != victim])
    made.train(LAST)
    return made.result()


def _alone(rank: RankContext) -> dict[str, Any]:
    made = PreferenceSurvivor(rank, "one")
    made.begin(topology_for("one", 1))
    made.train(LAST)
    return made.result()


@pytest.mark.parametrize(
    ("when", "victim"),
    [
        ("told 1", 0),
        *(in_campaign(when, 2) for when in ("forward", "backward", "whole")),
        *(in_campaign(when, 0) for when in ("voted", "applied")),
    ],
)
def test_a_lost_replica_changes_no_bit_of_losses_and_metrics(when: str, victim: int) -> None:
    """A step that is reported by a survivor has the same means."""
    results = run_ranks(_survive, 3, {"victim": victim, "when": when}, dies={victim: "SIGKILL"})
    for result in results:
        assert result.rank == victim or result.exit == 0, result.log
    found = [result.value for result in results if result.value]
    (alone,) = rank_values(_alone, 1)
    assert len(found) == 2
    for value in found:
        assert (value["curve"], value["digest"]) == (alone["curve"], alone["digest"])
        for what, step, numbers in value["events"]:
            assert what == "fed" or numbers == alone["curve"][str(step)]
    assert len(alone["curve"]["1"]) == 8


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ("objective.kind=reward objective.beta=1", "beta is a key of dpo"),
        ("objective.kind=dpo layout.cp=2", "layout.cp cuts them; use layout.cp 1"),
        ("objective.kind=dpo layout.pp=2 layout.schedule=pipedream", "use layout.schedule 1f1b"),
        ("objective.kind=dpo data.chat.weights=true", "use data.chat.weights: false"),
        ("objective.kind=ipo objective.beta=0", "divides by zero in ipo"),
        ("objective.kind=dpo objective.loss_type=hinge objective.label_smoothing=0.1", "no effect"),
        ("objective.kind=dpo objective.loss_type=exo_pair", "takes the logarithm"),
        ("objective.kind=next_token model.score_head=only", "use model.score_head: none"),
        ("objective.kind=nonsense", "is 'nonsense', not one of next_token"),
    ],
)
def test_what_an_objective_does_not_go_with_is_refused(keys: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        resolve_config("data: {attention: document}", "run.yaml", keys.split())


def test_a_row_without_its_side_tensor_is_refused() -> None:
    config = _config("kto")
    read = preference_rows(1, 0, 4, VOCABULARY, LENGTH)
    with pytest.raises(DataError, match="needs 'label' of each row"):
        loaded(replace(read, side={"reference": read.side["reference"]}), DecoderTask(config))


def test_the_score_head_follows_from_the_kind() -> None:
    found = resolve_config(
        None, "command line", ["objective.kind=reward", "data.attention=document"]
    )
    assert found.config.model.score_head == "only"
    assert str(found.origins["model.score_head"]) == "planned (objective.kind reward)"
