"""What a rank does when it is commanded: the engine's half of worker.py, which runs it in one thread.

    performer = Performer(settings, place, run_dir)
    reply = performer.run(command, within_s=1800)            # Copied for a checkpoint that is to be written
    performer.standing(request)                              # from another thread: where it is at this moment

Of a net on several ranks each has one. All do the same in the same order; what leaves them (a publication, answers) leaves
through the leader, and each writes its part of a checkpoint. A command that outlives its time by far has its stacks written to the log, also where Python itself is stuck, and the process
ends: it is the last resort, chorus.py speaks before.
"""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from areal.base.errors import ConfigError
from areal.config.backend_spec import parse_backend
from areal.engine import checkpoint
from areal.engine.checkpoint_files import File
from areal.engine.chorus import LAST_RESORT, patience
from areal.engine.commands import (
    Command,
    Done,
    Load,
    Publish,
    Published,
    Reply,
    Restore,
    Save,
    Score,
    Scored,
    Standing,
    Stepped,
    Stop,
    TrainStep,
)
from areal.engine.engine import TrainEngine, world_alone
from areal.engine.parallel.meeting import Meeting
from areal.engine.parallel.pipeline import wait_for
from areal.engine.parallel.world import World
from areal.engine.place import Place
from areal.engine.settings import EngineSettings
from areal.weights import source

_SHOWN = 6  # frames; all are in the rank's log
_INNERMOST = 4  # frames, of which one in torch.distributed says that the rank waits for others

Files = Mapping[str, File]


@dataclass(frozen=True, slots=True)
class Copied:
    """A checkpoint, or this rank's part of it, that is to be written. seconds: how long the copy held up the engine's thread."""

    command: Save
    held: checkpoint.Held
    seconds: float


class Performer:
    """See the module's docstring. `run` belongs to one thread, the rest to any."""

    def __init__(self, settings: EngineSettings, place: Place, run_dir: Path) -> None:
        self.settings = settings
        self.place = place
        self._meeting = Meeting(place) if place.size > 1 else None
        self._source = None if place.rank else source(settings.transfer, run_dir)
        self._engine: TrainEngine | None = None
        self._thread: int | None = None

    def come(self, url: str) -> list[str]:
        """Where all ranks of the net listen, once all are there."""
        return [url] if self._meeting is None else self._meeting.come(url)

    def run(self, command: Command, *, within_s: float) -> Reply | Copied:
        """Do it; what a follower answers is that it is done. Raises whatever goes wrong."""
        with self._watched(within_s):
            reply = self._run(command)
        return reply if self.place.rank == 0 or isinstance(reply, Done | Copied) else Done(_request(command))

    def standing(self, request: int) -> Standing:
        """Where the engine's thread is. Written to the log too; from here on this rank is waited for, and not ended by itself."""
        frame = sys._current_frames().get(self._thread or 0)
        if frame is None:
            return Standing(request, "", waits=False)
        faulthandler.cancel_dump_traceback_later()
        print(f"{self.place.name} stands here:\n{''.join(traceback.format_stack(frame))}", file=sys.stderr, flush=True)
        return Standing(request, "".join(traceback.format_stack(frame)[-_SHOWN:]).rstrip(), waits=_waits(frame))

    def begin(self, copied: Copied) -> None:
        """Make the folder that all ranks write into; the leader, and this and what follows in a thread of its own."""
        checkpoint.begin(copied.command.path)

    def write_own(self, copied: Copied) -> Files:
        """This rank's part to the disk."""
        return checkpoint.write_own(copied.command.path, self.place.rank, copied.held)

    def finish(self, copied: Copied, files: Files, seconds: float) -> Done:
        """A checkpoint of what all ranks wrote; the leader. seconds: since it was begun."""
        command, started = copied.command, time.monotonic()
        size = checkpoint.finish(
            command.path,
            copied.held,
            files,
            self.settings.model_dir,
            step=command.step,
            model=command.model,
            about=command.about,
        )
        took = {"held_seconds": copied.seconds, "write_seconds": seconds + time.monotonic() - started}
        return Done(command.request, took | {"bytes": size})

    def abandon(self, copied: Copied) -> None:
        """What was begun and cannot be finished goes."""
        checkpoint.abandon(copied.command.path)

    def close(self) -> None:
        """Free what was published, and the place where the ranks met."""
        if self._source is not None:
            self._source.close()
            if self.place.meeting:
                Path(self.place.meeting).unlink(missing_ok=True)

    @contextmanager
    def _watched(self, within_s: float) -> Iterator[None]:
        self._thread = threading.get_ident()
        faulthandler.dump_traceback_later(within_s + LAST_RESORT * patience(within_s), exit=True, file=2)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
            self._thread = None

    def _run(self, command: Command) -> Reply | Copied:
        match command:
            case Load(request):
                self._engine = TrainEngine.load(self.settings, self._world())
                return Done(request)
            case Score(request, rows, base):
                scored = self._loaded.score(rows, base=base)
                return Scored(request, [values.astype("<f4").tobytes() for values in scored])
            case TrainStep(request, rows, step, current_version, lags):
                stats = self._loaded.train_step(rows, step=step, current_version=current_version, lags=lags)
                return Stepped(request, stats)
            case Publish():
                return self._publish(command)
            case Save(step=step, full=full):
                started = time.monotonic()
                held = self._loaded.hold(step, full=full)
                return Copied(command, held, time.monotonic() - started)
            case Restore(request, path):
                return Done(request, self._loaded.restore(path))
            case Stop(request):
                return Done(request)
        raise ConfigError(f"a rank does not know {type(command).__name__}")

    @property
    def _loaded(self) -> TrainEngine:
        if self._engine is None:
            raise ConfigError("this rank has loaded no net yet; its leader asks for that first")
        return self._engine

    def _world(self) -> World:
        if self._meeting is None:
            return world_alone(self.settings)
        limit = max(self.settings.step_timeout_seconds, self.place.within_s)
        return self._meeting.join(parse_backend(self.settings.backend), timeout_s=2 * LAST_RESORT * limit)

    def _publish(self, command: Publish) -> Reply:
        tensors = self._loaded.named_tensors()
        try:
            if self._source is None:
                return Done(command.request)
            for (
                old
            ) in command.retire:  # before, not after: two copies would stand beside each other at the peak of a step
                self._source.retire(old)
            manifest = self._source.publish(tensors, command.version)
            return Published(command.request, manifest | self._loaded.about_adapter())
        finally:
            for _ in tensors:  # the others go through it to its end, whatever became of what was written
                continue


def _waits(frame: FrameType) -> bool:
    found: FrameType | None = frame
    if frame.f_code is wait_for.__code__:  # torch has no frame of its own there
        return True
    for _ in range(_INNERMOST):
        if found is None:
            return False
        if "torch/distributed/" in found.f_code.co_filename.replace("\\", "/"):
            return True
        found = found.f_back
    return False


def _request(command: Command) -> int:
    return getattr(command, "request", 0)
