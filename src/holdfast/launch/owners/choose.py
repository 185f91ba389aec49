"""The owners of machines by the word that names them in `launch.on`."""

from __future__ import annotations

from importlib import import_module

from holdfast.errors import ConfigError, use_one_of
from holdfast.launch.owners.owner import MachineOwner

OWNERS = {
    "local": ("local", "LocalOwner"),
    "ssh": ("ssh.owner", "SshOwner"),
    "slurm": ("slurm.owner", "SlurmOwner"),
    "ray": ("ray.owner", "RayOwner"),
    "kubernetes": ("kubernetes.owner", "KubernetesOwner"),
}
"""Word -> module of this folder, class. A module is imported when its owner is used."""


def open_owner(word: str) -> MachineOwner:
    """Raises ConfigError for a word that names no owner."""
    if word not in OWNERS:
        raise ConfigError(
            f"{word!r} owns no machines that are known",
            where="--on",
            remedy=use_one_of(OWNERS),
        )
    module, name = OWNERS[word]
    found: MachineOwner = getattr(import_module(f"holdfast.launch.owners.{module}"), name)()
    return found
