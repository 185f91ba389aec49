"""What would work if nothing does."""

from __future__ import annotations

from holdfast.errors import LayoutError
from holdfast.plan.cost.evaluate import Problem
from holdfast.plan.search.limits import Limits


def nothing_fits_error(problem: Problem, limits: Limits) -> LayoutError:
    return LayoutError("no layout fits", where="layout", remedy="use more devices")
