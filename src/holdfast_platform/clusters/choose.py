"""The kinds of disposable clusters. Each module is imported when its kind is asked for."""

from __future__ import annotations

from holdfast.errors import UserError
from holdfast_platform.clusters.cluster import DisposableCluster

KINDS = ("ray", "slurm")


def open_kind(kind: str) -> DisposableCluster:
    """Raises UserError for an unknown kind."""
    if kind == "ray":
        from holdfast_platform.clusters.ray import RayKind

        return RayKind()
    if kind == "slurm":
        from holdfast_platform.clusters.slurm import SlurmKind

        return SlurmKind()
    raise UserError(
        f"there is no kind of cluster {kind!r}", where="--kind", remedy=f"use {' or '.join(KINDS)}"
    )
