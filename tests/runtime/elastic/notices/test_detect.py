"""`cluster.notices: auto`: what is found on machines of each kind, by files and variables alone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from holdfast.config.sections.cluster import ClusterConfig
from holdfast.elastic.notices.clouds import AZURE_CHASSIS_TAG, detect_sources, make_notice_source
from holdfast.elastic.notices.poller import NoticePoller


def _machine(root: Path, **firmware: str) -> Path:
    folder = root / "sys/class/dmi/id"
    folder.mkdir(parents=True)
    for name, text in firmware.items():
        (folder / name).write_text(f"{text}\n")
    return root


@pytest.mark.parametrize(
    ("firmware", "cloud"),
    [
        ({"sys_vendor": "Amazon EC2", "product_name": "p5.48xlarge"}, "aws"),
        ({"sys_vendor": "Xen", "bios_version": "4.11.amazon"}, "aws"),
        ({"sys_vendor": "Google", "product_name": "Google Compute Engine"}, "google"),
        ({"sys_vendor": "Microsoft Corporation", "chassis_asset_tag": AZURE_CHASSIS_TAG}, "azure"),
        ({"sys_vendor": "Microsoft Corporation", "chassis_asset_tag": "None"}, None),
        ({"sys_vendor": "Google", "product_name": "Pixelbook"}, None),
        ({"sys_vendor": "QEMU"}, None),
        ({}, None),
    ],
)
def test_whose_machine_it_is(tmp_path: Path, firmware: dict[str, str], cloud: str | None) -> None:
    assert detect_sources({}, _machine(tmp_path, **firmware)).source_names == (
        (cloud,) if cloud else ()
    )


def test_a_pod_in_a_cloud_has_both() -> None:
    """Firmware that cannot be read says nothing."""
    choice = detect_sources(
        {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "SLURM_JOB_ID": ""}, Path("/dev/null")
    )
    assert choice.source_names == ("kubernetes",)
    assert choice.startup_message == "notices: auto asks kubernetes (KUBERNETES_SERVICE_HOST)"


def test_what_is_found_is_said_in_one_line_and_asked(tmp_path: Path) -> None:
    root = _machine(tmp_path, sys_vendor="Amazon EC2")
    environment = {"SLURM_JOB_ID": "7", "RAY_ADDRESS": "auto"}
    found = make_notice_source(ClusterConfig(notices="auto"), environment=environment, root=root)
    assert found is not None
    assert [type(part).__name__ for part in found.leaf_sources] == ["SlurmSource", "AwsSource"]
    assert found.startup_message == (
        "notices: auto asks slurm (SLURM_JOB_ID), ray (RAY_ADDRESS), aws (made by Amazon EC2); "
        "ray is left out: the address of Ray's head is not known"
    )


def test_where_there_is_nobody_that_is_said_and_the_run_goes_on(tmp_path: Path) -> None:
    said: list[str] = []

    async def body() -> None:
        source = make_notice_source(ClusterConfig(notices="auto"), environment={}, root=tmp_path)
        watch = NoticePoller(source, 0.01, lambda warned: None, said.append)
        watch.close()

    asyncio.run(body())
    [line] = said
    assert line.startswith("notices: auto found nobody to ask")
    assert ClusterConfig().notices == "none", "unless it is asked for"
