"""Every remedy that a message names is carried out by a test, and leads out.

Remedies of the run file are in `tests/runtime/config/test_remedies.py`, those of the command line
in `test_remedies.py`. Here are those of files, stores, models and runs, in tables.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.cli.conftest import Trained
from tests.runtime.cli.remedies import (
    of_adapters,
    of_admissions,
    of_brokers,
    of_buckets,
    of_campaigns,
    of_checkpoints,
    of_clusters,
    of_commands,
    of_datasets_cases,
    of_disks,
    of_engine_code,
    of_hardware,
    of_imports,
    of_installations,
    of_kubernetes,
    of_launchers,
    of_launches,
    of_models,
    of_named_code,
    of_named_parts,
    of_nodes,
    of_objectives,
    of_others_cases,
    of_own_loops,
    of_plan_search,
    of_plans,
    of_pods,
    of_predictions,
    of_ray,
    of_ray_preparation,
    of_remote_datasets,
    of_rest,
    of_run_files,
    of_runs_cases,
    of_scores,
    of_sets_and_faults,
    of_sharding,
    of_simulations,
    of_slurm,
    of_sources,
    of_ssh,
    of_stores_cases,
    of_task_code,
    of_traces,
    of_trackers,
    of_trainers,
)
from tests.runtime.cli.remedies.lab import Case, Lab, carry_out
from tests.runtime.cli.remedies.not_carried_out import NOT_CARRIED_OUT
from tests.runtime.cli.remedies.sites import site_names

TABLES = (
    of_plan_search,
    of_plans,
    of_checkpoints,
    of_slurm,
    of_sources,
    of_datasets_cases,
    of_stores_cases,
    of_models,
    of_runs_cases,
    of_others_cases,
    of_run_files,
    of_commands,
    of_rest,
    of_adapters,
    of_own_loops,
    of_trainers,
    of_named_parts,
    of_sets_and_faults,
    of_imports,
    of_task_code,
    of_sharding,
    of_named_code,
    of_engine_code,
    of_campaigns,
    of_clusters,
    of_nodes,
    of_trackers,
    of_disks,
    of_hardware,
    of_objectives,
    of_installations,
    of_brokers,
    of_buckets,
    of_launchers,
    of_launches,
    of_pods,
    of_ssh,
    of_kubernetes,
    of_ray,
    of_remote_datasets,
    of_ray_preparation,
    of_traces,
    of_simulations,
    of_scores,
    of_predictions,
    of_admissions,
)
CASES: list[Case] = [one for table in TABLES for one in table.CASES]


@pytest.mark.parametrize("one", CASES, ids=str)
def test_the_remedy_leads_out(
    one: Case, trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    carry_out(one, Lab(tmp_path, trained.folder))


def test_each_message_with_a_remedy_is_in_a_table_or_has_a_reason() -> None:
    carried_out = {site for one in CASES for site in one.sites}
    with_reason = {site for sites in NOT_CARRIED_OUT.values() for site in sites}
    names = site_names()
    assert names - carried_out - with_reason == set(), (
        "give it a case in tests/runtime/cli/remedies"
    )
    assert (carried_out | with_reason) - names == set(), "no message is called so"
    assert carried_out & with_reason == set(), "a case carries it out: no reason is needed"
