"""Pruned, rounded and QLoRA models are opened by transformers, and compute what they should.

Commands in processes of their own write the folders. This process has written none of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from holdfast.config.sections.model import ModelConfig
from holdfast.export.weights import folder_decoder
from holdfast.model.decoder import Decoder
from holdfast.model.nf4 import rounded
from holdfast.model.quantized_layers import torchao_config
from tests.support.adapters import BATCH, MICROBATCH, MODEL, RUN, write_base
from tests.support.chat import message_rows, tokenizer_folder, write_rows
from tests.support.commands import apart

pytestmark = pytest.mark.slow
TOKENS = torch.randint(3, 300, (2, 24), generator=torch.Generator().manual_seed(1))
DEADLINE_S = 600.0
PRUNED = {
    "magnitude": ("--method", "magnitude", "--sparsity", "0.5"),
    "pairs": ("--method", "wanda", "--pattern", "2:4"),
    "blocks": ("--method", "layers", "--layers", "1"),
}


@dataclass(frozen=True)
class Places:
    """A base, and the run file of adapters of it."""

    root: Path
    base: Path
    run_file: Path

    def run(self, *words: str | Path) -> None:
        apart(*words, folder=self.root, deadline=DEADLINE_S).succeeds()

    def trained(self, name: str, *settings: str) -> Path:
        given = "train.steps=2", "checkpoint.every_steps=2", "layout.workers=1", *settings
        self.run("train", self.run_file, f"folder={self.root / name}", *given)
        return self.root / name

    def exported(self, run: Path, *words: str) -> Path:
        to = run.with_name("-".join((run.name, "export", *words)).replace("--", ""))
        self.run("export", run, "--to", to, *words)
        return to


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    root = tmp_path_factory.mktemp("small")
    shape = {**MODEL, "layers": 3, "dim": 128, "ffn_dim": 128, "init_std": 0.1}
    write_base(root / "base", ModelConfig.model_validate(shape))
    tokenizer_folder(root / "base")
    write_rows(root / "rows.jsonl", message_rows(60))
    sizes = {"steps": 2, "batch": BATCH, "microbatch": MICROBATCH}
    run_file = root / "run.yaml"
    run_file.write_text(
        RUN.format(root=root, rate=0.001, decay=0.1, targets="[q_proj, down_proj]", **sizes)
    )
    return Places(root, root / "base", run_file)


def opened(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    print(f"{folder.name}: {type(model).__name__}, {weight_bytes(folder):,} bytes")
    return model.eval()


@torch.no_grad()
def by_transformers(folder: Path) -> Tensor:
    logits: Tensor = opened(folder)(TOKENS).logits.float()
    return logits


@torch.no_grad()
def by_decoder(decoder: Decoder) -> Tensor:
    return decoder(TOKENS)


def weight_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def linear_layers(decoder: Decoder) -> list[nn.Linear]:
    return [part for part in decoder.layers.modules() if isinstance(part, nn.Linear)]


@pytest.mark.parametrize("how", PRUNED)
def test_pruned_folders(places: Places, how: str) -> None:
    places.run("data", "prepare", places.run_file)
    to, data = places.root / how, ("--data", places.run_file, "--samples", "8")
    places.run("prune", places.base, *PRUNED[how], "--to", to, *data)
    decoder = folder_decoder(to)
    assert torch.allclose(by_transformers(to), by_decoder(decoder), atol=1e-4)
    zeros = [float((layer.weight == 0).float().mean()) for layer in linear_layers(decoder)]
    if how == "blocks":
        assert len(decoder.layers) == 2
        assert weight_bytes(to) < 0.8 * weight_bytes(places.base)
    else:
        assert min(zeros) >= 0.45


@pytest.fixture(scope="module")
def dense(places: Places) -> Path:
    """A run's weights, trained by rounding them."""
    pytest.importorskip("torchao", reason="train.qat needs torchao")
    return places.exported(places.trained("rounding", "lora.rank=0", "train.qat=int4"))


@pytest.mark.parametrize("kind", ["int8", "int4", "int8-int4"])
def test_rounded_exports(places: Places, dense: Path, kind: str) -> None:
    """They compute what a pass of train.qat computes."""
    from torchao.quantization import quantize_
    from torchao.quantization.qat import QATConfig

    folder = places.exported(places.root / "rounding", "--quantize", kind)
    decoder, before = folder_decoder(dense), by_decoder(folder_decoder(dense))
    how = torchao_config(kind, "")
    how = how if kind == "int8" else QATConfig(how, step="prepare")  # there is no qat of int8
    for block in decoder.layers:
        quantize_(block, how)
    found, scale = by_transformers(folder), float(before.std())
    apart_of_dense = float((found - before).abs().max()) / scale
    apart_of_rounded = float((found - by_decoder(decoder)).abs().max()) / scale
    print(f"{kind}: {apart_of_dense:.2e} from dense, {apart_of_rounded:.2e} from rounded")
    assert weight_bytes(folder) < 0.7 * weight_bytes(dense)
    assert apart_of_rounded < 0.02 * apart_of_dense


@torch.no_grad()
def test_an_nf4_export_has_the_weights_of_qlora(places: Places, dense: Path) -> None:
    """To the bit. Logits are near those: bitsandbytes multiplies in bfloat16 on a CPU."""
    functional = pytest.importorskip("bitsandbytes.functional", reason="it unpacks the weights")
    folder = places.exported(places.root / "rounding", "--quantize", "nf4")
    model, decoder = opened(folder), folder_decoder(dense)
    for block, ours in zip(model.model.layers, decoder.layers, strict=True):
        pairs = (
            *(
                (block.self_attn.q_proj, ours.attention.q),
                (block.self_attn.k_proj, ours.attention.k),
            ),
            *(
                (block.self_attn.v_proj, ours.attention.v),
                (block.self_attn.o_proj, ours.attention.o),
            ),
            *((block.mlp.gate_proj, ours.ffn.gate), (block.mlp.up_proj, ours.ffn.up)),
            (block.mlp.down_proj, ours.ffn.down),
        )
        for theirs, layer in pairs:
            packed = theirs.weight
            layer.weight = nn.Parameter(rounded(layer.weight.detach()))
            assert torch.equal(
                functional.dequantize_4bit(packed.data, packed.quant_state), layer.weight
            )
    found, before = model(TOKENS).logits, by_decoder(folder_decoder(dense))
    apart_of_rounded = float((found - by_decoder(decoder)).abs().max())
    print(f"{apart_of_rounded:.2e} from rounded")
    assert apart_of_rounded < 0.05 * float((found - before).abs().max())


def test_exports_of_qlora(places: Places) -> None:
    """Merged, and as adapters for PEFT on a base that is rounded as the run's was."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    run = places.trained("qlora", "lora.base_dtype=nf4")
    found = by_transformers(places.exported(run))
    model: Any = AutoModelForCausalLM.from_pretrained(places.base)
    for layer in model.model.layers.modules():
        if isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(rounded(layer.weight.detach()))
    adapted = peft.PeftModel.from_pretrained(model, places.exported(run, "--format", "peft"))
    with torch.no_grad():
        theirs = adapted.eval()(TOKENS).logits
        with adapted.disable_adapter():
            without = adapted(TOKENS).logits
    assert torch.allclose(found, theirs, atol=1e-4)
    assert not torch.allclose(found, without, atol=1e-4)
