"""File names from names that are data: trial names, task ids, names inside model folders.

    safe_name("../../x")      # "%2E.%2F..%2Fx": one path component, whatever was asked for

Different names give different file names; a readable name stays readable. Used wherever a file name is made from a
config or a request.
"""

from __future__ import annotations

import hashlib

_KEPT = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-")
_LONGEST = 120  # bytes; file systems take 255, and callers add suffixes
_EMPTY = "%empty"  # no encoding gives "%e" followed by "m"


def safe_name(name: str) -> str:
    """One path component for any text: percent-encoded UTF-8, never hidden, never `..`, at most 120 bytes.

    A longer one is cut and ends with `~` and a hash of the whole, so that two long names do not meet."""
    encoded = "".join(chr(byte) if byte in _KEPT else f"%{byte:02X}" for byte in name.encode("utf-8", "surrogatepass"))
    if not encoded:
        return _EMPTY
    if encoded[0] in ".-":  # hidden files, `.`, `..`, and what a command would take for an option
        encoded = f"%{ord(encoded[0]):02X}{encoded[1:]}"
    if len(encoded) > _LONGEST:
        digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:16]
        encoded = f"{encoded[: _LONGEST - 17]}~{digest}"
    return encoded
