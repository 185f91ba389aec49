"""Chat templates by key, and the one that lies next to a tokenizer.

A template by key marks each reply with `{% generation %}`, up to and including the token that ends
it. So no mask has to be derived.
"""

from __future__ import annotations

from pathlib import Path

from holdfast.core.json_parsing import parse_json
from holdfast.errors import DataError

TEMPLATE_FILE = "chat_template.jinja"
NAME_THE_TEMPLATE = "set data.chat.template to chatml, llama3 or alpaca, or name a file of your own"

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


def read_template(key: str, file: str | None, folder: Path) -> str:
    """The text of a template: of `file`, by `key`, or of a model's folder. Raises DataError."""
    if file is not None:
        try:
            return Path(file).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8"
            raise DataError(
                f"{file} cannot be read ({reason})",
                where="data.chat.template_file",
                remedy="name a file with a chat template",
            ) from None
    if key != "folder":
        return BY_KEY[key]
    found = _folder_template(folder)
    if found is None:
        raise DataError(
            f"{folder} has no chat template, neither {TEMPLATE_FILE} nor in tokenizer_config.json",
            where="data.chat.template",
            remedy=NAME_THE_TEMPLATE,
        )
    return found


def _folder_template(folder: Path) -> str | None:
    """`chat_template.jinja` counts before `tokenizer_config.json`, as in transformers."""
    try:
        if (folder / TEMPLATE_FILE).is_file():
            return (folder / TEMPLATE_FILE).read_text("utf-8")
        settings = parse_json((folder / "tokenizer_config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return None
    found = settings.get("chat_template") if isinstance(settings, dict) else None
    if isinstance(found, list):  # several by name
        named = {t.get("name"): t.get("template") for t in found if isinstance(t, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None
