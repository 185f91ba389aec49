"""Images and recordings, prepared: their numbers are compared with other people's code.

Every kind of source gives the same, and any number of processes gives the same bytes."""

from __future__ import annotations

import io
import struct
import tarfile
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from holdfast.config.sections.features import FeaturesConfig
from holdfast.data.prepare.prepare import prepare_dataset
from holdfast.data.read.features import FeatureFormat, decode_wav
from holdfast.data.stream.dataset import Dataset
from holdfast.data.stream.verify import find_problems
from holdfast.errors import DataError
from tests.support.commands import within
from tests.support.corpus import batches, data_config, make, tree

Image = pytest.importorskip("PIL.Image")
RATE = 16_000
PATCHES = {"kind": "patches", "image_size": 32, "patch_size": 8}
LOG_MEL = {"kind": "log_mel", "mels": 80, "seconds": 1.0}


def form(**keys: Any) -> FeatureFormat:
    found = FeatureFormat.of(FeaturesConfig.model_validate(keys))
    assert found is not None
    return found


def pixels(seed: int, height: int = 40, width: int = 56) -> NDArray[np.uint8]:
    coarse = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(coarse).resize((width, height)))


def png(seed: int, **size: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels(seed, **size)).save(file, "PNG")
    return file.getvalue()


def sound(seed: int, seconds: float = 0.6) -> NDArray[np.int16]:
    draw, time = np.random.default_rng(seed), np.arange(int(RATE * seconds)) / RATE
    tone = np.sin(2 * np.pi * draw.uniform(200, 3000) * time)
    return (8000 * tone + 300 * draw.standard_normal(len(time))).astype("<i2")


def wav(seed: int, rate: int = RATE, seconds: float = 0.6) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes(sound(seed, seconds).tobytes())
    return file.getvalue()


def write_files(folder: Path, media: list[bytes], texts: list[str], ending: str) -> Path:
    folder.mkdir(parents=True)
    for number, (content, text) in enumerate(zip(media, texts, strict=True)):
        (folder / f"{number:03d}.{ending}").write_bytes(content)
        (folder / f"{number:03d}.txt").write_text(text + "\n")
    return folder


def write_tar(folder: Path, media: list[bytes], texts: list[str], ending: str) -> Path:
    folder.mkdir(parents=True)
    with tarfile.open(folder / "0.tar", "w") as out:
        for number, (content, text) in enumerate(zip(media, texts, strict=True)):
            for end, data in ((ending, content), ("txt", text.encode())):
                entry = tarfile.TarInfo(f"{number:03d}.{end}")
                entry.size = len(data)
                out.addfile(entry, io.BytesIO(data))
    return folder


def write_parquet(folder: Path, media: list[bytes], texts: list[str], ending: str) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    folder.mkdir(parents=True)
    column = "audio" if ending == "wav" else "image"
    cells = [{"bytes": content, "path": f"{n}.{ending}"} for n, content in enumerate(media)]
    table = pyarrow.table({column: cells, "caption": texts})
    parquet.write_table(table, folder / "train-00000.parquet", row_group_size=4)
    return folder


Write = Callable[[Path, list[bytes], list[str], str], Path]
WRITERS: dict[str, tuple[Write, dict[str, Any]]] = {
    "files": (write_files, {"kind": "files"}),
    "webdataset": (write_tar, {"kind": "webdataset"}),
    "parquet": (write_parquet, {"kind": "parquet", "field": "caption"}),
    "huggingface": (write_parquet, {"kind": "huggingface", "field": "caption"}),
}
TEXTS = [f"picture number {number}" for number in range(12)]


def prepared(root: Path, source: dict[str, Any], features: dict[str, Any], **more: Any) -> Dataset:
    return make(data_config(root, source, features=features, **more))


def test_patches_are_those_of_unfold_and_of_transformers() -> None:
    made = form(**PATCHES, fit="stretch").make(png(1), "here")
    image = Image.fromarray(pixels(1)).resize((32, 32), Image.Resampling.BICUBIC)
    planes = torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1)[None].float()
    unfolded = torch.nn.functional.unfold(planes, 8, stride=8)[0].T
    assert made.dtype == np.uint8
    assert np.array_equal(made, unfolded.numpy())

    transformers = pytest.importorskip("transformers")
    plain = {"do_rescale": False, "do_normalize": False, "resample": 3}
    process = transformers.ViTImageProcessorPil(size={"height": 32, "width": 32}, **plain)
    theirs = torch.as_tensor(process(Image.fromarray(pixels(1))).pixel_values[0]).float()[None]
    assert np.array_equal(made, torch.nn.functional.unfold(theirs, 8, stride=8)[0].T.numpy())

    # the middle of a wide image
    square = pixels(2, 32, 64)[:, 16:48]
    cut = form(**PATCHES).make(png(2, height=32, width=64), "here")
    assert np.array_equal(cut[0].reshape(3, 8, 8), square[:8, :8].transpose(2, 0, 1))


@pytest.mark.parametrize("mels", [80, 128])
def test_log_mel_is_that_of_whisper(mels: int) -> None:
    transformers = pytest.importorskip("transformers")
    extract = transformers.WhisperFeatureExtractor(feature_size=mels, chunk_length=1)
    for seed in range(3):
        made = form(kind="log_mel", mels=mels, seconds=1.0).make(wav(seed), "here")
        theirs = extract(sound(seed) / 32768.0, sampling_rate=RATE, return_tensors="np")
        theirs = theirs.input_features[0].T
        assert made.dtype == np.float16
        assert made.shape == theirs.shape == (100, mels)
        assert np.abs(made - theirs).max() < 1e-3  # float16 has eleven bits


@pytest.mark.parametrize("kind", WRITERS)
def test_each_kind_of_source_gives_the_same_numbers_and_texts(tmp_path: Path, kind: str) -> None:
    write, source = WRITERS[kind]
    for ending, content, features in (("png", png, PATCHES), ("wav", wav, LOG_MEL)):
        media = [content(number) for number in range(12)]
        path = write(tmp_path / ending, media, TEXTS, ending)
        dataset = prepared(
            tmp_path / f"set-{ending}",
            {**source, "path": str(path)},
            features,
            validation_fraction=0,
        )
        config = data_config(
            dataset.folder, {**source, "path": str(path)}, features=features, sequence_length=32
        )
        found = batches(dataset, config)
        batch = found.read_samples(0, 12)
        expected = {
            form(**features).make(one, "").tobytes(): t for one, t in zip(media, TEXTS, strict=True)
        }
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(dataset.tokenizer_path))
        read = {}
        for numbers, targets in zip(batch.side["features"], batch.targets, strict=True):
            ids = targets[targets >= 0].tolist()
            assert ids[-1] == dataset.end
            stored = numbers if ending == "png" else numbers.astype("<f2")
            read[stored.tobytes()] = tokenizer.decode(ids[:-1])
        assert read == expected


@pytest.mark.slow
def test_processes_and_kills_change_no_byte(tmp_path: Path) -> None:
    """Interrupted after each scanned or tokenised unit in turn, with other numbers of processes."""
    media, texts = [png(number) for number in range(30)], [f"{n} apples" for n in range(30)]
    for part in range(3):
        write_tar(tmp_path / f"in/{part}", media[part::3], texts[part::3], "png")
    write_parquet(tmp_path / "rows", media[:5], texts[:5], "png")  # repeats
    sources = (
        {"kind": "webdataset", "path": str(tmp_path / "in"), "name": "tar"},
        {"kind": "parquet", "path": str(tmp_path / "rows"), "name": "rows", "field": "caption"},
    )
    (tmp_path / "in/1/0.tar").rename(tmp_path / "in/1.tar")
    whole = data_config(
        tmp_path / "whole",
        *sources,
        features=PATCHES,
        deduplicate="within_source",
        shard_tokens=4096,
    )
    expected = make(whole)
    assert len(expected.shards()) > 3

    class StopError(Exception):
        pass

    def stop(what: str, done: int, total: int) -> None:
        if done >= 1 and (what, done) not in seen:
            seen.add((what, done))
            raise StopError

    seen: set[tuple[str, int]] = set()
    for processes in (1, 2, 3) * 4:
        config = whole.model_copy(update={"folder": str(tmp_path / "cut"), "processes": processes})
        try:
            prepare_dataset(config, lambda _: None, stop)
            break
        except StopError:
            continue
    assert len(seen) > 3
    assert tree(tmp_path / "cut") == tree(tmp_path / "whole")


def test_a_repeated_image_is_left_out_if_its_text_repeats_too(tmp_path: Path) -> None:
    bmp = io.BytesIO()
    Image.fromarray(pixels(0)).save(bmp, "BMP")
    path = write_files(tmp_path / "in", [png(0), png(0), png(1)], ["a", "a", "a"], "png")
    (path / "003.bmp").write_bytes(bmp.getvalue())
    (path / "003.txt").write_text("a")
    (path / "004.png").write_bytes(png(0))
    (path / "004.txt").write_text("b")
    dataset = prepared(tmp_path / "set", {"kind": "files", "path": str(path)}, PATCHES)
    (counts,) = dataset.manifest["sources"]
    assert (counts["documents"], counts["duplicates"]) == (5, 2)


def noisy(mode: str, kind: str) -> bytes:
    file = io.BytesIO()
    image = Image.fromarray(pixels(3)).convert("L")
    if mode == "frames":
        others = [Image.fromarray(pixels(n)) for n in (4, 5)]
        Image.fromarray(pixels(3)).save(file, kind, save_all=True, append_images=others)
    else:
        image.convert(mode).save(file, kind)
    return file.getvalue()


def broken_png() -> bytes:
    data = bytearray(png(1))
    data[len(data) // 2] ^= 255
    return bytes(data)


BAD: dict[str, tuple[str, Callable[[], bytes], str]] = {
    "empty image": ("png", lambda: b"", "empty"),
    "cut image": ("png", lambda: png(1)[:300], "damaged or cut short"),
    "changed image": ("png", broken_png, "damaged or cut short"),
    "no image": ("png", lambda: b"<html>not found</html>", "no image"),
    "16 bits": ("png", lambda: noisy("I;16", "PNG"), "mode I;16"),
    "frames": ("gif", lambda: noisy("frames", "GIF"), "3 frames"),
    "empty recording": ("wav", lambda: b"", "empty"),
    "no samples": ("wav", lambda: wav(1, seconds=0), "no samples"),
    "cut recording": ("wav", lambda: wav(1)[:2000], "cut short: 978 of 9,600 samples"),
    "cut header": ("wav", lambda: wav(1)[:30], "cut short"),
    "other rate": ("wav", lambda: wav(1, rate=44_100), "44,100 samples a second"),
    "long recording": ("wav", lambda: wav(1, seconds=1.5), "1.50 s, more than"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_named_or_left_out_and_counted(tmp_path: Path, name: str) -> None:
    ending, bad, says = BAD[name]
    content, features = (wav, LOG_MEL) if ending == "wav" else (png, PATCHES)
    media = [content(0), bad(), content(2)]
    path = write_tar(tmp_path / "in", media, TEXTS[:3], ending)
    source = {"kind": "webdataset", "path": str(path)}
    with pytest.raises(DataError) as caught:
        prepared(tmp_path / "set", source, features)
    assert "001" in str(caught.value)
    assert says in str(caught.value)
    assert caught.value.remedy
    assert "\n" not in str(caught.value)

    said: list[str] = []
    config = data_config(tmp_path / "set", {**source, "bad_rows": "skip"}, features=features)
    dataset = prepare_dataset(config, said.append)
    assert sum(dataset.counts(split)["documents"] for split in dataset.splits) == 2
    assert any("1 bad rows" in line for line in said)
    assert "001" in (tmp_path / "set" / "skipped.txt").read_text()
    prepare_dataset(config, said.append)  # the same sources are found to hold the same


def test_huge_images_are_refused_before_they_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.data.read.features.MAX_PIXELS", 2000)
    with pytest.raises(DataError, match="56 x 40 pixels, more than 2,000"):
        form(**PATCHES).make(png(1), "here")


def test_a_text_that_is_missing_and_an_image_without_bytes_are_named(tmp_path: Path) -> None:
    path = write_files(tmp_path / "in", [png(0), png(1)], ["a", "b"], "png")
    (path / "001.txt").unlink()
    (path / "notes.md").write_text("about them")
    said: list[str] = []
    source = {"kind": "files", "path": str(path)}
    with pytest.raises(DataError, match=r"001\.txt is missing"):
        prepared(tmp_path / "set", source, PATCHES)
    config = data_config(tmp_path / "set", {**source, "field": "folder"}, features=PATCHES)
    prepare_dataset(config, said.append)
    assert any("2 files that are no image" in line and "notes.md" in line for line in said), said
    without = prepared(tmp_path / "bare", {**source, "field": ""}, PATCHES, validation_fraction=0)
    assert without.counts("train") == {"documents": 2, "tokens": 2, "bytes": 2}

    rows = write_parquet(tmp_path / "rows", [wav(0)], ["a"], "wav")
    with pytest.raises(DataError, match="no column 'image'"):
        prepared(tmp_path / "other", {"kind": "parquet", "path": str(rows)}, PATCHES)


def test_a_changed_number_is_found_and_the_version_covers_the_settings(tmp_path: Path) -> None:
    path = write_files(tmp_path / "in", [png(n) for n in range(6)], TEXTS[:6], "png")
    source = {"kind": "files", "path": str(path)}
    dataset = prepared(tmp_path / "set", source, PATCHES)
    other = prepared(tmp_path / "other", source, {**PATCHES, "fit": "stretch"})
    assert dataset.version != other.version
    with pytest.raises(DataError, match=r"another data\.features"):
        prepared(tmp_path / "set", source, {**PATCHES, "fit": "stretch"})

    assert not find_problems(dataset.folder)
    before = batches(dataset, data_config(dataset.folder, source, features=PATCHES)).hash_of(0, 4)
    (file, *_) = sorted((dataset.folder / "shards").glob("train*.feat"))
    content = bytearray(file.read_bytes())
    content[7] ^= 1
    file.write_bytes(content)
    assert [str(file) in problem for problem in find_problems(dataset.folder)] == [True]
    opened = Dataset.open(dataset.folder)
    after = batches(opened, data_config(dataset.folder, source, features=PATCHES))
    assert after.hash_of(0, 6) != before
    assert len({after.hash_of(n, n + 1) for n in range(4)}) == 4


def test_the_built_in_decoder_refuses_images(tmp_path: Path) -> None:
    path = write_files(tmp_path / "in", [png(n) for n in range(6)], TEXTS[:6], "png")
    run_file = tmp_path / "run.yaml"
    run_file.write_text(
        f"data:\n  folder: {tmp_path}/set\n  sources: [{{kind: files, path: {path}}}]\n"
        "  features: {kind: patches, image_size: 32, patch_size: 8}\n"
    )
    within("train", run_file, f"folder={tmp_path}/run").refuses("data.features.kind", "task")
    within("data", "prepare", run_file).succeeds()
    shown = within("data", "inspect", run_file).succeeds().out
    assert "features: uint8 [16, 192]" in shown
    assert "picture number" in shown


@pytest.mark.parametrize("bits", [40, 64])
def test_a_recording_of_odd_width_or_with_a_damaged_header_is_a_bad_row(bits: int) -> None:
    size = bits // 8
    layout = struct.pack("<HHIIHH", 1, 1, 16000, 16000 * size, size, bits)
    parts = b"WAVEfmt ", struct.pack("<I", 16), layout, b"data", struct.pack("<I", size), b"\0" * 8
    content = b"RIFF" + struct.pack("<I", 36 + size) + b"".join(parts)
    with pytest.raises(ValueError, match="bits"):
        decode_wav(content)
    with pytest.raises(ValueError, match="cut short"):
        decode_wav(content.replace(b"fmt \x10", b"fmt \xc8"))


@pytest.mark.parametrize("seconds", [0.29, 1.1, 2.3])
def test_lengths_of_whole_frames_are_taken(seconds: float) -> None:
    assert FeaturesConfig(kind="log_mel", seconds=seconds).is_on
