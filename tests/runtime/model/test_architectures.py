"""Each architecture of Hugging Face: the same logits, the same bytes, the same config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from holdfast.config.huggingface.architectures import ARCHITECTURES, BY_TYPE
from holdfast.config.huggingface.convert import (
    FREE_KEYS,
    from_their_config,
    shape_of,
    to_their_config,
)
from holdfast.core.format.hf_names import huggingface_map
from holdfast.core.sharding.parameters import decoder_parameters
from holdfast.errors import ModelFolderError
from holdfast.model.decoder import Decoder
from holdfast.model.generate import DecodingSession
from holdfast.model.huggingface import export_folder, import_folder
from tests.support.models import lively, tokens

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
WINDOW = {"use_sliding_window": True, "sliding_window": 7}
QWEN3_MOE = {"model_type": "qwen3_moe", "head_dim": 16, "num_experts": 6}
CASES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "tie_word_embeddings": True},
    "llama_bias_yarn": {"model_type": "llama", "attention_bias": True, "rope_parameters": YARN},
    "llama_linear": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
    },
    "llama_yarn_in_full": {
        "model_type": "llama",
        "rope_parameters": {
            **YARN,
            "beta_fast": 8.0,
            "beta_slow": 2.0,
            "attention_factor": 1.25,
            "truncate": False,
        },
    },
    "qwen2": {"model_type": "qwen2"},
    "qwen2_window": {
        "model_type": "qwen2",
        **WINDOW,
        "max_window_layers": 3,
        "tie_word_embeddings": True,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 16, "rope_parameters": YARN},
    "mistral": {"model_type": "mistral", "sliding_window": 9},
    "mistral_wide_head": {"model_type": "mistral", "sliding_window": None, "head_dim": 24},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "sliding_window": 9},
    "qwen3_moe": {
        **QWEN3_MOE,
        "moe_intermediate_size": 24,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
    },
    "qwen3_moe_no_sum": {
        **QWEN3_MOE,
        "moe_intermediate_size": 24,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.01,
    },
    "dots1": {
        "model_type": "dots1",
        "head_dim": 16,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "sliding_window": None,
    },
    "phi3": {"model_type": "phi3", "sliding_window": 11},
    "phi3_partial": {
        "model_type": "phi3",
        "hidden_size": 64,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.75,
        },
    },
    "olmo2": {"model_type": "olmo2"},
    "granite": {
        "model_type": "granite",
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.0625,
        "logits_scaling": 2.0,
        "tie_word_embeddings": True,
    },
    "gemma": {"model_type": "gemma", "head_dim": 16, "num_key_value_heads": 1},
    "gemma2": {
        "model_type": "gemma2",
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": 7,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 7,
        "num_hidden_layers": 7,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "smollm3": {"model_type": "smollm3", "no_rope_layer_interval": 2},
    "smollm3_window": {"model_type": "smollm3", **WINDOW, "no_rope_layers": [1, 0, 1, 1, 0]},
}


def test_every_architecture_has_a_case() -> None:
    assert {case["model_type"] for case in CASES.values()} == set(BY_TYPE)


@pytest.mark.parametrize("case", CASES)
def test_config_goes_there_and_back(case: str) -> None:
    """What we write is read as the same model, and maps each of our parameters to one of theirs."""
    model = from_their_config(SIZES | CASES[case], "here")
    written = json.loads(json.dumps(to_their_config(model)))
    again = from_their_config(written, "there")
    assert shape_of(again) == shape_of(model)
    assert [getattr(again, key) for key in FREE_KEYS] == [getattr(model, key) for key in FREE_KEYS]
    assert written["model_type"] == CASES[case]["model_type"]
    built = Decoder(model.model_copy(update={"layers": model.layers}))
    assert [name for name, _ in built.named_parameters()] == [
        row.name for row in decoder_parameters(model)
    ]
    assert set(huggingface_map(model).to_theirs()) == {
        row.name for row in decoder_parameters(model)
    }


@pytest.mark.parametrize(
    "case",
    ["qwen2_window", "phi3_partial", "gemma2", "smollm3_window", "mixtral", "qwen3_moe", "dots1"],
)
def test_folder_comes_back_byte_for_byte(case: str, tmp_path: Path) -> None:
    """Without transformers: export, import, export."""
    model = from_their_config(SIZES | CASES[case], "here")
    ours = lively(model)
    export_folder(tmp_path / "out", model, ours.state_dict(), None)
    again, tensors = import_folder(tmp_path / "out")
    assert again == model
    assert all(torch.equal(tensors[name], p) for name, p in ours.state_dict().items())
    if model.experts is None:
        part = tensors.box("layers.1.ffn.up.weight", (10, 3), (20, 5))
        assert torch.equal(part, ours.state_dict()["layers.1.ffn.up.weight"][10:30, 3:8])
    else:
        part = tensors.box("layers.1.ffn.experts.up.weight", (1, 10, 3), (2, 4, 5))
        assert torch.equal(
            part, ours.state_dict()["layers.1.ffn.experts.up.weight"][1:3, 10:14, 3:8]
        )
    export_folder(tmp_path / "again", again, tensors, None)
    for path in (tmp_path / "out").iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("case", CASES)
def test_cached_reading_gives_the_same_logits(case: str) -> None:
    """Token by token past every window, and in pieces."""
    model = lively(from_their_config(SIZES | CASES[case], "here"), dtype=torch.float64)
    text = tokens(2, 20)
    with torch.no_grad():
        want = model(text)
        session, at = DecodingSession(model, 20), 0
        for length in (9, 1, 1, 4, 1, 1, 1, 2):
            got = session.read(text[:, at : at + length])
            at += length
            torch.testing.assert_close(got, want[:, at - 1], rtol=1e-9, atol=1e-9)


QWEN3_30B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
"""As it was published with the weights."""
DOTS1 = SIZES | CASES["dots1"] | {"moe_layer_freq": 1, "scoring_func": "noaux_tc"}
DOTS1 |= {"n_group": None, "topk_group": None}


def test_published_configs_of_experts_are_read() -> None:
    """They have keys that transformers itself does not write."""
    model = from_their_config(QWEN3_30B_A3B, "here")
    assert model.experts is not None
    assert model.inner_dim == 768
    assert model.window == 0
    assert from_their_config(DOTS1, "here").experts is not None


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": ({"model_type": "llama", "mup": 3}, "key mup is not understood"),
    "several": (
        {"model_type": "llama", "mup": 3, "mlp_bias": True, "hidden_act": "relu"},
        "mlp_bias true is not supported.*mup is not understood.*hidden_act 'relu'",
    ),
    "longrope": (
        {"model_type": "phi3", "rope_scaling": {"type": "longrope", "short_factor": [1.0]}},
        "rope scaling of type 'longrope'",
    ),
    "vision": ({"model_type": "gemma3", "text_config": {}}, "model_type 'gemma3'"),
    "missing": ({"model_type": "qwen2", "hidden_size": None}, "key 'hidden_size' is missing"),
    "text": ({"model_type": "gemma2", "num_hidden_layers": "ten"}, "num_hidden_layers 'ten'"),
    "scaling": ({"model_type": "llama", "rope_scaling": "yes"}, "rope_scaling 'yes' is not a"),
    "factor": ({"model_type": "llama", "rope_scaling": {"type": "linear"}}, "'factor' is missing"),
    "in scaling": (
        {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2.0, "power": 3}},
        "key power of rope scaling linear is not understood",
    ),
    "layers": (
        {"model_type": "gemma2", "layer_types": ["full_attention"]},
        "layer_types has 1 entries for 5 blocks",
    ),
    "layer type": (
        {"model_type": "gemma2", "layer_types": ["linear_attention"] * 5},
        "layer_types 'linear_attention' is not supported",
    ),
    "both ways": (
        {"model_type": "gemma2", "use_bidirectional_attention": True},
        "use_bidirectional_attention true",
    ),
    "quantized": (
        {"model_type": "llama", "quantization_config": {"bits": 4}},
        "quantization_config .* is not supported",
    ),
    "partial": ({"model_type": "llama", "partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    "late window": (
        {**CASES["qwen3_moe"], **WINDOW, "max_window_layers": 3},
        "max_window_layers 3 with a window is not supported",
    ),
    "window": (
        {
            "model_type": "gemma3_text",
            "sliding_window": None,
            "layer_types": ["sliding_attention"] * 5,
        },
        "there is no sliding_window",
    ),
    "a list": ({"model_type": ["llama"]}, "model_type .'llama'. is not supported"),
    "null heads": ({"model_type": "llama", "num_attention_heads": 0}, "heads"),
}


FOR_OWN_CODE = (
    *("unknown", "several", "longrope", "vision", "in scaling", "layer type", "both ways"),
    *("partial", "late window", "a list"),
)


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_understood_is_named(case: str) -> None:
    changes, message = REFUSED[case]
    with pytest.raises(ModelFolderError, match=f"here: .*{message}") as refused:
        from_their_config(SIZES | changes, "here")
    own_code = "train it by its own code with model.code: transformers" in str(refused.value)
    assert own_code == (case in FOR_OWN_CODE)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_logits_and_bytes_are_transformers(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    shape = SIZES | CASES[case]
    kind = transformers.AutoConfig.for_model(**shape)
    other = transformers.AutoModelForCausalLM.from_config(kind, attn_implementation="eager")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        biases = [b for name, b in other.named_buffers() if name.endswith("correction_bias")]
        for parameter in (*other.parameters(), *biases):
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    other.eval().save_pretrained(tmp_path / "in")

    model, tensors = import_folder(tmp_path / "in")
    assert shape_of(model) == shape_of(from_their_config(shape, "here"))
    ours = Decoder(model)
    ours.load_state_dict(dict(tensors))
    text = tokens(2, 60)
    with torch.no_grad():
        mine, want = ours(text), other(text).logits
    assert want.std() > 0.3
    torch.testing.assert_close(mine, want, rtol=0, atol=1e-4)

    export_folder(tmp_path / "out", model, tensors, None)
    before = load_file(tmp_path / "in" / "model.safetensors")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager", output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(loaded).__name__ == ARCHITECTURES[model.family].class_name
    with torch.no_grad():
        torch.testing.assert_close(loaded.eval()(text).logits, want, rtol=0, atol=1e-5)
