"""The name of a node that the user gave none."""

from __future__ import annotations

import platform
from collections.abc import Mapping

from holdfast.config.sections.cluster import MAX_NAME_LENGTH

NAME_VARIABLES = ("SLURMD_NODENAME", "POD_NAME")
"""Slurm's name of the node (several may share a host); the pod's, as manifests here set it."""


def default_node_name(environ: Mapping[str, str]) -> str:
    """Return the name by which Slurm or Kubernetes knows this node, otherwise the machine's.

    A name that is too long keeps its end: what tells pods of one set apart is there."""
    named = (environ.get(variable, "") for variable in NAME_VARIABLES)
    name = next(filter(None, named), "") or platform.node() or "localhost"
    return name[-MAX_NAME_LENGTH:].lstrip(".-")
