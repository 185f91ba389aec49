"""The tokenizer: a byte-level BPE trained on the corpus, or a tokenizer.json that is there.

Byte-level BPE (Radford et al., 2019, section 2.2) has all 256 bytes as symbols. So any text can be
spelt, and none needs an unknown token.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from holdfast.config.huggingface.folder import end_ids, is_pointer, read_json_object
from holdfast.core.data.special_tokens import END, KNOWN_ENDS
from holdfast.data.read.containers import pointer_error
from holdfast.errors import DataError


@dataclass(frozen=True)
class Vocabulary:
    """A dataset's knowledge of its tokenizer. `size` counts ids, added tokens included. begin_id:
    of the token that begins each document; None: there is none."""

    size: int
    end_id: int
    end_token: str
    begin_id: int | None = None

    @property
    def dtype(self) -> str:
        """The token shards' element type, little-endian."""
        return "<u2" if self.size <= 2**16 else "<u4"


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> str:
    """The JSON of a byte-level BPE with `vocab_size` ids, `<|end|>` the first.

    A corpus too small for that many merges gives fewer ids.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    text: str = tokenizer.to_str(pretty=True)
    return text + "\n"


TOKENIZER_REMEDY = "name a tokenizer.json, or leave it out to train one"


def _refusal(what: str, remedy: str = TOKENIZER_REMEDY) -> DataError:
    return DataError(what, where="data.tokenizer.path", remedy=remedy)


def tokenizer_file(path: str | Path) -> Path:
    """The tokenizer.json that a path means: the file, or the one in that folder. Raises DataError
    for a folder without one."""
    found = Path(path).expanduser()
    if not found.is_dir():
        return found
    if (found / "tokenizer.json").is_file():
        return found / "tokenizer.json"
    names = sorted(p.name for p in found.iterdir())
    slow = [n for n in names if n in ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")]
    remedy = TOKENIZER_REMEDY
    if slow:
        remedy = (
            "write one with transformers: "
            f"AutoTokenizer.from_pretrained('{found}').save_pretrained('{found}')"
        )
    raise _refusal(
        f"{found} holds no tokenizer.json" + (f", only {', '.join(slow)}" if slow else ""), remedy
    )


def _tokenizer_text(path: Path) -> str:
    """The text of a tokenizer.json. Raises DataError for what is no such file."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise _refusal(f"{path} does not exist") from None
    except OSError as error:
        raise _refusal(
            f"{path} cannot be read ({error.strerror})",
            "give yourself the permission to read it, or name another",
        ) from None
    if is_pointer(raw):
        raise pointer_error(str(path))
    if not raw:
        raise _refusal(f"{path} is empty", "fetch it again")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise _refusal(f"{path} is not a tokenizer.json (it is not UTF-8)") from None


def load_tokenizer(path: Path) -> Tokenizer:
    """Load a tokenizer for tokenising: no truncation and no padding. Text that spells a special
    token is text, so a document cannot smuggle in an end of document.

    Raises DataError when the file is no tokenizer.json, and for a tokenizer that is random.
    """
    text = _tokenizer_text(path)
    try:
        tokenizer = Tokenizer.from_str(_with_special_ends(text))
    except Exception as error:  # the library raises bare Exception
        raise _refusal(f"{path} is not a tokenizer.json ({str(error).splitlines()[0]})") from None
    dropout = getattr(tokenizer.model, "dropout", None)
    if dropout:
        raise _refusal(
            f"{path} is random: with model.dropout {dropout:g} the same text gives other tokens "
            "each time",
            "set model.dropout to null in a copy of the file",
        )
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def _with_special_ends(text: str) -> str:
    """A tokenizer.json in which each end token is special: only then its spelling stays text."""
    value = json.loads(text)
    added = value.get("added_tokens") if isinstance(value, dict) else None
    plain = [
        token
        for token in added or ()
        if isinstance(token, dict)
        and token.get("content") in KNOWN_ENDS
        and not token.get("special")
    ]
    if not plain:
        return text
    for token in plain:
        token["special"] = True
    return json.dumps(value)


def describe_tokenizer(tokenizer: Tokenizer, path: Path) -> Vocabulary:
    """Size, end token and begin token. What the files next to `path` say counts first. Raises
    DataError when no end-of-text token is known."""
    ids: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    neighbours = read_neighbours(path)
    own = neighbours.end_token(ids)
    for token in KNOWN_ENDS if own is None else (own,):
        if token in ids:
            begin = find_begin(tokenizer, neighbours)
            begin = None if begin == ids[token] else begin  # the text before ends with it already
            return Vocabulary(max(ids.values()) + 1, ids[token], token, begin)
    if own is not None:
        raise _refusal(
            f"the files next to {path} name the end token {own!r}, which it does not have",
            "fetch the folder again, or name a tokenizer.json that lies alone",
        )
    raise _refusal(
        f"{path} has no end-of-text token",
        f"add one of {', '.join(KNOWN_ENDS)} to its added tokens",
    )


def stop_tokens(tokenizer: Tokenizer, path: Path) -> dict[str, int]:
    """Spelling -> id of the tokens at which generation ends, as the files next to a tokenizer.json
    say."""
    ids = {describe_tokenizer(tokenizer, path).end_id} | end_ids(path.parent)
    return {str(tokenizer.id_to_token(number)): number for number in sorted(ids)}


@dataclass(frozen=True)
class Neighbours:
    """What lies next to a tokenizer.json: its settings, and those of the model."""

    settings: dict[str, Any]
    model: dict[str, Any]

    def end_token(self, ids: Mapping[str, int]) -> str | None:
        """The end token that they name; None if they name none."""
        named = _content(self.settings.get("eos_token"))
        if named is not None:
            return named
        number = self.model.get("eos_token_id")
        number = number[0] if isinstance(number, list) and number else number
        return next((token for token, i in ids.items() if i == number), None)


def read_neighbours(path: Path) -> Neighbours:
    """Of a tokenizer.json; empty if it lies alone."""
    if path.name != "tokenizer.json":
        return Neighbours({}, {})
    files = ("special_tokens_map.json", "tokenizer_config.json", "config.json")
    tokens, settings, model = (read_object(path.parent / name) for name in files)
    said = {key: value for key, value in settings.items() if value is not None}
    return Neighbours(tokens | said, model)


def read_object(path: Path) -> dict[str, Any]:
    """The object of a JSON file; empty if there is no file."""
    return read_json_object(path) if path.is_file() else {}


def _content(token: Any) -> str | None:
    """Special tokens stand in settings as text, or as an object with the text inside."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def find_begin(tokenizer: Tokenizer, neighbours: Neighbours) -> int | None:
    """The token that begins each prompt at inference: the tokenizer adds it, or transformers does
    because tokenizer_config.json says so. None if there is none, or it is not a single one."""
    wanted = neighbours.settings.get("add_bos_token")
    if wanted is False:
        return None
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    full = tokenizer.encode("a", add_special_tokens=True).ids
    for length in range(len(full) - len(plain) + 1):
        if full[length : length + len(plain)] == plain:
            if length == 1:
                return int(full[0])
            break
    named = _content(neighbours.settings.get("bos_token"))
    ids: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    return ids.get(named) if wanted is True and named is not None else None


def needed_size(path: Path, end: int, begin: int | None) -> int:
    """Rows that a model needs for what this tokenizer makes of texts: the largest such id + 1.
    Special tokens that were only added do not count, because no text becomes one of them."""
    tokenizer = load_tokenizer(path)
    added = tokenizer.get_added_tokens_decoder()
    ids = set(tokenizer.get_vocab(with_added_tokens=False).values())
    ids |= {number for number, token in added.items() if not token.special}
    return max(ids | {end} | ({begin} if begin is not None else set())) + 1


def describe_difference(path: Path, other: Path) -> str | None:
    """Return how two tokenizer.json differ in the meaning of token ids; None if they do not."""
    a, b = (load_tokenizer(p).get_vocab(with_added_tokens=True) for p in (path, other))
    if len(a) != len(b):
        return f"{len(a)} tokens against {len(b)}"
    moved = [token for token, number in a.items() if b.get(token) != number]
    if moved:
        return f"{len(moved)} tokens have another id, {min(moved)!r} among them"
    models_ = [json.loads(p.read_text(encoding="utf-8")) for p in (path, other)]
    for part in ("model", "normalizer", "pre_tokenizer"):
        if models_[0].get(part) != models_[1].get(part):
            return f"another {part}"
    return None
