"""`cluster.sites`: places that slow links join."""

from __future__ import annotations

from fnmatch import fnmatchcase

from pydantic import Field

from holdfast.config.sections.base import Section


class SiteConfig(Section):
    """One place, and the link that joins it with all other sites. Links inside it count as
    fast."""

    name: str = Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$")
    """the zone of its nodes, for copies of snapshots, replicas and governance"""
    nodes: tuple[str, ...] = ()
    """names of its nodes; * stands for any characters"""
    workers: int = Field(0, ge=0)
    """workers that `holdfast plan` expects there; 0: an equal part of layout.workers"""
    mbit_s: float | None = Field(None, gt=0)
    """Mbit/s that a copy of a file reaches from it to other sites and back, one way. Left out: a
    run measures it when it starts"""
    latency_ms: float | None = Field(None, ge=0)
    """milliseconds one way to another site; of two sites, the larger value counts. Left out: 0, or
    measured with mbit_s"""
    usd_per_gb: float = Field(0.0, ge=0, description="price of 1e9 bytes that leave it")

    def has(self, node: str) -> bool:
        """Return True if a node of this name belongs to the site."""
        return any(fnmatchcase(node, pattern) for pattern in self.nodes)
