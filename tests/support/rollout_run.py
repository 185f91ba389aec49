"""A small run that generates its data, disturbed or not, and what it made."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from holdfast.core.data.lineage import split_effective
from holdfast.data.read.vocabulary import train_tokenizer
from holdfast.events import BatchFed, StepDone
from holdfast.model.huggingface import export_folder
from holdfast.wire.journal import read_journal
from holdfast.wire.store.run_store import FolderStore
from tests.support import models

ROLES = ("actor", "scorer", "worker", "agent")
REWARD = """
def score(completion: str, answer: str) -> float:
    return sum(c.isdigit() for c in completion) / 4 + (0.5 if answer in completion else 0.0)
"""
RUN_FILE = """
name: rollout
seed: 7
device: cpu
data: {sequence_length: 24, attention: document, tokenizer: {path: tokenizer.json}}
model: {layers: 2, dim: 32, heads: 2, kv_heads: 2, ffn_dim: 64, max_position: 64}
objective: {kind: grpo}
rollout:
  prompts: [{path: prompts.jsonl}]
  rewards: [{kind: function, function: "reward:score"}]
  samples: 4
  max_tokens: 8
train:
  batch_size: 16
  microbatch_size: 4
  steps: 12
  optimizer: {learning_rate: 3.0e-3}
  schedule: {warmup_steps: 1}
layout: {workers: 1}
checkpoint: {every_steps: 1}
cluster: {max_restarts_without_progress: 10000, threads_per_worker: 1}
"""
DEADLINE_S = 900.0


def write_run_file(folder: Path) -> Path:
    """Write prompts, tokenizer, reward and run file; return the last."""
    pairs = [(a, b) for a in range(5) for b in range(4)]
    rows = [
        {"prompt": f"{a}+{b}=", "answer": str(a + b), "size": ("small", "big")[a > 2]}
        for a, b in pairs
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "tokenizer.json").write_text(train_tokenizer([row["prompt"] for row in rows], 257))
    (folder / "reward.py").write_text(REWARD)
    path = folder / "run.yaml"
    path.write_text(RUN_FILE)
    return path


def write_teacher(folder: Path) -> None:
    """Write a wider model with opinions, that knows the tokens of `write_run_file`."""
    model = models.config(vocab_size=257)
    values = models.lively(model).state_dict()
    values["head.weight"] = 6 * values["head.weight"]
    export_folder(folder, model, values, folder.with_name("tokenizer.json"))


@dataclass
class RolloutRun:
    """One run, started as often as its agent is killed."""

    run_file: Path
    folder: Path
    settings: tuple[str, ...] = ()
    killed: Counter[str] = field(default_factory=Counter)
    resumed_from: list[int] = field(default_factory=list)  # newest step at each kill of the agent
    process: subprocess.Popen[bytes] | None = None

    def start(self, *more: str) -> None:
        with self.folder.with_suffix(".out").open("ab") as output:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "holdfast", "train", str(self.run_file)),
                    *(f"folder={self.folder}", *self.settings, *more),
                ],
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    @property
    def said(self) -> str:
        return self.folder.with_suffix(".out").read_text()

    def finish(self) -> None:
        """Run to the end, undisturbed."""
        if self.process is None:
            self.start()
        assert self.process is not None
        assert self.process.wait(DEADLINE_S) == 0, self.said

    def disturb(self, kills: int, chooser: random.Random, pause_s: float = 2.0) -> None:
        """Kill roles drawn at random until there were so many kills, then run to the end. After
        each kill of the agent there are one to six actors."""
        self.start()
        until, done = time.monotonic() + DEADLINE_S, 0
        while sum(self.killed.values()) < kills:
            assert time.monotonic() < until, self.said
            time.sleep(pause_s * chooser.uniform(0.3, 1.0))
            assert self.process is not None
            if self.process.poll() is not None:
                assert self.process.returncode == 0, self.said
                return  # it was faster
            role = chooser.choice(ROLES)
            if not all(map(self.pids, ("actor", "scorer", "worker"))):
                continue  # they have not begun to work since the last kill
            step = max(self.curve(), default=0)
            if step <= done and chooser.random() < 0.8:
                continue
            pids = self.pids(role)
            with suppress(ProcessLookupError):
                os.kill(chooser.choice(pids), signal.SIGKILL)
                self.killed[role] += 1
                done = step
            if role == "agent":
                self.process.wait(DEADLINE_S)
                self.resumed_from.append(step)
                self.start(f"rollout.actors={chooser.randint(1, 6)}")
        self.finish()

    def pids(self, role: str) -> list[int]:
        """The processes of a role, by their titles."""
        assert self.process is not None
        if role == "agent":
            return [self.process.pid]
        found = []
        with suppress(psutil.Error):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                with suppress(psutil.Error):
                    if " ".join(child.cmdline()).startswith(f"holdfast: {role} "):
                        found.append(child.pid)
        return found

    # --- what it made ---------------------------------------------------------------------------
    def curve(self) -> dict[int, tuple[float, dict[str, float]]]:
        """Loss and metrics of each step that counts."""
        events = (record.event for record in self._effective())
        return {e.step: (e.loss, dict(e.metrics)) for e in events if isinstance(e, StepDone)}

    def fed(self) -> dict[int, tuple[str, str]]:
        """Hash and groups of each ledger entry that counts, by position."""
        entries = (
            entry
            for record in self._effective()
            if isinstance(record.event, BatchFed)
            for entry in record.event.entries
        )
        return {e["start"]: (e["hash"], str(e["groups"])) for e in entries if "groups" in e}

    def _effective(self) -> list[object]:
        if not self.folder.exists():
            return []
        return list(split_effective(read_journal(FolderStore(self.folder)))[0])
