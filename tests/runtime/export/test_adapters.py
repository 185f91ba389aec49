"""A run of adapters by the real commands: its checkpoint, its exports, and what is refused.

The losses are those of PEFT and TRL on the same batches, which a golden file holds.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from holdfast.checkpoint.restore.catalog import list_commits
from holdfast.checkpoint.restore.reader import Checkpoint
from holdfast.config.loading.load import load_config
from holdfast.config.loading.lora_from import read_adapter_config
from holdfast.config.sections.lora import LoraConfig
from holdfast.config.sections.model import ModelConfig
from holdfast.core.sharding.adapters import adapted_layers, lora_parameters
from holdfast.core.sharding.parameters import decoder_parameters
from holdfast.events import StepDone
from holdfast.launch.run.runs import read_resolved
from holdfast.model.huggingface import export_folder
from holdfast.model.init import initial_tensor
from holdfast.model.lora import merged
from holdfast.model.peft_folder import read_adapter, write_adapter
from holdfast.wire.journal import read_journal
from holdfast.wire.store.run_store import FolderStore
from tests.support.adapters import GOLDEN, write_base, write_run
from tests.support.commands import here, within

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run file of a finished run, with its exports next to it. Tests leave them as they are."""
    root = tmp_path_factory.mktemp("adapters")
    path = write_run(root)
    for command in (
        ("train", path),
        ("export", path, "--to", root / "adapter", "--format", "peft"),
        ("export", path, "--to", root / "merged"),
    ):
        done = within(*command)
        assert done.code == 0, done.err
    return path


def _losses(folder: Path) -> list[float]:
    events = [record.event for record in read_journal(FolderStore(folder))]
    found = {event.step: event.loss for event in events if isinstance(event, StepDone)}
    return [found[step] for step in sorted(found)]


def test_losses_are_those_of_peft_and_trl(trained: Path) -> None:
    golden = json.loads(GOLDEN.read_text())
    ours = _losses(trained.parent / "run")
    assert len(golden) == 2
    for losses in golden.values():
        assert ours == pytest.approx(losses, abs=1e-5)
    assert ours[-1] < ours[0]


def test_a_checkpoint_holds_the_adapters_alone(trained: Path) -> None:
    config = load_config(trained).config
    parameters = sum(row.size for row in lora_parameters(config.model, config.lora))
    store = FolderStore(trained.parent / "run")
    checkpoint = Checkpoint.open(store, list_commits(store)[0])
    assert sum(spec.nbytes for spec in checkpoint.tensors) == 3 * 4 * parameters
    kept = sum(p.stat().st_size for p in (trained.parent / "run" / "data").rglob("*.safetensors"))
    base = (trained.parent / "base" / "model.safetensors").stat().st_size
    assert kept < base / 2
    resolved = read_resolved(trained.parent / "run") or {}
    assert len(resolved["config"]["lora"]["base_checksum"]) == 32


def test_the_merged_export_is_the_base_and_the_adapters(trained: Path) -> None:
    from transformers import AutoModelForCausalLM

    root, config = trained.parent, load_config(trained).config
    base, merged = (
        AutoModelForCausalLM.from_pretrained(root / name, dtype=torch.float32)
        for name in ("base", "merged")
    )
    tokens = torch.arange(24).reshape(2, 12) * 7 % 400
    with torch.no_grad():
        before, found = base(tokens).logits, merged(tokens).logits
        for name, value in read_adapter(root / "adapter", config.model, config.lora).items():
            assert value.any(), name
        _hook_adapters(base, root / "adapter", config.lora.scale)
        expected = base(tokens).logits
    assert (found - before).abs().max() > 1e-2
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def _hook_adapters(base: torch.nn.Module, adapter: Path, scale: float) -> None:
    """Add B A x to the outputs of the base's layers, by the names in an adapter's folder."""
    from safetensors.torch import load_file

    held = load_file(adapter / "adapter_model.safetensors")
    for name in held:
        layer, _, rest = name.removeprefix("base_model.model.").partition(".lora_A")
        if rest:
            down, up = held[name], held[name.replace("lora_A", "lora_B")]

            def hook(
                _: object,
                given: tuple[torch.Tensor],
                out: torch.Tensor,
                down: torch.Tensor = down,
                up: torch.Tensor = up,
            ) -> torch.Tensor:
                return out + given[0] @ down.T @ up.T * scale

            base.get_submodule(layer).register_forward_hook(hook)


def test_an_export_names_the_adapter_s_version(trained: Path) -> None:
    root = trained.parent
    version = json.loads((root / "adapter" / "holdfast.json").read_text())
    resolved = read_resolved(root / "run") or {}
    assert version == {
        "name": "default",
        "run": "tuned",
        "run_id": resolved["run_id"],
        "step": 20,
        "base_checksum": resolved["config"]["lora"]["base_checksum"],
    }
    config = json.loads((root / "adapter" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["down_proj", "q_proj", "v_proj"]
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (4, 8, "LORA")


@pytest.mark.slow
def test_a_run_continues_an_exported_adapter(trained: Path, capsys: Capture) -> None:
    """Its first loss is that of the exported adapters, and the export of its start is the same."""
    root = trained.parent
    text = trained.read_text().replace(
        "lora: {rank: 4, alpha: 8, targets: [q_proj, v_proj, down_proj]}", "lora: {from: adapter}"
    )
    path = root / "next.yaml"
    path.write_text(text.replace("/run\n", "/next\n"))
    done = here(capsys, "train", path, "train.steps=1", "train.optimizer.learning_rate=1e-12")
    assert done.code == 0, done.err
    assert "which begin as those of" in done.err
    exported = here(capsys, "export", root / "next", "--to", root / "again", "--format", "peft")
    assert exported.code == 0, exported.err
    config = load_config(path).config
    first, again = (
        read_adapter(root / name, config.model, config.lora) for name in ("adapter", "again")
    )
    assert first.keys() == again.keys()
    for name, value in first.items():
        torch.testing.assert_close(again[name], value, rtol=0, atol=1e-9)


def test_other_commands_work_with_the_run_or_refuse(trained: Path, capsys: Capture) -> None:
    root = trained.parent
    prompt = "Say blue.", "--chat", "--tokens", "3", "--temperature", "0"
    said = here(capsys, "generate", root / "run", *prompt).succeeds()
    assert here(capsys, "generate", root / "merged", *prompt).succeeds().out == said.out
    here(capsys, "generate", root / "merged", "x", "--step", "3").refuses("--step has no effect")
    for command in (("checkpoint", "verify"), ("data", "audit"), ("checkpoint", "show")):
        assert here(capsys, *command, root / "run").code == 0
    named = here(
        capsys,
        "export",
        root / "run",
        "--to",
        root / "x",
        "--format",
        "dcp",
        "--names",
        "torchtitan",
    )
    named.refuses("--names torchtitan", "trains adapters alone", "--format hf")
    imported = here(
        capsys, "checkpoint", "import", trained, "--from", root / "base", f"folder={root / 'y'}"
    )
    imported.refuses("checkpoint import", "name the base in model.from")
    layout = here(capsys, "layout", "show", trained)
    assert layout.code == 0, layout.err


def test_a_changed_or_missing_base_is_refused(
    trained: Path, capsys: Capture, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    shutil.copytree(trained.parent, root)
    path = root / "run.yaml"
    path.write_text(path.read_text().replace(str(trained.parent), str(root)))
    longer = ("train", path, "train.steps=21")
    shutil.rmtree(root / "base")
    write_base(root / "base", seed=4)
    here(capsys, *longer).refuses_last(
        "not those that the run was begun with", "put the files back", "lora.base"
    )
    shutil.rmtree(root / "base")
    here(capsys, *longer).refuses_last("there is no config.json here", "name the folder")
    shutil.copytree(trained.parent / "base", root / "moved")
    moved = here(capsys, "train", path, "train.steps=21", f"model.from={root / 'moved'}")
    assert moved.code == 0, moved.err
    run = root / "run"
    shutil.rmtree(root / "moved")
    write_base(root / "moved", seed=4)
    for command in (("export", run, "--to", root / "other"), ("generate", run, "Say blue.")):
        here(capsys, *command).refuses_last("not those that the run was begun with")
    assert not (root / "other").exists()
    there = "--base", trained.parent / "base"
    assert here(capsys, "export", run, "--to", root / "merged again", *there).code == 0
    adapters = here(capsys, "export", run, "--to", root / "other", "--format", "peft")
    assert adapters.code == 0, adapters.err


def test_targets_and_bases_that_do_not_fit_are_refused(trained: Path, capsys: Capture) -> None:
    new = f"folder={trained.parent / 'new'}"
    here(capsys, "train", trained, new, "lora.targets=[query]").refuses_last(
        "lora.targets query: no linear layer", "use all-linear, or some of q_proj"
    )
    here(capsys, "train", trained, new, "lora.base_checksum=00").refuses_last(
        "not those that the run was begun with"
    )
    tokenizer = f"data.tokenizer.path={trained.parent / 'base' / 'tokenizer.json'}"
    plain = "model={preset: tiny, vocab_size: 400}", tokenizer
    here(capsys, "train", trained, new, *plain).refuses_last(
        "no folder gives the weights of the base", "add model: {from: FOLDER}"
    )
    base = f"lora.base={trained.parent / 'base'}"
    here(capsys, "train", trained, new, *plain, base).refuses_last(
        "has another shape", "model.from"
    )
    here(capsys, "export", trained, "--to", trained.parent / "adapter").refuses(
        "not an empty folder"
    )


def test_a_run_of_the_full_model_has_no_adapters(tmp_path: Path, capsys: Capture) -> None:
    folder = tmp_path / "run"
    shutil.copytree(GOLDEN.parents[1] / "runs" / "halfway", folder)
    to = tmp_path / "adapter"
    exported = here(capsys, "export", folder, "--to", to, "--format", "peft")
    exported.refuses_last("trains the full model", "use --format hf")
    based = here(capsys, "export", folder, "--to", to, "--base", tmp_path)
    based.refuses_last("no folder of frozen weights", "leave out --base")
    assert not to.exists()


@pytest.mark.parametrize("targets", [["all-linear"], ["attention.q", "ffn.up", "o_proj"]])
def test_a_layer_of_phi_3_that_is_several_of_ours_gets_one_adapter(
    tmp_path: Path, targets: list[str]
) -> None:
    """PEFT adds alpha / r * B A to the layer, with the rank and alpha of its patterns. That is what
    a merged export adds. A layer of which one part is a target has zeros for the rest."""
    shape = {"family": "phi3", "rope_theta": 1e4, "vocab_size": 40, "kv_heads": 2, "ffn_dim": 24}
    model = ModelConfig.model_validate(
        {"preset": None, "layers": 2, "dim": 16, "heads": 4, **shape}
    )
    lora = LoraConfig(rank=2, alpha=6, targets=tuple(targets))
    base = {row.name: initial_tensor(row, 3) for row in decoder_parameters(model)}
    adapters = {row.name: torch.randn(row.shape) for row in lora_parameters(model, lora)}
    both = dict(base)
    for layer in adapted_layers(model, lora):
        down, up = adapters[f"{layer}.lora_A"], adapters[f"{layer}.lora_B"]
        both[f"{layer}.weight"] = merged(base[f"{layer}.weight"], down, up, lora.scale)
    write_adapter(tmp_path / "adapter", model, lora, adapters, {})
    for name, values in (("base", base), ("merged", both)):
        export_folder(tmp_path / name, model, values, None)
    before, after, peft = (
        load_file(next((tmp_path / name).glob("*.safetensors")))
        for name in ("base", "merged", "adapter")
    )
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert "model.layers.1.self_attn.qkv_proj.weight" in before
    for name, value in before.items():
        layer = name.removesuffix(".weight")
        if (down := peft.pop(f"base_model.model.{layer}.lora_A.weight", None)) is not None:
            up = peft.pop(f"base_model.model.{layer}.lora_B.weight")
            rank = config.get("rank_pattern", {}).get(layer, config["r"])
            assert down.shape[0] == up.shape[1] == rank
            scale = config.get("alpha_pattern", {}).get(layer, config["lora_alpha"]) / rank
            value = value + scale * up @ down
        torch.testing.assert_close(value, after[name])
    assert not peft
    if targets == ["all-linear"]:
        said = read_adapter_config(tmp_path / "adapter")
        assert (said["rank"], said["alpha"]) == (2, 6)
        again = lora.model_copy(update={"targets": tuple(said["targets"])})
        back = read_adapter(tmp_path / "adapter", model, again)
        assert back.keys() == adapters.keys()
        assert all(torch.equal(back[name], value) for name, value in adapters.items())
