"""Rounds of learners between two sites on an emulated link, next to what the planner predicts.

    python -m benchmarks.runtime.outer_links cells        # seconds and bytes of 24 cells
    python -m benchmarks.runtime.outer_links named        # the compute share of the plan's rounds
    python -m benchmarks.runtime.outer_links heartbeats   # control requests beside a transfer
    python -m benchmarks.runtime.outer_links overlap      # what inner steps hide of the exchange

Each site is one node with a network of its own. The kernel's token bucket limits the bits a second
in both directions. If the kernel has no netem, a process holds packets back. It needs what F9 needs
(docs/studies/score.md).

The run file gives the links, so that ranks send no faster. Before each cell, some rounds on a fast
link give the seconds of an inner step. They also give those
of a round without computing, coding and exchange. The exchange is predicted from what two copies
reach on the link, and from its latency.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median

from tests.support.commands import within, write_run_file
from tests.support.nodes import Nodes, nodes_of

from holdfast.cli.plan_rounds import read_round_request
from holdfast.events import GenerationStarted, OuterRound, StepDone, WorkerLost
from holdfast.launch.run.rounds import AUTO_CODECS
from holdfast.plan.cost.rounds import CodecChoice, RoundModel
from holdfast_lab.chaos.network import DEVICE, Network

NAMES = ("a", "b")
LINKS = ((10, 0), (30, 0), (100, 0))
"""Mbit/s, and milliseconds one way. On a kernel without netem, a process adds the milliseconds, and
it needs a quiet processor."""
STEPS = (10, 40)
ROUNDS = 5
"""Of a cell, after one that may have begun on the link before."""
SETTINGS = (
    "model.layers=2",
    "model.dim=192",
    "model.heads=4",
    "model.kv_heads=4",
    "model.ffn_dim=512",
    "data.sequence_length=32",
    "train.steps=100000",
    "train.evaluate.every=0",
    "train.batch_size=4",
    "train.microbatch_size=2",
    "outer.learners=2",
    "layout.workers=2",
    "checkpoint.every_steps=100000",
)
LARGE = ("model.dim=512", "model.ffn_dim=1536", "model.heads=8", "model.kv_heads=8")
"""So that a transfer fills the windows of TCP."""
DEEP = ("limit", "16mb")
"""A queue that loses nothing."""
ROUTER = ("latency", "400ms")
PROBE = """\
import http.client, sys, time
address, port, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
link, end = http.client.HTTPConnection(address, port, timeout=60), time.monotonic() + seconds
while time.monotonic() < end:
    start = time.monotonic()
    link.request("GET", "/healthz")
    link.getresponse().read()
    print(time.monotonic() - start, flush=True)
    time.sleep(0.1)
"""
PROBED_PORT = 9911
COPY = """\
import socket, sys, threading, time
role, address, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
if role == "server":
    listener = socket.create_server((address, 9912))
    print("ready", flush=True)
    link, _ = listener.accept()
else:
    link = socket.create_connection((address, 9912))
def receive(left):
    while left:
        left -= len(link.recv(min(left, 1 << 16)))
sender = threading.Thread(target=link.sendall, args=(bytes(2 * size),))
sender.start()
receive(size)  # until the window is open
start = time.monotonic()
receive(size)
print(size / (time.monotonic() - start), flush=True)
sender.join()
"""
COPY_BYTES = 3_000_000


@dataclass(frozen=True)
class Measured:
    """Medians of some rounds. A round waits for its slowest worker."""

    round_s: float
    inner_s: float  # of the slowest rank
    codec_s: float
    sent_bytes: int  # of the rank that sends most
    rest_s: float


@contextmanager
def running(folder: Path, *settings: str) -> Iterator[tuple[Nodes, Network]]:
    """A run of two nodes, which has begun its first round on a plain link."""
    with Network() as network:
        network.up(NAMES)
        run_file = folder / "run.yaml"
        with nodes_of(run_file, folder / "run", *SETTINGS, *settings) as run:
            for name in NAMES:
                own = [*network.settings(name), "cluster.min_nodes=2", "cluster.beat_seconds=2"]
                if name == NAMES[0]:
                    own.append(f"cluster.metrics_port={PROBED_PORT}")
                run.start(name, settings=own, before=network.command(name))
            run.wait_step(1, nodes=set(NAMES))
            yield run, network


def rounds_of(run: Nodes, coded: bool, count: int) -> Measured:
    """Wait for so many more rounds, after one that is under way."""
    first = max(run.losses()) + 2
    run.wait_step(first + count - 1)
    done = {e.step: e for e in run.events(StepDone) if first <= e.step < first + count}
    rounds = [e for e in run.events(OuterRound) if first <= e.step < first + count]
    own = [e for e in rounds if e.rank == 0 and e.step in done]
    rest = [
        done[e.step].seconds
        - (e.inner_s + e.codec_s + e.waited_s)
        - (0.0 if coded else done[e.step].phases.get("reduce", 0.0))
        for e in own
    ]
    return Measured(
        median(done[e.step].seconds for e in own),
        median(max(e.inner_s for e in rounds if e.step == step) for step in done),
        median(e.codec_s for e in own),
        max(e.sent_bytes for e in rounds),
        max(0.0, median(rest)),
    )


def links_of(bandwidth: float) -> str:
    """Return the key with the links of both sites. bandwidth: bytes a second."""
    rows = (f"{{name: site-{n}, nodes: [{n}], mbit_s: {bandwidth * 8e-6:.2f}}}" for n in NAMES)
    return f"cluster.sites=[{', '.join(rows)}]"


def cells(folder: Path, codecs: Sequence[str]) -> int:
    """Print a line for each cell, and how many are predicted within 10 % and 2 %."""
    prepare(folder)
    model, choices = planned(folder)
    near = near_bytes = near_share = count = 0
    times: dict[tuple[int, int, int], dict[str, tuple[float, float]]] = {}
    print(f"{model.values:,} values of a change, two sites of one worker; Mbit/s, ms, inner steps")
    reached: dict[tuple[int, int], float] = {}
    with Network() as network:
        network.up(NAMES)
        for link in LINKS:
            shape(network, *link)
            reached[link] = copied(network)
            print(f"{link[0]} Mbit/s, {link[1]} ms: copies reach {reached[link] * 8e-6:.1f} Mbit/s")
    chosen_codecs = [codec for codec in choices if codec.name in codecs]
    for every, codec, link in product(STEPS, chosen_codecs, LINKS):
        name, (mbit_s, ms) = codec.name, link
        place = folder / f"{name}-{every}-{mbit_s}-{ms}"
        place.mkdir()
        (place / "run.yaml").write_text((folder / "run.yaml").read_text())
        keys = (f"outer.every_steps={every}", f"outer.codec.name={name}", links_of(reached[link]))
        with running(place, *keys) as (run, network):
            shape(network, 10_000, 0)
            plain = rounds_of(run, codec.payload > 0, ROUNDS)
            shape(network, mbit_s, ms)
            found = rounds_of(run, codec.payload > 0, ROUNDS)
        own = replace(model, inner_s=plain.inner_s / every, rest_s=plain.rest_s)
        sites = tuple(
            replace(site, bandwidth=reached[link], latency_s=ms / 1000) for site in model.sites
        )
        told = replace(own, sites=sites).cost(every, codec)
        share = found.inner_s / found.round_s
        error = told.round_s / found.round_s - 1
        bytes_error = told.sent_bytes / found.sent_bytes - 1
        near += abs(error) <= 0.1
        near_share += abs(told.compute_share / share - 1) <= 0.1
        near_bytes += abs(bytes_error) <= 0.02
        count += 1
        times.setdefault((mbit_s, ms, every), {})[name] = (told.round_s, found.round_s)
        print(
            f"{mbit_s:4} {ms:3} {every:3} {name:5} round {found.round_s:6.3f} s, predicted "
            f"{told.round_s:6.3f} ({error:+.1%}); share {share:5.1%}, predicted "
            f"{told.compute_share:5.1%}; sent {found.sent_bytes:,}, predicted "
            f"{told.sent_bytes:,.0f} ({bytes_error:+.2%})",
            flush=True,
        )
    for (mbit_s, ms, every), cell in times.items():
        chosen = min(cell, key=lambda name: cell[name][0])
        best = min(cell, key=lambda name: cell[name][1])
        behind = cell[chosen][1] / cell[best][1] - 1
        print(
            f"{mbit_s} Mbit/s, {ms} ms, {every} steps: auto takes {chosen}, {behind:.1%} behind "
            f"{best}"
        )
    print(
        f"of {count} cells, {near} rounds and {near_share} shares are within 10 %, and the bytes "
        f"of {near_bytes} within 2 %"
    )
    return 0


def named(folder: Path) -> int:
    """Print the compute share at 100 Mbit/s with the inner steps that the planner names."""
    prepare(folder)
    model, choices = planned(folder)
    for codec in choices:
        if codec.name not in ("none", "int8"):
            continue
        place = folder / f"{codec.name}-named"
        place.mkdir()
        (place / "run.yaml").write_text((folder / "run.yaml").read_text())
        with running(place, "outer.every_steps=40", f"outer.codec.name={codec.name}") as (run, net):
            shape(net, 10_000, 0)
            plain = rounds_of(run, codec.payload > 0, ROUNDS)
            shape(net, 100, 0)
            bandwidth = copied(net)
        sites = tuple(replace(s, bandwidth=bandwidth, latency_s=0.0) for s in model.sites)
        own = replace(model, inner_s=plain.inner_s / 40, rest_s=plain.rest_s, sites=sites)
        told = own.least_steps(codec, 0.9)
        assert told is not None
        more = (
            *(f"outer.every_steps={told.every_steps}", f"outer.codec.name={codec.name}"),
            links_of(bandwidth),
        )
        again = folder / f"{codec.name}-again"
        again.mkdir()
        (again / "run.yaml").write_text((folder / "run.yaml").read_text())
        with running(again, *more) as (run, net):
            shape(net, 100, 0)
            found = rounds_of(run, codec.payload > 0, 3)
        print(
            f"100 Mbit/s, {codec.name}: the plan names {told.every_steps} inner steps; "
            f"compute share {found.inner_s / found.round_s:.1%}",
            flush=True,
        )
    return 0


def overlap(folder: Path, mbit_s: float) -> int:
    """Print rounds with and without overlap on a slow link, next to what is predicted."""
    prepare(folder)
    model, choices = planned(folder)
    every = STEPS[-1]
    for codec in (choice for choice in choices if choice.name in ("none", "int8")):
        for tau in (0, every // 2):
            place = folder / f"{codec.name}-{tau}"
            place.mkdir()
            (place / "run.yaml").write_text((folder / "run.yaml").read_text())
            keys = {"every_steps": every, "overlap_steps": tau, "codec.name": codec.name}
            settings = [f"outer.{key}={value}" for key, value in keys.items()]
            with running(place, *settings) as (run, network):
                shape(network, 10_000, 0)
                plain = rounds_of(run, codec.payload > 0, ROUNDS)
                shape(network, mbit_s, 0)
                found = rounds_of(run, codec.payload > 0, ROUNDS)
                bandwidth = copied(network)
            sites = tuple(replace(s, bandwidth=bandwidth, latency_s=0.0) for s in model.sites)
            own = replace(model, rest_s=plain.rest_s, sites=sites, overlap_steps=tau)
            told = replace(own, inner_s=plain.inner_s / every).cost(every, codec)
            print(
                f"{mbit_s:g} Mbit/s, {codec.name}, {every} steps, overlap {tau}: round "
                f"{found.round_s:.3f} s, {plain.round_s:.3f} s on a fast link, predicted "
                f"{told.round_s:.3f}; share {found.inner_s / found.round_s:.1%}, predicted "
                f"{told.compute_share:.1%}",
                flush=True,
            )
    return 0


def shape(network: Network, mbit_s: float, ms: float, queue: Sequence[str] = DEEP) -> None:
    """Give the line between the sites a bandwidth, by the kernel's token bucket at both ends, and a
    latency one way. queue: of the bucket."""
    rate = ("tbf", "rate", f"{mbit_s}mbit", "burst", "32kb", *queue)
    for name in NAMES:
        command = [*network.command(name), "tc", "qdisc", "replace", "dev", DEVICE, "root", *rate]
        subprocess.run(command, check=True, capture_output=True)
    network.set_delay(NAMES[1], ms)


def copied(network: Network) -> float:
    """Return the bytes a second that two copies reach, one each way at the same time."""
    words = (network.address("a"), str(COPY_BYTES))
    python = (sys.executable, "-c", COPY)
    server = subprocess.Popen(
        [*network.command("a"), *python, "server", *words], stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    server.stdout.readline()
    client = [*network.command("b"), *python, "client", *words]
    said = subprocess.run(client, check=True, capture_output=True, text=True).stdout
    server.communicate()
    return float(said)


def prepare(folder: Path) -> Path:
    run_file = write_run_file(folder)
    within("data", "prepare", run_file, *SETTINGS).succeeds()
    return run_file


def planned(folder: Path) -> tuple[RoundModel, list[CodecChoice]]:
    """The model of the run's rounds, and the codecs as they are measured here."""
    words = [*SETTINGS, "cluster.places=1", "cluster.threads_per_worker=1"]
    request = read_round_request(folder / "run.yaml", words, "", "2x1@100", None)
    assert request is not None
    return request.model, [c for c in request.codecs if c.name in AUTO_CODECS]


def heartbeats(folder: Path, seconds: float, codec: str) -> int:
    """Print the latency of control requests over a link that a transfer fills."""
    prepare(folder)
    settings = ("outer.every_steps=5", f"outer.codec.name={codec}", *LARGE)
    with running(folder, *settings) as (run, network):
        shape(network, 10, 20, ROUTER)
        rounds_of(run, False, 1)
        probe = [*network.command("b"), sys.executable, "-c", PROBE]
        words = (network.address("a"), str(PROBED_PORT), str(seconds))
        said = subprocess.run([*probe, *words], capture_output=True, text=True, check=True).stdout
        times = sorted(map(float, said.split()))
        found = rounds_of(run, False, 1)
        lost, begun = run.events(WorkerLost), run.events(GenerationStarted)
    print(
        f"10 Mbit/s, 20 ms, a round of {found.round_s:.1f} s with {found.inner_s:.1f} s of "
        f"computing: {len(times)} control requests, median {median(times):.3f} s, p99 "
        f"{times[int(0.99 * len(times))]:.3f} s, longest {times[-1]:.3f} s; "
        f"{len(lost)} workers lost"
    )
    for event in begun:
        print(f"a generation from step {event.step}: {event.reason} {event.cause}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=("cells", "named", "heartbeats", "overlap"))
    parser.add_argument("--seconds", type=float, default=60, help="of control requests")
    parser.add_argument("--mbit-s", type=float, default=30, help="overlap: of the link")
    parser.add_argument("--codec", default="none", help="heartbeats: outer.codec.name")
    parser.add_argument("--codecs", nargs="*", default=AUTO_CODECS, help="cells: of these codecs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.part == "cells":
            return cells(Path(folder) / "links", options.codecs)
        if options.part == "named":
            return named(Path(folder) / "links")
        if options.part == "overlap":
            return overlap(Path(folder) / "links", options.mbit_s)
        return heartbeats(Path(folder) / "links", options.seconds, options.codec)


if __name__ == "__main__":
    sys.exit(main())
