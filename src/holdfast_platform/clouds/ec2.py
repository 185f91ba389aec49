"""Instances of Amazon EC2 that belong to one run: ordered, listed and ended by its Query protocol.

Each instance has tags with the run, its node and its offer. So any later command finds them again,
and no list of them is kept.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol
from urllib.parse import urlencode
from xml.etree import ElementTree

from holdfast.wire.secret_managers.aws import AwsService
from holdfast.wire.secret_managers.request import SecretManagerError

VERSION = "2016-11-15"
RUN_TAG, NODE_TAG, OFFER_TAG = "holdfast:run", "holdfast:node", "holdfast:offer"
MAX_TAG_CHARS = 256
CAPACITY_CODES = (
    "InsufficientInstanceCapacity",
    "SpotMaxPriceTooLow",
    "MaxSpotInstanceCountExceeded",
    "InstanceLimitExceeded",
    "VcpuLimitExceeded",
)
"""Codes of errors that say that the cloud has no more such instances for this account now."""


class CapacityError(Exception):
    """The cloud has no such instance now; its text is the cloud's own code."""


@dataclass(frozen=True)
class Instance:
    """One instance of the run."""

    id: str  # the cloud's own name
    node: str  # of the run
    offer: str  # name of the offer by which it was ordered
    state: str  # as EC2 calls it: pending, running, shutting-down, terminated, ...
    launched: float  # seconds since 1970

    @property
    def is_live(self) -> bool:
        """Return True if it is paid for."""
        return self.state in LIVE_STATES


LIVE_STATES = ("pending", "running")
STATES = (*LIVE_STATES, "shutting-down", "terminated", "stopping", "stopped")
"""All states of an instance that EC2's documentation lists."""


@dataclass(frozen=True)
class InstanceSettings:
    """What all instances of a run have in common. "" leaves a setting to the account."""

    image: str  # AMI with Holdfast
    machine: str  # EC2's name of the type
    subnet: str = ""
    profile: str = ""  # name of the instance profile, whose role reads the bucket and the secret


class Fleet(Protocol):
    """Instances of one run. Every method may raise SecretManagerError: the cloud does not answer,
    or refuses."""

    def instances(self) -> list[Instance]:
        """Return all that the cloud still lists, those that have ended too."""

    def order(self, node: str, offer: str, *, spot: bool, script: str) -> Instance:
        """Order one instance that runs `script` when it starts. Raises CapacityError."""

    def end(self, ids: Sequence[str]) -> None:
        """End instances. One that has ended is no error."""


class Ec2Fleet:
    """Implements `Fleet`. run: the run's location, which is the same on every machine."""

    def __init__(self, service: AwsService, run: str, settings: InstanceSettings) -> None:
        self._service, self._settings = service, settings
        self._run = run.partition("?")[0][-MAX_TAG_CHARS:]

    def instances(self) -> list[Instance]:
        found: list[Instance] = []
        token = ""
        while True:
            page = self._ask(
                "DescribeInstances",
                {"Filter.1.Name": f"tag:{RUN_TAG}", "Filter.1.Value.1": self._run}
                | ({"NextToken": token} if token else {}),
            )
            found += [_instance(each) for each in _items(page, "instancesSet")]
            if not (token := page.findtext("nextToken") or ""):
                return sorted(found, key=lambda each: (each.launched, each.node))

    def order(self, node: str, offer: str, *, spot: bool, script: str) -> Instance:
        settings = self._settings
        # The same order again, after an answer that was lost, gives the same instance.
        token = hashlib.sha256(f"{self._run} {node}".encode()).hexdigest()
        asked = {
            "ImageId": settings.image,
            "InstanceType": settings.machine,
            "MinCount": "1",
            "MaxCount": "1",
            "ClientToken": token,
            "UserData": base64.b64encode(script.encode()).decode(),
            "InstanceInitiatedShutdownBehavior": "terminate",
            "TagSpecification.1.ResourceType": "instance",
        }
        tags = {"Name": node, RUN_TAG: self._run, NODE_TAG: node, OFFER_TAG: offer}
        for number, (key, value) in enumerate(tags.items(), 1):
            asked[f"TagSpecification.1.Tag.{number}.Key"] = key
            asked[f"TagSpecification.1.Tag.{number}.Value"] = value
        if spot:
            asked["InstanceMarketOptions.MarketType"] = "spot"
            asked["InstanceMarketOptions.SpotOptions.SpotInstanceType"] = "one-time"
        if settings.subnet:
            asked["SubnetId"] = settings.subnet
        if settings.profile:
            asked["IamInstanceProfile.Name"] = settings.profile
        try:
            answer = self._ask("RunInstances", asked)
        except SecretManagerError as error:
            if code := next((code for code in CAPACITY_CODES if f"({code})" in str(error)), ""):
                raise CapacityError(code) from None
            raise
        return _instance(next(_items(answer, "instancesSet")))

    def end(self, ids: Sequence[str]) -> None:
        if ids:
            named = {f"InstanceId.{number}": each for number, each in enumerate(ids, 1)}
            self._ask("TerminateInstances", named)

    def spot_price(self) -> float | None:
        """Return the lowest of the newest spot prices of the machine type's zones, in US dollars an
        hour. None: the cloud sells none."""
        page = self._ask(
            "DescribeSpotPriceHistory",
            {"InstanceType.1": self._settings.machine, "ProductDescription.1": "Linux/UNIX"},
        )
        newest: dict[str, tuple[str, float]] = {}
        for each in _items(page, "spotPriceHistorySet"):
            if each.findtext("instanceType") == self._settings.machine:
                priced = (
                    each.findtext("timestamp") or "",
                    float(each.findtext("spotPrice") or "inf"),
                )
                zone = each.findtext("availabilityZone") or ""
                newest[zone] = max(newest.get(zone, priced), priced)
        return min((price for _, price in newest.values()), default=None)

    def _ask(self, action: str, values: Mapping[str, str]) -> ElementTree.Element:
        body = urlencode({"Action": action, "Version": VERSION} | dict(values)).encode()
        headers = {"content-type": "application/x-www-form-urlencoded; charset=utf-8"}
        answer = self._service.post(headers, body)
        try:
            text = re.sub(r'\sxmlns="[^"]*"', "", answer.decode(), count=1)
            return ElementTree.fromstring(text)
        except (ElementTree.ParseError, UnicodeDecodeError):
            raise SecretManagerError(f"the answer to {action} is no XML") from None


_STATE = "instanceState/name"


def _items(page: ElementTree.Element, name: str) -> Iterator[ElementTree.Element]:
    for group in page.iter(name):
        yield from group.findall("item")


def _instance(item: ElementTree.Element) -> Instance:
    tags = {
        each.findtext("key") or "": each.findtext("value") or "" for each in _items(item, "tagSet")
    }
    # Without these, an instance would be ordered twice, or never ended.
    said = {key: item.findtext(key) or "" for key in ("instanceId", "launchTime", _STATE)}
    if lacking := [key for key, value in said.items() if not value]:
        raise SecretManagerError(f"EC2's answer has an instance without {', '.join(lacking)}")
    if said[_STATE] not in STATES:
        raise SecretManagerError(
            f"EC2 says that {said['instanceId']} is {said[_STATE]!r}, a state that is not known "
            "here"
        )
    began = datetime.fromisoformat(said["launchTime"]).timestamp()
    nodes = tags.get(NODE_TAG, ""), tags.get(OFFER_TAG, "")
    return Instance(said["instanceId"], *nodes, said[_STATE], began)
