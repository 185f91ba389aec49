"""torchtitan's side of `benchmarks.runtime.exchange`: its Llama 3, its optimizer container and its
CheckpointManager, in one process on a CPU. One request as JSON, one line of JSON as the answer."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from benchmarks.peers.torchtitan_llama import shaped, without_triton
from holdfast.config.sections.model import ModelConfig

Found = dict[str, Any]


class Trainer:
    """The parts of torchtitan's own trainer that hold state."""

    def __init__(self, request: Found, folder: Path, **settings: Any) -> None:
        from torchtitan.components.checkpoint import CheckpointManager
        from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
        from torchtitan.models.common.rope import ComplexRoPE
        from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter

        resolved = json.loads(Path(request["resolved"]).read_text())
        config = resolved.get("config", resolved)
        shape, adamw = ModelConfig(**config["model"]), config["train"]["optimizer"]
        model: Any = shaped(shape, request["sequence"], ComplexRoPE)
        self.model: nn.Module = model
        rate = {"lr": adamw["learning_rate"], "betas": tuple(adamw["betas"]), "eps": adamw["eps"]}
        decays = {".*norm.*": 0.0, ".*": adamw["weight_decay"]}
        groups = [
            ParamGroupConfig(
                pattern=pattern,
                optimizer_name="AdamW",
                optimizer_kwargs={**rate, "weight_decay": decay},
            )
            for pattern, decay in decays.items()
        ]
        self.optimizer = OptimizersContainer(
            OptimizersContainer.Config(param_groups=groups, implementation="foreach"),
            model_parts=[self.model],
        )
        self.manager = CheckpointManager(
            CheckpointManager.Config(
                enable=True,
                interval=1,
                keep_latest_k=0,
                last_save_model_only=False,
                exclude_from_loading=["dataloader", "lr_scheduler"],
                **settings,
            ),
            dataloader=None,
            model_parts=[self.model],
            optimizers=self.optimizer,
            lr_schedulers={},
            states={},
            base_folder=str(folder),  # type: ignore[arg-type]
            sd_adapter=Llama3StateDictAdapter(model.config, None),
        )

    def state(self) -> dict[str, Tensor]:
        found = {**self.model.state_dict(), **self.optimizer.state_dict()}
        return {k: v.detach().clone() for k, v in found.items() if isinstance(v, Tensor)}

    def logits(self, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            out: Tensor = self.model(tokens)
        return out


def take(request: Found) -> Found:
    """Load both of our folders, compare, take a step, save."""
    import transformers

    from_hf = Trainer(
        request,
        Path(request["save"]) / "unused",
        initial_load_path=request["hf"],
        initial_load_in_hf=True,
    )
    trainer = Trainer(
        request,
        Path(request["save"]),
        initial_load_path=request["dcp"],
        initial_load_model_only=False,
    )
    assert from_hf.manager.load()
    assert trainer.manager.load()
    peer = transformers.AutoModelForCausalLM.from_pretrained(request["hf"]).eval()
    tokens = torch.randint(0, 300, (2, request["sequence"]), generator=torch.Generator())
    with torch.no_grad():
        due = peer(tokens).logits
    answer = {
        "dcp": float((trainer.logits(tokens) - due).abs().max()),
        "hf": float((from_hf.logits(tokens) - due).abs().max()),
        "unlike": _unlike_stored(trainer, request),
    }
    logits = trainer.model(tokens[:, :-1])
    nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    trainer.optimizer.step()
    trainer.manager.save(request["step"] + 1)
    torch.save(trainer.state(), Path(request["save"]) / "state.pt")
    return answer


def _unlike_stored(trainer: Trainer, request: Found) -> int:
    """Tensors of the optimizer that are not those in the folder, read by DCP alone."""
    found = {k: v for k, v in trainer.optimizer.state_dict().items() if isinstance(v, Tensor)}
    stored = {"optimizer": {k: torch.full_like(v, float("nan")) for k, v in found.items()}}
    dcp.load(stored, checkpoint_id=request["dcp"])
    moved = sum(bool(v.abs().max() > 0) for v in found.values())
    assert moved == len(found), "the optimizer's state is empty"
    return sum(not torch.equal(stored["optimizer"][k], v) for k, v in found.items())


def compare(request: Found) -> Found:
    """Tensors that came back otherwise than they went."""
    trainer = Trainer(
        request,
        Path(request["save"]) / "back",
        initial_load_path=request["dcp"],
        initial_load_model_only=False,
    )
    assert trainer.manager.load()
    due = torch.load(Path(request["save"]) / "state.pt", weights_only=True)
    found = trainer.state()
    assert found.keys() == due.keys()
    return {
        "tensors": len(due),
        "unlike": sum(not torch.equal(found[name], due[name]) for name in due),
    }


def main() -> None:
    request = json.loads(sys.argv[1])
    with without_triton():
        answer = {"take": take, "compare": compare}[request["do"]](request)
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
