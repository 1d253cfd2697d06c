"""Large columns come back as they were, from fewer bytes; small ones and noise are left alone, and no frame grows without bound."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from backports import zstd
from hypothesis import given
from hypothesis import strategies as st

from areal.base.errors import StoreError
from areal.base.types import Completion, Interaction, Message, Tool
from areal.store import packing
from areal.store.codec import decode, encode

LARGEST = 100_000
TOOLS = tuple(
    Tool(f"tool_{n}", parameters={"type": "object", "description": "reads a file\nand says so"}) for n in range(40)
)


def interaction(prompt: int, output: int, turns: int = 40) -> Interaction:
    chance = np.random.default_rng(0)
    logprobs = -chance.exponential(0.5, output).astype(np.float32)
    done = Completion(
        chance.integers(0, 5000, output, np.int32),
        logprobs,
        np.full(output, 7, np.int32),
        np.ones(output, np.float32),
        1.0,
        "stop",
    )
    asked = tuple(Message("user", f"and what is in file {n} ?\nä\0") for n in range(turns))
    return Interaction(
        "i",
        "s",
        0,
        chance.integers(0, 5000, prompt, np.int32),
        done,
        asked,
        Message("assistant", "x"),
        tools=TOOLS[:turns],
    )


def plain(kept: Interaction) -> dict[str, Any]:
    """What it is without packing, column by column."""
    done = kept.completion
    arrays = (kept.prompt_ids, done.token_ids, done.versions, done.kept_mass, done.logprobs)
    return {"arrays": [(array.dtype, array.tolist()) for array in arrays], "texts": (kept.messages, kept.tools)}


def mixed(kept: Interaction) -> Any:
    """As many values, of which one is another than the rest."""
    values = np.full(len(kept.completion.token_ids), 7)
    values[-1:] = 8
    return values


@pytest.mark.parametrize("output", [0, 1, 2, 3, 700])
@pytest.mark.parametrize("alike", [True, False])
def test_one_value_repeated_is_kept_as_that_value(output: int, alike: bool) -> None:
    whole = interaction(0, output, 0)
    if not alike:
        done = whole.completion
        whole = replace(whole, completion=replace(done, versions=mixed(whole).astype(np.int32)))
    facts, recording = encode(whole)
    repeated = [entry for entry in recording["packed"].split() if "*" in entry]
    expected = [f"versions*{output}"] * alike + [f"kept_mass*{output}"] if output > 1 else []
    assert repeated == expected
    assert plain(decode({**facts, **recording}, "s")) == plain(whole)


@pytest.mark.parametrize("count", ["-1", "0", "1", str(2**60)])
def test_a_count_that_no_store_wrote_is_refused(count: str) -> None:
    facts, recording = encode(interaction(0, 10, 0))
    with pytest.raises(StoreError, match=r"versions are damaged.*restore a copy"):
        decode({**facts, **recording, "packed": f"versions*{count}"}, "s")


def test_a_long_recording_comes_back_from_a_third_of_its_bytes() -> None:
    whole = interaction(prompt=4000, output=1000)
    facts, recording = encode(whole)
    assert recording["packed"].split() == ["prompt_ids", "token_ids", "versions*1000", "kept_mass*1000"]
    assert len(recording["logprobs"]) == 4000
    assert (recording["messages"], recording["tools"]) == ("", "")
    assert (len(recording["versions"]), len(recording["kept_mass"])) == (4, 4)
    assert len(recording["texts"]) < 1000
    assert len(recording["prompt_ids"]) < 16_000 * 0.6
    assert plain(decode({**facts, **recording}, "s")) == plain(whole)


def test_what_is_short_or_does_not_shrink_is_kept_as_it_is() -> None:
    short = interaction(prompt=100, output=packing.LEAST // 4 - 1, turns=3)
    short = replace(short, completion=replace(short.completion, versions=mixed(short), kept_mass=mixed(short)))
    recording = encode(short)[1]
    assert (recording["packed"], recording["texts"]) == ("", None)
    noise = np.frombuffer(np.random.default_rng(1).bytes(8000), np.int32)
    assert encode(replace(short, prompt_ids=noise))[1]["prompt_ids"] == noise.tobytes()


def test_nothing_larger_is_packed_than_can_be_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "LARGEST", 8000)
    whole = interaction(prompt=2001, output=1000)
    facts, recording = encode(whole)
    assert recording["packed"].split() == ["token_ids", "versions*1000", "kept_mass*1000"]
    assert plain(decode({**facts, **recording}, "s")) == plain(whole)


@given(st.integers(0, 3), st.integers(0, 900), st.integers(0, 60))
def test_any_mixture_of_sizes_comes_back(prompt: int, output: int, turns: int) -> None:
    whole = interaction(prompt * 400, output, turns)
    facts, recording = encode(whole)
    assert plain(decode({**facts, **recording}, "s")) == plain(whole)


@pytest.mark.parametrize(
    ("frame", "said"),
    [
        (zstd.compress(bytes(LARGEST * 100)), "larger than the"),
        (zstd.compress(bytes(LARGEST + 1)), "larger than the"),
        (zstd.compress(bytes(4000))[:-4], "cut off"),
        (b"no frame", "damaged"),
    ],
    ids=["bomb", "one byte more", "cut", "foreign"],
)
def test_a_frame_that_no_store_wrote_is_refused(frame: bytes, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "LARGEST", LARGEST)
    facts, recording = encode(interaction(prompt=4000, output=10))
    for column in ("prompt_ids", "texts"):
        with pytest.raises(StoreError, match=f"{column} are .*{said}.*restore a copy"):
            decode({**facts, **recording, column: frame}, "s")


def test_threads_share_the_compressor() -> None:
    wrong: list[int] = []

    def encodes(size: int) -> None:
        whole = interaction(size, 700)
        for _ in range(20):
            facts, recording = encode(whole)
            if plain(decode({**facts, **recording}, "s")) != plain(whole):
                wrong.append(size)

    threads = [threading.Thread(target=encodes, args=(size,)) for size in (1000, 2000, 3000, 4000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
