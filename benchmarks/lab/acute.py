"""Staging against a multi-level baseline: `python -m benchmarks.lab.acute [--quick]`.

This follows ACUTE (Cho et al., IEEE Access 12, 2024, pp. 116891-116904). ACUTE stages checkpoints
in the memory of a stable node. It reports 43.30 % faster checkpoints than a multi-level scheme on
average. Here the baseline is PyTorch's DCP: `async_save` copies into local memory, then writes into
network storage that takes 100 MB/s. Ours copies in the background of the step into the mover's
arena. The mover sends it to a real `holdfast stage` over a link of 10 Gbit/s and, at the same time,
writes it into the same storage. Both train the same steps, in real processes, and save at the same
cadence.

    pause           seconds in which training pauses for a save
    safe outside    from the begin of a save until another machine has all of it: for the baseline
                    the network storage, for ours the staging machine's memory
    in storage      until the network storage has it
    lost            what a save and the steps during it took beyond as many steps without
    CPU             of the training process beyond those steps, and of all other processes

One row is harder than the baseline: DCP that writes into a staging node's memory over the same
link, with no storage behind. Then the complete `holdfast train` runs at that cadence. Its row is
the time for which training was blocked, from its journal, over the time of the run.

Differences from the paper: CPU instead of GPUs, one machine (the storage and the link are processes
with a token bucket), AdamW's state of a decoder. The first save of each way is not counted.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.runtime.staging import whole
from benchmarks.runtime.staging.processes import Rates, train
from benchmarks.runtime.staging.ways import DEFAULT, KEPT, NODE, OURS, PROCESS, WAYS

Found = dict[str, Any]
BASELINES = (DEFAULT, KEPT, PROCESS)
WHOLE = "holdfast train"
CADENCE = 100.0
SHARE = 1e-4
"""Blocked seconds over seconds of the run, at most."""
SHORTER = {"outside": (0.60, "43.30 % on average"), "pause": (0.75, "53.1 %, not in its abstract")}
"""What is asked, and what ACUTE reports, against the multi-level baseline."""
HEADS = (
    ("saves", 6),
    ("step s", 8),
    ("pause ms", 10),
    ("outside s", 11),
    ("storage s", 11),
    ("lost s", 8),
)


@dataclass(frozen=True)
class Size:
    """A decoder whose parameters and two moments, in fp32, have this size."""

    name: str
    vocabulary: int
    preset: str = "medium"
    sequence: int = 256
    batch: int = 2

    @property
    def model(self) -> Found:
        return {
            "preset": self.preset,
            "vocabulary": self.vocabulary,
            "sequence": self.sequence,
            "batch": self.batch,
        }


SIZES = (Size("667 MB", 17_404), Size("1.31 GB", 69_731))
QUICK = (Size("9 MB", 512, "tiny", 32, 4),)
NBYTES = {"667 MB": 667e6, "1.31 GB": 1.31e9, "9 MB": 9e6}


def compare(size: Size, settings: argparse.Namespace, rates: Rates, folder: Path) -> Found:
    """Return one answer for each way, and one for the complete system."""
    found: Found = {}
    saves = settings.rounds
    nbytes = int(1.05 * NBYTES[size.name])
    deadline = 120.0 + (saves + 1) * max(settings.every, 3 * nbytes / rates.storage + 60.0)
    for way in settings.ways:
        with tempfile.TemporaryDirectory(dir=folder) as name:
            if way == WHOLE:
                found[way] = whole.measure(
                    size.model,
                    nbytes,
                    rates.link,
                    Path(name),
                    settings.saves,
                    settings.every,
                    120.0 + settings.saves * (settings.every + 30.0),
                )
                continue
            found[way] = train(
                way,
                size.model,
                nbytes,
                rates,
                Path(name),
                saves,
                settings.every,
                settings.plain,
                deadline,
            )
    return found


# --- printing -------------------------------------------------------------------------------
def median(found: Found, key: str) -> float:
    return float(statistics.median(save[key] for save in found["saves"]))


def show(size: Size, found: Found, rates: Rates) -> None:
    good = {way: row for way, row in found.items() if "error" not in row}
    rows = {way: row for way, row in good.items() if way != WHOLE}
    for way in found.keys() - good.keys():
        print(f"\n{size.name}, {way}: failed: {found[way]['error']}")
    if rows:
        nbytes = next(iter(rows.values()))["bytes"]
        memcpy = statistics.median(row["memcpy"] for row in rows.values())
        print(
            f"\n{size.name}: {nbytes / 1e6:.0f} MB of state. Floors: memcpy {memcpy:.2f} s, over "
            f"the link of {rates.link * 8e-9:g} Gbit/s {nbytes / rates.link:.2f} s, into storage "
            f"at {rates.storage / 1e6:g} MB/s {nbytes / rates.storage:.2f} s"
        )
        heads = "".join(f"{head:>{width}}" for head, width in HEADS)
        print(f"{'':24}{heads}   CPU s a save")
        for way in (way for way in WAYS if way in rows):
            print(_row(way, rows[way]))
        for line in verdicts(rows):
            print(f"  {line}")
    if WHOLE in good:
        _show_whole(size, good[WHOLE])


def _row(way: str, row: Found) -> str:
    stored = [save["stored"] for save in row["saves"] if save["stored"] is not None]
    cpu = {"trainer": median(row, "cpu")} | row["helpers"]
    cells = (
        str(len(row["saves"])),
        f"{row['step']:.2f}",
        f"{1e3 * median(row, 'pause'):.1f}",
        f"{median(row, 'outside'):.2f}",
        f"{statistics.median(stored):.2f}" if stored else "none",
        f"{median(row, 'lost'):.2f}",
    )
    used = ", ".join(f"{name} {seconds:.2f}" for name, seconds in cpu.items())
    shown = "".join(f"{c:>{width}}" for c, (_, width) in zip(cells, HEADS, strict=True))
    return f"{way:24}{shown}   {used}"


def verdicts(rows: dict[str, Found]) -> list[str]:
    """The bars that these rows decide: against the best of the baseline's settings."""
    ours, baselines = rows.get(OURS), [way for way in BASELINES if way in rows]
    if ours is None:
        return []
    out = []
    for key, (asked, theirs) in SHORTER.items() if baselines else ():
        best = min(baselines, key=lambda way: median(rows[way], key))
        out.append(_bar(key, median(ours, key), median(rows[best], key), asked, best, theirs))
    if NODE in rows:
        for key in SHORTER:
            shorter = 1 - median(ours, key) / median(rows[NODE], key)
            out.append(f"{_name(key)}: {100 * shorter:.1f} % shorter than {NODE} (nothing asked)")
    return out


def _name(key: str) -> str:
    return "checkpoint time" if key == "outside" else key


def _bar(key: str, value: float, base: float, asked: float, best: str, theirs: str) -> str:
    held = "yes" if value <= (1 - asked) * base else "NO"
    return (
        f"{_name(key)}: {value:.4f} s, {100 * (1 - value / base):.1f} % shorter than {best} "
        f"({base:.4f} s), {100 * asked:g} % asked (ACUTE: {theirs}): {held}"
    )


def _show_whole(size: Size, row: Found) -> None:
    each = row["blocked"] / row["saves"]
    print(
        f"\n{WHOLE}, {size.name}: {row['saves']} saves, one every {row['every']:g} s, in "
        f"{row['wall']:.0f} s and {row['steps']} steps of {row['step']:.2f} s; from the journal"
    )
    print(
        f"  blocked {1e3 * row['blocked']:.1f} ms in all ({1e3 * each:.2f} a save, at most "
        f"{1e3 * row['longest']:.2f}); kept by the stage {row['kept']:.2f} s after the offer, "
        f"durable after {row['durable']:.2f}; on leaving {_ms(row['leaving'])} ms, not counted"
    )
    used = ", ".join(f"{name} {seconds:.2f}" for name, seconds in row["helpers"].items())
    print(f"  CPU s from one save to the next: {used}")
    shares = {f"as measured, every {row['every']:g} s": row["share"]}
    if row["every"] != CADENCE:
        shares[f"at one save every {CADENCE:g} s"] = each / CADENCE
    for meaning, share in shares.items():
        held = "yes" if share < SHARE else "NO"
        print(f"  blocked / wall, {meaning}: {100 * share:.4f} %, under {100 * SHARE:g} %: {held}")


def _ms(seconds: list[float]) -> str:
    return ", ".join(f"{1e3 * each:.1f}" for each in seconds) or "none"


def _settings() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    every = (*WAYS, WHOLE)
    parser.add_argument("sizes", nargs="*", help=", ".join(size.name for size in SIZES))
    parser.add_argument(
        "--ways", nargs="+", choices=every, default=every, metavar="WAY", help=", ".join(every)
    )
    parser.add_argument("--quick", action="store_true", help="little state, few saves")
    parser.add_argument(
        "--every",
        type=float,
        default=CADENCE,
        help="seconds between saves; each "
        "begins when the one before has ended, however short this is",
    )
    parser.add_argument("--rounds", type=int, default=3, help="saves of each way")
    parser.add_argument("--saves", type=int, default=10, help=f"saves of {WHOLE}")
    parser.add_argument("--plain", type=int, default=3, help="steps without a save between two")
    parser.add_argument("--storage", type=float, default=100.0, help="MB/s into network storage")
    parser.add_argument("--link", type=float, default=10.0, help="Gbit/s between two nodes")
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary one)")
    parser.add_argument("--json", type=Path, help="keep everything here, added to what is there")
    settings = parser.parse_args()
    unknown = set(settings.sizes) - {size.name for size in SIZES}
    if unknown:
        parser.error(f"there is no size {unknown.pop()!r}: {', '.join(NBYTES)}")
    if settings.quick:
        settings.rounds, settings.saves, settings.every = 2, 2, 0.5
    return settings


def main() -> None:
    settings = _settings()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    rates = Rates(settings.storage * 1e6, settings.link * 1e9 / 8)
    everything: Found = {}
    if settings.json and settings.json.exists():
        everything = json.loads(settings.json.read_text())
    with tempfile.TemporaryDirectory(prefix="hf-", dir=settings.folder) as name:
        for size in QUICK if settings.quick else SIZES:
            if settings.sizes and size.name not in settings.sizes:
                continue
            found = everything.setdefault(size.name, {})
            found |= compare(size, settings, rates, Path(name))
            show(size, found, rates)
            if settings.json:
                settings.json.write_text(json.dumps(everything, indent=1))


if __name__ == "__main__":
    main()
