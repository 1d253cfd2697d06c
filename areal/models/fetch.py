"""`actor.path` to a folder that can be loaded: a folder of yours, a bundled model's name, or a hub id.

    resolve("smollm2-135m")                     # ~/.cache/areal/models/smollm2-135m-float32
    resolve("./checkpoints/step-000120")        # itself, after a look at what lies in it
    python -m areal.models.fetch smollm2-135m   # prints the folder

The cache is `$AREAL_CACHE`, else ~/.cache/areal. Weights are safetensors or nothing: pickles run code when they load. No torch and
no transformers at import. Used by assemble.py, `areal model`; the bundled models are in bundled.py.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from pathlib import Path

from areal.base.errors import ArealError, ConfigError
from areal.models.bundled import BUNDLED, Progress, bundled_model
from areal.models.tokenizer import read_json

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.jinja", "*.model"]


def cache_root() -> Path:
    """`$AREAL_CACHE`, else ~/.cache/areal."""
    configured = os.environ.get("AREAL_CACHE", "").strip()
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "areal"


def resolve(path_or_name: str | Path, cache_dir: Path | None = None, progress: Progress = print) -> Path:
    """The folder with config.json, safetensors and tokenizer of what `actor.path` names.

    An existing folder wins over a bundled name of the same spelling. Raises ConfigError, saying what to do, if the folder
    cannot be used, the name is unknown or its source cannot be reached.
    """
    text = str(path_or_name)
    folder = Path(text).expanduser()
    if text.strip() and os.path.isdir(folder):  # False, not an error, for what cannot be a path
        check_folder(folder)
        return folder.resolve()
    if text in BUNDLED:
        return bundled_model(text, cache_dir or cache_root(), progress)
    if _HUB_ID.fullmatch(text):
        return _from_hub(text, progress)
    raise ConfigError(
        f"there is no model {text!r:.200}: it is no folder, and no bundled model ({', '.join(BUNDLED)}); "
        "a hub id has the form owner/name and needs network"
    )


def check_folder(folder: Path) -> None:
    """Raises ConfigError unless `folder` holds config.json and safetensors that lie inside it."""
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} has no config.json: give the folder that save_pretrained wrote")
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        return
    if index.is_file():
        _check_index(folder, index)
        return
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for path in folder.glob(pattern))
    if pickles:
        raise ConfigError(
            f"{folder} holds its weights as a pickle ({pickles[0]}), which runs code when it loads; convert it where you "
            "trust it: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW), then use NEW"
        )
    raise ConfigError(f"{folder} has no model.safetensors: save the model with save_pretrained")


def same_vocabulary(folder: Path, policy: Path, role: str) -> None:
    """Raises ConfigError unless both folders' tokenizers give the same id to every token: log-probs of ids are compared."""
    ours, theirs = _vocabulary(policy), _vocabulary(folder)
    if ours is None or theirs is None or ours == theirs:
        return
    raise ConfigError(
        f"{role}: the tokenizer of {folder} is not that of the policy in {policy}, so its log-probs would be of other tokens; "
        "use a model of the same family"
    )


def _vocabulary(folder: Path) -> dict[str, int] | None:
    found = read_json(folder / "tokenizer.json")
    vocabulary = found.get("model", {}).get("vocab")
    added = {each["content"]: each["id"] for each in found.get("added_tokens", [])}
    return vocabulary | added if isinstance(vocabulary, dict) else None


def _check_index(folder: Path, index: Path) -> None:
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"{index} is not a weight index; save the model again") from None
    for name in sorted(names, key=str):
        if not isinstance(name, str) or name != Path(name).name or not name.endswith(".safetensors"):
            raise ConfigError(
                f"{index} names {name!r:.200}, which is no safetensors file of this folder; it is not read"
            )
        if not (folder / name).is_file():
            raise ConfigError(f"{folder} lacks {name}, which its index names; copy the whole folder")


def _from_hub(name: str, progress: Progress) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    progress(f"getting {name} from the Hugging Face hub")
    try:
        folder = Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except RepositoryNotFoundError:
        raise ConfigError(
            f"the hub has no model {name!r}, or it is gated: check the spelling, log in with `hf auth login`, "
            f"or use a bundled model ({', '.join(BUNDLED)})"
        ) from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"{name} is no local folder and the hub cannot be reached ({type(error).__name__}: {reason:.200}); check the "
            f"network, give a folder, or use a bundled model ({', '.join(BUNDLED)})"
        ) from None
    check_folder(folder)
    return folder


def main(argv: list[str] | None = None) -> int:
    """`python -m areal.models.fetch NAME`: the folder on stdout, progress on stderr."""
    parser = argparse.ArgumentParser(prog="areal model", description="Get a model and print its folder.")
    parser.add_argument("model", help=f"a folder, a hub id, or one of: {', '.join(BUNDLED)}")
    parser.add_argument("--cache-dir", type=Path, help="instead of $AREAL_CACHE or ~/.cache/areal")
    arguments = parser.parse_args(argv)
    try:
        print(resolve(arguments.model, arguments.cache_dir, lambda line: print(line, file=sys.stderr, flush=True)))
    except ArealError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
