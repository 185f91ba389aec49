"""The score at level 0: a policy over the scenarios, in the engine. Pure.

All policies run over one cost model with fixed constants, the reference machine. It has 64 nodes in
replicas of 8, and a state of 208 GB (13 B parameters). A node moves 1 GB/s to the run store, all of
them 20 GB/s, and a node 2.5 GB/s to another one. It costs 2 $ an hour and takes 2 kW. A kWh has
400 g of CO2.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast_lab.engine.interfaces import Costs, PolicyMaker
from holdfast_lab.engine.ledger import Ledger
from holdfast_lab.engine.loop import Limits, Simulation
from holdfast_lab.engine.table_cost import linear_cost
from holdfast_lab.score.scenarios import LEVEL_0, SCENARIOS, ScenarioRun, draw_scenario
from holdfast_lab.score.score import REFERENCE_SHARE, PairScore

STEP_TOKENS = 4_000_000.0
NODES_PER_REPLICA = 8
REFERENCE_COSTS = Costs(
    state_bytes=208e9,
    store_bandwidth=20e9,
    node_store_bandwidth=1e9,
    peer_bandwidth=2.5e9,
    usd_per_node_hour=2.0,
    grams_co2_per_kwh=400.0,
    busy_watts=2000.0,
    idle_watts=600.0,
)


def run_scenario(run: ScenarioRun, policy: PolicyMaker) -> Ledger:
    """What a policy makes of a scenario."""
    # The cost model of a scenario: speed grows with complete replicas.
    rate = STEP_TOKENS / run.step_s
    cost = linear_cost(run.nodes, rate, STEP_TOKENS, REFERENCE_COSTS, NODES_PER_REPLICA)
    return Simulation(cost, policy(cost), Limits(run.seconds)).run(run.events)


def level_0_pairs(
    policy: PolicyMaker, scenarios: Sequence[str], seeds: Sequence[int]
) -> list[PairScore]:
    """The values of all pairs."""
    found = []
    for name in scenarios:
        for seed in seeds:
            run = draw_scenario(name, seed, LEVEL_0)
            found.append(pair_of_ledger(run, run_scenario(run, policy)))
    return found


def pair_of_ledger(run: ScenarioRun, ledger: Ledger) -> PairScore:
    """The values of one simulated run. y ends with the first step after the fault: the engine runs
    at the full speed of the layout from then on."""
    parts, t_ref = SCENARIOS[run.scenario].parts, REFERENCE_SHARE * run.between_s
    ideal = ledger.ideal_tokens
    g = ledger.tokens / ideal if ideal else 0.0
    x, y = ledger.lost_s.mean, ledger.rto_s.quantile(0.95)
    has_faults = ledger.interruptions > 0
    share = min(1.0, g)
    return PairScore(
        run.scenario,
        run.seed,
        g,
        1 / (1 + x / t_ref) if has_faults and "RPO" in parts else None,
        1 / (1 + y / t_ref) if has_faults and "RTO" in parts else None,
        share if "EO" in parts else None,
        share if "J" in parts else None,
        share if "P" in parts else None,
        x,
        y,
        y,
        ledger.tokens,
        ledger.usd,
        ledger.grams_co2,
    )
