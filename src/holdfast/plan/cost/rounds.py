"""The time, bytes and price of a round of learners on sites with slow links between them.

A worker computes its learners one after the other. With a codec, the payload of a learner leaves
while the next one computes. So only what the last payloads take is seen. Sums in fp32 leave when
all learners are done. A site's link carries what its workers send to other sites, and as much comes
in. It is shared by them all:

    round = learners of a worker x (inner steps x seconds of one + encoding)
            + the rest of the exchange + decoding of all learners + the rest of a round

With `outer.overlap_steps` a change leaves so many inner steps before its learner is done. With
fragments a round has a part of the inner steps, and exchanges a part of the values.

Links inside a site count as instant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log2

from holdfast.core.round_bytes import bytes_to_each
from holdfast.core.sharding.reduction_tree import Shares

MOST_STEPS = 10**6
"""Inner steps of a round, as `outer.every_steps` allows."""
OVERHEAD_MARGIN = 1.25
"""All of a round but its computing may take so much longer than predicted. A number of steps still
reaches its compute share then (`benchmarks.runtime.outer_links named`)."""
FIRST_WINDOW_BYTES = 14_480
"""That a connection sends before it hears of the other side (RFC 6928)."""


@dataclass(frozen=True)
class Site:
    """Workers in one place, and the link that joins them with all other sites."""

    name: str
    workers: int
    bandwidth: float  # bytes a second, one way
    latency_s: float = 0.0  # one way
    usd_per_gb: float = 0.0  # of 1e9 bytes that leave it


@dataclass(frozen=True)
class CodecChoice:
    """A codec with its payload, and what it costs on the workers' processors."""

    name: str
    payload: int  # bytes; 0: sums travel in fp32
    encode_s: float = 0.0  # of one change
    decode_s: float = 0.0


@dataclass(frozen=True)
class RoundCost:
    """The prediction of one round."""

    codec: str
    every_steps: int
    compute_s: float  # of the inner steps
    codec_s: float
    exchange_s: float  # that no computing hides
    rest_s: float
    sent_bytes: float  # of the worker that sends most
    leaving_bytes: float  # of all sites, over their links
    leaving_by_site: Mapping[str, float]
    link_usd: float  # of these bytes
    usd: float | None  # None: the price of the machines is not known

    @property
    def round_s(self) -> float:
        return self.compute_s + self.codec_s + self.exchange_s + self.rest_s

    @property
    def compute_share(self) -> float:
        return self.compute_s / self.round_s if self.round_s else 0.0

    @property
    def safe_share(self) -> float:
        """The compute share if all else takes `OVERHEAD_MARGIN` times as long."""
        rest_s = OVERHEAD_MARGIN * (self.round_s - self.compute_s)
        return self.compute_s / (self.compute_s + rest_s) if self.round_s else 0.0


@dataclass(frozen=True)
class RoundModel:
    """Rounds of one run. shares: the learners of each worker, site by site. Inner steps of the
    methods are `outer.every_steps`, of which a round has one part for each fragment."""

    shares: Shares
    values: int  # of a change; with fragments of the largest one
    sites: tuple[Site, ...]
    inner_s: float  # of one inner step of one learner
    rest_s: float = 0.0  # of a round without computing, codec and exchange
    usd_per_hour: float | None = None  # of all machines
    fragments: int = 1
    overlap_steps: int = 0  # inner steps of a learner after its change has left

    def cost(self, every_steps: int, codec: CodecChoice) -> RoundCost:
        """Return the cost of a round of so many inner steps with a codec."""
        most = max(len(share) for share in self.shares)
        compute_s = most * (every_steps // self.fragments) * self.inner_s
        to_each = bytes_to_each(self.shares, self.values, codec.payload)
        learners = sum(len(share) for share in self.shares)
        decode_s = learners * codec.decode_s
        turn_s = compute_s / most + codec.encode_s
        end_s = self._exchange_end_s(turn_s, most, to_each, codec)
        codec_s = most * codec.encode_s + decode_s
        leaving = self._leaving(to_each)
        round_s = end_s + decode_s + self.rest_s
        usd = sum(n * site.usd_per_gb for n, site in zip(leaving, self.sites, strict=True)) / 1e9
        machines = None if self.usd_per_hour is None else self.usd_per_hour * round_s / 3600
        return RoundCost(
            codec.name,
            every_steps,
            compute_s,
            codec_s,
            end_s - most * turn_s,
            self.rest_s,
            max(to_each) * (len(to_each) - 1),
            sum(leaving),
            {site.name: n for site, n in zip(self.sites, leaving, strict=True)},
            usd,
            None if machines is None else machines + usd,
        )

    def least_steps(self, codec: CodecChoice, share: float) -> RoundCost | None:
        """Return the round with the fewest inner steps whose safe share is at least `share`; None
        if there is none."""
        part = self.fragments  # a round has at least one step before its change leaves
        low = high = self.overlap_steps + 1
        while self.cost(high * part, codec).safe_share < share:
            low, high = high, high * 2
            if high * part > MOST_STEPS:
                return None
        while low < high:
            middle = (low + high) // 2
            if self.cost(middle * part, codec).safe_share < share:
                low = middle + 1
            else:
                high = middle
        return self.cost(high * part, codec)

    def _members(self) -> list[range]:
        """The workers of each site."""
        found, first = [], 0
        for site in self.sites:
            found.append(range(first, first + site.workers))
            first += site.workers
        return found

    def _leaving(self, to_each: Sequence[float]) -> list[float]:
        """The bytes that leave each site in a round."""
        count = len(to_each)
        return [sum(to_each[r] for r in own) * (count - len(own)) for own in self._members()]

    def _exchange_end_s(
        self, turn_s: float, most: int, to_each: Sequence[float], codec: CodecChoice
    ) -> float:
        """When the last byte has come, in seconds after the start of the round."""
        members, count = self._members(), len(to_each)
        overlap_s = self.overlap_steps * self.inner_s
        ends = [turn_s * most]
        for site, own in zip(self.sites, members, strict=True):
            away = [r for r in range(count) if r not in own]
            if not away or not own:
                continue
            out = [(to_each[r] * len(away), len(self.shares[r])) for r in own]
            into = [(to_each[r] * len(own), len(self.shares[r])) for r in away]
            waves = most if codec.payload else 1
            for parts in (out, into):
                at = 0.0
                for wave in range(waves):
                    at = max(at, turn_s * (wave + 1 if codec.payload else most) - overlap_s)
                    size = sum(n / k if codec.payload else n for n, k in parts if k > wave)
                    at += size / site.bandwidth
                latency_s = max(s.latency_s for s in self.sites)
                flow = max(to_each) / (waves if codec.payload else 1)
                trips = 1 if codec.payload else 2
                ends.append(at + trips * latency_s + _ramp_s(flow, site.bandwidth, latency_s))
        return max(ends)


def _ramp_s(flow: float, bandwidth: float, latency_s: float) -> float:
    """Seconds that a connection loses until its window fills the link (slow start)."""
    window = min(flow, 2 * latency_s * bandwidth)
    return 2 * latency_s * log2(max(1.0, window / FIRST_WINDOW_BYTES))


def fastest(model: RoundModel, every_steps: int, codecs: Sequence[CodecChoice]) -> RoundCost:
    """Return the shortest round. Of equal ones, the first codec wins."""
    return min((model.cost(every_steps, codec) for codec in codecs), key=lambda c: c.round_s)


def best_round(
    model: RoundModel, codecs: Sequence[CodecChoice], share: float
) -> tuple[RoundCost | None, Mapping[str, RoundCost]]:
    """Return the round with the fewest inner steps that reaches a compute share, over all codecs,
    and that of each codec which reaches it."""
    found = {codec.name: model.least_steps(codec, share) for codec in codecs}
    reached = {name: cost for name, cost in found.items() if cost is not None}
    best = min(reached.values(), key=lambda cost: cost.every_steps, default=None)
    return best, reached
