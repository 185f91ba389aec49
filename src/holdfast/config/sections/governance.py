"""The `governance` section: where a run and its data may be."""

from __future__ import annotations

import re

from holdfast.config.sections.base import InPlace, Section


class GovernanceConfig(Section):
    """Rules of the user's organisation that a run keeps."""

    regions: InPlace[tuple[str, ...]] = ()
    """regions or zones, such as eu-west-1, in which data, memory tiers, checkpoints and nodes have
    to lie; none: anywhere (docs/guide/governance.md)"""

    def allows(self, zone: str) -> bool:
        """Whether a zone or region lies in one of `regions`: eu-west-1a and eu-west-1-b lie in
        eu-west-1, and eu-west-10 does not."""
        return any(
            re.fullmatch(re.escape(region) + "(-.+|[A-Za-z]+)?", zone) for region in self.regions
        )
