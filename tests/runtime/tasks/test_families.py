"""Models of sound and images on tar shards: samples by number, refusals, and transformers' loss."""

from __future__ import annotations

import importlib.util
import io
import tarfile
import wave
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from holdfast.config.loading.load import resolve_config
from holdfast.config.loading.model_from import SPEECH_TASK, VISION_TASK
from holdfast.data.read.tar_shards import TarShards
from holdfast.errors import TaskError
from holdfast.tasks.transformers.sample_batch import padded_batch, read_texts, read_wav
from tests.support.marks import in_campaign

PARTS = ((".wav",), (".txt",))


def write_tar(path: Path, files: Mapping[str, bytes]) -> Path:
    with tarfile.open(path, "w") as out:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            out.addfile(info, io.BytesIO(content))
    return path


def wav(values: list[int], width: int = 2, rate: int = 8, channels: int = 1) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(channels)
        out.setsampwidth(width)
        out.setframerate(rate)
        offset = 128 if width == 1 else 0
        size = {"length": width, "byteorder": "little"}
        out.writeframes(b"".join((v + offset).to_bytes(**size, signed=width > 1) for v in values))
    return file.getvalue()


def test_samples_have_numbers_in_the_order_of_shards(tmp_path: Path) -> None:
    write_tar(tmp_path / "b.tar", {"c.wav": b"3", "c.txt": b"three"})
    files = {
        "x/a.txt": b"one",
        "x/b.wav": b"2",
        "x/a.wav": b"1",
        "x/b.txt": b"two",
        "x/b.cls": b"7",
    }
    write_tar(tmp_path / "a.tar", files)
    shards = TarShards(tmp_path, PARTS)
    assert [shards.read(i)[".txt"] for i in range(len(shards))] == [b"one", b"two", b"three"]
    assert shards.read(2) == {".wav": b"3", ".txt": b"three"}
    (note,) = shards.notes()
    assert ".cls (1 times, first in" in note
    assert note.endswith("x/b)")
    before = shards.version
    write_tar(tmp_path / "b.tar", {"c.wav": b"3", "c.txt": b"four."})
    assert TarShards(tmp_path, PARTS).version == before  # it covers names and sizes
    write_tar(tmp_path / "b.tar", {"d.wav": b"3", "d.txt": b"four."})
    assert TarShards(tmp_path, PARTS).version != before


@pytest.mark.parametrize(
    ("name", "files", "says"),
    [
        ("a.tar", {"s.wav": b""}, r"a\.tar sample s has no \.txt: it has \.wav"),
        ("a.tar", {"s.wav": b"", "s.txt": b"", "s.TXT": b""}, r"has s\.TXT twice"),
        ("a.tar.gz", {}, r"a\.tar\.gz is compressed"),
        ("a.zip", {}, r"has no file \*\.tar"),
    ],
)
def test_wrong_shards_are_refused(
    name: str, files: dict[str, bytes], says: str, tmp_path: Path
) -> None:
    write_tar(tmp_path / name, files)
    with pytest.raises(TaskError, match=rf"task\.args\.shards: .*{says}.*; .+"):
        TarShards(tmp_path, PARTS)


def test_a_cut_shard_is_refused(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", {"s.txt": b"text", "s.wav": b"1" * 5000})
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(TaskError, match=r"a\.tar (ends inside s\.wav|cannot be read)"):
        TarShards(tmp_path, PARTS)


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_wav_of_each_width_is_read(width: int) -> None:
    half = 2 ** (8 * width - 2)
    content = wav([half, -half, 0, half], width, channels=2)
    assert read_wav(content, 8, "s").tolist() == [0.0, 0.25]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"fLaC", "is no PCM wav"),
        (wav([1], rate=16), "has 16 samples a second, and the model's feature extractor takes 8"),
    ],
)
def test_other_recordings_are_refused(content: bytes, says: str) -> None:
    with pytest.raises(TaskError, match=f"a.tar: s {says}"):
        read_wav(content, 8, "a.tar: s")


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({".txt": b"\xff"}, "UnicodeDecodeError"),
        ({".json": b'{"prompt": "a"}'}, "'completion'"),
        ({".json": b'{"prompt": "a", "completion": 3}'}, "is no text"),
        ({".json": b'{"prompt": "a", "completion": "b", "answer": "c"}'}, "the key 'answer'"),
        ({".json": b"[]"}, "TypeError"),
    ],
)
def test_other_texts_are_refused(parts: dict[str, bytes], says: str) -> None:
    with pytest.raises(TaskError, match=f"a.tar: s has .*{says}"):
        read_texts(parts, "a.tar: s")


def test_a_batch_has_the_longest_shape() -> None:
    items = [{"x": torch.ones(1, 2), "labels": torch.tensor([4])}]
    items.append({"x": torch.ones(2, 1), "labels": torch.tensor([5, 6])})
    batch = padded_batch(items, {"labels": -100})
    assert batch["x"].tolist() == [[[1, 1], [0, 0]], [[1, 0], [1, 0]]]
    assert batch["labels"].tolist() == [[4, -100], [5, 6]]


@pytest.fixture(scope="module")
def inputs() -> ModuleType:
    path = Path(__file__).parents[3] / "examples" / "speech_and_images" / "inputs.py"
    spec = importlib.util.spec_from_file_location("speech_and_images_inputs", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("kind", ["speech", in_campaign("images")])
def test_the_loss_is_that_of_transformers(kind: str, inputs: ModuleType, tmp_path: Path) -> None:
    """On samples of unlike lengths. The run file's folders start at its own."""
    if kind == "images":
        pytest.importorskip("PIL", reason="images need pillow")
    inputs.write_all(kind, tmp_path)
    given = "model: {from: model, code: transformers}\ntask: {args: {shards: train}}\n"
    config = resolve_config(given, "run.yaml", base=str(tmp_path)).config
    assert config.task.name == (SPEECH_TASK if kind == "speech" else VISION_TASK)
    from holdfast.tasks.task.loading import load_task

    task = load_task(config.task)
    model = task.with_values(task.weights()).eval()  # type: ignore[attr-defined]
    samples = task.data()
    assert samples is not None
    items = [dict(samples[index]) for index in range(3)]
    short = {"labels", "decoder_input_ids", "input_ids", "attention_mask"} & items[0].keys()
    items[1] |= {name: items[1][name][:-1] for name in short}  # other lengths
    batch = task.collate(items)
    assert not torch.equal(batch["labels"], torch.stack([items[0]["labels"]] * 3))
    given_to_theirs = {k: v for k, v in batch.items() if k != "decoder_input_ids"}
    with torch.no_grad():
        ours, theirs = float(task.loss(model, batch)), float(model(**given_to_theirs).loss)
    assert ours / task.weight(batch) == pytest.approx(theirs, rel=1e-5)
    assert np.isfinite(theirs)
