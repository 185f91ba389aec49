"""A GGUF export answers as the run does, in llama.cpp."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import ModelFolderError
from holdfast.export.gguf import GGUF_CONFIG, write_gguf
from holdfast_lab.chaos.sample_run import WORDS
from tests.support.borders import unknown_entries
from tests.support.commands import within, write_run_file


def test_a_model_that_llama_cpp_would_compute_otherwise_is_refused(tmp_path: Path) -> None:
    plain = {"model_type": "llama", "hidden_act": "silu"}
    odd = unknown_entries(GGUF_CONFIG) | {"model_type": "qwen3", "hidden_act": "gelu"}
    for name, value in odd.items():
        (tmp_path / "config.json").write_text(json.dumps(plain | {name: value}))
        with pytest.raises(ModelFolderError, match=name):
            write_gguf(tmp_path, tmp_path / "model.gguf", None)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_llama_cpp_answers_greedily_with_the_same_text(tmp_path: Path, tied: bool) -> None:
    pytest.importorskip("gguf", reason="needs the extra gguf")
    library: Any = pytest.importorskip("llama_cpp", reason="needs llama-cpp-python")
    shape = (
        *("model.layers=3", "model.dim=64", "model.heads=4", "model.kv_heads=2"),
        *("model.ffn_dim=96", f"model.tied_embeddings={str(tied).lower()}"),
    )
    words = ("train.steps=60", "train.optimizer.learning_rate=0.01", "layout.workers=1", *shape)
    within("train", write_run_file(tmp_path / "t"), *words).succeeds()
    run, file = tmp_path / "t/run", tmp_path / "model.gguf"
    within("export", run, "--to", file, "--format", "gguf").succeeds()
    model = library.Llama(str(file), n_ctx=512, verbose=False, n_threads=1)
    prompts = [f"{WORDS[i]} {WORDS[-i - 1]}" for i in range(8)] + [
        "It's 1234 o'clock,\n\n  so",
        "é∑",
    ]
    for prompt in prompts:
        how = ("--tokens", "40", "--temperature", "0")
        ours = within("generate", run, prompt, *how).succeeds().out.removesuffix("\n")
        theirs = model(prompt, max_tokens=40, temperature=0.0, top_k=1)["choices"][0]["text"]
        assert prompt + theirs == ours.replace("\ufffd", "")  # llama_cpp leaves out such bytes
