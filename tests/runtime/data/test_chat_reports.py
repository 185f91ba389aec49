"""Broken templates and masks of public reports. Each is refused before a dataset is written.

A case names the report, makes its template or rows in small, and has words of the refusal.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from holdfast.data.read.chat_templates import BY_KEY
from holdfast.errors import DataError
from tests.runtime.data.test_chat_templates import TALK, prepare
from tests.support.chat import CHATML, conversation

HEADER = "<|im_start|>assistant"
ANSWER = "It is two, because two comes right after one when we count."
THOUGHT = {"role": "assistant", "content": f"<think>\nOne, and then?\n</think>\n\n{ANSWER}"}


@dataclass(frozen=True)
class Report:
    """report: an issue (#) or a pull request (!). what: what was trained wrongly there."""

    report: str
    what: str
    words: tuple[str, ...]  # of the refusal
    template: str = CHATML
    rows: tuple[Any, ...] | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.report


def messages(*talk: dict[str, Any]) -> tuple[Any, ...]:
    return ({"messages": list(talk)},)


def replies_become(text: str) -> str:
    """ChatML with other content for a reply."""
    return CHATML.replace(
        "message['content']", f"({text} if message['role'] == 'assistant' else message['content'])"
    )


REPORTS = (
    Report(
        "marin-community/marin#7237",
        "a mask of zeros: the template marks no reply",
        ("2 replies", "marks 0 parts", "generation"),
        CHATML + "{% if false %}{% generation %}{% endgeneration %}{% endif %}",
        messages(*TALK),
    ),
    Report(
        "NVIDIA-NeMo/Megatron-Bridge#2598",
        "a mask of ones: prompts are trained as well",
        ("everything carries loss", "rows: text"),
        "{% generation %}" + CHATML + "{% endgeneration %}",
        tuple({"messages": conversation(seed)} for seed in range(6)),
    ),
    Report(
        "huggingface/trl!5988",
        "the end of a reply is a token of the next message: the model never stops",
        ("no reply ends with a stop token (<|im_end|>)", "eos_token"),
        BY_KEY["chatml"].replace(
            "{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}",
            "{{ message['content'] }}{% endgeneration %}{{ '<|im_end|>\\n' }}",
        ),
    ),
    Report(
        "axolotl-ai-cloud/axolotl!3756",
        "the folder's eos_token is none that the template writes",
        ("no reply ends with a stop token (<|endoftext|>)", "eos_token"),
        settings={"eos": "<|endoftext|>"},
    ),
    Report(
        "OpenRLHF/OpenRLHF#393",
        "two begin tokens",
        ("begins with '<|endoftext|>' twice",),
        "{{ '<|endoftext|><|endoftext|>' }}" + CHATML,
    ),
    Report(
        "huggingface/trl#4147",
        "the header of a reply is trained, because add_generation_prompt does nothing",
        (f"begins with '{HEADER}", "add_generation_prompt"),
        CHATML.replace("{% if add_generation_prompt %}", "{% if false %}"),
    ),
    Report(
        "modelscope/ms-swift#4939",
        "thoughts of earlier replies are dropped once another message follows",
        ("no beginning of the full text", "generation"),
        replies_become(
            "message['content'] if loop.last else message['content'].split('</think>')[-1]"
        ),
        messages(TALK[1], THOUGHT, TALK[3], THOUGHT),
    ),
    Report(
        "huggingface/trl!6766",
        "the thoughts of the only reply are cut off, and so are never trained",
        ("leaves out a part of the reply in message 2", "One, and then?"),
        replies_become("message['content'].split('</think>')[-1]"),
        messages(TALK[3], THOUGHT),
    ),
    Report(
        "raullenchai/Rapid-MLX#1765",
        "a system message in the middle is dropped",
        ("leaves out message 3 of the role system", "Be brief."),
        CHATML.replace(
            "{% for message in messages %}",
            "{% for message in messages if loop.index0 == 0 or message['role'] != 'system' %}",
        ).replace("loop.index0 == 0", "message == messages[0]"),
        messages(*TALK[1:3], TALK[0], *TALK[3:]),
    ),
    Report(
        "sgl-project/sglang#40082",
        "a role that the template does not know is dropped",
        ("leaves out message 1 of the role developer",),
        CHATML.replace(
            "{% for message in messages %}",
            "{% for message in messages if message['role'] in ('system', 'user', 'assistant') %}",
        ),
        messages({"role": "developer", "content": "Answer in verse."}, *TALK[1:]),
    ),
    Report(
        "huggingface/trl!5526",
        "an end token stands wherever no reply is asked for, so also after a prompt alone",
        ("no beginning of the full text", "generation"),
        CHATML.replace("{% endif %}", "{% else %}{{ '<|endoftext|>' }}{% endif %}"),
        messages(*TALK),
    ),
    Report(
        "huggingface/smol-course#260",
        "rows whose roles do not alternate, as the template demands",
        ("fails in line 1", "roles must alternate", "leave it out"),
        "{% for message in messages %}"
        "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
        "{{ message['content'] }}{% endfor %}",
        messages(*TALK[1:3], TALK[4]),
    ),
)


@pytest.mark.parametrize("case", REPORTS, ids=str)
def test_what_a_public_report_trained_wrongly_is_refused(case: Report, tmp_path: Path) -> None:
    rows = None if case.rows is None else list(case.rows)
    with pytest.raises(DataError) as refused:
        prepare(tmp_path, case.template, rows, **case.settings)
    for word in case.words:
        assert word in str(refused.value)
    assert not (tmp_path / "dataset" / "manifest.json").exists()


def test_a_system_message_that_a_template_folds_into_the_request_is_no_loss(tmp_path: Path) -> None:
    """The form of Gemma 3 and Mistral: nothing is dropped, so nothing is refused."""
    folded = (
        "{% if messages[0]['role'] == 'system' %}"
        "{% set first = messages[0]['content'] + '\\n\\n' %}"
        "{% set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}"
        "{% endif %}{% for message in rest %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
        "{{ (first if loop.first else '') + message['content'] | trim + '<|im_end|>\\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    lines = "\n".join(prepare(tmp_path, folded, list(messages(*TALK) * 4), deduplicate=False))
    assert "<|im_start|>user\nBe brief.\n\nSay one.<|im_end|>" in lines
