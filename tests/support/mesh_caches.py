"""What torch keeps for device meshes."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor, _redistribute

from holdfast.parallel.torch_compat import _cached_functions


def count_mesh_cache_entries() -> int:
    """Return the entries of the caches that `forget_meshes` clears. C++'s does not tell."""
    dispatcher: Any = DTensor
    propagated = dispatcher._op_dispatcher.sharding_propagator.propagate_op_sharding
    planners: Any = getattr(_redistribute, "_planner_cache", {})
    held = [int(f.cache_info().currsize) for f in (propagated, *_cached_functions())]
    return len(planners) + sum(held)
