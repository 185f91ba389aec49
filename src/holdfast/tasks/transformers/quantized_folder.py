"""A folder in Hugging Face form with rounded weights, which transformers loads as it is."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Literal

from holdfast.errors import ConfigError
from holdfast.model.new_folder import new_folder
from holdfast.model.quantized_layers import torchao_config
from holdfast.tasks.transformers.folder_model import COPIED, transformers_package

Kind = Literal["int8", "int4", "int8-int4", "nf4"]
OPTION = "--quantize"


def quantize_folder(source: Path, to: Path, kind: Kind, shard_bytes: int) -> None:
    """Write the model of `source` with rounded weights in the linear layers of its blocks. The
    complete model is held in memory. Raises UserError.

    int8, int4, int8-int4: by torchao, which keeps a 4-bit weight in a byte. nf4: by bitsandbytes,
    two weights in a byte.
    """
    transformers = transformers_package()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source, local_files_only=True, quantization_config=_settings(transformers, kind)
    )
    with new_folder(to) as partial:
        model.save_pretrained(partial, max_shard_size=shard_bytes)
        for path in sorted(source.iterdir()):
            if path.suffix in COPIED and not (partial / path.name).exists():
                shutil.copyfile(path, partial / path.name)


def _settings(transformers: Any, kind: Kind) -> Any:
    """Raises ConfigError without the package."""
    if kind != "nf4":
        return transformers.TorchAoConfig(torchao_config(kind, OPTION))
    try:
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"nf4 weights need the package bitsandbytes ({error})",
            where=OPTION,
            remedy="pip install 'holdfast[nf4]', or use int4",
        ) from error
    return transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
