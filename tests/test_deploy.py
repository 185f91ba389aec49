"""The files of `deploy/`, each read and checked against its format.

`make image` builds the image. The slow tests build the package from the image's files, and run
the commands of the Compose file as processes. systemd verifies the unit.
"""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import jsonschema
import pytest
import yaml

from holdfast.config.loading.load import load_config
from holdfast.errors import UserError
from tests.support.commands import start
from tests.support.deploy_files import (
    DEPLOY,
    compose,
    container_instructions,
    is_executable,
    node_commands,
    unit_command,
    unit_settings,
)
from tests.support.kubernetes_definitions import problems
from tests.support.ranks import DEADLINE_S, ROOT, wait_until

SCHEMA = ROOT / "tests/golden/compose/compose_spec.json.gz"
KNOWN = {"FROM", "ARG", "ENV", "WORKDIR", "COPY", "RUN", "LABEL", "USER", "STOPSIGNAL"}
KNOWN |= {"ENTRYPOINT", "CMD"}


def test_the_image_names_and_pins_what_it_holds() -> None:
    found = container_instructions()
    assert {word for word, _ in found} <= KNOWN
    assert [rest for word, rest in found if word == "FROM"] == ["${BASE} AS build", "${BASE}"]
    assert ("ARG", "BASE") in found  # without a default: a tag would name another image each week
    installs = [rest for word, rest in found if word == "RUN" and "pip install" in rest]
    assert len(installs) == 2
    assert all(" -c constraints.txt " in each for each in installs)
    assert any("pip freeze --all > /opt/holdfast/contents.txt" in rest for _, rest in found)
    constrained = (ROOT / "constraints.txt").read_text().splitlines()
    assert all("==" in line for line in constrained if line and not line.startswith("#"))


def test_the_image_copies_files_that_are_there_and_runs_as_an_ordinary_user() -> None:
    found = container_instructions()
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for word, rest in found:
        if word == "COPY" and "--from=" not in rest:
            for name in rest.split()[:-1]:
                assert (ROOT / name).exists(), name
                assert f"!{name}" in ignored, name
    assert [rest for word, rest in found if word == "USER"] == ["1000:1000"]
    assert ("ENTRYPOINT", '["holdfast"]') in found
    (extras,) = [rest for word, rest in found if rest.startswith("EXTRAS=")]
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras.removeprefix("EXTRAS=").split(",")) <= set(known)


def test_the_compose_file_fits_its_schema_and_names_keys_of_holdfast() -> None:
    made = compose({"BASE": "python@sha256:0"})
    schema = json.loads(gzip.decompress(SCHEMA.read_bytes()))
    errors = jsonschema.Draft7Validator(schema).iter_errors(made)
    assert [error.message for error in errors] == []
    with pytest.raises(AssertionError, match="by its digest"):
        compose({})
    for name, words in node_commands().items():
        assert words[0] == ("train" if name == "node-1" else "join")
        config = load_config(DEPLOY / "run.yaml", [word for word in words if "=" in word]).config
        assert config.cluster.metrics_port == 9400
        assert config.cluster.grace_seconds <= 60  # stop_grace_period
        assert made["services"][name]["stop_grace_period"] == "60s"
    assert made["services"]["node-2"]["image"] == made["services"]["node-1"]["image"]


def test_the_unit_starts_a_node_that_can_save_and_that_no_mistake_starts_again() -> None:
    command = unit_command("my-run", "machine")
    assert command[1:5] == ["join", "/runs/my-run", "--node", "machine"]
    config = load_config(DEPLOY / "run.yaml", command[5:]).config
    settings = unit_settings()
    assert settings["TimeoutStopSec"] == [str(int(config.cluster.grace_seconds))]
    assert settings["RestartPreventExitStatus"] == [str(UserError.exit_code)]
    assert settings["KillMode"] == ["mixed"]
    assert any("HOLDFAST_SECRET_FILE=%d/secret" in each for each in settings["Environment"])


def test_the_rights_of_agents_are_objects_of_kubernetes() -> None:
    made = list(yaml.safe_load_all((DEPLOY / "kubernetes/nodes-role.yaml").read_text()))
    assert [each["kind"] for each in made] == ["ClusterRole", "ClusterRoleBinding"]
    assert [problems(each) for each in made] == [[], []]


@pytest.mark.slow
def test_the_package_builds_from_the_files_that_the_image_gets(tmp_path: Path) -> None:
    for word, rest in container_instructions():
        if word == "COPY" and "--from=" not in rest:
            for name in rest.split()[:-1]:
                source = ROOT / name
                copy = shutil.copytree if source.is_dir() else shutil.copy
                copy(source, tmp_path / name)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "."]
    subprocess.run([*command, "-w", "out"], cwd=tmp_path, check=True, capture_output=True)
    assert list((tmp_path / "out").glob("holdfast-*.whl"))


@pytest.mark.slow
@pytest.mark.skipif(not is_executable("systemd-analyze"), reason="apt-get install systemd")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    """With a program and a user that this machine has."""
    text = (DEPLOY / "holdfast-agent@.service").read_text()
    unit = tmp_path / "holdfast-agent@run.service"
    unit.write_text(
        text.replace("/opt/holdfast/bin/holdfast", "/bin/true").replace(
            "User=holdfast", "User=root"
        )
    )
    command = ["systemd-analyze", "verify", "--man=no", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_the_commands_of_the_compose_file_train_the_run(tmp_path: Path) -> None:
    """As processes, with folders of this test in place of the volumes."""
    runs = tmp_path / "runs"
    runs.mkdir()
    run_file = tmp_path / "run.yaml"
    places = {
        "/runs": str(runs),
        "/texts": str(ROOT / "docs" / "guide"),
        "/etc/holdfast": str(tmp_path),
    }

    def placed(text: str) -> str:
        for inside, outside in places.items():
            text = text.replace(inside, outside)
        return text.replace("cluster.metrics_port=9400", "cluster.metrics_port=0")

    run_file.write_text(placed((DEPLOY / "run.yaml").read_text()))
    commands = {name: [placed(word) for word in each] for name, each in node_commands().items()}
    first, *others = commands.values()
    agents = [start(*first, "train.steps=30")]
    try:
        _wait_for(runs / "compose/resolved.json", agents[0])
        agents += [start(*each) for each in others]
        assert [agent.wait(DEADLINE_S) for agent in agents] == [0, 0, 0]
    finally:
        for agent in agents:
            agent.kill()


def _wait_for(path: Path, agent: subprocess.Popen[str]) -> None:
    wait_until(lambda: path.exists() or agent.poll() is not None, DEADLINE_S, str(path))
    assert path.exists(), "the first node has ended"
