"""What a step takes beyond its products, its attention and the bytes of fused kernels.

`holdfast calibrate` measures steps of small models and fits these constants (`plan/probing`). The
values here, of a device without measured steps, change nothing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepCosts:
    """Constants of one kind of device and its host.

    kernel_s: host seconds of each kernel of a pass: Python, dispatch, bookkeeping of gradients. On
        an accelerator they pass while the device computes. A CPU computes nothing meanwhile.
    microbatch_s: seconds of the passes of a microbatch through a stage, whatever the stage holds.
    step_s: seconds of a step, whatever it computes.
    products: how many times as long products take in a step as alone: there a cache has lost their
        operands, and some are transposed.
    moves: elements that kernels of blocks that are not compiled move, for each one of fused kernels
        (`Layer.whole_moved`).
    gradient_moves: times that the gradients of a microbatch are moved to be summed.
    update_moves: times that the update reads and writes its bytes (`StateBytes.updated`). The
        norm of the gradients is in it.
    """

    kernel_s: float = 0.0
    microbatch_s: float = 0.0
    step_s: float = 0.0
    products: float = 1.0
    moves: float = 1.0
    gradient_moves: float = 0.0
    update_moves: float = 1.0


NOT_MEASURED = StepCosts()
