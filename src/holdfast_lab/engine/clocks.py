"""Time and power of a node under a cap: a documented model of clocks. Pure.

A cap lowers the clock of a device. The part of a step that waits for its arithmetic takes longer,
the part that waits for memory, links or the host does not:

    time(c) = bound / c + 1 - bound          relative to full clock, c in (0, 1]

The power of switching is C V^2 f, and the voltage falls with the clock. So the power falls with the
cube of the clock (Horowitz, Indermaur and Gonzalez, IEEE Symposium on Low Power Electronics, 1994):

    watts(c) = host + idle + (busy - idle) c^3

BOUND comes from one published pair (McDonald et al., Findings of NAACL 2022, arXiv 2205.09646).
Under a cap of 150 W, devices of 250 W used 13.7 % less energy. Models trained 6.8 % longer. A model
with 40 W idle gives both with a bound of 0.7. The best cap differs from device
to device, so measure it before you rely on it.
"""

from __future__ import annotations

from dataclasses import dataclass

BOUND = 0.7
"""Share of a step that waits for the clock."""
LEAST_CLOCK = 0.5
"""Lower clocks are outside of what was measured."""
_CLOCKS = tuple(k / 40 for k in range(20, 41))


@dataclass(frozen=True)
class NodePower:
    """Watts of one node. host_w: all but the devices, while it is on. idle_w, busy_w: of its
    devices together. off_w: of a node that is powered down."""

    host_w: float
    idle_w: float
    busy_w: float
    off_w: float = 0.0
    bound: float = BOUND

    def __post_init__(self) -> None:
        if not (0 <= self.idle_w <= self.busy_w and self.host_w >= 0 and 0 <= self.bound <= 1):
            raise ValueError("watts must be 0 or more, idle at most busy, a share between 0 and 1")

    @property
    def waiting_w(self) -> float:
        """A node that is on and does nothing."""
        return self.host_w + self.idle_w

    def watts(self, clock: float) -> float:
        """Of a node that trains at this share of the full clock."""
        return self.waiting_w + (self.busy_w - self.idle_w) * clock**3

    def rate(self, clock: float) -> float:
        """Work in a second, relative to the full clock."""
        return 1 / (self.bound / clock + 1 - self.bound)

    def clock_under(self, cap_w: float) -> float:
        """The clock of devices that may take `cap_w` together; never below LEAST_CLOCK."""
        share = max(0.0, cap_w - self.idle_w) / max(1e-9, self.busy_w - self.idle_w)
        return float(min(1.0, max(LEAST_CLOCK, share ** (1 / 3))))


def clocks(is_capped: bool) -> tuple[float, ...]:
    """The clocks that a policy chooses from."""
    return _CLOCKS if is_capped else (1.0,)
