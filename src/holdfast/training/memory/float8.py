"""float8 products with the weights of blocks, through torchao (`train.precision: fp8`).

Everything else is as in bf16: parameters stay under their names, in float32 between steps. A
product takes float8 copies of both factors, e4m3 with one scale for each row, a power of two. So a
token's scale depends on that token alone. Three products of a layer are so: its output, and the
gradients of its input and of its weight. The head stays in bf16.

torchao imports the compiler, and takes a second or two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from holdfast.errors import ConfigError

_RECIPE = "rowwise"  # torchao's own name. It calls this one stable


def apply_float8(blocks: Sequence[nn.Module], *, is_emulated: bool) -> None:
    """Change the linear layers of the blocks in place; call it before they are compiled or sharded.

    is_emulated: for a device without such kernels, which `holdfast train` refuses. Tests use it.
        The factors are rounded in the same way, and then multiplied in float32.
    `config/sections/degrees.py` has refused layers that the kernels cannot take. Raises ConfigError
    without torchao.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise ConfigError(
            f"train.precision fp8 needs the package torchao, and the import ended: {error}",
            where="train.precision",
            remedy="install it on this node with pip install 'holdfast[fp8]'",
        ) from error
    config = replace(Float8LinearConfig.from_recipe_name(_RECIPE), emulate=is_emulated)
    for block in blocks:
        convert_to_float8_training(block, config=config)
