"""A model that a command reads: that of a run, or of a folder in Hugging Face form."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from holdfast.config.huggingface.folder import CONFIG, read_folder_model
from holdfast.config.sections.governance import GovernanceConfig
from holdfast.config.sections.model import ModelConfig
from holdfast.config.sections.task import refuse_task
from holdfast.data.read.vocabulary import load_tokenizer
from holdfast.export.weights import dataset_tokens, settings_folder
from holdfast.launch.run.runs import RESOLVED_FILE, Run, open_run
from holdfast.launch.start.regions import noted_regions


@dataclass(frozen=True)
class ModelSource:
    """A model, and what an export of it gives back."""

    model: ModelConfig
    tokenizer: Path | None
    end_token: str | None  # None: a known one
    settings: Path  # folder with settings of generation
    run: Run | None  # None: it is a folder

    @property
    def governance(self) -> GovernanceConfig:
        """The regions that it may lie in. Raises ConfigError for a damaged note."""
        return noted_regions(self.settings) if self.run is None else self.run.config.governance


def open_source(path: Path, what: str) -> ModelSource:
    """Read what a path says of its model, and no weights. what: it is for, such as "pruning".
    Raises UserError for a path that is neither, and for a run of a task."""
    if (path / CONFIG).is_file() and not (path / RESOLVED_FILE).exists():
        tokenizer = path / "tokenizer.json"
        known = tokenizer if tokenizer.is_file() else None
        return ModelSource(read_folder_model(path), known, None, path, None)
    run = open_run(path)
    refuse_task(run.config.task, what)
    place, settings = run.dataset_files / "tokenizer.json", settings_folder(run)
    if not place.is_file():
        return ModelSource(run.config.model, None, None, settings, run)
    end = dataset_tokens(run.dataset_files, load_tokenizer(place)).end_token
    return ModelSource(run.config.model, place, end, settings, run)
