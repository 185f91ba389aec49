"""Holdfast as a trainer of `holdfast score`: an agent on each node, as `holdfast train` starts it.

Steps, samples and losses come from the journal and its data ledger. `holdfast-restart` is the same
with `cluster.recovery: restart`. No process survives a loss, and no state lies in memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.checkpoint.restore.catalog import list_commits
from holdfast.events import BatchFed, GenerationStarted, Record, StepDone
from holdfast.launch.node.fleet import forked_workers
from holdfast.wire.child_command import module_command
from holdfast.wire.journal import JournalTail
from holdfast.wire.store.run_store import FolderStore
from holdfast_lab.score.harness.node_processes import ParkedNodes
from holdfast_lab.score.harness.torchrun_trainer import flip_bytes
from holdfast_lab.score.harness.trainer import TrainerRun, Workplace
from holdfast_lab.score.record import Commit

_RUN_FILE = """\
name: score
folder: {folder}/run
device: cpu
task: holdfast_lab.score.trainers.workload:ScoreTask
train:
  steps: 1000000
  batch_size: 24
  microbatch_size: 2
  optimizer: {{learning_rate: 0.001, weight_decay: 0.01, clip_norm: 1000000}}
  schedule: {{warmup_steps: 0}}
  evaluate: {{every: 0}}
"""
_BEAT_S, _SETTLE_S, _ALONE_S, _NOTICES_S = 16.0, 12.0, 80.0, 4.0
"""Seconds of the real world, divided by k. A node beats so often, and is lost after three beats. A
new node must be reachable for so long, and a minority waits so long. A node looks for a notice so
often."""
_LEAST_BEAT_S = 0.2


class HoldfastTrainer:
    name = "holdfast"
    obeys_network = True
    survives = True

    def why_unavailable(self, python: str) -> str:
        return ""

    def open(self, workplace: Workplace) -> TrainerRun:
        return _HoldfastRun(workplace, self.survives)


class RestartingTrainer(HoldfastTrainer):
    """Recovery by restart: all processes end, and new ones read the newest checkpoint."""

    name = "holdfast-restart"
    survives = False


class _HoldfastRun(ParkedNodes):
    def __init__(self, workplace: Workplace, survives: bool) -> None:
        super().__init__(workplace, "agents")
        folder, self._survives = workplace.folder.absolute(), survives
        self._notices = folder / "notices"
        self._notices.mkdir(parents=True)
        self._run_file = folder / "run.yaml"
        self._run_file.write_text(_RUN_FILE.format(folder=folder))
        self._run_folder = folder / "run"
        self._tail: JournalTail | None = None
        self._records: list[Record] = []

    def _command(self, node: str) -> list[str]:
        return module_command(
            "holdfast_lab.score.trainers.holdfast_node",
            str(self._run_file),
            f"cluster.node={node}",
            f"cluster.notices_at={self._notices / node}",
            *self._settings(),
            *(self._at.network.settings(node) if self._at.network is not None else ()),
        )

    def _settings(self) -> list[str]:
        k, on = self._at.k, self._at.is_resilient
        every_s = self._at.save_interval_s
        return [
            f"layout.workers={self._at.places}",
            "layout.dp_shard=1",
            "cluster.places=1",
            "cluster.min_nodes=1",
            f"cluster.beat_seconds={max(_LEAST_BEAT_S, _BEAT_S / k)}",
            f"cluster.settle_seconds={_SETTLE_S / k}",
            f"cluster.alone_seconds={_ALONE_S / k}",
            "cluster.heartbeat_seconds=0.05",
            "cluster.gather_seconds=30",
            "cluster.threads_per_worker=1",
            "cluster.notices=file",
            f"cluster.notices_every_seconds={_NOTICES_S / k}",
            "cluster.max_restarts_without_progress=20",
            f"checkpoint.every_steps={0 if not on else 1000000}",
            f"checkpoint.every_seconds={every_s if on else 0}",
            f"checkpoint.memory_every_steps={1 if on and self._survives else 0}",
            f"cluster.recovery={'live' if self._survives else 'restart'}",
        ]

    def start(self, nodes: Sequence[str]) -> None:
        for node in nodes:
            (self._notices / node).unlink(missing_ok=True)
        super().start(nodes)

    def warn(self, node: str, seconds: float) -> None:
        (self._notices / node).write_text(f"{seconds:.3f}")

    def worker_pids(self, node: str) -> list[int]:
        return forked_workers(tree[0]) if (tree := self._processes.tree(node)) else []

    def commits(self) -> list[Commit]:
        if self._tail is None:
            if not self._run_folder.exists():
                return []
            self._tail = JournalTail(FolderStore(self._run_folder))
        self._records += self._tail.read_new()
        return commits_of_journal(self._records)

    def corrupt_checkpoint(self) -> bool:
        if not list_commits(FolderStore(self._run_folder)):
            return False
        # The blobs of the newest checkpoint, which begin with its step.
        blobs = sorted(self._run_folder.glob("data/*/*.safetensors"), key=lambda path: path.name)
        newest = blobs[-1].name.partition("-")[0] if blobs else ""
        return flip_bytes([path for path in blobs if path.name.partition("-")[0] == newest])


def commits_of_journal(records: Sequence[Record]) -> list[Commit]:
    """The committed steps of a journal, in order of time. A step that two writers tell of counts
    from the first."""
    workers: dict[int, int] = {}
    fed: dict[tuple[int, int], set[tuple[int, int]]] = {}
    done: dict[tuple[int, int], Record] = {}
    for record in records:
        match record.event:
            case GenerationStarted(topology=topology):
                workers[record.generation] = len(topology.get("nodes", ()))
            case BatchFed(step=step, entries=entries):
                ranges = fed.setdefault((record.generation, step), set())
                ranges.update((int(e["start"]), int(e["stop"])) for e in entries)
            case StepDone(step=step):
                known = done.get((record.generation, step))
                if known is None or record.time < known.time:
                    done[record.generation, step] = record
            case _:
                pass
    made = []
    for (generation, step), record in done.items():
        event = record.event
        assert isinstance(event, StepDone)
        ranges_of_step = tuple(sorted(fed.get((generation, step), ())))
        made.append(
            Commit(
                record.time,
                step,
                float(event.samples or event.tokens),
                workers.get(generation, 0),
                event.loss,
                ranges_of_step,
            )
        )
    return sorted(made, key=lambda commit: (commit.t_s, commit.step))
