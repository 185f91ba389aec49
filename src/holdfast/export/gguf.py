"""A folder in Hugging Face form as one GGUF file, for llama.cpp (extra `gguf`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from holdfast.borders import Border
from holdfast.config.huggingface.folder import CHAT_TEMPLATE
from holdfast.core.json_parsing import parse_json
from holdfast.data.read.vocabulary import describe_tokenizer, load_tokenizer
from holdfast.errors import ConfigError, ModelFolderError
from holdfast.wire.store.publish import publish_file, temporary_beside

ARCHITECTURE = "llama"
_SPLITS = {
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+": "llama-bpe",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+": "qwen2",
}
"""Expression of a tokenizer.json -> llama.cpp's name of it."""
GGUF_CONFIG = Border(
    "config.json of a folder that becomes GGUF",
    frozenset(
        (
            *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
            *("max_position_embeddings", "rms_norm_eps", "num_attention_heads", "head_dim"),
            *("num_key_value_heads", "rope_theta", "bos_token_id", "eos_token_id"),
        )
    ),
    frozenset(
        (
            *("architectures", "initializer_range", "tie_word_embeddings", "attention_dropout"),
            *("use_cache", "pad_token_id", "dtype", "torch_dtype", "pretraining_tp"),
            "transformers_version",
        )
    ),
    {"model_type": (ARCHITECTURE,), "hidden_act": ("silu",)},
)


def require_gguf() -> None:
    """Raises ConfigError unless the package gguf is installed."""
    if find_spec("gguf") is None:
        raise ConfigError(
            "it needs the package gguf, which is not installed",
            where="--format gguf",
            remedy="pip install 'holdfast[gguf]'",
        )


def write_gguf(folder: Path, to: Path, dtype: str | None) -> None:
    """Write the file. Weights are held one at a time. Raises ModelFolderError for a model that has
    no exact counterpart. dtype: float16 for matrices of 16 bits."""
    config = parse_json((folder / "config.json").read_text("utf-8"))
    remedy = "export it with --format hf"
    GGUF_CONFIG.check(config, str(folder), ModelFolderError, remedy)
    gguf: Any = import_module("gguf")
    temporary = temporary_beside(to)
    writer = gguf.GGUFWriter(temporary, ARCHITECTURE)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    sizes = {
        "name": to.stem,
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "head_count": heads,
        "head_count_kv": kv_heads,
        "rope_freq_base": config["rope_theta"],
        "layer_norm_rms_eps": config["rms_norm_eps"],
        "vocab_size": config["vocab_size"],
        **dict.fromkeys(("key_length", "value_length", "rope_dimension_count"), config["head_dim"]),
    }
    for key, value in sizes.items():
        getattr(writer, f"add_{key}")(value)
    kinds = gguf.LlamaFileType
    writer.add_file_type(kinds.MOSTLY_F16 if dtype == "float16" else kinds.ALL_F32)
    _add_tokenizer(writer, gguf.TokenType, folder, config)
    for name, tensor in _tensors(folder, config["num_hidden_layers"]):
        if name.endswith((".attn_q.weight", ".attn_k.weight")):
            # llama.cpp turns neighbours, and Hugging Face a row and the one half a head later.
            count = heads if "attn_q" in name else kv_heads
            shape = tensor.shape
            halves = tensor.reshape(count, 2, shape[0] // count // 2, *shape[1:])
            tensor = halves.swapaxes(1, 2).reshape(shape)
        narrow = dtype == "float16" and tensor.ndim > 1
        writer.add_tensor(name, tensor.astype("float16" if narrow else "float32"))
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        publish_file(temporary, to)
    finally:
        temporary.unlink(missing_ok=True)


def _tensors(folder: Path, layers: int) -> Iterator[tuple[str, Any]]:
    """Yield each tensor by llama.cpp's name."""
    from safetensors import safe_open

    gguf: Any = import_module("gguf")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "numpy") as file:
            for name in file.keys():  # noqa: SIM118 (no dictionary)
                yield names.get_name(name, (".weight",)), file.get_tensor(name)


def _add_tokenizer(writer: Any, kinds: Any, folder: Path, config: Mapping[str, Any]) -> None:
    """The tokenizer's tokens, merges, kinds and ends. Raises ModelFolderError."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        what, remedy = "a GGUF file has a tokenizer, and this folder has none", "add tokenizer.json"
        raise ModelFolderError(what, where=str(folder), remedy=remedy)
    value = parse_json(path.read_text("utf-8"))
    steps = value["pre_tokenizer"] or {}
    steps = steps.get("pretokenizers", [steps])
    split = next((s["pattern"].get("Regex") for s in steps if s.get("type") == "Split"), None)
    is_gpt2 = [(s.get("type"), s.get("use_regex", True)) for s in steps] == [("ByteLevel", True)]
    pre = "gpt-2" if is_gpt2 else _SPLITS.get(split or "")
    model = value["model"]
    if model["type"] != "BPE" or pre is None or value["normalizer"] is not None:
        raise ModelFolderError(
            "its tokenizer has no known counterpart in llama.cpp",
            where=str(path),
            remedy="convert the folder with the script of that program",
        )
    tokens = {number: (text, kinds.NORMAL) for text, number in model["vocab"].items()}
    for token in value["added_tokens"]:
        kind = kinds.CONTROL if token["special"] else kinds.USER_DEFINED
        tokens[token["id"]] = token["content"], kind
    unused = ((f"[PAD{n}]", kinds.UNUSED) for n in range(config["vocab_size"]))
    rows = [tokens.get(number, spare) for number, spare in enumerate(unused)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([text for text, _ in rows])
    writer.add_token_types([kind for _, kind in rows])
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    writer.add_token_merges(merges)
    ends = config["eos_token_id"]
    writer.add_eos_token_id(ends[0] if isinstance(ends, list) else ends)
    begin = describe_tokenizer(load_tokenizer(path), path).begin_id
    if begin is not None:
        writer.add_bos_token_id(begin)
    writer.add_add_bos_token(begin is not None)
    if (template := folder / CHAT_TEMPLATE).is_file():
        writer.add_chat_template(template.read_text("utf-8"))
