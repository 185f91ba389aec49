"""Three sites train one model with Holdfast and Flower; one of them leaves and returns.

    pip install 'flwr>=1.42'
    python examples/federated/run.py --work /tmp/federated

The sites are processes of this machine: a SuperLink and three SuperNodes of Flower. In round 1 the
training of site C is killed, and continues. In round 2 site B is lost with all its processes; it
returns in round 3. Afterwards the loss on held-out text stands next to that of a central training
on all texts with as many tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from training import train

HERE = Path(__file__).resolve().parent
SITES = ("A", "B", "C")
MAX_FILE = 20_000  # bytes of a text
FILES = 24  # of each site
DEADLINE_S = 1200


def write_texts(folder: Path) -> None:
    """Deal modules of Python's standard library: the first letter decides the site."""
    found: dict[str, list[Path]] = {name: [] for name in ("public", "A", "B", "C", "held_out")}
    for number, path in enumerate(sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))):
        if path.stat().st_size > MAX_FILE:
            continue
        site = "A" if path.name < "f" else "B" if path.name < "p" else "C"
        name = {0: "public", 1: "held_out"}.get(number % 6, site)
        found[name].append(path)
    for name, paths in found.items():
        (folder / name).mkdir(parents=True)
        for path in paths[:FILES]:
            shutil.copy(path, folder / name / f"{path.stem}.txt")


def prepare(work: Path, steps: int) -> None:
    """Write the texts, and train the model that the sites begin with on public ones."""
    write_texts(work / "texts")
    shutil.copy(HERE / "site.yaml", work / "site.yaml")
    shape = {"preset": None, "layers": 2, "dim": 64, "heads": 4, "kv_heads": 2, "ffn_dim": 128}
    train(
        work / "site.yaml",
        work / "start",
        model=shape,
        data__folder=str(work / "start/dataset"),
        data__tokenizer={"vocab_size": 512},
        **{"data.sources.0.path": str(work / "texts/public"), "train.steps": steps},
    )


def train_centrally(work: Path, steps: int) -> None:
    """Train on the texts of all sites: as many steps, each with the samples of all sites."""
    sources = [
        {"kind": "text", "path": str(work / "texts" / site), "name": site, "weight": 1}
        for site in SITES
    ]
    train(
        work / "site.yaml",
        work / "central",
        model__from=str(work / "start/model"),
        data__folder=str(work / "central/dataset"),
        data__sources=sources,
        **{"train.batch_size": 8 * len(SITES), "train.steps": steps},
    )


def held_out_loss(model: Path, texts: Path) -> float:
    """Mean loss in nats a token, by transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, network = (c.from_pretrained(model) for c in (AutoTokenizer, AutoModelForCausalLM))
    total, count = 0.0, 0
    for path in sorted(texts.glob("*.txt")):
        ids = tokenizer(path.read_text("utf-8"), return_tensors="pt").input_ids[0]
        rows = ids[: len(ids) // 65 * 65].view(-1, 65)
        with torch.no_grad():
            for chunk in rows.split(16):
                loss = network(input_ids=chunk, labels=chunk).loss
                total, count = total + float(loss) * chunk[:, 1:].numel(), count + chunk.numel()
                count -= len(chunk)
    return total / count


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def answers(address: str) -> bool:
    host, _, port = address.partition(":")
    with suppress(OSError), socket.create_connection((host, int(port)), 1):
        return True
    return False


class Federation:
    """The SuperLink and the SuperNodes, as processes."""

    def __init__(self, work: Path) -> None:
        self.work, self.nodes = work, dict[str, subprocess.Popen[bytes]]()
        self.programs = Path(sys.executable).parent  # Flower's; it looks for more of them itself
        self.environ = os.environ | {
            "FLWR_HOME": str(work / "flower"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "PATH": f"{self.programs}{os.pathsep}{os.environ['PATH']}",
        }
        self.address = f"127.0.0.1:{free_port()}"
        home = work / "flower"
        home.mkdir(exist_ok=True)
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "{self.address}"\n'
            "insecure = true\n"
        )
        port = ("--port", self.address.partition(":")[2])
        more = ("--disable-runtime-dependency-installation",)
        self.link = self._start("flower-superlink", "superlink", *port, *more)
        wait_for("the SuperLink", lambda: answers(self.address))

    def _start(self, program: str, name: str, *words: str) -> subprocess.Popen[bytes]:
        with (self.work / f"{name}.log").open("ab") as out:
            command = [str(self.programs / program), "--insecure", *words]
            return subprocess.Popen(command, env=self.environ, stdout=out, stderr=out)

    def join(self, site: str) -> None:
        """Start the SuperNode of a site."""
        words = ("--superlink", self.address, "--port", str(free_port()))
        config = ("--node-config", f'site="{site}"')
        self.nodes[site] = self._start("flower-supernode", f"site-{site}", *words, *config)

    def lose(self, site: str) -> None:
        """Kill all processes of a site, as if its machine was lost."""
        for process in _tree(self.nodes[site].pid):
            with suppress(psutil.Error):
                process.kill()
        self.nodes[site].wait()

    def submit(self) -> None:
        app = self.work / "app"
        shutil.copytree(HERE, app, ignore=shutil.ignore_patterns("__pycache__", "run.py"))
        command = [str(self.programs / "flwr"), "run", str(app), "here"]
        config = ["--run-config", f'work="{self.work}"']
        subprocess.run([*command, *config], env=self.environ, check=True)

    def end(self) -> None:
        for process in (*self.nodes.values(), self.link):
            for each in _tree(process.pid):
                with suppress(psutil.Error):
                    each.kill()
            process.wait()


def _tree(pid: int) -> list[psutil.Process]:
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    return []


def wait_for(what: str, is_there: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_there():
        if time.monotonic() > deadline:
            raise SystemExit(f"{what} did not come")
        time.sleep(0.5)


def rounds_of(work: Path) -> list[dict[str, Any]]:
    with suppress(OSError, ValueError):
        rounds: list[dict[str, Any]] = json.loads((work / "rounds.json").read_text())
        return rounds
    return []


def is_training(work: Path, site: str, number: int) -> bool:
    """Return True once a site has a checkpoint of this round."""
    return any((work / "sites" / site / f"round-{number}/run/commits").glob("*"))


def kill_training(work: Path, site: str) -> None:
    """Kill the agent that trains at a site."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            words = " ".join(process.cmdline())
            if "holdfast.cli.main train" in words and f"/sites/{site}/" in words:
                os.kill(process.pid, signal.SIGKILL)


def disturb(federation: Federation, work: Path) -> None:
    """Kill a training in round 1; lose site B in round 2, and let it return in round 3."""
    wait_for("site C", lambda: is_training(work, "C", 1))
    kill_training(work, "C")
    print("round 1: the training of site C is killed", flush=True)
    wait_for("round 2 at site B", lambda: is_training(work, "B", 2))
    federation.lose("B")
    print("round 2: site B is lost", flush=True)
    wait_for("round 3", lambda: len(rounds_of(work)) > 2)
    federation.join("B")
    print("round 3: site B returns", flush=True)


def report(work: Path) -> dict[str, Any]:
    """Compare the models, and sum up how the rounds went."""
    federated = work / "federated"
    shutil.copytree(work / "start/model", federated)
    shutil.copy(work / "weights.safetensors", federated / "model.safetensors")
    models = {"start": "start/model", "federated": "federated", "central": "central/model"}
    losses = {n: held_out_loss(work / path, work / "texts/held_out") for n, path in models.items()}
    rounds = rounds_of(work)
    asked, answered = sum(r["asked"] for r in rounds), sum(len(r["answered"]) for r in rounds)
    sites = {
        site: {
            "merged": sum(site in row["answered"] for row in rounds),
            "missed": sum(site not in row["answered"] for row in rounds),
            "backlog": max((row["backlog"].get(site, 0) for row in rounds), default=0),
        }
        for site in SITES
    }
    return {"loss": losses, "sync_success": answered / asked, "sites": sites, "rounds": rounds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="a new folder for all files")
    parser.add_argument("--undisturbed", action="store_true", help="kill nothing")
    given = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    work = given.work.absolute()
    work.mkdir(parents=True)
    prepare(work, 40)
    print("the common model is trained", flush=True)
    federation = Federation(work)
    try:
        for site in SITES:
            federation.join(site)
        federation.submit()
        if not given.undisturbed:
            disturb(federation, work)
        wait_for("the end", lambda: (work / "weights.safetensors").exists())
    finally:
        federation.end()
    rounds = rounds_of(work)
    train_centrally(work, 30 * len(rounds))
    found = report(work)
    (work / "report.json").write_text(json.dumps(found, indent=1) + "\n")
    print(f"\n{'round':6} asked answered  killed and resumed")
    for row in rounds:
        resumed = row["lost_and_resumed"]
        print(f"{row['round']:5} {row['asked']:6} {', '.join(row['answered']):9} {resumed}")
    for site, row in found["sites"].items():
        print(
            f"site {site}: {row['merged']} rounds merged, {row['missed']} missed, "
            f"{row['backlog']} begun and never sent"
        )
    print(f"updates that were asked for and came: {found['sync_success']:.0%}")
    print("held-out loss: " + ", ".join(f"{n} {value:.4f}" for n, value in found["loss"].items()))


if __name__ == "__main__":
    main()
