"""Remedies of messages about a task's sharding table: a wrong one, and the one that a remedy asks
for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from holdfast.tasks.task.module import meta_module
from holdfast.tasks.task.sharding import sharding_rows
from tests.runtime.cli.remedies.lab import Case, Lab, case, fixed
from tests.runtime.cli.remedies.of_others import values
from tests.support.sample_tasks import WIDTH, Classifier

Table = Mapping[str, Any]


class Layers(nn.Module):
    """An embedding whose matrix is also the last layer's, and a layer between."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(WIDTH, 8), nn.LayerNorm(8)
        self.between, self.head = nn.Linear(8, 8), nn.Linear(8, WIDTH, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.between(self.norm(self.embed(tokens))))
        return out


def read_table(lab: Lab) -> None:
    class Task(Classifier):
        def model(self) -> nn.Module:
            return Layers()

        def sharding(self) -> Any:
            return lab.settings["table"]

    made = Task()
    sharding_rows(made, meta_module(made))


def _table(message: str, wrong: Table, remedy: str, right: Table) -> Case:
    site, begin = f"tasks/task/sharding.py: {message}", values(table=wrong)
    return case(site, begin, read_table, remedy, fixed(table=right))


COLUMNS = "colwise_gather_output"
CASES: list[Case] = [
    _table(
        "sharding() names …, and the module has no such layer",
        {"blocks.betwen": COLUMNS},
        r"use names such as between, embed, norm, head",
        {"between": COLUMNS},
    ),
    _table(
        "sharding() names layer … twice: … and …",
        {"b*": COLUMNS, "between": "rowwise"},
        r"let one pattern fit it",
        {"b*": COLUMNS},
    ),
    _table(
        "sharding() returned … for …",
        {"between": "columns"},
        r"use one of colwise, colwise_gather_output, rowwise, embedding_rowwise, "
        r"replicated_with_grad_allreduce, or a pair of it and a number of parts",
        {"between": (COLUMNS, 4)},
    ),
    _table(
        "sharding() says … for layer …, which is a …",
        {"norm": "colwise"},
        r"colwise is for a plain torch\.nn\.Linear: name no other layer",
        {},
    ),
    _table(
        "sharding() says … parts for layer …, and its size is …",
        {"between": ("rowwise", 3)},
        r"name a number of parts that divides it",
        {"between": ("rowwise", 4)},
    ),
    _table(
        "….… is also …, and sharding() does not cut both in one way",
        {"head": COLUMNS},
        r"name both \(embedding_rowwise and colwise_gather_output\), or none",
        {"embed": "embedding_rowwise", "head": COLUMNS},
    ),
]
