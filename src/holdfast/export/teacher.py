"""A teacher's likeliest tokens of a dataset, for a run file that distils."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from holdfast.config.loading.load import LoadedConfig
from holdfast.data.stream.batch import Batches
from holdfast.data.stream.dataset import Dataset
from holdfast.errors import ConfigError
from holdfast.export.weights import folder_decoder
from holdfast.launch.run.reference_run import KEY, teacher_values


def store_teacher(
    loaded: LoadedConfig, dataset: Dataset, say: Callable[[int, int], None]
) -> tuple[str, str]:
    """Store what is missing. Return the folder, and the digest of all pieces. Raises UserError."""
    config = loaded.config
    if config.objective.kind != "distill":
        raise ConfigError(
            f"objective.kind is {config.objective.kind}, which has no teacher",
            where=loaded.where("objective.kind"),
            remedy="use objective: {kind: distill, reference: {model: FOLDER}}",
        )
    from holdfast.training.compress.teach import teach

    key = str(teacher_values(loaded, dataset, {})[f"{KEY}.key"][0])
    batches = Batches(dataset, config.data, config.train, config.seed, reference=key)
    assert batches.reference is not None
    teacher = folder_decoder(Path(config.objective.reference.model))
    temperature = config.objective.number("temperature")
    device = "cpu" if config.device == "auto" else config.device
    digest = teach(teacher, batches, temperature, device, say)
    return str(batches.reference.folder), digest
