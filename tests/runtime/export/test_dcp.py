"""DCP both ways, by the commands: stock `dcp.load` reads what `export` writes, and `checkpoint
import` reads it back, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from holdfast.checkpoint.interop.dcp import DcpFolder
from holdfast.checkpoint.restore.catalog import list_commits
from holdfast.checkpoint.restore.reader import Checkpoint
from holdfast.config.sections.model import ModelConfig
from holdfast.core.format.flat_names import SCHEMES
from holdfast.core.sharding.boxes import whole_box
from holdfast.core.sharding.parameters import decoder_parameters
from holdfast.launch.run.runs import open_run
from holdfast.model.decoder import Decoder
from tests.runtime.cli.conftest import Trained
from tests.support.commands import Outcome, here

Capture = pytest.CaptureFixture[str]


def ours(folder: Path) -> dict[str, torch.Tensor]:
    store = open_run(folder).store
    checkpoint = Checkpoint.open(store, list_commits(store)[0])
    found = {}
    for spec in checkpoint.tensors:
        value = torch.empty(spec.shape)
        checkpoint.read(
            whole_box(spec.name, spec.shape), value.reshape(-1).view(torch.uint8).numpy().data
        )
        found[spec.name] = value
    return found


def exported(capsys: Capture, trained: Trained, to: Path, *more: str) -> Outcome:
    return here(capsys, "export", trained.folder, "--to", to, "--format", "dcp", *more)


def imported(capsys: Capture, trained: Trained, start: Path, run: Path, *more: str) -> Outcome:
    return here(
        capsys, "checkpoint", "import", trained.run_file, "--from", start, f"folder={run}", *more
    )


def test_the_optimizers_settings_are_there(
    trained: Trained, tmp_path: Path, capsys: Capture
) -> None:
    """Under the names that a flattened optimizer of torch has; read by stock DCP."""
    exported(capsys, trained, tmp_path / "dcp")
    optimizer = torch.optim.AdamW([torch.zeros(1)])
    names = {
        f"optimizer.param_groups.{name}.{key}"
        for name in ("norm.weight", "embed.weight")
        for key in optimizer.param_groups[0]
        if key != "params"
    }
    state: dict[str, Any] = dict.fromkeys(names)
    dcp.load(state, storage_reader=FileSystemReader(tmp_path / "dcp"), no_dist=True)
    assert state["optimizer.param_groups.norm.weight.weight_decay"] == 0.0
    assert state["optimizer.param_groups.embed.weight.weight_decay"] == 0.1
    assert state["optimizer.param_groups.embed.weight.betas"] == (0.9, 0.95)


def trainer(model: ModelConfig) -> tuple[Decoder, torch.optim.AdamW]:
    """Anybody's training program around the same decoder: torch's own AdamW, in two groups."""
    torch.manual_seed(3)
    decoder = Decoder(model)
    for parameter in decoder.parameters():  # a decoder is made without values
        torch.nn.init.normal_(parameter)
    decays = {p.name: p.decay for p in decoder_parameters(model)}
    groups = [
        {
            "params": [p for n, p in decoder.named_parameters() if decays[n] is decay],
            "weight_decay": 0.1 * decay,
        }
        for decay in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    for _ in range(2):
        for parameter in decoder.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return decoder, optimizer


FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def test_a_torch_optimizer_goes_on_from_an_export(
    trained: Trained, tmp_path: Path, capsys: Capture
) -> None:
    """The state dictionaries are torch's own, flattened as torchtitan saves them."""
    exported(capsys, trained, tmp_path / "dcp")
    decoder, optimizer = trainer(open_run(trained.folder).config.model)
    flat = get_optimizer_state_dict(decoder, optimizer, options=FLAT)
    state = {**decoder.state_dict(), "optimizer": flat}
    dcp.load(state, storage_reader=FileSystemReader(tmp_path / "dcp"), no_dist=True)
    decoder.load_state_dict({name: state[name] for name in decoder.state_dict()})
    set_optimizer_state_dict(decoder, optimizer, optim_state_dict=state["optimizer"], options=FLAT)
    due = ours(trained.folder)
    for name, parameter in decoder.named_parameters():
        assert torch.equal(parameter, due[f"model.{name}"])
        held = optimizer.state[parameter]
        assert torch.equal(held["exp_avg"], due[f"optimizer.exp_avg.{name}"])
        assert torch.equal(held["exp_avg_sq"], due[f"optimizer.exp_avg_sq.{name}"])
        assert held["step"] == 6
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.1, 0.0}


def test_a_torch_trainers_checkpoint_is_imported(
    trained: Trained, tmp_path: Path, capsys: Capture
) -> None:
    decoder, optimizer = trainer(open_run(trained.folder).config.model)
    flat = get_optimizer_state_dict(decoder, optimizer, options=FLAT)
    state = {**decoder.state_dict(), "optimizer": flat, "train_state": {"step": 2}}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    run = tmp_path / "run"
    done = imported(capsys, trained, tmp_path / "dcp", run)
    assert done.code == 0, done.err
    assert "weights and AdamW's moments of DCP after step 2" in done.err
    found = ours(run)
    for name, parameter in decoder.named_parameters():
        held = optimizer.state[parameter]
        assert torch.equal(found.pop(f"model.{name}"), parameter)
        assert torch.equal(found.pop(f"optimizer.exp_avg.{name}"), held["exp_avg"])
        assert torch.equal(found.pop(f"optimizer.exp_avg_sq.{name}"), held["exp_avg_sq"])
    assert not found


@pytest.mark.parametrize("names", ["holdfast", "torchtitan", "torchtitan-0.2", "huggingface"])
def test_a_state_comes_back_bit_for_bit(
    trained: Trained, tmp_path: Path, capsys: Capture, names: str
) -> None:
    folder, run = tmp_path / "dcp", tmp_path / "run"
    done = exported(capsys, trained, folder, "--names", names, "--json")
    assert json.loads(done.out)["step"] == 6
    model = open_run(trained.folder).config.model
    assert {row.theirs for row in SCHEMES[names](model)} <= set(DcpFolder.open(folder).tensors)
    found = imported(capsys, trained, folder, run, "--json")
    assert found.code == 0, found.err
    assert json.loads(found.out)["step"] == 6
    assert f"named as {names} names them" in found.err
    same = here(capsys, "checkpoint", "diff", trained.folder, run)
    assert same.code == 0, same.out
    exported(capsys, trained, folder).refuses("empty folder")


def test_a_run_goes_on_from_an_imported_step(
    trained: Trained, tmp_path: Path, capsys: Capture
) -> None:
    """Step 3 out and in again, then trained to step 6: the bits of the run that never left."""
    folder, run = tmp_path / "dcp", tmp_path / "run"
    exported(capsys, trained, folder, "--step", "3")
    assert imported(capsys, trained, folder, run).code == 0
    done = here(capsys, "train", trained.run_file, f"folder={run}")
    assert done.code == 0, done.err
    assert here(capsys, "checkpoint", "diff", trained.folder, run).code == 0


def test_weights_alone_begin_at_step_0(trained: Trained, tmp_path: Path, capsys: Capture) -> None:
    folder, run = tmp_path / "dcp", tmp_path / "run"
    exported(capsys, trained, folder)
    assert imported(capsys, trained, folder, run, "--weights-only").code == 0
    before, after = ours(trained.folder), ours(run)
    assert all(torch.equal(after[n], v) for n, v in before.items() if n.startswith("model."))
    assert not any(v.any() for n, v in after.items() if n.startswith("optimizer."))
    imported(capsys, trained, folder, run).refuses("has checkpoints already")


def test_what_cannot_be_meant_is_refused(trained: Trained, tmp_path: Path, capsys: Capture) -> None:
    to = ["--to", tmp_path / "x"]
    here(capsys, "export", trained.folder, *to, "--names", "torchtitan").refuses("--format dcp")
    half = ["--format", "dcp", "--dtype", "bfloat16"]
    here(capsys, "export", trained.folder, *to, *half).refuses("--dtype")
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(b"x")
    run = tmp_path / "run"
    found = imported(capsys, trained, tmp_path / "dcp", run)
    found.refuses("not a pickle that DCP wrote", str(tmp_path / "dcp"))
    assert not (run / "resolved.json").exists()


def test_an_export_has_several_files(trained: Trained, tmp_path: Path, capsys: Capture) -> None:
    to = ["export", trained.folder, "--to", tmp_path / "many", "--shard-size"]
    here(capsys, *to, "0").refuses("0")
    done = here(capsys, *to, "0.00001")
    assert done.code == 0, done.err
    assert len(list((tmp_path / "many").glob("model-*.safetensors"))) > 2
