"""Remedies of messages about imports of DCP folders, copies, chats and data of a run."""

from __future__ import annotations

import json
import pickle
import shlex
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from re import Match
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from holdfast.api.start import SCREEN
from holdfast.checkpoint.bucket.copy import copy_checkpoint
from holdfast.checkpoint.interop.dcp import DcpFolder
from holdfast.checkpoint.interop.dcp_import import import_dcp
from holdfast.checkpoint.interop.dcp_metadata import METADATA
from holdfast.checkpoint.restore.catalog import list_commits
from holdfast.cli import checkpoint_import, data
from holdfast.config.loading.load import LoadedConfig, PlannedValues, load_config, resolve_config
from holdfast.config.sections.optimizer import OptimizerConfig
from holdfast.core.format.flat_names import SCHEMES
from holdfast.core.format.manifest import Commit
from holdfast.data.stream.dataset import Dataset
from holdfast.launch.start import data as start_data
from holdfast.launch.start.facts import Facts
from holdfast.machine.hardware import detect_hardware
from holdfast.wire.store.run_store import FolderStore
from tests.runtime.cli.remedies.lab import Case, Lab, case, fixed
from tests.runtime.cli.remedies.of_datasets import begin_chat, prepare_chat, read_row, template
from tests.runtime.cli.remedies.of_runs import RUN, attempt, begin_run, line, run_command
from tests.support.chat import CHATML
from tests.support.corpus import data_config, make, text_folder, text_source
from tests.support.models import config

MODEL = config()
NAMED = {"source": "s", "data": "d", "samples": 4, "validation": 0, "parameters": ["w float32 4"]}


# --- folders of torch.distributed.checkpoint ------------------------------------------------
def save(folder: Path, state: dict[str, Any]) -> None:
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)


def model_state(steps: tuple[float, ...] = ()) -> dict[str, Any]:
    """The parameters, and AdamW's moments where `steps` are given: one number of updates each."""
    rows = SCHEMES["holdfast"](MODEL)
    state: dict[str, Any] = {row.theirs: torch.ones(row.shape) for row in rows}
    if not steps:
        return state
    moments: dict[str, Any] = {}
    for number, row in enumerate(rows):
        for kind in ("exp_avg", "exp_avg_sq"):
            moments[f"state.{row.theirs}.{kind}"] = torch.zeros(row.shape)
        moments[f"state.{row.theirs}.step"] = torch.tensor(steps[number % len(steps)])
    return state | {"optimizer": moments}


def saved(change: Callable[[dict[str, Any]], object], *steps: float, **given: Any) -> Any:
    """Begin with a folder that is changed before it is saved."""

    def begin(lab: Lab) -> None:
        state = model_state(steps)
        change(state)
        save(lab.folder / "dcp", state)
        save(lab.folder / "right", model_state())
        lab.settings.update(folder="dcp", run="new", **given)

    return begin


def unchanged(state: dict[str, Any]) -> None: ...


def reshape_first(state: dict[str, Any]) -> None:
    state[next(iter(state))] = torch.ones(3)


def import_folder(lab: Lab) -> None:
    given = dict(lab.settings)
    (lab.folder / given["run"]).mkdir(exist_ok=True)
    store = FolderStore(lab.folder / given.pop("run"))
    import_dcp(store, lab.folder / given.pop("folder"), MODEL, **given)


def begin_imported(lab: Lab) -> None:
    saved(unchanged)(lab)
    import_folder(lab)


def begin_no_metadata(lab: Lab) -> None:
    saved(unchanged)(lab)
    lab.write(f"dcp/{METADATA}", b"\x80\x04torn")


def begin_hole(lab: Lab) -> None:
    save(lab.folder / "dcp", {"w": torch.ones(4)})
    path = lab.folder / "dcp" / METADATA
    metadata = pickle.loads(path.read_bytes())
    metadata.state_dict_metadata["w"].size = torch.Size((6,))
    path.write_bytes(pickle.dumps(metadata))


def save_again(lab: Lab, found: Match[str]) -> None:
    shutil.rmtree(lab.folder / "dcp")
    save(lab.folder / "dcp", {"w": torch.ones(4)})


def of_import(site: str, begin: Any, remedy: str, **settings: Any) -> Case:
    return case(f"checkpoint/interop/{site}", begin, import_folder, remedy, fixed(**settings))


# --- runs and their data --------------------------------------------------------------------
def begin_other_state(lab: Lab) -> None:
    """A target that has another state after the same step of the same run."""
    source, target = FolderStore(lab.folder / RUN), FolderStore(lab.folder / "made")
    key = list_commits(source)[0]
    copy_checkpoint(source, key, target)
    commit = Commit.from_bytes(source.get(key), key)
    (lab.folder / "made" / key).write_bytes(replace(commit, meta={"position": 0}).to_bytes())


def copy_to_new(lab: Lab, found: Match[str]) -> None:
    lab.settings["line"][-1] = lab.path("new")


def begin_lost_tokenizer(lab: Lab) -> None:
    begin_run(lab)
    shutil.copytree(lab.trained.parent / "dataset", lab.folder / "dataset")
    (lab.folder / "dataset/tokenizer.json").unlink()
    path = lab.folder / RUN / "resolved.json"
    resolved = json.loads(path.read_text())
    resolved["dataset"]["folder"] = lab.path("dataset")
    path.write_text(json.dumps(resolved))
    lab.settings["line"] = shlex.split(f"generate {lab.path(RUN)} the --tokens 1")


def prepare_again(lab: Lab, found: Match[str]) -> None:
    shutil.rmtree(lab.folder / "dataset")
    words = shlex.split(found[1].replace("RUN.yaml", lab.path("run.yaml")))
    run_command([*words[1:], f"data.folder={lab.path('dataset')}"])


def begin_many_tokens(lab: Lab) -> None:
    """A dataset with more tokens than the model knows. The model's own tokenizer lies in `own`."""
    text_folder(lab.folder / "in", files=6, words=60)
    made = make_set(lab, "own", {"vocab_size": 270, "sample_bytes": 20_000})
    lab.write("hf/tokenizer.json", made.tokenizer_path.read_bytes())
    lab.settings.update(folder="out", tokenizer={"vocab_size": 300, "sample_bytes": 20_000})


def make_set(lab: Lab, folder: str, tokenizer: dict[str, Any]) -> Dataset:
    source = text_source(lab.folder / "in")
    return make(data_config(lab.folder / folder, source, tokenizer=tokenizer))


def match_vocabulary(lab: Lab) -> None:
    dataset = make_set(lab, **lab.settings)
    loaded = resolve_config(None, "command line", [f"data.folder={dataset.folder}"])
    checkpoint_import._with_folder_vocabulary(loaded, dataset, lab.folder / "hf", 280)


def name_own_tokenizer(lab: Lab, found: Match[str]) -> None:
    lab.settings.update(folder="new", tokenizer={"path": lab.path("hf/tokenizer.json")})


# --- a task's own data ----------------------------------------------------------------------
def know_task(loaded: LoadedConfig) -> PlannedValues:
    """What the child process finds out of a task with samples."""
    return {f"task.{key}": (value, "asked") for key, value in NAMED.items()}


def attempt_of_task(lab: Lab) -> None:
    """`holdfast train` is followed up to the data, where no text is missed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "ask_task", know_task)
        patch.setattr(start_data, "ask_task", know_task)
        patch.setattr(start_data, "ask_named", lambda loaded: {})
        if lab.settings["line"][0] != "train":
            attempt(lab)
            return
        file, *overrides = lab.settings["line"][1:]
        loaded = load_config(Path(file), overrides)
        facts = Facts(detect_hardware())
        start_data.prepare_run_data(loaded, facts, lab.folder / "new", SCREEN, fresh=False)


def type_line(lab: Lab, found: Match[str]) -> None:
    lab.settings["line"] = shlex.split(found[1])[1:]


# A last reply is not written, so it ends before its beginning.
WITHOUT_LAST = (
    "{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ 'U:' + message['content'] }}{% elif not loop.last %}"
    "{{ 'A:' + message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'A:' }}{% endif %}"
)
REPLIES_ALONE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{{ message['content'] + '<|im_end|>' }}{% endif %}{% endfor %}"
)
TOOL_ROWS = [
    {"messages": [{"role": "tool", "content": f"{i}"}, {"role": "assistant", "content": f"{i}."}]}
    for i in range(12)
]
TASK = r"train: (holdfast train .*)"
OF_MODEL = r"name a checkpoint of the model in the run file"
WEIGHTS = r"import the weights alone, with --weights-only"

CASES: list[Case] = [
    of_import(
        "dcp.py: this is not a checkpoint that can be imported: …",
        begin_no_metadata,
        r"name the folder that torch\.distributed\.checkpoint\.save wrote",
        folder="right",
    ),
    case(
        "checkpoint/interop/dcp.py: … is not whole: …",
        begin_hole,
        lambda lab: DcpFolder.open(lab.folder / "dcp"),
        r"save it again",
        save_again,
    ),
    of_import(
        "dcp_import.py: the run has checkpoints already (…)",
        begin_imported,
        r"import into a new run folder, with folder=<path>",
        run="other",
    ),
    of_import(
        "dcp_import.py: tensor … is missing, so this is not the run's model",
        saved(lambda state: state.pop(list(state)[-1])),
        OF_MODEL,
        folder="right",
    ),
    of_import(
        "dcp_import.py: … has the shape …, the run's model needs …",
        saved(reshape_first),
        OF_MODEL,
        folder="right",
    ),
    of_import(
        "dcp_import.py: it holds AdamW's moments, and the run's train.optimizer.name is …",
        saved(unchanged, 7.0, optimizer=OptimizerConfig(name="lion")),
        WEIGHTS,
        weights_only=True,
    ),
    of_import(
        "dcp_import.py: the optimizer's state has no single step: …",
        saved(unchanged, 7.0, 8.0),
        WEIGHTS,
        weights_only=True,
    ),
    case(
        "checkpoint/bucket/copy.py: holds another checkpoint of step …, generation …",
        line("checkpoint copy {root}/run 6 --to {root}/made", begin_other_state),
        attempt,
        r"name a new folder",
        copy_to_new,
    ),
    case(
        "export/weights.py: the run's tokenizer is not there",
        begin_lost_tokenizer,
        attempt,
        r"remove the folder if it is there, and prepare the dataset again: "
        r"(holdfast data prepare RUN\.yaml)",
        prepare_again,
    ),
    case(
        "cli/checkpoint_import.py: the dataset's tokenizer makes … tokens of texts, and the model "
        "knows …",
        begin_many_tokens,
        match_vocabulary,
        r"name the model's own tokenizer in data\.tokenizer\.path, and another data\.folder",
        name_own_tokenizer,
    ),
    case(
        "cli/data.py: … is for text, and this run trains …, which gives its own data",
        line("data verify {root}/run.yaml task=mine:Net"),
        attempt_of_task,
        TASK,
        type_line,
    ),
    case(
        "data/read/chat_documents.py: the text ends before message … begins",
        template(WITHOUT_LAST),
        read_row,
        r"mend the template in a copy of the folder, or name another in data\.chat",
        fixed(template=CHATML),
    ),
    case(
        "data/stages/dedup_split.py: nothing is left of … documents: … | ",
        begin_chat(CHATML, chat={"train_on": ["tool"]}),
        prepare_chat,
        r"name files that hold text, or for chats their roles in data\.chat\.train_on",
        fixed(chat={"train_on": ["assistant"]}),
    ),
    case(
        "data/prepare/chat_preparation.py: no token of any row carries loss",
        begin_chat(REPLIES_ALONE, chat={"train_on": ["tool"]}, rows=TOOL_ROWS),
        prepare_chat,
        r"look at data\.chat\.train_on, and at the template",
        fixed(template=CHATML),
    ),
]
