"""Distillation: the loss is TRL's with all tokens, and a plain formula with some of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import Tensor

from holdfast.config.run import RunConfig
from holdfast.config.sections.model import ModelConfig
from holdfast.config.sections.objective import ObjectiveConfig
from holdfast.data.stream.batch import Batches
from holdfast.data.stream.reference import MANIFEST, ReferenceOrigin
from holdfast.data.stream.reference import TEACHER_IDS as IDS
from holdfast.data.stream.reference import TEACHER_LOGPS as LOGPS
from holdfast.data.stream.verify import find_problems
from holdfast.errors import DataError
from holdfast.model.decoder import Decoder
from holdfast.model.init import initialise
from holdfast.rollout.roles.teacher import Teacher
from holdfast.training.compress.teach import teach
from holdfast.training.engine.objective import NextTokenObjective
from holdfast.training.objectives.registry import make_objective
from tests.support import corpus, models
from tests.support.marks import in_campaign

VOCABULARY = 24
OWN: dict[str, dict[str, Any]] = {
    "rollout": {"prompts": [{"path": "prompts.jsonl"}]},
    "data": {"attention": "document"},
}
"""The student's own completions."""
SHAPE = {"layers": 2, "dim": 8, "heads": 2, "kv_heads": 1, "ffn_dim": 16}


def made_decoder(softcap: float) -> Decoder:
    given = {"preset": None, **SHAPE, "vocab_size": VOCABULARY, "logit_softcap": softcap}
    with torch.device("meta"):
        decoder = Decoder(ModelConfig.model_validate(given))
    decoder.to_empty(device="cpu").double()
    initialise(decoder, 3)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(8 if parameter.dim() > 1 else 1)
    return decoder


def expected_loss(
    logits: Tensor, teacher: Tensor, targets: Tensor, how: dict[str, float]
) -> Tensor:
    """alpha * CE + (1 - alpha) * divergence of all logits, or of the top k and the rest."""
    carried = targets != -100
    entropy = F.cross_entropy(logits[carried], targets[carried], reduction="sum")
    student, teacher = logits / how["temperature"], teacher / how["temperature"]
    if how["top_k"] == VOCABULARY:
        pytest.importorskip("trl", reason="the loss is compared with TRL's")
        from trl.experimental.gkd import GKDTrainer

        loss = GKDTrainer.generalized_jsd_loss
        rest = loss(
            logits, teacher * how["temperature"], targets, how["beta"], how["temperature"], "sum"
        )
        return how["alpha"] * entropy + (1 - how["alpha"]) * rest
    p, q = teacher[carried].softmax(-1), student[carried].softmax(-1)
    ids = p.topk(int(how["top_k"])).indices
    p, q = (torch.cat([x.gather(1, ids), 1 - x.gather(1, ids).sum(1, True)], 1) for x in (p, q))
    b = how["beta"]
    m = q if b == 0 else p if b == 1 else (1 - b) * q + b * p
    forward, reverse = (p * (p / m).log()).sum(), (q * (q / m).log()).sum()
    divergence = forward if b == 0 else reverse if b == 1 else b * forward + (1 - b) * reverse
    return how["alpha"] * entropy + (1 - how["alpha"]) * divergence


@pytest.mark.parametrize("top_k", [in_campaign(VOCABULARY), 5])
@pytest.mark.parametrize(
    ("beta", "temperature", "alpha", "softcap"),
    [(0.0, 1.0, 0.5, 0.0), (1.0, 2.0, 0.0, 3.0), (0.3, 0.7, 0.9, 0.0)],
)
def test_loss_and_gradients(
    top_k: int, beta: float, temperature: float, alpha: float, softcap: float
) -> None:
    how = {"top_k": top_k, "beta": beta, "temperature": temperature, "alpha": alpha}
    config = ObjectiveConfig.model_validate({"kind": "distill", "reference": {"model": "t"}, **how})
    decoder = made_decoder(softcap)
    draw = torch.Generator().manual_seed(5)
    tokens, targets = torch.randint(0, VOCABULARY, (2, 3, 9), generator=draw)
    targets[1, 4:6] = -100
    teacher = torch.randn(3, 9, VOCABULARY, generator=draw, dtype=torch.float64) * 2
    stored, ids = (teacher / temperature).log_softmax(-1).topk(top_k)
    side = {IDS: ids.int(), LOGPS: stored}
    objective = NextTokenObjective(decoder, chunk=64, loss=make_objective(config))
    objective._chunk = 7  # several chunks; the run file asks for 64 or more
    said = objective(tokens, targets, None, side)
    expected = expected_loss(decoder(tokens), teacher, targets, how)
    assert float(said[0]) == pytest.approx(float(expected), rel=1e-9)
    parameters = list(decoder.parameters())
    ours = torch.autograd.grad(said, parameters, torch.eye(len(said)).double()[0])
    for a, b in zip(ours, torch.autograd.grad(expected, parameters), strict=True):
        assert float((a - b).norm()) <= 1e-9 * float(b.norm())
    with torch.no_grad():
        assert torch.allclose(objective(tokens, targets, None, side), said, rtol=1e-12)
    entropy, count, divergence = said[1:4].tolist()
    assert not said[5:].any(), "there are no completions"
    assert count == 25
    assert alpha * entropy + (1 - alpha) * divergence == pytest.approx(float(said[0]), rel=1e-12)
    blank = objective(tokens, torch.full_like(targets, -100), None, {})
    assert not blank.any()


def test_a_teachers_tokens_are_stored_once(tmp_path: Path) -> None:
    """Three pieces; a piece that is lost or damaged is computed again, and has the same bytes."""
    source = corpus.text_source(corpus.text_folder(tmp_path / "texts", 6, 9000))
    config = corpus.data_config(tmp_path / "data", source, sequence_length=64)
    dataset = corpus.make(config)
    origin = ReferenceOrigin(dataset.version, "0" * 32, "fp32", "any", 64, "drop")
    key = origin.teacher_key(4, 2.0)
    read = Batches(dataset, config, corpus.train_config(), 1, reference=key)
    store = read.reference
    assert store is not None
    with pytest.raises(DataError, match=r"a teacher's tokens cannot be read.*holdfast data teach"):
        read.microbatch(1, 0)
    model = models.config(vocab_size=dataset.vocab_size)
    teacher = models.lively(model)
    said: list[tuple[int, int]] = []
    digest = teach(teacher, read, 2.0, "cpu", lambda *pieces: said.append(pieces))
    count = len(store.pieces)
    assert count > 1
    assert said == [(number, count) for number in range(1, count + 1)]

    batch = read.microbatch(1, 0)
    with torch.no_grad():
        logps = (teacher(torch.from_numpy(batch.inputs)).float() / 2.0).log_softmax(-1)
    values, ids = logps.topk(4)
    assert torch.equal(torch.from_numpy(batch.side[IDS]).long(), ids)
    assert torch.allclose(torch.from_numpy(batch.side[LOGPS]), values, atol=1e-6)
    start, stop = read.positions(1, 0)
    assert read.hash_of(start, stop) == batch.entries[0]["hash"]

    before = store.path(1).read_bytes()
    damaged = bytearray(before)
    damaged[-3] ^= 1
    store.path(1).write_bytes(damaged)
    assert any("piece-00001" in problem for problem in find_problems(dataset))
    (store.folder / MANIFEST).unlink()
    assert store.present() == [True, False] + [True] * (count - 2)
    assert teach(teacher, read, 2.0, "cpu", lambda *pieces: None) == digest
    assert store.path(1).read_bytes() == before
    assert find_problems(dataset) == []


def test_a_teacher_reads_a_completion_in_the_place_of_its_tokens() -> None:
    """As one pass over prompt and completion without anything after them."""
    model = models.config(vocab_size=VOCABULARY)
    decoder = models.lively(model)
    teacher = Teacher(decoder, 12, 0.5, 4)
    prompt, reply = [5, 3, 9], [7, 1, 2, 8]
    found = teacher.read([*prompt, *reply], len(prompt))
    with torch.no_grad():
        logits = decoder(torch.tensor([prompt + reply]))[0]
    values, ids = (logits[2:6] / 0.5).log_softmax(-1).topk(4)
    assert torch.equal(torch.from_numpy(found[IDS]).long(), ids)
    assert torch.allclose(torch.from_numpy(found[LOGPS]), values, atol=1e-5)
    blank = teacher.blank(3)
    assert {name: part.shape for name, part in blank.items()} == {
        IDS: (3, 12, 4),
        LOGPS: (3, 12, 4),
    }


def test_trainers_alone_have_the_teacher() -> None:
    objective = {"kind": "distill", "reference": {"model": "teacher"}, "beta": 0.5}
    config = RunConfig.model_validate({"model": {"preset": "tiny"}, "objective": objective, **OWN})
    assert not config.has_read_reference  # which actors would read with


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"objective": {"alpha": 0.2}, **OWN}, "alpha 0.2 would teach the student its own"),
        ({**OWN, "rollout": {**OWN["rollout"], "samples": 2, "filter": "no_variance"}}, "by their"),
        ({**OWN, "data": {"attention": "full"}}, "use data.attention: document"),
        ({**OWN, "layout": {"tp": 2}}, "needs all logits of a token, and layout.tp cuts them"),
        ({"objective": {"kind": "distill"}}, "kind distill has no teacher: use reference"),
        ({"layout": {"tp": 2}}, "needs all logits of a token, and layout.tp cuts them"),
        ({"objective": {"beta": 2}}, "beta 2.0 is above 1, the reverse KL: use beta 1"),
        ({"objective": {"loss_type": "hinge"}}, "loss_type is a key of dpo"),
        ({"lora": {"rank": 2}}, "distill has not been tried with adapters"),
    ],
)
def test_what_does_not_fit(changes: dict[str, Any], says: str) -> None:
    objective = {"kind": "distill", "reference": {"model": "teacher"}}
    given: dict[str, Any] = {"model": {"preset": "tiny", "vocab_size": 64}, "objective": objective}
    for section, values in changes.items():
        whole = section == "objective" and values == {"kind": "distill"}
        given[section] = values if whole else {**given.get(section, {}), **values}
    with pytest.raises(ValidationError, match=says):
        RunConfig.model_validate(given)
