"""What the controller says to a rank, and what comes back: few typed messages, msgspec frames, never method names.

    frame = encode(TrainStep(request=7, rows=rows, step=3))
    command = decode_command(frame)

Every link begins with Hello (protocol version and run token, compared in constant time). A reply carries the request's
number; Failed carries a sentence. Token arrays travel as raw little-endian bytes (int32 / float32 / bool).
Load, Write and Where are what a net's leader says to its other ranks. Used by client.py (controller), chorus.py (leader) and worker.py (rank).
"""

from __future__ import annotations

from typing import Any

import msgspec

PROTOCOL = 6


class Row(msgspec.Struct, frozen=True, array_like=True):
    """One training row of length n: ids i4[n], trained ?[n], and f4[n] each of behaviour log-probs, advantages,
    temperatures; versions i4[n]. `sequence` numbers the session inside the batch (rows of one session share it).

    interactions i4[n]: which sampled answer a trained token belongs to; empty = all of this row's are one answer. reference,
    teacher f4[n]: log-probs of those policies; empty = there is none. For a critic: `advantages` are the returns to
    predict, `proximal` its values at the start of the step."""

    session_id: str
    sequence: int
    ids: bytes
    trained: bytes
    logprobs: bytes
    versions: bytes
    temperatures: bytes
    advantages: bytes = b""
    proximal: bytes = b""  # f4[n]; empty = the rank takes its own log-probs at the start of the step
    interactions: bytes = b""
    reference: bytes = b""
    teacher: bytes = b""


class Hello(msgspec.Struct, frozen=True, tag=True):
    protocol: int
    token: str


class Score(msgspec.Struct, frozen=True, tag=True):
    """Compute this engine's log-probs of every trained token (a critic's: its values before it). base: without its adapter."""

    request: int
    rows: list[Row]
    base: bool = False


class TrainStep(msgspec.Struct, frozen=True, tag=True):
    """One training step: mini-batches, backward, clip, optimizer step(s). current_version: label being trained.

    lags: how many steps the weights of each label in `versions` are behind it; labels that are missing count 0."""

    request: int
    rows: list[Row]
    step: int
    current_version: int
    lags: dict[int, int] = {}


class Publish(msgspec.Struct, frozen=True, tag=True):
    """Hand the current weights to the transfer under this version label, after freeing the copies of those in `retire`."""

    request: int
    version: int
    retire: list[int] = []


class Save(msgspec.Struct, frozen=True, tag=True):
    """Write a checkpoint folder (complete or not at all). full: with optimizer, schedule and RNG, for recovery. model: with a model that
    transformers loads; a net without an adapter cannot do without. about: facts for its completion mark.

    Commands that follow run as soon as a copy of the state is taken; Done comes when the folder is on disk, with `held_seconds`
    (of the engine's thread), `write_seconds` and `bytes`."""

    request: int
    path: str
    step: int
    full: bool
    model: bool = True
    about: dict[str, Any] = {}


class Write(msgspec.Struct, frozen=True, tag=True):
    """From a net's leader, after Save is done and over a link of its own: write the pieces that were held for it. Done comes when they are on
    disk, with `files`: name -> bytes and checksum. go: false where there is nothing to write into, so that they are let go."""

    request: int
    go: bool


class Restore(msgspec.Struct, frozen=True, tag=True):
    request: int
    path: str


class Stop(msgspec.Struct, frozen=True, tag=True):
    request: int


class Load(msgspec.Struct, frozen=True, tag=True):
    """The first command of all, from a net's leader: meet the other ranks, load the net and cut it."""

    request: int


class Where(msgspec.Struct, frozen=True, tag=True):
    """Where does the engine stand? Answered at once, also while a command runs, and written to the rank's log."""

    request: int


class Standing(msgspec.Struct, frozen=True, tag=True):
    """stack: of the engine's thread, innermost call last; empty where no command runs. waits: for other ranks, in a collective."""

    request: int
    stack: str
    waits: bool


class Scored(msgspec.Struct, frozen=True, tag=True):
    request: int
    logprobs: list[bytes]  # f4[n] per row


class Stepped(msgspec.Struct, frozen=True, tag=True):
    """stats: loss, grad_norm, lr, entropy, clip_ratio, trained_tokens, computed_tokens, logprob_gap_max (over tokens
    whose version is the current one; NaN-free, 0 when there is none), logprob_gap_tokens, seconds, ..."""

    request: int
    stats: dict[str, float]


class Published(msgspec.Struct, frozen=True, tag=True):
    request: int
    manifest: dict[str, Any]


class Done(msgspec.Struct, frozen=True, tag=True):
    request: int
    info: dict[str, Any] = {}


class Failed(msgspec.Struct, frozen=True, tag=True):
    """kind: the ArealError class name to raise on the controller's side."""

    request: int
    kind: str
    message: str


Command = Hello | Score | TrainStep | Publish | Save | Write | Restore | Stop | Load | Where
Reply = Scored | Stepped | Published | Done | Failed | Standing

_encoder = msgspec.msgpack.Encoder()
_commands = msgspec.msgpack.Decoder(Command)
_replies = msgspec.msgpack.Decoder(Reply)


def encode(message: Command | Reply) -> bytes:
    return _encoder.encode(message)


def decode_command(frame: bytes) -> Command:
    """Raises msgspec.ValidationError for anything that is not one of ours."""
    return _commands.decode(frame)


def decode_reply(frame: bytes) -> Reply:
    return _replies.decode(frame)
