"""Pauses of a recovery without the work that is lost, each number with its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast.policy.membership.state import MembershipRules

RUNG_S: Mapping[int, float] = dict(enumerate((0.055, 0.145, 0.447, 0.672, 0.557, 0.010, 5.84)))
"""Seconds beyond a step until training continues, by rung of the recovery ladder: the worst of
`python -m benchmarks.runtime.recovery` (four workers, 0.7 M parameters, CPU;
docs/log/measurements.md). Bytes and devices' communicators are added."""


@dataclass(frozen=True)
class RecoveryCosts:
    """Seconds and bandwidths of a recovery. A test or a caller may replace each.

    communicator_s: until an accelerator's groups work again, 1.4 to 2.0 s for 32 to 1,024 ranks
    (NCCL shrink, NeMo-RL pull request 3186); 0 for CPUs. save_pause_s: training waits for a save
    (`benchmarks.runtime.gpu --only train-1b`, 14.8 GB: 2 ms).
    """

    rung_s: Mapping[int, float] = field(default_factory=lambda: RUNG_S)  # fixed part of each
    detection_s: float = MembershipRules.node_timeout_s  # until a lost node is noticed
    communicator_s: float = 2.0
    save_pause_s: float = 0.002
    sent_share: float = 0.1  # of a save's time on the network, that training feels; assumed
    store_bandwidth: float = 1e9  # bytes a second of a node to and from the run store; assumed
    node_return_s: float = 7_200.0  # until a lost node is replaced; assumed
    spot_return_s: float = 1_200.0  # the same of a spot node; assumed
    domain_return_s: float = 3_600.0  # of a rack or zone; assumed

    def return_s(self, is_spot: bool) -> float:
        """Until a node of such a pool is replaced."""
        return self.spot_return_s if is_spot else self.node_return_s
