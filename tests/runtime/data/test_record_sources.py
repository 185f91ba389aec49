"""Each format with each kind of damage: one sentence with file and row, or a counted skip."""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import struct
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import ipc, parquet
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from xxhash import xxh3_128

from holdfast.config.sections.data import SourceConfig
from holdfast.data.read.record_sources import masked_crc32c
from holdfast.data.read.sources import plan_source, read_unit
from holdfast.data.stream.dataset import Dataset
from holdfast.errors import DataError
from tests.support.commands import within, write_run_file

TEXTS = [f"Text {i} with 日本 and some words.\nIts second line {i}." for i in range(9)]
BAD = 4  # the row that is damaged
LIMIT = 4096
HUGE = "long " * 2000
FILE = "tokenizer.json"
WRONG = "Text 4 \udcff wrong"  # stands for the byte 0xff


def raw(text: str) -> bytes:
    return text.encode(errors="surrogateescape")


# --- writers: rows of bytes -> files --------------------------------------------------------------
def write_jsonl(folder: Path, rows: list[bytes]) -> Path:
    lines = [b'{"text": ' + json.dumps(row.decode("latin-1"))[:0].encode() for row in rows]
    path = folder / "rows.jsonl"
    escaped = [row.replace(b"\n", b"\\n") for row in rows]
    path.write_bytes(b"".join(b + b'"' + e + b'"}\n' for b, e in zip(lines, escaped, strict=True)))
    return path


def write_gzip(folder: Path, rows: list[bytes]) -> Path:
    path = folder / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(write_jsonl(folder, rows).read_bytes()))
    (folder / "rows.jsonl").unlink()
    return path


def write_zstd(folder: Path, rows: list[bytes]) -> Path:
    path = folder / "rows.jsonl.zst"
    plain = write_jsonl(folder, rows)
    # With the checksum of the content, as the command zstd writes it.
    import zstandard

    path.write_bytes(zstandard.ZstdCompressor(write_checksum=True).compress(plain.read_bytes()))
    plain.unlink()
    return path


def _table(rows: list[bytes]) -> pa.Table:
    offsets = [0]
    for row in rows:
        offsets.append(offsets[-1] + len(row))
    buffers = [None, pa.py_buffer(struct.pack(f"<{len(offsets)}i", *offsets))]
    text = pa.StringArray.from_buffers(len(rows), buffers[1], pa.py_buffer(b"".join(rows)))
    return pa.table({"text": text})


def write_parquet(folder: Path, rows: list[bytes]) -> Path:
    path = folder / "rows.parquet"
    parquet.write_table(
        _table(rows), path, row_group_size=3, compression="none", write_page_checksum=True
    )
    return path


def write_arrow(folder: Path, rows: list[bytes]) -> Path:
    path = folder / "rows.arrow"
    with ipc.new_file(path, _table(rows).schema) as file:
        file.write_table(_table(rows), max_chunksize=3)
    return path


def write_text(folder: Path, rows: list[bytes]) -> Path:
    for number, row in enumerate(rows):
        (folder / f"{number}.txt").write_bytes(row)
    return folder / f"{BAD}.txt"


def write_tar(folder: Path, rows: list[bytes]) -> Path:
    path = folder / "rows.tar"
    with tarfile.open(path, "w") as file:
        for number, row in enumerate(rows):
            for ending, data in (("cls", b"3"), ("txt", row)):
                info = tarfile.TarInfo(f"{number:03d}.{ending}")
                info.size = len(data)
                file.addfile(info, io.BytesIO(data))
    return path


def _field(number: int, data: bytes) -> bytes:
    size, value = b"", len(data)
    while value > 127:
        size, value = size + bytes([value & 127 | 128]), value >> 7
    return bytes([number << 3 | 2]) + size + bytes([value]) + data


def write_tfrecord(folder: Path, rows: list[bytes]) -> Path:
    out = b""
    for row in rows:
        features = b""
        for name, value in ((b"other", b"x"), (b"text", row)):
            features += _field(1, _field(1, name) + _field(2, _field(1, _field(1, value))))
        data = _field(1, features)
        size = struct.pack("<Q", len(data))
        out += size + struct.pack("<I", masked_crc32c(size))
        out += data + struct.pack("<I", masked_crc32c(data))
    path = folder / "rows.tfrecord"
    path.write_bytes(out)
    return path


def write_mds(folder: Path, rows: list[bytes]) -> Path:
    samples = [
        struct.pack("<I", len(row)) + struct.pack("<q", n) + row for n, row in enumerate(rows)
    ]
    begin = 4 + 4 * (len(rows) + 1)
    offsets = [begin]
    for sample in samples:
        offsets.append(offsets[-1] + len(sample))
    data = struct.pack("<I", len(rows)) + struct.pack(f"<{len(offsets)}I", *offsets)
    path = folder / "shard.00000.mds"
    path.write_bytes(data + b"".join(samples))
    info = {
        "basename": path.name,
        "bytes": path.stat().st_size,
        "hashes": {"sha1": hashlib.sha1(path.read_bytes()).hexdigest()},
    }
    shard = {
        "column_names": ["n", "text"],
        "column_encodings": ["int", "str"],
        "column_sizes": [8, None],
        "compression": None,
        "format": "mds",
        "hashes": ["sha1"],
        "raw_data": info,
        "samples": len(rows),
        "size_limit": 1 << 26,
        "version": 2,
        "zip_data": None,
    }
    (folder / "index.json").write_text(json.dumps({"shards": [shard], "version": 2}))
    return path


def write_warc(folder: Path, rows: list[bytes]) -> Path:
    out = b""
    for row in [b"software: none", *rows]:
        kind = "conversion" if out else "warcinfo"
        digest = base64.b32encode(hashlib.sha1(row).digest()).decode()
        head = f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Block-Digest: sha1:{digest}\r\n"
        out += f"{head}Content-Length: {len(row)}\r\n\r\n".encode() + row + b"\r\n\r\n"
    path = folder / "rows.warc"
    path.write_bytes(out)
    return path


def byte_tokenizer(folder: Path) -> Path:
    """A tokenizer with a token for each byte, and an end token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {letter: number for number, letter in enumerate([*letters, "<|endoftext|>"])}
    tokenizer = Tokenizer(models.BPE(words, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def write_pair(
    folder: Path, documents: list[list[list[int]]], code: int = 8, dtype: str = "<u2"
) -> Path:
    """Documents of sequences of tokens, as Megatron writes them."""
    sequences = [ids for document in documents for ids in document]
    lengths = [len(ids) for ids in sequences]
    item = np.dtype(dtype).itemsize
    places = np.concatenate(([0], np.cumsum(lengths)))[:-1] * item
    firsts = np.cumsum([0, *(len(document) for document in documents)])
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(sequences), len(firsts))
    parts = np.array(lengths, "<i4"), places.astype("<i8"), firsts.astype("<i8")
    path = folder / "rows.bin"
    path.with_suffix(".idx").write_bytes(head + b"".join(part.tobytes() for part in parts))
    path.write_bytes(b"".join(np.array(ids, dtype).tobytes() for ids in sequences))
    return path


def write_megatron(folder: Path, rows: list[bytes]) -> Path:
    """Each row is a document with an end token. The byte 0xff becomes a token that is unknown."""
    tokenizer = Tokenizer.from_file(str(byte_tokenizer(folder.parent / "tokenizer") / FILE))
    end = tokenizer.token_to_id("<|endoftext|>")
    documents = []
    for row in rows:
        ids = [
            t for part in row.split(b"\xff") for t in (999, *tokenizer.encode(part.decode()).ids)
        ]
        documents.append([[*ids[1:], end]])
    return write_pair(folder, documents)


@dataclass(frozen=True)
class Form:
    """kind: of the source. write: returns the file that is damaged. row: how the place of row BAD
    is written. is_cut_per_row: the rows before a cut stay. has_checksum: of its content."""

    kind: str
    write: Callable[[Path, list[bytes]], Path]
    row: str
    has_checksum: bool = True
    is_folder: bool = False
    skips_rows: bool = True  # a row that is bad is left out alone


FORMS = {
    "jsonl": Form("jsonl", write_jsonl, ":5", has_checksum=False),
    "jsonl.gz": Form("jsonl", write_gzip, ":5"),
    "jsonl.zst": Form("jsonl", write_zstd, ":5"),
    "parquet": Form("parquet", write_parquet, "row 4"),
    "arrow": Form("arrow", write_arrow, "row 4", has_checksum=False),
    "text": Form("text", write_text, "4.txt", has_checksum=False, is_folder=True),
    "webdataset": Form("webdataset", write_tar, "004"),
    "tfrecord": Form("tfrecord", write_tfrecord, "row 4"),
    "mds": Form("mds", write_mds, "row 4", is_folder=True),
    "warc": Form("warc", write_warc, "record 5"),
    "megatron": Form("megatron", write_megatron, "document 4", has_checksum=False),
}


def read(form: Form, path: Path, **more: Any) -> tuple[list[str], list[DataError]]:
    """The documents, and what was refused or left out."""
    place = path.parent if form.is_folder else path
    source = SourceConfig(kind=form.kind, path=str(place), **more)  # type: ignore[arg-type]
    plan = plan_source(source, 0, 0, tokenizer=str(path.parent.parent / "tokenizer"))
    problems = list(plan.refused)
    texts = [t for unit in plan.units for t in read_unit(unit, LIMIT, xxh3_128(), problems)]
    return texts, problems


def damage(form: Form, folder: Path, how: str) -> Path:
    """Write the rows with one kind of damage; return the file."""
    rows = [raw(text) for text in TEXTS]
    if how in ("wrong encoding", "huge row"):
        rows[BAD] = raw(WRONG if how == "wrong encoding" else HUGE)
    path = form.write(folder, rows)
    data = bytearray(path.read_bytes())
    if how == "cut":
        at = data.find(raw(TEXTS[7])[:8]) if form.kind != "text" else -1
        path.write_bytes(data[: at + 4 if at > 0 else len(data) * 2 // 3])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "bad checksum":
        at = data.find(b"Text 4")
        if path.suffix in (".gz", ".zst"):
            at = len(data) - (6 if path.suffix == ".gz" else 2)
        elif form.kind == "webdataset":
            at = data.find(b"004.txt") + 2
        data[at] ^= 1
        path.write_bytes(data)
    return path


def folder_of(root: Path) -> Path:
    folder = root / "source"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("name", FORMS)
def test_the_documents_are_those_that_were_written(tmp_path: Path, name: str) -> None:
    form = FORMS[name]
    path = form.write(folder_of(tmp_path), [raw(text) for text in TEXTS])
    assert read(form, path) == (TEXTS, [])


@pytest.mark.parametrize("how", ["cut", "bad checksum", "wrong encoding", "empty", "huge row"])
@pytest.mark.parametrize("name", FORMS)
def test_damage_is_named_or_left_out_and_counted(tmp_path: Path, name: str, how: str) -> None:
    form = FORMS[name]
    if how == "bad checksum" and not form.has_checksum:
        pytest.skip("the format has none")
    path = damage(form, folder_of(tmp_path), how)
    if form.kind == "text" and how in ("cut", "empty"):
        expected = [*TEXTS[:BAD], path.read_text(), *TEXTS[BAD + 1 :]]
        assert read(form, path) == (expected, [])  # a shorter text is a text
        return

    _, problems = read(form, path)
    (problem,) = problems
    sentence = str(problem)
    assert str(path) in sentence
    assert problem.remedy
    assert "\n" not in sentence
    if how in ("wrong encoding", "huge row"):
        assert form.row in sentence
    if how == "cut" and name in ("tfrecord", "warc", "jsonl"):
        assert any(mark in sentence for mark in ("row 7", "record 8", ":8")), sentence

    texts, skipped = read(form, path, bad_rows="skip")
    assert [str(error) for error in skipped] == [sentence]
    if how in ("wrong encoding", "huge row"):
        assert texts == TEXTS[:BAD] + TEXTS[BAD + 1 :]
    else:
        assert set(texts) <= set(TEXTS)
        assert len(set(texts)) == len(texts)


def test_the_command_refuses_a_bad_row_and_counts_those_it_skips(tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path)
    (tmp_path / "shards").mkdir()
    path = damage(FORMS["tfrecord"], tmp_path / "shards", "bad checksum")
    text = run_file.read_text().replace(
        f'{{kind: text, path: "{tmp_path}/texts"}}', f'{{kind: tfrecord, path: "{path}"}}'
    )
    run_file.write_text(text)
    within("data", "prepare", run_file).refuses_last(f"{path}, row 4", "checksum")
    run_file.write_text(text.replace("kind: tfrecord", "kind: tfrecord, bad_rows: skip"))
    done = within("data", "prepare", run_file).succeeds()
    assert "1 bad rows or files are left out" in done.out + done.err
    assert "row 4" in (tmp_path / "dataset" / "skipped.txt").read_text()


def test_crc32c_is_that_of_the_standard() -> None:
    crc = masked_crc32c(b"123456789")
    rotated = (crc - 0xA282EAD8) & 0xFFFFFFFF
    assert (rotated >> 17 | rotated << 15) & 0xFFFFFFFF == 0xE3069283


def _index(path: Path, at: int, data: bytes) -> None:
    index = bytearray(path.with_suffix(".idx").read_bytes())
    index[at : at + len(data)] = data
    path.with_suffix(".idx").write_bytes(index)


BAD_INDEX: dict[str, tuple[Callable[[Path], object], str]] = {
    "magic": (lambda path: _index(path, 0, b"X"), "no index of Megatron"),
    "version": (lambda path: _index(path, 9, b"\2"), "version 2"),
    "type": (lambda path: _index(path, 17, b"\x06"), "type of tokens 6"),
    "length": (lambda path: _index(path, 34, b"\1\0\0\0"), "sequence 1"),
    "negative length": (lambda path: _index(path, 34, b"\xff" * 4), "sequence 0"),
    "document": (lambda path: _index(path, 34 + 12 * 9, b"\x01"), "first sequence of a document"),
    "cut": (
        lambda path: path.with_suffix(".idx").write_bytes(
            path.with_suffix(".idx").read_bytes()[:-3]
        ),
        "bytes instead of",
    ),
    "no bin": (lambda path: path.unlink(), "rows.bin is missing"),
    "no idx": (lambda path: path.with_suffix(".idx").unlink(), "rows.idx is missing"),
}


@pytest.mark.parametrize("name", BAD_INDEX)
def test_a_bad_index_of_tokens_is_refused_with_its_place(tmp_path: Path, name: str) -> None:
    form = FORMS["megatron"]
    path = form.write(folder_of(tmp_path), [raw(text) for text in TEXTS])
    break_it, said = BAD_INDEX[name]
    break_it(path)
    try:
        _, (problem,) = read(form, path.parent)
    except DataError as error:
        problem = error
    assert said in str(problem)
    assert str(path.with_suffix("")) in str(problem)
    assert problem.remedy


def test_tokens_of_megatron_come_through_as_they_are(tmp_path: Path) -> None:
    """A document of two sequences, a special token inside, an empty document, and a text that a
    stage changes. Tokens that the tokenizer would not make of the text are kept."""
    folder = byte_tokenizer(tmp_path / "tokenizer")
    tokenizer = Tokenizer.from_file(str(folder / FILE))
    end = tokenizer.token_to_id("<|endoftext|>")
    ids = [tokenizer.encode(text).ids for text in TEXTS]
    mail = tokenizer.encode("Write to someone.real@company.org at noon.").ids
    documents = [[ids[0][:5], [*ids[0][5:], end]], [ids[1]], [[end]], [[*mail, end]], [ids[2]]]
    path = write_pair(folder_of(tmp_path), documents, 4, "<i4")
    run_file = write_run_file(tmp_path)
    text = run_file.read_text().replace(
        f'{{kind: text, path: "{tmp_path}/texts"}}',
        f'{{kind: megatron, path: "{path.with_suffix("")}"}}',
    )
    run_file.write_text(text.replace("{vocab_size: 300}", f'{{path: "{folder}"}}'))
    keys = ("data.validation_fraction=0", "data.stages=[{kind: personal_data}]")
    within("data", "prepare", run_file, *keys).succeeds()
    (stream,) = Dataset.open(tmp_path / "dataset").streams("train")
    tokens = stream.read(0, stream.tokens).tolist()
    cut = [i for i, token in enumerate(tokens) if token == end]
    found = [tokens[a:b] for a, b in zip([0, *(i + 1 for i in cut[:-1])], cut, strict=True)]
    assert [found[0], found[1], found[3]] == [ids[0], ids[1], ids[2]]
    assert "company" not in tokenizer.decode(found[2])
    assert stream.documents == 4

    bare = text.replace("{vocab_size: 300}", "{vocab_size: 300}")
    run_file.write_text(bare)
    within("data", "prepare", run_file).refuses_last("sources.0", "tokenizer.path")
