"""The names of what the stages of `data.stages` look for, and the files of their code."""

from __future__ import annotations

RULES: dict[str, tuple[str, ...]] = {
    "gopher": (
        *("short", "long", "short_words", "long_words", "hashes", "ellipses", "bullets"),
        *("ellipsis_lines", "letters", "stop_words"),
        *("paragraphs", "paragraph_characters", "lines", "line_characters"),
        *(f"top_{n}_grams" for n in (2, 3, 4)),
        *(f"repeated_{n}_grams" for n in range(5, 11)),
    ),
    "c4": (
        *("long_word", "citation", "end_punctuation", "few_words", "lorem_ipsum", "javascript"),
        *("curly_bracket", "policy", "few_sentences"),
    ),
    "fineweb": ("line_punctuation", "short_lines", "repeated_lines", "line_breaks"),
}
"""Kind -> its rules, in the order in which they are tried."""

PERSONAL_ITEMS = (
    *("private_key", "api_key", "url_credentials", "email", "iban", "crypto_address"),
    *("payment_card", "us_ssn", "mac_address", "ipv6", "ipv4", "phone"),
)
"""Kinds of personal data, in the order in which they are looked for."""

CODE: dict[str, tuple[str, ...]] = {
    "gopher": ("filters/heuristics.py",),
    "c4": ("filters/heuristics.py",),
    "fineweb": ("filters/heuristics.py",),
    "length": ("filters/plain.py",),
    "pattern": ("filters/plain.py",),
    "personal_data": ("filters/personal_data.py",),
    "remove": ("filters/plain.py",),
    "language": ("filters/language.py",),
    "perplexity": ("filters/word_grams.py", "filters/perplexity.py", "filters/shingles.py"),
    "contamination": ("filters/word_grams.py", "filters/contamination.py", "filters/shingles.py"),
    "function": ("filters/user_function.py",),
    "score": (
        *("filters/score.py", "filters/user_function.py"),
        *("filters/word_grams.py", "filters/perplexity.py", "filters/shingles.py"),
    ),
    "near_duplicates": ("filters/shingles.py", "stages/near_duplicates.py"),
    "importance": ("filters/word_grams.py", "filters/shingles.py", "stages/importance.py"),
}
"""Kind -> the files below `holdfast/data` whose code decides what the stage does."""
