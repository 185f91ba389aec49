"""Chat templates by key, and the one that lies next to a tokenizer.

A template by key marks each reply with `{% generation %}`, up to and including the token that ends
it. So no mask has to be derived.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from holdfast.data.read.vocabulary import read_object
from holdfast.errors import DataError

TEMPLATE_FILE = "chat_template.jinja"
LEGACY_FILE = "chat_template.json"
"""Where processors of transformers kept the template before release 4.48: its only key has it."""
NAME_THE_TEMPLATE = (
    "set data.chat.template to alpaca (chatml and llama3 need their own tokens), or "
    "name a file of your own"
)

BY_KEY = {
    "chatml": (
        "{% for message in messages %}"
        "{{ '<|im_start|>' + message['role'] + '\\n' }}"
        "{% if message['role'] == 'assistant' %}"
        "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
        "{% else %}{{ message['content'] + '<|im_end|>\\n' }}{% endif %}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    "llama3": (
        "{{ bos_token }}"
        "{% for message in messages %}"
        "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}"
        "{% if message['role'] == 'assistant' %}"
        "{% generation %}{{ message['content'] | trim }}{{ '<|eot_id|>' }}{% endgeneration %}"
        "{% else %}{{ message['content'] | trim }}{{ '<|eot_id|>' }}{% endif %}"
        "{% endfor %}"
        "{% if add_generation_prompt %}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
    ),
    "alpaca": (
        "{{ bos_token }}"
        "{% for message in messages %}"
        "{% if message['role'] == 'assistant' %}{{ '### Response:\\n' }}"
        "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{{ '\\n\\n' }}"
        "{% elif message['role'] == 'user' %}"
        "{{ '### Instruction:\\n' + message['content'] + '\\n\\n' }}"
        "{% else %}{{ message['content'] + '\\n\\n' }}{% endif %}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '### Response:\\n' }}{% endif %}"
    ),
}
"""`data.chat.template`: the forms of ChatML, of Llama 3 and of Alpaca."""

DEFAULT, TOOL_USE = "default", "tool_use"
"""Names of templates that are taken by themselves: for rows, and for rows with tools."""
FOLDERS = ("chat_templates", "additional_chat_templates")
"""Folders in which transformers keeps templates by name: once, and since release 4.53."""


def read_templates(
    key: str, file: str | None, folder: Path, name: str | None = None
) -> dict[str, str]:
    """Return template by name: that of `file`, by `key`, or those of a model's folder. The one that
    rows take is the default: if the run file has a `name`, of that name. Raises DataError."""
    if file is not None:
        try:
            return {DEFAULT: Path(file).read_text("utf-8")}
        except (OSError, UnicodeDecodeError) as error:
            what = (
                f"{file} cannot be read ({getattr(error, 'strerror', None) or 'it is not UTF-8'})"
            )
            remedy = "name a file with a chat template"
            raise DataError(what, where="data.chat.template_file", remedy=remedy) from None
    if key != "folder":
        return {DEFAULT: BY_KEY[key]}
    named = folder_templates(folder)
    if name is not None and name in named:
        return {DEFAULT: named[name]}
    if name is None and DEFAULT in named:
        return named
    what, remedy = (
        f", neither {TEMPLATE_FILE} nor in tokenizer_config.json or {LEGACY_FILE}",
        NAME_THE_TEMPLATE,
    )
    if named:
        what = f" of the name {name or DEFAULT}"
        remedy = f"set data.chat.template_name to {' or '.join(named)}"
    what = f"{folder} has no chat template{what}"
    raise DataError(what, where="data.chat.template", remedy=remedy)


def folder_templates(folder: Path) -> dict[str, str]:
    """Return template by name, as a model's folder has them. Raises DataError.

    Files count before `tokenizer_config.json`, which a `chat_template.jinja` hides, as in
    transformers."""
    files = {path.stem: path for name in FOLDERS for path in (folder / name).glob("*.jinja")}
    found: Any = None
    if (folder / TEMPLATE_FILE).is_file():
        files[DEFAULT] = folder / TEMPLATE_FILE
    else:
        found = read_object(folder / "tokenizer_config.json").get("chat_template")
        if found is None:
            found = read_object(folder / LEGACY_FILE).get("chat_template")
    if isinstance(found, list):
        found = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
    named = found if isinstance(found, dict) else {DEFAULT: found}
    try:
        named = named | {name: path.read_text("utf-8") for name, path in sorted(files.items())}
    except (OSError, ValueError) as error:
        what = f"a chat template cannot be read ({error})"
        raise DataError(what, where=str(folder), remedy=NAME_THE_TEMPLATE) from None
    return {str(name): text for name, text in named.items() if isinstance(text, str)}


def joined(default: str, tool_use: str) -> str:
    """One template that does what the two do. The signs keep white space as it is."""
    default, tool_use = (text.removesuffix("\n") for text in (default, tool_use))
    return f"{{% if tools +%}}{tool_use}{{%+ else +%}}{default}{{%+ endif %}}"
