"""Weight files of other programs: forms that are read, and what is said of those that are not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from holdfast.config.huggingface.weight_files import (
    ADAPTER,
    FILES,
    INDEX,
    INDEX_KEYS,
    SINGLE,
    describe_unread,
    read_weights,
)
from holdfast.config.sections.lora import LoraConfig
from holdfast.config.sections.model import ModelConfig
from holdfast.core.sharding.adapters import lora_parameters
from holdfast.data.read.weight_files import refuse_not_finite
from holdfast.errors import ModelFolderError
from holdfast.model.huggingface import import_folder
from holdfast.model.peft_folder import read_adapter, write_adapter
from tests.support.adapters import MODEL, write_base
from tests.support.borders import unknown_entries

SHAPE = ModelConfig.model_validate(MODEL)
LORA = LoraConfig(rank=2, targets=("q_proj", "down_proj"))


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    values = {row.name: torch.rand(row.shape) for row in lora_parameters(SHAPE, LORA)}
    write_adapter(tmp_path / "sky", SHAPE, LORA, values, {})
    return tmp_path / "sky"


def _rename(folder: Path, rename: Callable[[str], str]) -> dict[str, Tensor]:
    there = load_file(folder / ADAPTER)
    save_file({rename(name): value for name, value in there.items()}, folder / ADAPTER)
    return there


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: name.replace(".weight", ".default.weight"),
        lambda name: name.replace("base_model.model.", "base_model.model._orig_mod."),
        lambda name: name.replace("mlp.", "_orig_mod.mlp.").replace(".weight", ".sky_2.weight"),
        lambda name: "module." + name,
        lambda name: "_orig_mod.module." + name,
        lambda name: name.removeprefix("base_model.model."),
    ],
)
def test_other_names_of_one_adapter_are_read(adapter: Path, rename: Callable[[str], str]) -> None:
    before = read_adapter(adapter, SHAPE, LORA)
    _rename(adapter, rename)
    after = read_adapter(adapter, SHAPE, LORA)
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_the_difference_between_names_is_said(adapter: Path) -> None:
    there = _rename(adapter, lambda name: name.replace("q_proj", "qq_proj"))
    with pytest.raises(ModelFolderError, match=r"q_proj\S+ is missing, and \S+qq_proj\S+ is there"):
        read_adapter(adapter, SHAPE, LORA)
    two = {
        name.replace(".weight", f".{one}.weight"): v for one in "ab" for name, v in there.items()
    }
    save_file({name: value.clone() for name, value in two.items()}, adapter / ADAPTER)
    with pytest.raises(ModelFolderError, match="one tensor by two names"):
        read_adapter(adapter, SHAPE, LORA)
    (adapter / ADAPTER).rename(adapter / "adapter_model.bin")
    with pytest.raises(ModelFolderError, match=r"pickle.*adapter_model\.bin.*safetensors"):
        read_adapter(adapter, SHAPE, LORA)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_are_named(
    tmp_path: Path, dtype: torch.dtype, value: float
) -> None:
    tensors = {"a": torch.full((3, 5), 6e4, dtype=dtype), "b": torch.zeros(0, dtype=dtype)}
    save_file(tensors, tmp_path / SINGLE)
    refuse_not_finite(read_weights(tmp_path).values())
    tensors["a"][2, 4] = value
    save_file(tensors, tmp_path / SINGLE)
    with pytest.raises(ModelFolderError, match=f"{SINGLE}: tensor a has NaN or infinite"):
        refuse_not_finite(read_weights(tmp_path).values())


@pytest.fixture
def base(tmp_path: Path) -> Path:
    write_base(tmp_path / "base", SHAPE)
    return tmp_path / "base"


def test_files_of_two_models_are_refused(base: Path) -> None:
    stale = base / "model-00002-of-00002.safetensors"
    shutil.copyfile(base / SINGLE, stale)
    with pytest.raises(ModelFolderError, match=f"{stale.name} is here too, and {SINGLE} is taken"):
        import_folder(base)
    index = {"weight_map": dict.fromkeys(load_file(stale), stale.name)}
    (base / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelFolderError, match=f"{SINGLE} is here too, and {stale.name} is taken"):
        import_folder(base)
    (base / SINGLE).unlink()
    import_folder(base)
    for name, value in unknown_entries(INDEX_KEYS).items():
        (base / INDEX).write_text(json.dumps(index | {name: value}))
        with pytest.raises(ModelFolderError, match=name):
            import_folder(base)
    (base / INDEX).unlink()
    with pytest.raises(ModelFolderError, match=f"no {SINGLE} here, only {stale.name}"):
        import_folder(base)


def test_an_adapter_next_to_weights_is_refused(base: Path) -> None:
    (base / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelFolderError, match=r"has an adapter too.*lora\.from"):
        import_folder(base)


def test_other_weight_files_and_another_size_are_a_line(base: Path) -> None:
    assert describe_unread(base, read_weights(base).values()) == []
    for name in unknown_entries(FILES):
        (base / f"{name}.bin").write_text("")
    (base / "consolidated.safetensors").write_text("")
    (line,) = describe_unread(base, read_weights(base).values())
    assert all(name in line for name in (*unknown_entries(FILES), "consolidated.safetensors"))
    (base / SINGLE).rename(base / "model-00001-of-00001.safetensors")
    names = load_file(base / "model-00001-of-00001.safetensors")
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, "")}
    index["weight_map"] = dict.fromkeys(names, "model-00001-of-00001.safetensors")
    (base / INDEX).write_text(json.dumps(index))
    lines = describe_unread(base, read_weights(base).values())
    assert "says 1 bytes, and its tensors have" in lines[1]


def test_a_base_of_a_compiled_module_is_named(base: Path) -> None:
    there = load_file(base / SINGLE)
    save_file({f"_orig_mod.{name}": value for name, value in there.items()}, base / SINGLE)
    with pytest.raises(ModelFolderError, match=r"is missing, and _orig_mod\.model.* is there"):
        import_folder(base)
