"""Completions whose bits depend on weights, prompt, key and sampling alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.config.sections.lora import LoraConfig
from holdfast.config.sections.model import ModelConfig
from holdfast.core.sharding.adapters import adapted_layers
from holdfast.errors import UserError
from holdfast.model.decoder import Decoder
from holdfast.model.generate import generate
from holdfast.model.lora import merged
from holdfast.rollout.decode.policy import PolicyDecoder
from holdfast.rollout.decode.threads import serial_kernels
from holdfast.rollout.messages import Begun, Completion, CompletionKey, CompletionRequest, Sampling
from tests.support.models import config, lively

CPU = torch.device("cpu")
EXPERTS = {"count": 6, "top_k": 2, "width": 20, "shared": 1}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": "qkvo"},
    # No width is a multiple of a vector's length, so the last elements of each tensor are special.
    "odd": {"dim": 36, "heads": 3, "kv_heads": 3, "ffn_dim": 57, "vocab_size": 97},
    "gemma": {
        "dim": 40,
        "tied_embeddings": True,
        "vocab_multiple": 64,
        "window": 9,
        "window_layers": (0,),
        "window_rope_theta": 100.0,
        "attention_softcap": 5.0,
        "logit_softcap": 9.0,
        "activation": "gelu_tanh",
        "norms": "both",
        "norm_plus_one": True,
    },
    "olmo": {"qk_norm": True, "qk_norm_width": "all", "norms": "post", "no_rope_layers": (1,)},
    "mixtral": {"family": "mixtral", "experts": {**EXPERTS, "shared": 0}, "window": 70},
    "deepseek": {"experts": {**EXPERTS, "scores": "sigmoid", "choice_bias": True, "first": 1}},
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def policy(model: ModelConfig, source: Decoder, slots: int, **how: Any) -> PolicyDecoder:
    made = PolicyDecoder(model, CPU, slots=slots, max_length=180, **how)
    made.load(source.state_dict())
    return made


def requests(model: ModelConfig, count: int, seed: int = 0) -> list[CompletionRequest]:
    """Of prompts and settings that differ; every second prompt is that of the request before."""
    draw, made = random.Random(seed), list[CompletionRequest]()
    for number in range(count):
        size = draw.choice((1, 5, 31, 32, 33, 64, 90))
        prompt = tuple(draw.randrange(model.vocab_size) for _ in range(size))
        prompt = made[-1].prompt if number % 2 else prompt
        how = Sampling(
            max_tokens=draw.choice((1, 2, 9, 40)),
            temperature=draw.choice((0.0, 0.7, 1.0)),
            top_p=draw.choice((0.9, 1.0)),
            stop=tuple(draw.sample(range(model.vocab_size), 3)),
        )
        made.append(CompletionRequest(CompletionKey(3, 0, number // 2, number % 2), prompt, how))
    return made


MANY = pytest.param("llama", 200, (1, 2, 5, 8, 11), marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("kind", "count", "slot_counts"),
    [*((kind, 12, (2, 11)) for kind in (*KINDS, "bfloat16", "adapters")), MANY],
)
def test_bits_depend_on_the_request_alone(
    kind: str, count: int, slot_counts: tuple[int, ...]
) -> None:
    model = config(**KINDS.get(kind, {}))
    source, how = lively(model), dict[str, Any]()
    adapters: dict[str, torch.Tensor] = {}
    if kind == "bfloat16":
        how["dtype"] = torch.bfloat16
    if kind == "adapters":
        how["lora"] = LoraConfig(rank=3)
        for layer, (outputs, inputs) in adapted_layers(model, how["lora"]).items():
            adapters[f"{layer}.lora_A"] = torch.randn(3, inputs)
            adapters[f"{layer}.lora_B"] = torch.randn(outputs, 3)

    def make(slots: int) -> PolicyDecoder:
        if not adapters:
            return policy(model, source, slots, **how)
        made = PolicyDecoder(model, CPU, slots=slots, max_length=180, **how)
        made.load_base(source.state_dict())
        made.load(adapters)
        return made

    asked = requests(model, count)
    alone = make(1)
    wanted = {each.key: next(alone.generate([each], run_seed=5)) for each in asked}
    for slots in slot_counts:
        random.Random(slots).shuffle(asked)
        made = list(make(slots).generate(iter(asked), run_seed=5))
        assert len(made) == len(asked)
        wrong = [each.key for each in made if each != wanted[each.key]]
        assert not wrong, f"{slots} slots: {len(wrong)} completions differ"
    assert {each.finish for each in wanted.values()} == {"stop", "length"}
    taken = make(2)  # it continues what another one began, next to a text of its own
    for each in asked:
        whole = wanted[each.key]
        if len(whole.tokens) < 2:
            continue
        cut = random.Random(str(each.key)).randrange(1, len(whole.tokens))
        begun = Begun(each.key, whole.tokens[:cut], whole.logps[:cut])
        taken.cancel()
        assert taken.start(each, 5, begun) is None
        taken.start(replace(each, sampling=replace(each.sampling, max_tokens=40)), 9)
        assert begun in taken.begun()
        is_ended = any(whole in taken.step() for _ in range(40))
        assert is_ended, f"{each.key} continues from {cut} tokens"
    assert set(make(8).generate(asked, run_seed=6)) != set(wanted.values())


@pytest.mark.parametrize("kind", KINDS)
def test_text_and_probabilities_are_those_of_the_full_forward(kind: str) -> None:
    model = config(**KINDS[kind])
    source = lively(model, dtype=torch.float64)
    decoder = policy(model, source, 3, dtype=torch.float64)
    asked = [
        replace(each, sampling=Sampling(40, temperature=float(number % 2) * 0.8))
        for number, each in enumerate(requests(model, 4))
    ]
    for number, made in enumerate(sorted(decoder.generate(asked, 1), key=lambda each: each.key)):
        prompt = torch.tensor([asked[number].prompt])
        text = torch.cat((prompt, torch.tensor([made.tokens])), 1)
        temperature = asked[number].sampling.temperature
        if temperature == 0:
            assert torch.equal(text, generate(source, prompt, 40, temperature=0))
        logits = source(text)[0, prompt.shape[1] - 1 : -1] / (temperature or 1.0)
        full = logits.log_softmax(-1).gather(1, text[0, prompt.shape[1] :, None])[:, 0]
        torch.testing.assert_close(torch.tensor(made.logps).double(), full, rtol=0, atol=1e-5)
        read = torch.tensor(decoder.read(asked[number], made.tokens)).double()
        torch.testing.assert_close(read, full, rtol=0, atol=1e-5)
        score = torch.randn(1, model.dim, dtype=torch.float64)
        values = source.hidden(text)[0, prompt.shape[1] - 1 : -1] @ score[0]
        read = torch.tensor(decoder.read(asked[number], made.tokens, score=score)).double()
        torch.testing.assert_close(read, values, rtol=0, atol=1e-4)


def test_what_is_read_of_a_text_has_the_same_bits_amid_any_other_work() -> None:
    """A reference and a policy with adapters read what they read before, which is the base's."""
    model, lora = config(), LoraConfig(rank=3)
    source, asked = lively(model), requests(model, 6)
    plain, with_adapters = (
        policy(model, source, 1),
        PolicyDecoder(model, CPU, slots=9, max_length=180, lora=lora),
    )
    with_adapters.load_base(source.state_dict())
    with_adapters.load(
        {
            f"{layer}.lora_{part}": torch.randn(shape)
            for layer, (outputs, inputs) in adapted_layers(model, lora).items()
            for part, shape in (("A", (3, inputs)), ("B", (outputs, 3)))
        }
    )
    made = {each.key: each.tokens for each in plain.generate(asked, 0)}
    wanted = [policy(model, source, 1).read(each, made[each.key]) for each in asked]
    for each in asked[:4]:
        with_adapters.start(each, 0)
    for number in reversed(range(len(asked))):
        with_adapters.step()
        tokens = made[asked[number].key]
        assert plain.read(asked[number], tokens) == wanted[number]
        assert with_adapters.read(asked[number], tokens, of_base=True) == wanted[number]
        assert with_adapters.read(asked[number], tokens) != wanted[number]


def test_adapters_are_those_of_merged_weights() -> None:
    model, lora = config(), LoraConfig(rank=4)
    source, state, adapters = lively(model), dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    state.update(source.state_dict())
    decoder = PolicyDecoder(model, CPU, slots=2, max_length=100, lora=lora)
    decoder.load_base(state)
    for layer, (outputs, inputs) in adapted_layers(model, lora).items():
        down, up = torch.randn(4, inputs) / 4, torch.randn(outputs, 4) / 4
        adapters |= {f"{layer}.lora_A": down, f"{layer}.lora_B": up}
        state[f"{layer}.weight"] = merged(state[f"{layer}.weight"], down, up, lora.scale)
    decoder.load(adapters)
    source.load_state_dict(state)
    key, prompt = CompletionKey(0, 0, 0, 0), tuple(range(9))
    (made,) = decoder.generate([CompletionRequest(key, prompt, Sampling(30, 0.0))], 0)
    found = generate(source, torch.tensor([prompt]), 30, temperature=0)
    assert made.tokens == tuple(found[0, 9:].tolist())


def test_greedy_text_is_that_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="compares with transformers")
    from holdfast.model.huggingface import import_folder

    shape = transformers.LlamaConfig(
        vocab_size=120,
        hidden_size=32,
        intermediate_size=56,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
        eos_token_id=None,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(shape).eval()
    theirs.save_pretrained(tmp_path)
    model, tensors = import_folder(tmp_path)
    decoder = PolicyDecoder(model, CPU, slots=4, max_length=128)
    decoder.load(dict(tensors))
    prompts = [tuple(torch.randint(120, (size,)).tolist()) for size in (1, 7, 40, 64, 3)]
    asked = [
        CompletionRequest(CompletionKey(0, 0, n, 0), prompt, Sampling(50, 0.0))
        for n, prompt in enumerate(prompts)
    ]
    for made in decoder.generate(asked, 0):
        prompt = torch.tensor([prompts[made.key.prompt]])
        text = theirs.generate(
            prompt, max_new_tokens=50, do_sample=False, attention_mask=torch.ones_like(prompt)
        )
        assert made.tokens == tuple(text[0, prompt.shape[1] :].tolist())


def test_weights_are_copied_in_place_and_forget_what_was_read() -> None:
    model = config()
    first, second = lively(model, 1), lively(model, 2)
    decoder, asked = policy(model, first, 2), requests(model, 6)

    def all_of() -> list[Completion]:
        return sorted(decoder.generate(asked, 0), key=lambda each: each.key)

    wanted, memory = all_of(), [p.data_ptr() for p in decoder._model.parameters()]
    read = decoder.read(asked[0], wanted[0].tokens)
    decoder.load(second.state_dict())
    assert all_of() != wanted
    assert decoder.read(asked[0], wanted[0].tokens) != read
    broken = {name: value * torch.nan for name, value in first.state_dict().items()}
    decoder.load(broken)
    with pytest.raises(UserError, match="not finite"):
        all_of()
    decoder.load(first.state_dict())
    assert all_of() == wanted
    assert decoder.read(asked[0], wanted[0].tokens) == read
    assert [p.data_ptr() for p in decoder._model.parameters()] == memory
    with pytest.raises(ValueError, match="names differ"):
        decoder.load({})


def test_threads_of_the_process_do_not_matter_and_stay() -> None:
    """Two threads give other products here. In the strict mode of MKL they do not, and are used."""
    model = config(dim=384, heads=8, ffn_dim=1536)
    source = lively(model)
    decoder, asked = policy(model, source, 8), requests(model, 8)
    wanted = set(decoder.generate(asked, 0))
    decoder.load(source.state_dict())
    torch.set_num_threads(2)
    assert set(decoder.generate(asked, 0)) == wanted
    with serial_kernels(), ThreadPoolExecutor(1) as other:
        assert (torch.get_num_threads(), other.submit(torch.get_num_threads).result()) == (1, 2)
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(
    ("prompt", "how", "problem"),
    [
        ((), Sampling(4), "0 tokens"),
        ((1,), Sampling(0), "asks for 0"),
        ((1,) * 150, Sampling(31), "more than 180"),
        ((1,), Sampling(4, temperature=-1.0), "temperature"),
        ((1,), Sampling(4, top_p=0.0), "top_p"),
    ],
)
def test_requests_that_do_not_fit_are_refused(
    prompt: tuple[int, ...], how: Sampling, problem: str
) -> None:
    model = config()
    request = CompletionRequest(CompletionKey(0, 0, 7, 0), prompt, how)
    with pytest.raises(UserError, match=problem):
        list(policy(model, lively(model), 2).generate([request], 0))
