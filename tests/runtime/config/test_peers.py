"""Peers in the run file: what is refused, and in which words."""

from __future__ import annotations

import pytest

from holdfast.config.loading.load import resolve_config
from holdfast.errors import ConfigError

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
