"""The run file: what is refused and in which words, what wins, and where each value is from."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.config.loading.fields import leaves
from holdfast.config.loading.load import LoadedConfig, Origin, load_config, resolve_config
from holdfast.config.loading.model_from import yaml_word
from holdfast.config.loading.yaml_tree import dump, parse_scalar, parse_value, parse_yaml
from holdfast.config.run import RunConfig
from holdfast.config.sections.run_place import local_run_folder
from holdfast.errors import ConfigError


def refused(text: str | None, *overrides: str) -> list[str]:
    """The sentences of a refusal, one for each mistake."""
    with pytest.raises(ConfigError) as caught:
        resolve_config(text, "run.yaml", overrides)
    return str(caught.value).split("\n")


def test_unknown_key_names_line_and_nearest_name() -> None:
    text = "\n" * 10 + "train:\n  stpes: 100\n"
    assert refused(text) == ["run.yaml:12: unknown key train.stpes; did you mean train.steps?"]


@pytest.mark.parametrize(
    ("text", "start", "offer"),
    [
        ("sede: 1", "1: unknown key sede", "did you mean seed?"),
        (
            "data: {tokenizer: {kind: bpe}}",
            "1: unknown key data.tokenizer.kind",
            "data.tokenizer has path, vocab_size, sample_bytes",
        ),
        (
            "tokenizer: {vocab_size: 300}",
            "1: unknown key tokenizer",
            "did you mean data.tokenizer?",
        ),
        ("steps: 1", "1: unknown key steps", "did you mean train.steps?"),
        ("lr: 1", "1: unknown key lr", "did you mean train.optimizer.learning_rate?"),
        ("train.steps: 1", "1: unknown key train.steps", "write 'steps:' indented below 'train:'"),
        (
            "train: {'¹': 1}",
            "1: unknown key train.¹",
            "train has steps, epochs, batch_size, microbatch_size, batch_warmup, precision, loss_chunk, compile, recompute, recompute_keep, partition_activations, keep_zeros, qat, deterministic, digest_every, optimizer, schedule, evaluate, stop, memory, profile",
        ),
        ("model: {n_layers: 2}", "1: unknown key model.n_layers", "did you mean model.layers?"),
        (
            "data:\n  sources:\n    - kind: text\n      pth: x",
            "4: unknown key data.sources.0.pth",
            "did you mean data.sources.0.path?",
        ),
        ("train: {steps: abc}", "1: train.steps is 'abc'", "1000 would work"),
        ("train: {steps: 1.5}", "1: train.steps is 1.5", "use 2"),
        ("train:\n  steps:", "2: train.steps is empty", "1000 would work"),
        ("train: {steps: true}", "1: train.steps is true", "use 1000"),
        ("train: {steps: 0}", "1: train.steps is 0", "use 1"),
        ("train: {steps: 20k}", "1: train.steps is '20k'", "use 20000"),
        (
            "train:\n  optimizer: {learning_rate: -3e-4}",
            "2: train.optimizer.learning_rate is -0.0003",
            "use 0.0003",
        ),
        ("data: {validation_fraction: 5}", "1: data.validation_fraction is 5", "use 0.05"),
        (
            "train:\n  optimizer:\n    learning_rate: .inf",
            "3: train.optimizer.learning_rate is inf",
            "0.003 would work",
        ),
        ("tensorboard: maybe", "1: tensorboard is 'maybe'", "false would work"),
        ("name: 3", "1: name is 3", "put it in quotes: '3'"),
        (
            "folder: file:///shared/run",
            "1: folder: file://",
            "use runs/{name}, or an address that begins with s3://, gs:// or az://",
        ),
        ("train: 3", "1: train is 3", "write its keys indented below it"),
        (
            "data: {sources: python-stdlib}",
            "1: data.sources is 'python-stdlib'",
            "write its items below it, each after '- ', or remove it",
        ),
        ("data:\n  sources: []", "2: data.sources has", "name at least one, or remove the key"),
        (
            "data:\n  sources:\n    - kind: jsonl",
            "3: data.sources.0.path is missing",
            "use a file, folder or glob",
        ),
        ("device: gpu", "1: device: gpu", "use auto"),
        (
            "train:\n  precision: fp8\nmodel:\n  ffn_dim: 200",
            "2: train.precision fp8",
            "use train.precision bf16",
        ),
        (
            "train:\n  precision: fp8\ndata:\n  sequence_length: 100",
            "2: train.precision fp8",
            "use data.sequence_length 112, or train.microbatch_size 4",
        ),
        (
            "train:\n  precision: fp8\nlayout: {pp: 2, schedule: zb-h1}",
            "2: train.precision fp8",
            "use layout.schedule 1f1b",
        ),
        ("train: {steps: 3}\ndevice: tpu", "2: device: tpu", "use cpu"),
        ("device: rocm", "1: device is 'rocm'", "did you mean cuda?"),
        ("train: {precision: bfloat16}", "1: train.precision is 'bfloat16'", "did you mean bf16?"),
        ("model: {preset: tinny}", "1: model.preset 'tinny'", "nearest: tiny"),
        ("model:\n  preset: [1]", "2: model.preset is [1]", "'tiny' would work"),
        ("model: {heads: 3}", "1: model.kv_heads 2", "use one of [1, 3]"),
        (
            "checkpoint:\n  interval: adaptive\n  min_seconds: 30\n  max_seconds: 10",
            "3: checkpoint.min_seconds 30",
            "use 10 or less",
        ),
        ("model: {dim: 130}", "1: model.heads 4", "use dim 128"),
        ("train: {batch_size: 7}", "1: train.batch_size 7", "use 8"),
        ("layout:\n  dp_shard: 2\n  workers: 3", "3: layout.workers 3", "use 2 or 4"),
        (
            "layout: {dp_shard: 4}",
            "1: layout.dp_shard 4",
            "use train.microbatch_size 4, or layout.dp_shard 2",
        ),
    ],
)
def test_one_mistake_is_one_sentence(text: str, start: str, offer: str) -> None:
    """start: line, key and value."""
    (sentence,) = refused(text)
    assert sentence.startswith(f"run.yaml:{start}")
    assert sentence.partition("; ")[2] == offer


def test_all_mistakes_come_at_once() -> None:
    sentences = refused("train:\n  steps: abc\n  batch: 3\nseed: -1\n", "layout.workers=x")
    places = [sentence.partition(": ")[0] for sentence in sentences]
    assert sorted(places) == ["command line", "run.yaml:2", "run.yaml:3", "run.yaml:4"]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.steps", "an override is written key=value"),
        ("=3", "an override is written key=value"),
        ("trian.steps=3", "unknown key trian.steps; did you mean train.steps?"),
        ("train.steps.x=3", "unknown key train.steps.x"),
        ("train.steps=abc", "train.steps is 'abc', not a whole number; 1000 would work"),
        ("data.sources.path=x", "data.sources is a list"),
        ("data.sources.3.path=x", "data.sources has no item 3; the next one is data.sources.0"),
        ("train.steps=[1", "not valid YAML"),
        ("train=3", "train is 3, not a section of keys"),
        ("layout=automatic", "did you mean layout.mode=auto?"),
        ("train.optimizer=adamw", "did you mean train.optimizer.name=adamw?"),
        ("data.sources[0].kind=text", "did you mean data.sources.0.kind?"),
        ("name=my first run", "use my-first-run"),
        ("task.hidden=3", "unknown key task.hidden; write task.args.hidden"),
    ],
)
def test_refusals_of_the_command_line_say_so(override: str, words: str) -> None:
    (sentence,) = refused("data: {}\n", override)
    assert sentence.startswith(f"command line: {override}")
    assert words in sentence


def test_the_command_line_wins_over_the_file() -> None:
    loaded = resolve_config(
        "train:\n  steps: 7\n  compile: true\n",
        "run.yaml",
        ["train.steps=8", "name=2026", "train.optimizer.betas=[0.8, 0.9]"],
    )
    config = loaded.config
    assert (config.train.steps, config.train.compile, config.name) == (8, True, "2026")
    assert config.train.optimizer.betas == (0.8, 0.9)
    assert loaded.origins["train.steps"] == Origin("command line", "train.steps=8")
    assert loaded.origins["train.compile"] == Origin("file", "run.yaml:3")
    assert loaded.origins["train.optimizer.betas"].kind == "command line"
    assert loaded.origins["seed"] == Origin("default")


def test_the_last_override_counts() -> None:
    assert resolve_config(None, "x", ["seed=3", "seed=4"]).config.seed == 4


def test_lists_are_reached_by_index_and_grow_at_the_end() -> None:
    text = "data:\n  sources:\n    - {kind: text, path: a}\n"
    loaded = resolve_config(
        text, "run.yaml", ["data.sources.0.path=b", "data.sources.1.kind=python-stdlib"]
    )
    sources = loaded.config.data.sources
    assert [(s.kind, s.path) for s in sources] == [("text", "b"), ("python-stdlib", None)]
    assert loaded.origins["data.sources.0.kind"].place == "run.yaml:3"
    assert loaded.origins["data.sources.0.path"].kind == "command line"
    assert loaded.origins["data.sources.0.weight"].kind == "default"


def test_a_list_given_whole_replaces_the_files() -> None:
    loaded = resolve_config(
        "data:\n  sources:\n    - {kind: text, path: a}\n    - {kind: text, path: b}\n",
        "run.yaml",
        ["data.sources=[{kind: text, path: c}]"],
    )
    assert [s.path for s in loaded.config.data.sources] == ["c"]
    assert loaded.origins["data.sources.0.path"].kind == "command line"


def test_a_preset_is_an_origin_and_can_be_overridden() -> None:
    loaded = resolve_config("model: {preset: llama3.2-1b, layers: 2}\n", "run.yaml")
    assert (loaded.config.model.layers, loaded.config.model.dim) == (2, 2048)
    assert loaded.origins["model.dim"] == Origin("preset", "llama3.2-1b")
    assert loaded.origins["model.layers"].kind == "file"
    assert loaded.origins["model.init_std"].kind == "default"


def test_every_value_has_an_origin() -> None:
    loaded = resolve_config("train:\n  batch_warmup: [{from_step: 1, batch_size: 8}]\n", "run.yaml")
    keys = {key for key, _ in leaves(loaded.config.model_dump(mode="json"))}
    assert keys == set(loaded.origins)


def test_planned_values_are_validated_and_marked() -> None:
    loaded = resolve_config("layout: {dp_shard: 2}\n", "run.yaml")
    planned = loaded.with_planned({"layout.workers": 4, "device": "cpu"}, "two accelerators")
    assert planned.config.layout.workers == 4
    assert planned.origins["device"] == Origin("planned", "two accelerators")
    assert loaded.config.layout.workers == 0, "the old one is untouched"
    with pytest.raises(ConfigError, match="is not a multiple of"):
        loaded.with_planned({"layout.workers": 3}, "three accelerators")


def test_an_empty_section_is_its_defaults() -> None:
    assert resolve_config("train:\nmodel:\n", "run.yaml").config == RunConfig()


def test_a_resolved_configuration_reads_back_equal() -> None:
    loaded = resolve_config("model: {preset: qwen3-0.6b}\nseed: 5\n", "run.yaml", ["train.steps=9"])
    assert RunConfig.model_validate(loaded.to_json()["config"]) == loaded.config


# --- files -----------------------------------------------------------------------------------
def refused_file(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(b"\xef\xbb\xbfseed: 3\r\nname: \xc3\xa9tude\r\n".replace(b"\xc3\xa9", b"e"))
    loaded = load_config(path)
    assert isinstance(loaded, LoadedConfig)
    assert (loaded.config.seed, loaded.config.name) == (3, "etude")
    assert loaded.origins["name"].place == f"{path}:2"


def test_what_is_no_run_file_is_refused(tmp_path: Path) -> None:
    assert "there is no such run file" in refused_file(tmp_path / "none.yaml")
    (tmp_path / "run.yaml").touch()
    assert f"did you mean {tmp_path}/run.yaml?" in refused_file(tmp_path / "rum.yaml")
    assert "a folder, not a run file" in refused_file(tmp_path)
    latin = tmp_path / "latin.yaml"
    latin.write_bytes("seed: 1\nname: é\n".encode("latin-1"))
    assert refused_file(latin).startswith(f"{latin}:2: the byte 0xe9 is not UTF-8")
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(bytes(range(128)))
    assert "does not belong in a text file" in refused_file(binary)
    inside = latin / "run.yaml"
    assert "cannot be read" in refused_file(inside)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("seed: 1\n")
    path.chmod(0)
    assert "cannot be read" in refused_file(path)


# --- properties --------------------------------------------------------------------------------
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)
KEYS = st.sampled_from(
    ["data", "train", "model", "layout", "seed", "name", "steps", "dim", "sources"]
)


@given(st.dictionaries(KEYS, VALUES | st.dictionaries(KEYS, VALUES, max_size=2), max_size=3))
def test_whatever_is_written_is_accepted_or_refused_in_sentences(value: dict[str, object]) -> None:
    try:
        text = json.dumps(value, allow_nan=False)
    except ValueError:
        return
    try:
        resolve_config(text, "run.yaml")
    except ConfigError as error:
        for sentence in str(error).split("\n"):
            assert sentence.startswith(("run.yaml", "command line")), sentence


def test_a_comment_in_an_override_is_refused() -> None:
    (sentence,) = refused(None, "folder=runs/z #1")
    assert "would be a comment" in sentence
    assert resolve_config(None, "run.yaml", ['folder="runs/z #1"']).config.folder.endswith("/z #1")
    assert resolve_config(None, "run.yaml", ["folder=runs/z#1"]).config.folder.endswith("/z#1")


# --- the local folder and the dataset of a run in a bucket ----------------------------------------
def test_a_run_in_a_bucket_has_its_dataset_below_it() -> None:
    place = "folder=s3://b/runs/{name}/?endpoint=https://h&region=x"
    assert load_config(None, [place]).config.data.folder == (
        "s3://b/runs/run/dataset?endpoint=https://h&region=x"
    )
    for other in ("mine", "s3://c/mine"):
        assert load_config(None, [place, f"data.folder={other}"]).config.data.folder == other
    assert load_config(None, ["folder=runs/mine"]).config.data.folder == "datasets/python-stdlib"
    # No dataset lies open in a bucket whose checkpoints are sealed.
    sealed = load_config(None, ["folder=s3://b/run?seal=env"])
    assert sealed.config.data.folder == "datasets/python-stdlib"


def test_one_bucket_is_one_local_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = local_run_folder("s3://b/runs/mine?endpoint=https://h&region=x")
    assert first.startswith(f"{tmp_path}/holdfast/runs/mine-")
    assert local_run_folder("s3://b/runs/mine/?timeout=9&endpoint=https://h") == first
    others = ("s3://b/runs/mine", "s3://c/runs/mine?endpoint=https://h", "gs://b/runs/mine")
    assert len({first, *map(local_run_folder, others)}) == 4


# --- peers in the run file ------------------------------------------------------------------------
TWO = """\
checkpoint:
  machine: {name: here, rack: a}
  peers:
    - {name: one, address: "10.0.0.7:7600", rack: b}
    - {name: two, address: "[fd00::7]:7600", stable: true, memory_gb: 64}
  peer_every_steps: 5
  peer_interface: 10.0.0.5
"""


def test_a_run_file_with_peers() -> None:
    found = resolve_config(TWO, "run.yaml", ()).config.checkpoint
    assert [(p.name, p.address, p.stable) for p in found.peers] == [
        ("one", "10.0.0.7:7600", False),
        ("two", "[fd00::7]:7600", True),
    ]
    assert found.machine.rack == "a"
    assert found.peer_every_steps == 5


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (TWO.replace("10.0.0.7:7600", "10.0.0.7"), "checkpoint.peers.0.address"),
        (TWO.replace("[fd00::7]:7600", "fd00::7:7600"), "checkpoint.peers.1.address"),
        (TWO.replace("name: two", "name: one"), "two peers are called one"),
        (TWO.replace("rack: b", "stable: true"), "one and two are both stable"),
        (TWO.replace("peer_every_steps: 5", "peer_every_steps: 0"), "must be at least 1"),
        (TWO.replace("name: two, ", ""), "checkpoint.peers.1.name"),
        (TWO.replace("10.0.0.5", "127.0.0.1"), "one at 10.0.0.7:7600 cannot read from 127.0.0.1"),
        (TWO.replace("10.0.0.5", "0.0.0.0"), "cannot be told to read from 0.0.0.0"),
        (TWO.replace("10.0.0.5", "'::'"), "cannot be told to read from ::"),
        (TWO + "  peer_advertise: localhost:7600\n", "cannot read from localhost:7600"),
    ],
)
def test_what_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        resolve_config(text, "run.yaml", ())
    assert "run.yaml:" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        TWO.replace("10.0.0.5", "0.0.0.0") + "  peer_advertise: trainer.local\n",
        TWO.replace("10.0.0.5", "127.0.0.1") + "  peer_advertise: 10.0.0.5:7600\n",
        TWO.replace("10.0.0.7", "localhost")
        .replace("[fd00::7]", "[::1]")
        .replace("10.0.0.5", "::1"),
    ],
)
def test_what_can_be_reached(text: str) -> None:
    assert len(resolve_config(text, "run.yaml", ()).config.checkpoint.peers) == 2


# --- YAML as a run file uses it -------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12", 12),
        ("-3", -3),
        ("010", 10),
        ("1_000", 1000),
        ("0x10", 16),
        ("3e-3", 3e-3),
        ("1.5", 1.5),
        (".5", 0.5),
        ("6.", 6.0),
        ("1E3", 1000.0),
        (".inf", math.inf),
        ("-.inf", -math.inf),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("no", "no"),
        ("on", "on"),
        ("1:30", "1:30"),
        ("2026-11-21", "2026-11-21"),
        ("e3", "e3"),
    ],
)
def test_scalars_follow_the_core_schema(text: str, value: object) -> None:
    found = parse_scalar(text)
    assert found == value
    assert type(found) is type(value)


def test_nan_is_a_number() -> None:
    assert math.isnan(parse_scalar(".nan"))  # type: ignore[arg-type]


def test_quoted_numbers_are_text() -> None:
    assert parse_yaml("a: '1'\nb: \"true\"\n", "f").value == {"a": "1", "b": "true"}


def test_every_key_has_its_line() -> None:
    tree = parse_yaml("a: 1\nb:\n  c: [1, 2]\n  d:\n    - e: 5\n\n    - e: 6\n", "f")
    assert tree.lines["b", "c"] == 3
    assert tree.lines["b", "d", 1, "e"] == 7


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("", None, "the run file is empty"),
        ("# only a comment\n", None, "the run file is empty"),
        ("- 1\n", 1, "a run file is made of sections and keys"),
        ("train\n", 1, "a run file is made of sections and keys"),
        ("a: 1\nb: 2\na: 3\n", 3, "a was already given on line 1"),
        ("b:\n  a: 1\n  a: 2\n", 3, "b.a was already given on line 2"),
        ("a:\n\tb: 1\n", 2, "a tab cannot indent YAML"),
        ("a: b: c\n", 1, "not valid YAML"),
        ("a: [1,\n", 2, "not valid YAML"),
        ("a: 'x\n", 2, "not valid YAML"),
        ("a: 1\n---\nb: 2\n", 2, "one YAML document"),
        ("a: &x 1\n", 1, "anchors"),
        ("b: 1\na: *x\n", 2, "aliases"),
        ("b: 1\na: *x*\n", 2, "put it in quotes if it is text"),
        ("a: !!python/object:os.system x\n", 1, "the tag !!python/object:os.system"),
        ("a: !mine x\n", 1, "the tag !mine"),
        ("? [a]\n: 1\n", 1, "a key must be a word"),
        ("a: \x00\n", 1, "does not belong in a text file"),
        ("a: 1\nb: \x1b[0m\n", 2, "does not belong in a text file"),
        ("a: " + "[" * 40 + "]" * 40, 1, "nested too deeply"),
        ("a: " + "[" * 5000, None, "nested too deeply"),
    ],
)
def test_refusals_name_the_line(text: str, line: int | None, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_yaml(text, "run.yaml")
    said = str(caught.value)
    assert said.startswith("run.yaml: " if line is None else f"run.yaml:{line}: ")
    assert words in said
    assert "\n" not in said


def test_values_of_the_command_line() -> None:
    assert parse_value("[0.9, 0.99]", "x") == [0.9, 0.99]
    assert parse_value("{kind: text, path: a b}", "x") == {"kind": "text", "path": "a b"}
    assert parse_value("", "x") is None
    assert parse_value("'200'", "x") == "200"


@given(st.text(max_size=200))
def test_any_text_is_a_tree_or_a_refusal(text: str) -> None:
    try:
        outcome: object = parse_yaml(text, "run.yaml").value
    except ConfigError as error:
        outcome = str(error)
    assert isinstance(outcome, dict) or str(outcome).startswith("run.yaml")


TEXTS = ["1e-4", "0000000009", "x #y", "a: b", "no", "true", "~", "", "[a]", "sp ace/x", "*a", "é"]


@pytest.mark.parametrize("text", TEXTS)
def test_a_written_text_is_read_as_itself(text: str) -> None:
    written = dump({"name": text, "items": [text]})
    assert parse_yaml(written, "run.yaml").value == {"name": text, "items": [text]}
    assert parse_value(yaml_word(text), "") == text
