"""What each rung of the recovery ladder cost a run, from its own journal."""

from __future__ import annotations

from holdfast.report.history.history import History


def rung_prices(history: History) -> dict[int, float]:
    """Return by rung the most seconds beyond a step until training continued.

    They contain the bytes that were moved and the communicators of this run. A rung that the run
    never took is not in it.
    """
    step_s = {point.step: point.seconds for point in history.steps}
    prices: dict[int, float] = {}
    for incident in history.incidents:
        waited = incident.stood_still_s if incident.is_planned else incident.seconds
        if incident.rung < 0 or waited is None or incident.restart_step is None:
            continue
        price = max(0.0, waited - step_s.get(incident.restart_step + 1, 0.0))
        prices[incident.rung] = max(price, prices.get(incident.rung, 0.0))
    return prices
