"""Paths of a run file and of the command line: the home, variables, and where they start."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.config.loading.fields import all_keys
from holdfast.config.loading.identity import config_hash
from holdfast.config.loading.load import LoadedConfig, load_config, resolve_config
from holdfast.config.loading.paths import FREE_PATHS, PLACES
from holdfast.errors import ConfigError
from tests.runtime.config.test_identity import meanings_of_keys

SOURCE = "data.sources.0.path"
WITH_SOURCE = "data:\n  sources:\n    - {kind: text, path: texts}\n"
KEYS = [*FREE_PATHS, "data.tokenizer.path", SOURCE]


@pytest.fixture(autouse=True)
def _home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    monkeypatch.delenv("NOWHERE", raising=False)


def located(loaded: LoadedConfig, key: str) -> str:
    """The path that a key has come to."""
    if key in loaded.places:
        return loaded.places[key]
    value: object = loaded.config
    for part in key.split("."):
        value = getattr(value, part)
    return str(value)


def with_value(key: str, value: str, base: str = "") -> LoadedConfig:
    given = ["cluster.notices=file"] if key.startswith("cluster.notices") else []
    if key.startswith("objective.reference"):
        given = ["objective.kind=dpo", "data.attention=document"]
    return resolve_config(WITH_SOURCE, "run.yaml", [*given, f"{key}={value}"], base)


@pytest.mark.parametrize("key", KEYS)
def test_the_home_is_filled_in(key: str) -> None:
    assert located(with_value(key, "~/a/b"), key) == "/home/me/a/b"
    assert located(with_value(key, "./~/a"), key) == "./~/a"


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("$SCRATCH/x", "write /scratch/me/x"),
        ("a/${SCRATCH}", "write a//scratch/me"),
        ("$NOWHERE/x", "write the path in full"),
        ("~no-such-user/x", "there is no such user"),
        ("x" * 300, "more than 255 bytes"),
        ('"a\\0b"', "a control character"),
        ("s3//bucket/run", "write s3://"),
        ("GS:bucket/run", "write gs://"),
        ("http//bucket/run", "write s3://"),
    ],
)
def test_a_path_that_would_make_an_odd_folder_is_refused(key: str, value: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        with_value(key, value)
    sentence = str(caught.value)
    assert sentence.startswith(f"command line: {key}=")
    assert f": {key}: " in sentence
    assert says in sentence
    assert "\n" not in sentence


def test_a_refusal_names_the_line_and_all_come_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_config("folder: $A/x\ndata:\n  folder: $B/y\n", "run.yaml")
    first, second = str(caught.value).split("\n")
    assert first.startswith("run.yaml:1: folder: '$A/x' has a $")
    assert second.startswith("run.yaml:3: data.folder: '$B/y' has a $")


@pytest.mark.parametrize("key", KEYS)
def test_a_relative_path_starts_at_the_run_file_or_at_the_current_folder(key: str) -> None:
    """The run file's own at its folder; an override's where the command is given."""
    *sections, name = ("data.sources" if key == SOURCE else key).split(".")
    value = "[{kind: text, path: a/b}]" if key == SOURCE else "a/b"
    text = "cluster: {notices: file}\n" if not key.startswith("cluster") else ""
    if sections[:1] == ["objective"]:  # a key of some kinds of objectives alone
        text += "data: {attention: document}\n"
    for depth, section in enumerate(sections):
        text += f"{'  ' * depth}{section}:\n"
    notices = "notices: file, " if key.startswith("cluster") else ""
    if notices:
        text = f"cluster: {{{notices}{name}: {value}}}\n"
    else:
        text += f"{'  ' * len(sections)}{name}: {value}\n"
    if sections[:1] == ["objective"]:
        text += "  kind: dpo\n"
    assert located(resolve_config(text, "up/run.yaml", (), "../up"), key) == "../up/a/b"
    assert located(resolve_config(text, "run.yaml", (), ""), key) == "a/b"
    assert located(with_value(key, "a/b", "../up"), key) == "a/b"
    assert located(with_value(key, "/a/b", "../up"), key) == "/a/b"


def test_the_same_run_file_is_the_same_run_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "one" / "two").mkdir(parents=True)
    (tmp_path / "run.yaml").write_text(WITH_SOURCE + "  tokenizer: {path: t.json}\n")
    found = set()
    for here in (tmp_path, tmp_path / "one", tmp_path / "one" / "two"):
        monkeypatch.chdir(here)
        loaded = load_config(Path(os.path.relpath(tmp_path / "run.yaml")))
        loaded = loaded.with_planned({"layout.workers": 1}, "a test")
        data = loaded.config.data
        paths = [loaded.config.run_folder, data.folder, data.tokenizer.place, data.sources[0].place]
        found.add((*(os.path.realpath(str(p)) for p in paths), config_hash(loaded.config)))
    (only,) = found
    names = ("runs/run", "datasets/python-stdlib", "t.json", "texts")
    assert only[:4] == tuple(f"{tmp_path.resolve()}/{name}" for name in names)


def test_a_path_up_is_shortened_unless_a_link_is_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real/deep")
    (tmp_path / "plain").mkdir()
    monkeypatch.chdir(tmp_path)
    text = "folder: ../run\n"
    assert resolve_config(text, "x", (), "plain").config.folder == "run"
    assert resolve_config(text, "x", (), "link").config.folder == "link/../run"


def test_a_name_on_the_hub_is_no_path_unless_there_is_such_a_folder(tmp_path: Path) -> None:
    text = "data:\n  sources: [{kind: huggingface, path: some/set}]\n"
    assert located(resolve_config(text, "run.yaml", (), str(tmp_path)), SOURCE) == "some/set"
    (tmp_path / "some" / "set").mkdir(parents=True)
    found = located(resolve_config(text, "run.yaml", (), str(tmp_path)), SOURCE)
    assert found == f"{tmp_path}/some/set"


def test_an_address_keeps_its_form() -> None:
    found = with_value("checkpoint.bucket", "s3://b/p?credentials=~/c&region=x")
    assert found.config.checkpoint.bucket == "s3://b/p?credentials=/home/me/c&region=x"
    assert with_value("checkpoint.bucket", "''").config.checkpoint.bucket == ""
    service = resolve_config("cluster: {notices_at: 'https://h:1'}\n", "run.yaml", (), "up")
    assert service.config.cluster.notices_at == "https://h:1"


def test_every_key_that_means_a_path_is_known() -> None:
    """A key whose description speaks of a file or folder is a path, or is listed here."""
    others = {"data.sources.*.field", "checkpoint.machine.name", "checkpoint.folder_survives"}
    others |= {"launch.kubernetes.claim", "launch.kubernetes.claim_at"}  # a name; a path of pods
    others |= {"launch.ssh.python", "launch.ssh.folder"}  # paths of other hosts
    others |= {"data.chat.template_name"}  # a name in a folder
    others |= {"rollout.rewards.*.function", "objective.reference.key"}  # names in a file, a folder
    words = ("folder", "path of", "file,", "file's path", "bucket for")
    meanings = meanings_of_keys()
    meant = {
        key
        for key, info in all_keys()
        if info.annotation in (str, str | None) and any(w in meanings[key] for w in words)
    }
    assert meant - others == {*FREE_PATHS, *PLACES}
