"""The server: averages what the sites send, and writes down which sites took part."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from safetensors.torch import load_file, save_file

app = ServerApp()
SITES = 3


class Watched(FedAvg):
    """Federated averaging that counts: `rounds` has a row for each round."""

    def __init__(self, work: Path, **settings: Any):
        super().__init__(**settings)
        self.work, self.rounds = work, []

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        messages = list(super().configure_train(server_round, arrays, config, grid))
        self.rounds.append({"round": server_round, "asked": len(messages)})
        self._write()
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        replies = list(replies)
        good = [reply.content["metrics"] for reply in replies if not reply.has_error()]
        row = self.rounds[-1]
        row["answered"] = sorted("ABC"[int(each["site"])] for each in good)
        row["lost_and_resumed"] = sum(int(each["lost"]) for each in good)
        row["backlog"] = {"ABC"[int(each["site"])]: int(each["backlog"]) for each in good}
        self._write()
        return super().aggregate_train(server_round, replies)

    def _write(self) -> None:
        (self.work / "rounds.json").write_text(json.dumps(self.rounds, indent=1) + "\n")


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Wait for all sites, run the rounds, and write the model's weights."""
    work = Path(str(context.run_config["work"]))
    while len(list(grid.get_node_ids())) < SITES:
        time.sleep(0.5)
    strategy = Watched(work, fraction_evaluate=0.0, min_train_nodes=2, min_available_nodes=2)
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(load_file(work / "start/model/model.safetensors")),
        num_rounds=int(context.run_config["rounds"]),
        timeout=float(context.run_config["timeout"]),
    )
    save_file(result.arrays.to_torch_state_dict(), work / "weights.part", {"format": "pt"})
    (work / "weights.part").rename(work / "weights.safetensors")
