"""A node finds its rack and zone in the environment, and the run file's words come first."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from holdfast.config.loading.load import LoadedConfig, load_config
from holdfast.errors import ConfigError
from holdfast.launch.node.fleet import Fleet
from holdfast.launch.node.node_place import PLACE_VARIABLE, ZONE_VARIABLE, by_place
from holdfast.launch.start.facts import Facts
from holdfast.machine.hardware import detect_hardware
from tests.support.ranks import wait_until


def loaded(*overrides: str) -> LoadedConfig:
    return load_config(None, [f"folder={Path.cwd()}/none", *overrides])


def with_place(before: LoadedConfig, environ: Mapping[str, str]) -> LoadedConfig:
    return before.with_values(by_place(before, Facts(detect_hardware(), environ)))


def rack_and_zone(found: LoadedConfig) -> tuple[str, str]:
    machine = found.config.checkpoint.machine
    return machine.rack, machine.zone


SLURM = {
    "SLURM_TOPOLOGY_ADDR": "spine.leaf0.n1",
    "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node",
}


def test_slurm_names_the_switch_and_the_owner_the_rest() -> None:
    assert rack_and_zone(with_place(loaded(), SLURM)) == ("leaf0", "")
    told = SLURM | {PLACE_VARIABLE: "zone=us-east-1a, power=p2"}
    assert rack_and_zone(with_place(loaded(), told)) == ("leaf0", "us-east-1a")
    assert with_place(loaded(), told).config.checkpoint.machine.power == "p2"
    assert rack_and_zone(with_place(loaded(), {ZONE_VARIABLE: "z"})) == ("", "z")
    assert rack_and_zone(with_place(loaded(), {ZONE_VARIABLE: ""})) == ("", "")


def test_the_run_file_comes_before_the_environment() -> None:
    found = with_place(loaded("checkpoint.machine.rack=mine"), SLURM)
    assert rack_and_zone(found) == ("mine", "")


def test_a_slurm_without_switches_names_no_rack() -> None:
    flat = {"SLURM_TOPOLOGY_ADDR": "n1", "SLURM_TOPOLOGY_ADDR_PATTERN": "node"}
    before = loaded()
    assert with_place(before, flat) is before


@pytest.mark.parametrize("text", ["rck=1", "rack=", "rack", "name=x"])
def test_words_that_name_no_place_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="names no place") as refused:
        with_place(loaded(), {PLACE_VARIABLE: text})
    assert refused.value.where == PLACE_VARIABLE


# --- which processes of a node are found, so that a fault hits the one that it names --------------
TEMPLATE = "import os, time\nos.fork() and os.fork()\ntime.sleep(600)"
AGENT = f"""\
import ctypes, subprocess, sys, time
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # whoever loses his parent becomes a child of this one
command = [sys.executable, "-c", {TEMPLATE!r}, "holdfast.elastic.worker.fork_server"]
subprocess.Popen(command, start_new_session=True)
time.sleep(600)
"""


def test_workers_are_found_also_when_their_template_has_just_ended(tmp_path: Path) -> None:
    """It is a zombie until the agent looks, and they are the agent's own children."""
    fleet = Fleet(tmp_path, [sys.executable, "-c", AGENT], [])
    try:
        fleet.start("a")
        wait_until(lambda: len(fleet.worker_pids("a")) == 2, what="two workers")
        template, workers = fleet.child_pid("a", "template"), fleet.worker_pids("a")
        assert template is not None
        assert template not in workers
        os.kill(template, signal.SIGKILL)
        wait_until(lambda: fleet.child_pid("a", "template") is None, what="the fork server's end")
        assert Path(f"/proc/{template}").exists(), "as a zombie"
        assert sorted(fleet.worker_pids("a")) == sorted(workers)
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: fleet.worker_pids("a") == [], what="their end")
    finally:
        for pid in reversed(fleet.process_tree("a")):
            os.kill(pid, signal.SIGKILL)
        fleet.kill_all()
