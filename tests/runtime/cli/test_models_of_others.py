"""Commands around a folder in Hugging Face form: what they refuse, and what they say next."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, processors

from holdfast.checkpoint.restore.catalog import origin_of_weights
from holdfast.data.stream.dataset import Dataset
from holdfast.wire.store.run_store import FolderStore
from tests.runtime.cli.conftest import Trained
from tests.support.commands import within, write_run_file


@pytest.fixture(scope="module")
def exported(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder. Do not change it: copy it."""
    folder = tmp_path_factory.mktemp("exported") / "hf"
    assert within("export", trained.folder, "--to", folder).code == 0
    return folder


def test_a_folder_without_a_tokenizer_asks_for_a_word(
    trained: Trained, exported: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(exported, tmp_path / "hf")
    (folder / "tokenizer.json").unlink()
    run = tmp_path / "a run"
    command = ["checkpoint", "import", trained.run_file, "--from", folder, f"folder={run}"]
    within(*command).refuses("there is no tokenizer.json", "--tokenizer-unchecked")
    assert not run.exists()
    done = within(*command, "--tokenizer-unchecked")
    assert done.code == 0, done.err
    following = done.err.split("train it: ")[1].strip()
    assert shlex.split(following)[:2] == ["holdfast", "train"]
    assert shlex.split(following)[2:] == [str(trained.run_file), f"folder={run}"]
    assert origin_of_weights(FolderStore(run)) == "hf"
    assert sorted(p.name for p in (run / "imported").iterdir()) == [
        "config.json",
        "generation_config.json",
    ]


def test_a_broken_folder_leaves_nothing_behind(
    trained: Trained, exported: Path, tmp_path: Path
) -> None:
    """It is looked into before the dataset is prepared."""
    folder = shutil.copytree(exported, tmp_path / "hf")
    index = {"weight_map": {"model.norm.weight": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    before = sorted(tmp_path.rglob("*"))
    within(
        "checkpoint",
        "import",
        trained.run_file,
        "--from",
        folder,
        f"folder={tmp_path}/run",
        f"data.folder={tmp_path}/data",
    ).refuses("model.safetensors.index.json", "which the index does not name")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_tokenizer_with_one_id_more_than_the_model(
    trained: Trained, exported: Path, tmp_path: Path
) -> None:
    """No text becomes a special token that was only added: the model needs no row for it."""
    tokenizer = Tokenizer.from_file(str(exported / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    tokenizer.add_special_tokens(["<pad>"])
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    folder = shutil.copytree(exported, tmp_path / "hf")
    shutil.copyfile(path, folder / "tokenizer.json")
    given = [f"data.tokenizer.path={path}", f"data.folder={tmp_path}/data"]
    command = ["checkpoint", "import", trained.run_file, "--from", folder, *given]
    for name, vocabulary in (("a", 0), ("b", size)):
        done = within(*command, f"folder={tmp_path}/{name}", f"model.vocab_size={vocabulary}")
        assert done.code == 0, done.err
        assert f"{size + 1} ids and the model {size}" in done.err
    refused = within(*command, f"folder={tmp_path}/c", f"model.vocab_size={size + 1}")
    refused.refuses_last(f"model.vocab_size is {size + 1} here and {size} there", "model.from=")


def test_shape_of_the_folder_and_all_differences(
    trained: Trained, exported: Path, tmp_path: Path
) -> None:
    command = ["checkpoint", "import", trained.run_file, "--from", exported]
    other = ["model.layers=2", "model.ffn_dim=32", f"folder={tmp_path}/run"]
    within(*command, *other).refuses(
        "model.layers is 2 here and 1 there",
        "model.ffn_dim is 32 here and 16 there",
        "model.layers=1 model.ffn_dim=16",
        f"model.from={exported}",
    )
    assert not (tmp_path / "run").exists()
    within(*command, *other, f"model.from={exported}").refuses("remove them")


def test_documents_begin_as_prompts_do(tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path)
    assert within("data", "prepare", run_file).code == 0
    tokenizer = Tokenizer.from_file(str(tmp_path / "dataset" / "tokenizer.json"))
    tokenizer.add_special_tokens(["<s>", "<stop>"])
    begin, end = tokenizer.token_to_id("<s>"), tokenizer.token_to_id("<stop>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", begin)]
    )
    folder = tmp_path / "own"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<stop>"}))
    given = [f"data.tokenizer.path={folder}/tokenizer.json", f"data.folder={tmp_path}/begun"]
    made = within("data", "prepare", run_file, *given)
    assert made.code == 0, made.err
    assert f"each document begins with token {begin}" in made.out + made.err
    dataset = Dataset.open(tmp_path / "begun")
    assert (dataset.begin, dataset.end) == (begin, end)
    for split in dataset.splits:
        (stream,) = dataset.streams(split)
        text = stream.read(0, stream.tokens)
        assert int((text == begin).sum()) == int((text == end).sum()) == stream.documents
        assert text[0] == begin
        assert (text[1:][text[:-1] == end] == begin).all()
    assert within("data", "verify", run_file, *given).code == 0
