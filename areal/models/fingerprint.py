"""Whether two model folders hold the same model: digests of its configuration, its tokenizer and its weights.

    fingerprint(folder)                # {"config": hex, "tokenizer": hex, "weights": hex}

What loading changes (library versions, dtype of the files) does not count. Weights are sampled, not read: every file's size, header
and both ends. Used by rollout/recovery.py. No torch.
"""

from __future__ import annotations

import json
from pathlib import Path

from areal.base.digests import checksum
from areal.models.tokenizer import read_json

_VOLATILE = ("transformers_version", "_name_or_path", "torch_dtype", "dtype")
_TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")
_END_BYTES = 65536


def fingerprint(folder: Path) -> dict[str, str]:
    """Of a folder that models/fetch.py found good."""
    config = {name: value for name, value in read_json(folder / "config.json").items() if name not in _VOLATILE}
    return {
        "config": checksum(json.dumps(config, sort_keys=True).encode()),
        "tokenizer": _digest([path.read_bytes() for name in _TOKENIZER if (path := folder / name).is_file()]),
        "weights": _digest([_sample(path) for path in sorted(folder.glob("*.safetensors"))]),
    }


def _sample(path: Path) -> bytes:
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        head += file.read(min(int.from_bytes(head, "little"), size) + _END_BYTES)
        file.seek(max(0, size - _END_BYTES))
        return head + file.read() + str(size).encode()


def _digest(parts: list[bytes]) -> str:
    return checksum("".join(checksum(part) for part in parts).encode())
