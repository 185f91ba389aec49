"""The architectures of Hugging Face that the decoder computes, one short description each.

A description says which model keys follow from which keys of `config.json` (`rules`). It says which
values all models of the architecture have (`always`), and which keys must have one of a few values
(`fixed`). `names` and `fused` say how tensors are named. A key of `config.json` that stands nowhere
here is refused, for it may change what the model computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.borders import Border
from holdfast.config.huggingface.rules import (
    Rule,
    choice,
    copy,
    embedding_by_dim,
    experts,
    heads,
    limit,
    query_scale,
    rotary,
    rotary_by_kind,
    unturned,
    unturned_blocks,
    window_by_block,
    window_everywhere,
)

_NAMES = {
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention.o": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
}
_POST_NAMES = {
    "attention_post_norm": "post_attention_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm",
}
_QWEN_EXPERTS = {
    "ffn.experts.gate": "mlp.experts.{}.gate_proj",
    "ffn.experts.up": "mlp.experts.{}.up_proj",
    "ffn.experts.down": "mlp.experts.{}.down_proj",
}
_BOTH_NAMES = _NAMES | _POST_NAMES | {"ffn_norm": "pre_feedforward_layernorm"}
OUTSIDE_NAMES = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
    "score.weight": "score.weight",
}
SCORED = "ForSequenceClassification"
"""The end of their name of a model with a score head in place of the vocabulary's."""

_TOKENS = ("bos", "cls", "decoder_start", "eos", "forced_bos", "forced_eos", "mask", "pad", "sep")
DROPOUT = ("attention_dropout", "embd_pdrop", "resid_pdrop")
"""Keys that the decoder trains without, which a run says."""
NEUTRAL = frozenset(
    (
        # tokens
        *(f"{name}_token_id" for name in (*_TOKENS, "unk")),
        # how a text is generated
        *("bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "do_sample"),
        *("early_stopping", "encoder_no_repeat_ngram_size", "length_penalty"),
        *("max_length", "min_length", "no_repeat_ngram_size", "num_beam_groups"),
        *("num_beams", "num_return_sequences", "remove_invalid_values"),
        *("repetition_penalty", "suppress_tokens", "temperature", "top_k", "top_p"),
        "typical_p",
        # what a forward pass returns
        *("output_attentions", "output_hidden_states", "output_router_logits"),
        *("output_scores", "return_dict", "return_dict_in_generate"),
        # training, other tasks, and where the folder is from
        *("_attn_implementation", "_attn_implementation_autoset", "_name_or_path"),
        *("architectures", "auto_map", "cache_implementation"),
        *("chunk_size_feed_forward", "classifier_dropout", "dtype", *DROPOUT),
        *("finetuning_task", "id2label", "num_labels", "is_decoder", "is_llama_config", "label2id"),
        *("model_type", "prefix", "pretraining_tp", "problem_type", "pruned_heads"),
        *("task_specific_params", "tf_legacy_loss", "tokenizer_class"),
        *("torch_dtype", "torchscript", "transformers.js_config", "transformers_version"),
        *("unsloth_fixed", "unsloth_version", "use_bfloat16", "use_cache"),
    )
)
"""Keys that do not enter the logits."""

_OFF = (False, None)
_FIXED_EVERYWHERE: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "add_cross_attention": (None, False),
    "is_encoder_decoder": (None, False),
    "tie_encoder_decoder": (None, False),
}


@dataclass(frozen=True)
class Architecture:
    """One architecture.

    Args:
        family: our name of it.
        class_name: their name of it.
        model_type: their short name, if it is not `family`.
        always: model keys with one value in it.
        fixed: their keys that must be absent or have one of these values. Written is the first,
            unless it is None.
        names: part of a block -> their name.
        fused: their name -> our parts that lie in it one after another.
        by_expert: our part -> their name of one expert's, with {} for its number.
    """

    family: str
    class_name: str
    rules: tuple[Rule, ...]
    model_type: str = ""
    always: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=lambda: _NAMES)
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    by_expert: Mapping[str, str] = field(default_factory=dict)

    @property
    def scored_name(self) -> str:
        """Their name of the same blocks with a score head; "": there is none."""
        if self.family in ("dots1", "granite"):
            return ""
        base = "Gemma3Text" if self.family == "gemma3" else self.class_name[: -len("ForCausalLM")]
        return base + SCORED

    @property
    def their_type(self) -> str:
        return self.model_type or self.family

    @property
    def all_fixed(self) -> dict[str, tuple[Any, ...]]:
        return {**_FIXED_EVERYWHERE, **self.fixed}

    @property
    def border(self) -> Border:
        """What config.json may say of it."""
        read = {key for rule in self.rules for key in rule.keys}
        return Border("config.json", frozenset(read), NEUTRAL, self.all_fixed)


_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
_GEMMA_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu_tanh", "silu": "silu"}
_BIASES = {False: "none", True: "qkvo"}

_OPTIONAL_BIAS = choice("attention_bias", "attention_bias", _BIASES, False)
_SILU = choice("hidden_act", "activation", _ACTIVATIONS, "silu")
_ROTARY = rotary()
_GEMMA_ACT = choice("hidden_activation", "activation", _GEMMA_ACTIVATIONS, "gelu_pytorch_tanh")
_LATE_WINDOW = window_by_block(
    lambda config, block: block >= (config.get("max_window_layers") or 28),
    absent=4096,
    switch="use_sliding_window",
    also=("max_window_layers",),
    write_also=lambda model: {"max_window_layers": min(model.windowed)} if model.windowed else {},
)
_GEMMA = {"norm_plus_one": True}


def _rules(
    eps: float,
    own_heads: Rule,
    *more: Rule,
    tied: bool = False,
    positions: int = 2048,
    activation: Rule = _SILU,
    turned: Rule = _ROTARY,
) -> tuple[Rule, ...]:
    """What all have, and `more`. eps, tied, positions: what counts where a key is missing."""
    return (
        copy("vocab_size", "vocab_size"),
        copy("hidden_size", "dim"),
        copy("intermediate_size", "ffn_dim"),
        copy("num_hidden_layers", "layers"),
        copy("max_position_embeddings", "max_position", positions),
        copy("initializer_range", "init_std", 0.02),
        copy("rms_norm_eps", "norm_eps", eps),
        copy("tie_word_embeddings", "tied_embeddings", tied),
        *(own_heads, activation, turned, *more),
    )


ARCHITECTURES: dict[str, Architecture] = {
    row.family: row
    for row in (
        Architecture(
            "llama",
            "LlamaForCausalLM",
            _rules(1e-6, heads(always_head=True), _OPTIONAL_BIAS),
            fixed={"mlp_bias": _OFF, "rope_interleaved": (None, False)},
        ),
        Architecture(
            "qwen2",
            "Qwen2ForCausalLM",
            _rules(1e-6, heads(absent_kv=32), _LATE_WINDOW, positions=32_768),
            always={"attention_bias": "qkv"},
            fixed={"use_mrope": (None, False)},
        ),
        Architecture(
            "qwen3",
            "Qwen3ForCausalLM",
            _rules(
                1e-6,
                heads(always_head=True, absent_head=128, absent_kv=32),
                *(_OPTIONAL_BIAS, _LATE_WINDOW),
                positions=32_768,
            ),
            always={"qk_norm": True},
        ),
        Architecture(
            "mistral",
            "MistralForCausalLM",
            _rules(
                1e-6,
                heads(always_head=True, absent_kv=8),
                window_everywhere(absent=4096),
                positions=131_072,
            ),
        ),
        Architecture(
            "mixtral",
            "MixtralForCausalLM",
            _rules(
                1e-5,
                heads(absent_kv=8),
                *(window_everywhere(absent=None), experts(("num_local_experts",), (8, 2))),
                positions=131_072,
                turned=rotary(1_000_000.0),
            ),
            fixed={"router_jitter_noise": (0.0, None)},
            names=_NAMES | {"ffn.router": "block_sparse_moe.gate"},
            by_expert={
                "ffn.experts.gate": "block_sparse_moe.experts.{}.w1",
                "ffn.experts.up": "block_sparse_moe.experts.{}.w3",
                "ffn.experts.down": "block_sparse_moe.experts.{}.w2",
            },
        ),
        Architecture(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            _rules(
                1e-6,
                heads(always_head=True, absent_kv=4),
                _OPTIONAL_BIAS,
                window_everywhere(4096, "use_sliding_window", without=("max_window_layers",)),
                experts(
                    ("num_experts", "num_local_experts"),
                    (128, 8),
                    "moe_intermediate_size",
                    "norm_topk_prob",
                ),
                positions=32_768,
            ),
            always={"qk_norm": True},
            fixed={"decoder_sparse_step": (1, None), "mlp_only_layers": ([], None)},
            names=_NAMES | {"ffn.router": "mlp.gate"},
            by_expert=_QWEN_EXPERTS,
        ),
        Architecture(
            "dots1",
            "Dots1ForCausalLM",
            _rules(
                1e-6,
                heads(always_head=True),
                _OPTIONAL_BIAS,
                window_by_block(
                    lambda config, block: block >= (config.get("max_window_layers") or 62),
                    also=("max_window_layers",),
                ),
                experts(
                    ("n_routed_experts", "num_local_experts"),
                    (8, 2),
                    "moe_intermediate_size",
                    "norm_topk_prob",
                    is_deepseek=True,
                ),
            ),
            always={"qk_norm": True},
            fixed={
                "n_group": (1, None),
                "topk_group": (1, None),
                "moe_layer_freq": (None, 1),
                "scoring_func": (None, "sigmoid", "noaux_tc"),
                "topk_method": (None, "noaux_tc"),
            },
            names=_NAMES
            | {
                "ffn.router": "mlp.gate",
                "ffn.router.choice_bias": "mlp.gate.e_score_correction_bias",
                "ffn.shared.gate": "mlp.shared_experts.gate_proj",
                "ffn.shared.up": "mlp.shared_experts.up_proj",
                "ffn.shared.down": "mlp.shared_experts.down_proj",
            },
            by_expert=_QWEN_EXPERTS,
        ),
        Architecture(
            "phi3",
            "Phi3ForCausalLM",
            _rules(
                1e-5,
                heads(),
                window_everywhere(absent=None),
                positions=4096,
                turned=rotary(scalings=(), partial=True),
            ),
            fixed={
                "attention_bias": (None, False),
                "mlp_bias": (None, False),
                "lm_head_bias": (None, False),
                "full_attn_mod": (None, 1),
                "interpolate_factor": (None, 1),
            },
            fused={
                "self_attn.qkv_proj": ("attention.q", "attention.k", "attention.v"),
                "mlp.gate_up_proj": ("ffn.gate", "ffn.up"),
            },
        ),
        Architecture(
            "olmo2",
            "Olmo2ForCausalLM",
            _rules(1e-5, heads(), _OPTIONAL_BIAS),
            always={"norms": "post", "qk_norm": True, "qk_norm_width": "all"},
            names=_NAMES | _POST_NAMES,
        ),
        Architecture(
            "smollm3",
            "SmolLM3ForCausalLM",
            _rules(
                1e-6,
                heads(absent_kv=4),
                unturned_blocks(),
                _OPTIONAL_BIAS,
                window_by_block(
                    lambda config, block: block in unturned(config),
                    switch="use_sliding_window",
                    also=("max_window_layers",),
                ),
                tied=True,
                positions=32_768,
                turned=rotary(2_000_000.0),
            ),
            fixed={"mlp_bias": _OFF},
        ),
        Architecture(
            "granite",
            "GraniteForCausalLM",
            _rules(
                1e-6,
                heads(),
                _OPTIONAL_BIAS,
                *(copy(key, key, 1.0) for key in ("embedding_multiplier", "residual_multiplier")),
                copy("attention_multiplier", "attention_scale", 1.0),
                copy("logits_scaling", "logit_divisor", 1.0),
            ),
            fixed={"mlp_bias": _OFF},
        ),
        Architecture(
            "gemma",
            "GemmaForCausalLM",
            _rules(
                1e-6,
                heads(always_head=True, absent_head=256, absent_kv=16),
                *(_OPTIONAL_BIAS, embedding_by_dim()),
                tied=True,
                positions=8192,
                activation=choice(
                    "hidden_act", "activation", _GEMMA_ACTIVATIONS, "gelu_pytorch_tanh"
                ),
            ),
            always=_GEMMA,
            fixed={
                "hidden_activation": (None, "gelu_pytorch_tanh"),
                "use_bidirectional_attention": (None, False),
            },
        ),
        Architecture(
            "gemma2",
            "Gemma2ForCausalLM",
            _rules(
                1e-6,
                heads(always_head=True, absent_head=256, absent_kv=4),
                *(_OPTIONAL_BIAS, embedding_by_dim(), query_scale(absent=256)),
                window_by_block(lambda config, block: block % 2 == 0, absent=4096),
                limit("attn_logit_softcapping", "attention_softcap", 50.0),
                limit("final_logit_softcapping", "logit_softcap", 30.0),
                tied=True,
                positions=8192,
                activation=_GEMMA_ACT,
            ),
            always=_GEMMA | {"norms": "both"},
            fixed={
                "hidden_act": (None, "gelu_pytorch_tanh"),
                "use_bidirectional_attention": (None, False),
            },
            names=_BOTH_NAMES,
        ),
        Architecture(
            "gemma3",
            "Gemma3ForCausalLM",
            _rules(
                1e-6,
                heads(always_head=True, absent_head=256, absent_kv=4),
                *(_OPTIONAL_BIAS, embedding_by_dim(), query_scale(absent=256)),
                window_by_block(
                    lambda config, block: bool(
                        (block + 1)
                        % int(
                            config.get("sliding_window_pattern")
                            or config.get("_sliding_window_pattern")
                            or 6
                        )
                    ),
                    absent=4096,
                    also=("sliding_window_pattern", "_sliding_window_pattern"),
                ),
                limit("final_logit_softcapping", "logit_softcap", 0.0),
                tied=True,
                positions=131_072,
                activation=_GEMMA_ACT,
                turned=rotary_by_kind(1_000_000.0, 10_000.0),
            ),
            model_type="gemma3_text",
            always=_GEMMA | {"norms": "both", "qk_norm": True},
            fixed={"attn_logit_softcapping": (None,), "use_bidirectional_attention": (None, False)},
            names=_BOTH_NAMES,
        ),
    )
}
BY_TYPE = {row.their_type: row for row in ARCHITECTURES.values()}
BORDERS = {name: row.border for name, row in BY_TYPE.items()}
