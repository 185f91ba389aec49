"""A site: trains the round's model on its own texts with Holdfast, and sends the weights back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from safetensors.torch import load_file, save_file
from training import train

app = ClientApp()


@app.train()
def train_round(message: Message, context: Context) -> Message:
    """Train `steps` steps from the weights of the message."""
    work, site = Path(str(context.run_config["work"])), str(context.node_config["site"])
    number = int(message.content["config"]["server-round"])
    steps = int(context.run_config["steps"])
    place = work / "sites" / site / f"round-{number}"
    begin = place / "begin"
    shutil.copytree(work / "start/model", begin, dirs_exist_ok=True)
    weights = message.content["arrays"].to_torch_state_dict()
    save_file(dict(weights), begin / "model.safetensors", {"format": "pt"})
    lost = train(
        work / "site.yaml",
        place,
        model__from=str(begin),
        data__folder=str(work / "sites" / site / "dataset"),
        **{"data.sources.0.path": str(work / "texts" / site), "train.steps": steps},
    )
    (place / "sent").touch()
    never_sent = [each for each in place.parent.glob("round-*") if not (each / "sent").exists()]
    metrics = {
        "num-examples": steps,  # each site does as many
        "site": "ABC".index(site),
        "lost": lost,
        "backlog": len(never_sent),  # rounds that this site began and never sent
    }
    (place / "metrics.json").write_text(json.dumps(metrics))
    content = RecordDict(
        {
            "arrays": ArrayRecord(load_file(place / "model/model.safetensors")),
            "metrics": MetricRecord(metrics),
        }
    )
    return Message(content=content, reply_to=message)
