"""Folders of transformers: the same logits, the same bytes, and clear refusals."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from holdfast.config.huggingface.folder import (
    GENERATION_KEYS,
    describe_unread_settings,
    end_ids,
    eos_of,
    keep_settings,
)
from holdfast.config.sections.model import ModelConfig
from holdfast.data.read.vocabulary import stop_tokens
from holdfast.errors import ModelFolderError
from holdfast.model.decoder import Decoder
from holdfast.model.huggingface import export_folder, import_folder
from tests.support.borders import unknown_entries
from tests.support.models import SCALING, SHAPES, config, lively, tokens, train_tokenizer

transformers = pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def theirs(folder: Path, **changes: Any) -> Any:
    """A random model of transformers, gains included, saved at `folder`."""
    shape = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 56,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    } | changes
    kind = shape.pop("kind", "Llama")
    dtype = shape.pop("dtype", torch.float32)
    built = getattr(transformers, f"{kind}ForCausalLM")(
        getattr(transformers, f"{kind}Config")(**shape)
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    built = built.to(dtype).eval()
    built.save_pretrained(folder, max_shard_size=shape.get("max_shard_size", "5GB"))
    return built


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
THEIRS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama_scaled_tied": {"rope_parameters": LLAMA3, "tie_word_embeddings": True},
    "llama_wide_head": {"head_dim": 24, "num_key_value_heads": 1},
    "qwen3": {"kind": "Qwen3", "head_dim": 24},
    "qwen3_tied_bf16": {
        "kind": "Qwen3",
        "head_dim": 24,
        "tie_word_embeddings": True,
        "dtype": torch.bfloat16,
    },
}


def load(model: ModelConfig, tensors: Mapping[str, torch.Tensor]) -> Decoder:
    built = Decoder(model)
    built.load_state_dict(dict(tensors))
    return built


@pytest.mark.parametrize("shape", SHAPES)
def test_exported_logits_are_transformers(shape: str, tmp_path: Path) -> None:
    model = config(**SHAPES[shape])
    ours, text = lively(model), tokens(2, 200)  # far beyond the scaled context of 32
    export_folder(tmp_path / "out", model, ours.state_dict(), None)
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        mine, other = ours(text), loaded.eval()(text).logits
    assert mine.std() > 0.5
    torch.testing.assert_close(mine, other, rtol=0, atol=1e-4)


@pytest.mark.parametrize("shape", THEIRS)
def test_imported_logits_and_bytes(shape: str, tmp_path: Path) -> None:
    theirs(tmp_path / "in", **THEIRS[shape])
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "in", dtype=torch.float32)
    model, tensors = import_folder(tmp_path / "in")
    text = tokens(2, 100)
    ours = load(model, {name: value.float() for name, value in tensors.items()})
    with torch.no_grad():
        torch.testing.assert_close(ours(text), other.eval()(text).logits, rtol=0, atol=1e-4)

    export_folder(tmp_path / "out", model, tensors, None)
    before = load_file(tmp_path / "in" / "model.safetensors")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert value.dtype == after[name].dtype
        assert torch.equal(value.view(torch.uint8), after[name].view(torch.uint8)), name
    assert import_folder(tmp_path / "out")[0] == model


def test_public_form_of_rope_scaling_is_read(tmp_path: Path) -> None:
    """Public repositories say rope_theta and rope_scaling on top; transformers 5 nests them."""
    theirs(tmp_path, rope_parameters=LLAMA3)
    nested = import_folder(tmp_path)[0]
    path = tmp_path / "config.json"
    public = json.loads(path.read_text())
    rope = public.pop("rope_parameters")
    public |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    path.write_text(json.dumps(public))
    assert import_folder(tmp_path)[0] == nested
    assert nested.rope_scaling is not None
    assert nested.rope_scaling.model_dump().items() >= SCALING.items()


def test_large_models_are_split_over_files(tmp_path: Path) -> None:
    model = config(head_dim=8)
    ours = lively(model)
    export_folder(tmp_path / "out", model, ours.state_dict(), None, shard_bytes=20_000)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert max((tmp_path / "out" / file).stat().st_size for file in files) < 24_000
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    text = tokens(1, 20)
    with torch.no_grad():
        torch.testing.assert_close(ours(text), loaded(text).logits, rtol=0, atol=1e-4)
    again, tensors = import_folder(tmp_path / "out")
    assert again == model
    assert all(torch.equal(tensors[name], p) for name, p in ours.state_dict().items())


def test_tensors_are_asked_for_once_and_boxes_read_a_part(tmp_path: Path) -> None:
    model = config()
    whole, asked = lively(model).state_dict(), []

    class Lazy(Mapping[str, torch.Tensor]):
        def __getitem__(self, name: str) -> torch.Tensor:
            asked.append(name)
            return whole[name]

        def __iter__(self) -> Iterator[str]:
            return iter(whole)

        def __len__(self) -> int:
            return len(whole)

    export_folder(tmp_path / "out", model, Lazy(), None, dtype=torch.bfloat16)
    assert sorted(asked) == sorted(whole)
    tensors = import_folder(tmp_path / "out")[1]
    assert set(tensors) == set(whole)
    part = tensors.box("layers.1.ffn.up.weight", (10, 3), (20, 5))
    expected = whole["layers.1.ffn.up.weight"].bfloat16()[10:30, 3:8]
    assert torch.equal(part, expected)
    stored = json.loads((tmp_path / "out" / "config.json").read_text())
    assert stored["dtype"] == stored["torch_dtype"] == "bfloat16"


def test_tokenizer_is_loaded_and_says_the_same(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(tmp_path / "tokenizer.json")
    model = config(vocab_size=300)
    export_folder(tmp_path / "out", model, lively(model).state_dict(), tmp_path / "tokenizer.json")
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "def add(a, b):\n    return a + b  # größer ☃"
    assert loaded.encode(text, add_special_tokens=False) == tokenizer.encode(text).ids
    assert loaded.decode(loaded.encode(text)) == text
    assert loaded.eos_token == "<|endoftext|>"
    built = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert built.generation_config.eos_token_id == tokenizer.token_to_id("<|endoftext|>")
    # Exported on from that folder, its settings go along unchanged.
    again, tensors = import_folder(tmp_path / "out")
    export_folder(tmp_path / "again", again, tensors, tmp_path / "out")
    for name in (
        *("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"),
        *("model.safetensors",),
    ):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()


def _edit(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "self_attn.q_proj.bias is missing"),
        ({"hidden_act": "relu", "mup_scale": 3}, "mup_scale is not understood.*hidden_act 'relu'"),
        ({"num_key_value_heads": 3}, "kv_heads 3 does not divide heads 4"),
        ({"intermediate_size": 57}, r"has shape \[56, 32\] but config.json says \[57, 32\]"),
        ({"num_hidden_layers": 3}, "model.layers.2.input_layernorm.weight is missing"),
        ({"num_hidden_layers": 1}, "belongs to no part of the decoder"),
    ],
)
def test_what_the_decoder_cannot_be_is_refused(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    theirs(tmp_path)
    _edit(tmp_path, **changes)
    with pytest.raises(ModelFolderError, match=message):
        import_folder(tmp_path)


def test_pickles_are_never_read(tmp_path: Path) -> None:
    built = theirs(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(built.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelFolderError, match="a pickle, which could run code"):
        import_folder(tmp_path)


def test_broken_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match=r"no config\.json"):
        import_folder(tmp_path)
    theirs(tmp_path)
    weights = tmp_path / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    with pytest.raises(ModelFolderError, match="not a complete safetensors file"):
        import_folder(tmp_path)
    weights.unlink()
    with pytest.raises(ModelFolderError, match=r"no model\.safetensors"):
        import_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelFolderError, match="not readable JSON"):
        import_folder(tmp_path)


def _write_index(folder: Path, weight_map: object) -> None:
    text = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)


def test_an_index_that_does_not_fit_its_files_is_named(tmp_path: Path) -> None:
    model = config(head_dim=8)
    export_folder(tmp_path, model, lively(model).state_dict(), None, shard_bytes=20_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    first, last = min(index.values()), max(index.values())
    moved = index | {"model.norm.weight": first}
    cases: list[tuple[object, str]] = [
        (moved, f"looks for model.norm.weight in {first}, which has no such tensor"),
        ({k: v for k, v in index.items() if k != "model.norm.weight"}, "does not name there"),
        (["model.norm.weight"], "no weight_map from tensors to files"),
        ({"model.norm.weight": 3}, "no weight_map from tensors to files"),
        (index | {"more": "lost.safetensors"}, r"names lost\.safetensors, which is not in"),
        ({"lm_head.weight": "../../etc/passwd"}, "which is not in the folder"),
    ]
    for weight_map, message in cases:
        _write_index(tmp_path, weight_map)
        with pytest.raises(ModelFolderError, match=message):
            import_folder(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[" * 100_000)
    with pytest.raises(ModelFolderError, match="not readable JSON"):
        import_folder(tmp_path)
    _write_index(tmp_path, index)
    (tmp_path / last).write_bytes((tmp_path / last).read_bytes()[:-10])
    with pytest.raises(ModelFolderError, match=f"{last}: this is not a complete safetensors file"):
        import_folder(tmp_path)
    (tmp_path / last).unlink()
    with pytest.raises(ModelFolderError, match=f"names {last}, which is not in the folder"):
        import_folder(tmp_path)


def test_numbers_of_another_kind_are_refused(tmp_path: Path) -> None:
    model = config(head_dim=8)
    export_folder(tmp_path / "out", model, lively(model).state_dict(), None)
    path = tmp_path / "out" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int32)
    save_file(tensors, path)
    with pytest.raises(ModelFolderError, match=r"model\.norm\.weight is of dtype I32"):
        import_folder(tmp_path / "out")


def test_settings_of_the_folder_come_back(tmp_path: Path) -> None:
    """Chat template, special tokens, sampling, several end tokens: unchanged, byte for byte."""
    train_tokenizer(tmp_path / "tokenizer.json")
    model, kept = config(vocab_size=300), tmp_path / "kept"
    (tmp_path / "in").mkdir()
    files = {
        "config.json": json.dumps({"eos_token_id": [0, 7], "pad_token_id": 3}),
        "generation_config.json": json.dumps({"eos_token_id": [0, 7], "top_k": 5}),
        "tokenizer_config.json": json.dumps({"eos_token": "<|endoftext|>", "padding": "left"}),
        "special_tokens_map.json": "{}",
        "chat_template.jinja": "{{ messages }}",
    }
    for name, text in files.items():
        (tmp_path / "in" / name).write_text(text)
    keep_settings(tmp_path / "in", kept, tokenizer=True)
    export_folder(
        tmp_path / "out",
        model,
        lively(model).state_dict(),
        tmp_path / "tokenizer.json",
        end_token="<|endoftext|>",
        imported=kept,
    )
    for name in files:
        if name != "config.json":
            assert (tmp_path / "out" / name).read_text() == files[name]
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (written["eos_token_id"], written["pad_token_id"]) == ([0, 7], 3)


def test_one_list_of_end_tokens_for_gate_export_and_generate(tmp_path: Path) -> None:
    """The run's own end token, and those that the settings of its weights name."""
    tokenizer = train_tokenizer(tmp_path / "tokenizer.json")
    kept, out, end = tmp_path / "kept", tmp_path / "out", tokenizer.token_to_id("<|endoftext|>")
    kept.mkdir()
    (kept / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    settings = {"eos_token_id": [7, 9], "top_k": 5, "temperature": 0.3}
    (kept / "generation_config.json").write_text(json.dumps(settings))
    export_folder(
        out,
        config(vocab_size=300),
        lively(config(vocab_size=300)).state_dict(),
        tmp_path / "tokenizer.json",
        end_token="<|endoftext|>",
        imported=kept,
    )
    wanted = {7, 9, end}
    for name in ("config.json", "generation_config.json"):
        assert eos_of(json.loads((out / name).read_text())) == wanted
    assert set(stop_tokens(tokenizer, out / "tokenizer.json").values()) == wanted == end_ids(out)
    drawn = unknown_entries(GENERATION_KEYS)
    (out / "generation_config.json").write_text(json.dumps(settings | drawn))
    line = describe_unread_settings(out)
    assert all(name in line for name in (*drawn, "top_k"))
    assert "temperature (" not in line


def test_tied_heads_that_differ_are_refused(tmp_path: Path) -> None:
    theirs(tmp_path, tie_word_embeddings=True)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path, metadata={"format": "pt"})
    assert import_folder(tmp_path)[0].tied_embeddings
    tensors["lm_head.weight"][0, 0] += 1
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ModelFolderError, match="their numbers differ"):
        import_folder(tmp_path)


def test_export_refuses_before_it_writes(tmp_path: Path) -> None:
    odd = config(qk_norm=True, norms="both")  # no architecture of theirs
    with pytest.raises(ModelFolderError, match=r"norms both is in no architecture.*use norms"):
        export_folder(tmp_path / "out", odd, lively(odd).state_dict(), None)
    assert not (tmp_path / "out").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "diary.txt").write_text("mine")
    plain = config()
    with pytest.raises(ModelFolderError, match="not an empty folder"):
        export_folder(tmp_path / "full", plain, lively(plain).state_dict(), None)
    (tmp_path / "tokenizer.json").write_text("[]")
    with pytest.raises(ModelFolderError, match=r"not a tokenizer\.json"):
        export_folder(
            tmp_path / "out", plain, lively(plain).state_dict(), tmp_path / "tokenizer.json"
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "tokenizer.json"]


FULL = """
import os, subprocess, sys
from pathlib import Path
from holdfast.errors import OutOfSpaceError, UserError
from holdfast.model.huggingface import export_folder, import_folder
from tests.support.models import config, lively
disk, model = Path(sys.argv[1]), config(vocab_size=4000)
def attempt():
    try:
        export_folder(disk / "out", model, lively(model).state_dict(), None)
    except UserError as error:
        return type(error).__name__ + ": " + str(error)
    return "written"
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "none", str(disk)], check=True)
print(attempt(), os.listdir(disk))
subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
print(attempt(), os.listdir(disk))
subprocess.run(["mount", "-o", "remount,rw,size=8m", str(disk)], check=True)
print(attempt(), os.listdir(disk), len(import_folder(disk / "out")[1]))
mounted = disk / "mounted"
mounted.mkdir()
subprocess.run(["mount", "-t", "tmpfs", "none", str(mounted)], check=True)
subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
export_folder(mounted, model, lively(model).state_dict(), None)
print(sorted(os.listdir(mounted)), len(import_folder(mounted)[1]))
"""


def _namespaces_work() -> bool:
    command = ["unshare", "-Urm", "mount", "-t", "tmpfs", "none", "/mnt"]
    return bool(shutil.which("unshare")) and subprocess.run(command, check=False).returncode == 0


@pytest.mark.skipif(not _namespaces_work(), reason="user and mount namespaces are not allowed here")
def test_full_and_read_only_disks(tmp_path: Path) -> None:
    """A real tmpfs in a namespace of its own: one sentence, nothing left, works with room."""
    found = subprocess.run(
        ["unshare", "-Urm", sys.executable, "-c", FULL, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[3],
    )
    full, locked, room, mounted = found.stdout.splitlines()
    assert full.startswith("OutOfSpaceError: ")
    assert full.endswith("the disk is full; make room, or name another place []")
    assert locked.startswith("ModelFolderError: ")
    assert "Read-only file system" in locked
    assert locked.endswith("[]")
    assert room == "written ['out'] 21"
    files = ["config.json", "generation_config.json", "model.safetensors"]
    assert mounted == f"{files} 21", "into an empty mount point whose parent is read-only"
