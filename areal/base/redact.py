"""Secrets stay out of everything a person or a file can read: log lines, error bodies, saved configs.

    protect(admin_key)                       # from now on this value is known as a secret in this process
    redact(f"401 for {admin_key}")           # "401 for …-key"
    hint("sk-sess-w0.AbC.XyZ9")              # "sk-…XyZ9": at most four characters of the value

Anything that begins `sk-`, follows `Bearer` or an api-key header is redacted without being announced. The list of
announced values lives as long as the process. Used by logs.py, config/show.py, web/error_bodies.py and whoever prints. No I/O.
"""

from __future__ import annotations

import re

_HINT_CHARS = 4
_SHORTEST_WITH_HINT = 12  # a shorter secret would be given away by a third
_SHORTEST_PROTECTED = 4  # hiding every "1" because somebody's key is "1" would make the log unreadable

_protected: set[str] = set()

# `(?<!\w)` keeps "task-7" whole. A value ends at white space or at what usually encloses it in JSON, YAML or a sentence.
_KEY_SHAPES = re.compile(r"(?<![\w-])sk-[^\s\"'\\,;()\[\]{}<>|&]+")
# After the name of a header, or a key written as JSON or as name=value; `api_key: not set` in a sentence stays readable.
_AFTER_HEADER = re.compile(
    r"(?i)(\bauthorization[\"']?\s*[:=]\s*[\"']?(?:bearer\s+|basic\s+)?|\bbearer\s+(?=\S{8})|"
    r"\bx-api-key[\"']?\s*[:=]\s*[\"']?|\bapi[-_]key(?:[\"']?\s*:\s*[\"']|=[\"']?))([^\s\"'\\,;()\[\]{}<>|&]+)"
)

# In a URL: after the user's name, or as a parameter.
_PASSWORD = re.compile(r"(?<=://)([^/?#@:]*:)[^/?#@]+(?=@)|([?&](?:ssl)?password=)[^&]+")


def hint(secret: str) -> str:
    """The shape of a secret without the secret: `sk-…` if it begins so, then its last four characters if it is long. Of a URL
    all but the password."""
    if "://" in secret:
        return _PASSWORD.sub(lambda found: f"{found[1] or found[2]}…", secret)
    tail = secret[-_HINT_CHARS:] if len(secret) >= _SHORTEST_WITH_HINT else ""
    return ("sk-" if secret.startswith("sk-") else "") + "…" + tail


def protect(*secrets: str | None) -> None:
    """Announce values that `redact` hides wherever they occur. Empty and very short ones are ignored."""
    _protected.update(secret for secret in secrets if secret and len(secret) >= _SHORTEST_PROTECTED)


def redact(text: str) -> str:
    """The same text with every known or key-shaped secret replaced by its hint."""
    for secret in sorted(_protected, key=len, reverse=True):
        if secret in text:
            text = text.replace(secret, hint(secret))
    text = _KEY_SHAPES.sub(lambda found: _hint_once(found[0]), text)
    return _AFTER_HEADER.sub(lambda found: found[1] + _hint_once(found[2]), text)


def _hint_once(value: str) -> str:
    return value if "…" in value else hint(value)
