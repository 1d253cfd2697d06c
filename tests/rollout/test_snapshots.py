"""When a run is saved, what stays, what is gone on from, and what a save that fails does to the run."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from areal.base.errors import CheckpointError, ConfigError
from areal.base.types import Version
from areal.cluster.run_folder import RunFolder
from areal.config.load import resolve as resolve_config
from areal.config.run import RecoverConfig
from areal.engine.checkpoint_files import (
    ADAPTER,
    FORMAT,
    File,
    Mark,
    checkpoints,
    critic_beside,
    damage,
    describe,
    looks_whole,
    read_mark,
    write_mark,
)
from areal.models.fetch import resolve
from areal.rollout.recovery import Lives, check_store, newest_good, take_up
from areal.rollout.snapshots import Purpose, Schedule, Snapshots, prune
from areal.store import open_store, store_url
from areal.weights.tensor_file import write_tensor_file

SAVED = {"held_seconds": 0.0, "write_seconds": 0.0, "bytes": 8}


def folder_of(
    path: Path,
    step: int,
    *,
    full: bool = True,
    model: bool = True,
    adapter: bool = False,
    about: Mapping[str, Any] | None = None,
) -> Path:
    """A checkpoint's files without a net's: small ones under the same names."""
    (path / "recovery").mkdir(parents=True)
    names = ["config.json", *(["recovery/state.json"] if full else [])]
    for name in names:
        (path / name).write_text(json.dumps({"step": step, "of": str(path)}))
    files = {name: describe(path / name) for name in names}
    for name in [*(["model.safetensors"] if model else []), *([ADAPTER] if adapter else [])]:
        (path / name).parent.mkdir(exist_ok=True)
        entry = write_tensor_file(path / name, {"weight": torch.zeros(1)})
        files[name] = File(entry["bytes"], entry["checksum"])
    write_mark(path, Mark(FORMAT, step, files, dict(about or {})))
    return path


class Ranks:
    """In the place of the nets' processes, which write folders: each when it is let go, or not at all."""

    def __init__(self, *, critic: bool = False, adapter: bool = False) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.begun: list[int] = []
        self.full: list[bool] = []
        self.fails = ""
        self._critic = critic
        self._adapter = adapter

    async def begin_save(
        self, path: str, step: int, *, full: bool, model: bool, about: Mapping[str, Any]
    ) -> asyncio.Task[Any]:
        self.begun.append(step)
        self.full.append(full)
        return asyncio.create_task(
            self._write(
                Path(path), step, full, model or not self._adapter, dict(about) | {"save": step, "critic": self._critic}
            )
        )

    async def _write(self, path: Path, step: int, full: bool, model: bool, about: dict[str, Any]) -> dict[str, float]:
        await self.gate.wait()
        if self.fails:
            raise CheckpointError(f"{path} could not be written: {self.fails}; free space there")
        shutil.rmtree(path, ignore_errors=True)
        folder_of(path, step, full=full, model=model, adapter=self._adapter, about=about)
        if full and self._critic:
            shutil.rmtree(critic_beside(path), ignore_errors=True)
            folder_of(critic_beside(path), step, about={"save": step})
        return SAVED


def snapshots(tmp_path: Path, ranks: Ranks, *, keep: int | None = 2, **schedules: Schedule) -> Snapshots:
    never = {"saver": Schedule(), "recover": Schedule()}
    chosen: dict[Purpose, Schedule] = never | schedules  # type: ignore[assignment]
    return Snapshots(tmp_path, ranks, chosen, keep=keep, origin={"path": "tiny"})  # type: ignore[arg-type]


def version(step: int) -> Version:
    return Version(step + 40, step, "life")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("schedule", "due"),
    [
        (Schedule(since=0.0), []),
        (Schedule(freq_steps=3, since=0.0), [3, 6, 9]),
        (
            Schedule(freq_secs=25.0, since=0.0),
            [3, 6, 9],
        ),  # steps end at 10, 20, ... seconds; each save starts the clock anew
        # steps of 4 groups, but for the fifth, which takes 9
        (Schedule(freq_epochs=1, epoch_groups=10, since=0.0), [3, 5, 7, 9]),
        (Schedule(freq_epochs=2, epoch_groups=8, since=0.0), [4, 7]),
        (Schedule(freq_epochs=1, epoch_groups=2, since=0.0), list(range(1, 11))),
        (Schedule(freq_epochs=1, epoch_groups=0, since=0.0), []),
        (Schedule(freq_steps=4, freq_secs=55.0, freq_epochs=1, epoch_groups=28, since=0.0), [4, 6, 8]),
    ],
)
def test_steps_passes_and_seconds_each_make_a_save_due(schedule: Schedule, due: list[int]) -> None:
    found, trained = [], 0
    for step in range(1, 11):
        before, trained = trained, trained + (9 if step == 5 else 4)
        if schedule.due(step, now=10.0 * step, trained=trained, before=before):
            found.append(step)
            schedule.since = 10.0 * step
    assert found == due


async def test_a_save_is_written_while_the_next_steps_go_on_and_one_at_a_time(tmp_path: Path) -> None:
    ranks = Ranks()
    async with snapshots(tmp_path, ranks, recover=Schedule(freq_steps=2)) as saving:
        ranks.gate.clear()
        await saving.save_if_due(version(1), 4)
        await saving.save_if_due(version(2), 4)  # returns although nothing is written
        await saving.save_if_due(version(3), 4)
        assert ranks.begun == [2]
        assert names(tmp_path) == []
        fourth = asyncio.create_task(saving.save_if_due(version(4), 4))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert ranks.begun == [2], "the one before is still being written"
        ranks.gate.set()
        await fourth
        await saving.save(version(5))
    assert ranks.begun == [2, 4, 5]
    assert (tmp_path / "latest").read_text() == "step-000005"
    assert read_mark(tmp_path / "step-000005").about == {
        "kept_for": ["recover", "saver"],
        "version": asdict(version(5)),
        "origin": {"path": "tiny"},
        "save": 5,
        "critic": False,
    }


async def test_the_end_is_saved_once_and_waits_for_the_disk(tmp_path: Path) -> None:
    ranks = Ranks()
    async with snapshots(tmp_path, ranks, recover=Schedule(freq_steps=1)) as saving:
        ranks.gate.clear()
        await saving.save_if_due(version(1), 4)
        end = asyncio.create_task(saving.save(version(1)))
        await asyncio.sleep(0)
        assert not end.done()
        ranks.gate.set()
        await end
    assert ranks.begun == [1]
    assert read_mark(tmp_path / "step-000001").about["kept_for"] == ["recover", "saver"]


async def test_an_adapter_alone_is_enough_to_go_on_from_and_not_for_the_end(tmp_path: Path) -> None:
    ranks = Ranks(adapter=True)
    async with snapshots(tmp_path, ranks, recover=Schedule(freq_steps=1), saver=Schedule(freq_steps=2)) as saving:
        for step in (1, 2, 3):
            await saving.save_if_due(version(step), 0)
            await saving.written()
            assert read_mark(tmp_path / f"step-00000{step}").has_model == (step == 2)
        await saving.save(version(3))
    assert ranks.begun == [1, 2, 3, 3]
    assert read_mark(tmp_path / "step-000003").has_model


async def test_a_disk_that_hangs_is_named_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("areal.rollout.snapshots.SAY_S", 0.01)
    caplog.set_level(logging.INFO, logger="areal")
    ranks = Ranks()
    async with snapshots(tmp_path, ranks) as saving:
        ranks.gate.clear()
        end = asyncio.create_task(saving.save(version(7)))
        async with asyncio.timeout(60):
            while "waiting for checkpoint step-000007 to be on disk" not in caplog.text:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        end.cancel()  # one more Ctrl-C
        await asyncio.wait({end})
    assert end.cancelled()
    assert "one more Ctrl-C or SIGTERM ends it without" in caplog.text
    assert names(tmp_path) == []


async def test_what_cannot_be_written_is_said_and_the_last_good_one_stands(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = Ranks()
    caplog.set_level(logging.WARNING, logger="areal")
    async with snapshots(tmp_path, ranks, recover=Schedule(freq_steps=1)) as saving:
        await saving.save_if_due(version(1), 4)
        await saving.written()
        ranks.fails = "No space left on device"
        await saving.save_if_due(version(2), 4)
        await saving.save_if_due(version(3), 4)  # the run goes on
        with pytest.raises(
            CheckpointError,
            match=r"the end of the run is not saved: .*step-000003 could not .*goes on from .*step-000001$",
        ):
            await saving.save(version(3))
        said = [record.getMessage() for record in caplog.records]
        assert [
            f"the checkpoint of step {step} is not saved" in text for step, text in zip((2, 3, 3), said, strict=True)
        ] == [True] * 3
        assert all("No space left on device" in text and "the last good one is" in text for text in said)
        assert names(tmp_path) == ["latest", "step-000001"]
        ranks.fails = ""
        await saving.save(version(3))
    assert newest_good(tmp_path).step == 3  # type: ignore[union-attr]


async def test_a_pointer_that_cannot_be_moved_is_said_and_older_ones_go_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "latest").mkdir()  # in the place of a full disk: what is written aside cannot take its name
    caplog.set_level(logging.WARNING, logger="areal")
    async with snapshots(tmp_path, Ranks(), recover=Schedule(freq_steps=1)) as saving:
        for step in (1, 2, 3):
            await saving.save_if_due(version(step), 4)  # the run goes on
        await saving.written()
    said = [record.getMessage() for record in caplog.records]
    assert [
        f"the checkpoint of step {step} stands, but `latest`" in text
        for step, text in zip((1, 2, 3), said, strict=True)
    ] == [True] * 3
    assert names(tmp_path) == ["latest", "step-000002", "step-000003"]


async def test_T081_older_ones_go_only_after_a_newer_one_is_complete_and_two_states_stay(tmp_path: Path) -> None:
    """A recovery state every step, a model every third, two models kept; what is not whole is neither counted nor touched."""
    ranks = Ranks(critic=True)
    broken = folder_of(tmp_path / "step-000000", 0)
    (broken / "config.json").write_text("{")
    async with snapshots(
        tmp_path, ranks, keep=2, recover=Schedule(freq_steps=1), saver=Schedule(freq_steps=3)
    ) as saving:
        for step in range(1, 12):
            await saving.save_if_due(version(step), 4)
            await saving.written()
            whole = [found.step for found in checkpoints(tmp_path) if looks_whole(found.path)]
            states = [found.step for found in checkpoints(tmp_path) if damage(found.path, recovery=True) is None]
            assert states == [last for last in (step, step - 1) if last > 0]
            models = [last for last in range(step, 0, -1) if last % 3 == 0][:2]
            assert whole == sorted({*states, *models}, reverse=True)
    assert names(tmp_path) == [
        "critic-000010", "critic-000011", "latest", "step-000000", "step-000006", "step-000009", "step-000010", "step-000011",
    ]  # fmt: skip
    assert not (tmp_path / "step-000009" / "recovery").exists()
    assert damage(tmp_path / "step-000009", recovery=False) is None


def test_all_models_are_kept_where_nobody_says_how_many_and_the_one_in_use_always(tmp_path: Path) -> None:
    for step in range(1, 7):
        folder_of(
            tmp_path / f"step-{step:06d}", step, about={"kept_for": ["recover", "saver"] if step % 2 else ["recover"]}
        )
    prune(tmp_path, keep=None, in_use=tmp_path / "step-000002")
    assert [found.step for found in checkpoints(tmp_path)] == [6, 5, 3, 2, 1]
    assert [found.step for found in checkpoints(tmp_path) if read_mark(found.path).resumable] == [6, 5]


def test_a_newer_recovery_state_gives_all_retries_back_and_nothing_else_does(tmp_path: Path) -> None:
    folder_of(tmp_path / "step-000004", 4)
    lives = Lives(RecoverConfig(retries=2), tmp_path)
    assert [lives.again(), str(lives)] == [True, "1 of 2 (recover.retries)"]
    folder_of(tmp_path / "step-000006", 6)
    assert [lives.again(), str(lives)] == [True, "1 of 2 (recover.retries)"]
    folder_of(tmp_path / "step-000008", 8, full=False)  # a mere model
    (folder_of(tmp_path / "step-000009", 9) / "config.json").write_text("{")  # not whole
    assert [lives.again(), str(lives)] == [True, "2 of 2 (recover.retries)"]
    assert not lives.again()
    for never in (RecoverConfig(retries=0), RecoverConfig(mode="off")):
        assert not Lives(never, tmp_path / "absent").again()


def test_T081_a_resume_passes_over_what_is_not_whole_says_so_and_sets_it_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (10, 20, 30, 40):
        folder_of(tmp_path / f"step-{step:06d}", step, full=step != 40)
    (tmp_path / "latest").write_text("step-000030")
    (tmp_path / "step-000030" / "recovery" / "state.json").write_text('{"step": 30, "of": "somebody else')
    (tmp_path / "step-000020" / "checkpoint.json").unlink()
    caplog.set_level(logging.WARNING, logger="areal")
    with pytest.raises(
        CheckpointError,
        match=r"step-000030 is damaged: state.json has .* bytes.* last good one is .*step-000010: recover.mode=auto",
    ):
        newest_good(tmp_path, "on")
    found = newest_good(tmp_path)
    assert found is not None
    assert (found.step, found.path) == (10, tmp_path / "step-000010")
    assert len(caplog.messages) == 2
    assert all("the run goes on from" in text and "step-000010" in text for text in caplog.messages)
    assert "it has no checkpoint.json" in caplog.messages[1]
    assert names(tmp_path) == ["latest", "step-000010", "step-000020.damaged", "step-000030.damaged", "step-000040"]
    assert newest_good(tmp_path, "on") == found


def test_T081_no_bit_of_the_mark_can_change_unseen(tmp_path: Path) -> None:
    """Else a good state passes for a mere model, or loses its critic, without a word."""
    about = {
        "kept_for": ["recover"],
        "version": asdict(Version(3, 20, "abcd")),
        "origin": {"path": "tiny"},
        "critic": True,
    }
    mark = folder_of(tmp_path / "step-000020", 20, about=about) / "checkpoint.json"
    before, whole = read_mark(mark.parent), mark.read_bytes()
    for at in range(len(whole) * 8):
        changed = bytearray(whole)
        changed[at // 8] ^= 1 << at % 8
        mark.write_bytes(changed)
        try:
            assert read_mark(mark.parent) == before, changed[at // 8 - 20 : at // 8 + 20]  # only a space between
        except CheckpointError:
            continue
    mark.write_text(json.dumps({**json.loads(whole), "format": 3, "checksum": ""}))
    assert read_mark(mark.parent) == replace(before, format=3, checksum=""), "an earlier release's has none"


def test_a_state_under_another_steps_name_is_no_place_to_go_on_from(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(folder_of(tmp_path / "step-000010", 10), tmp_path / "step-000090")
    with pytest.raises(
        CheckpointError, match=r"step-000090 was renamed or copied: it is of step 10\. The last good one is"
    ):
        newest_good(tmp_path, "on")
    found = newest_good(tmp_path)
    assert found is not None
    assert found.step == 10
    assert "it is of step 10. It stands as step-000090.damaged now" in caplog.text


def test_a_run_whose_every_state_is_damaged_does_not_begin_anew(tmp_path: Path) -> None:
    assert newest_good(tmp_path / "absent") is None
    with pytest.raises(CheckpointError, match="holds no recovery state; use auto to begin"):
        newest_good(tmp_path, "on")
    folder_of(tmp_path / "step-000010", 10, full=False)
    assert newest_good(tmp_path) is None, "a mere model is no place to go on from, and no damage"
    (folder_of(tmp_path / "step-000020", 20) / "config.json").unlink()
    with pytest.raises(
        CheckpointError, match=r"no recovery state in .* is good: .*config.json is missing.*actor.path set"
    ):
        newest_good(tmp_path)
    assert names(tmp_path) == ["step-000010", "step-000020"]


@pytest.mark.parametrize("left", [".step-000020.partial", ".critic-000020.partial", ".step-000007.old"])
def test_T081_what_a_killed_writer_left_is_removed(tmp_path: Path, left: str) -> None:
    folder_of(tmp_path / "step-000010", 10)
    folder_of(tmp_path / left, 20)
    found = newest_good(tmp_path)
    assert found is not None
    assert found.step == 10
    assert names(tmp_path) == ["step-000010"]


def test_T081_killed_between_the_two_renames_the_former_one_comes_back(tmp_path: Path) -> None:
    folder_of(tmp_path / ".step-000020.former", 20)
    folder_of(tmp_path / "step-000010", 10)
    folder_of(tmp_path / ".step-000010.former", 10)
    found = newest_good(tmp_path)
    assert found is not None
    assert found.step == 20
    assert names(tmp_path) == ["step-000010", "step-000020"]


def test_a_policy_without_its_own_critic_is_not_whole(tmp_path: Path) -> None:
    folder_of(tmp_path / "step-000010", 10, about={"critic": True, "save": "a"})
    newest = folder_of(tmp_path / "step-000020", 20, about={"critic": True, "save": "b"})
    folder_of(tmp_path / "critic-000010", 10, about={"save": "a"})
    assert not looks_whole(newest)
    assert "critic-000020 is no complete checkpoint" in (damage(newest, recovery=True) or "")
    folder_of(tmp_path / "critic-000020", 20, about={"save": "of another life"})
    assert "was saved with another checkpoint" in (damage(newest, recovery=True) or "")
    assert newest_good(tmp_path).step == 10  # type: ignore[union-attr]
    assert names(tmp_path) == ["critic-000010", "critic-000020.damaged", "step-000010", "step-000020.damaged"]


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFolder, Path]:
    """A run folder with one recovery state, begun with a model folder of its own."""
    base = tmp_path_factory.mktemp("models") / "mine"
    shutil.copytree(resolve("tiny-qwen3"), base)
    folder = RunFolder.of(str(tmp_path_factory.mktemp("runs")), "e", "t", None, None)
    folder.create()
    origin = dict(take_up(config_of(base), folder).origin)
    folder_of(folder.checkpoints / "step-000010", 10, about={"origin": origin, "critic": False})
    folder.store_path.touch()
    return folder, base


def config_of(base: Path | str, *overrides: str) -> Any:
    return resolve_config(None, [f"actor.path={base}", *overrides]).config


def test_a_run_goes_on_with_its_own_model_wherever_that_lies_now(begun: tuple[RunFolder, Path], tmp_path: Path) -> None:
    folder, base = begun
    shutil.copytree(base, tmp_path / "moved")
    for path in (base, tmp_path / "moved"):
        start = take_up(config_of(path), folder)
        assert (start.step, start.model_dir) == (10, folder.checkpoints / "step-000010")
        assert start.origin["path"] == str(base)
    (tmp_path / "moved").rename(tmp_path / "away")
    with pytest.raises(ConfigError, match="there is no model"):
        take_up(config_of(tmp_path / "moved"), folder)
    base.rename(base.with_name("gone"))  # the checkpoint has all that is needed
    assert take_up(config_of(base), folder).step == 10
    base.with_name("gone").rename(base)


async def test_a_checkpoint_that_the_store_does_not_know_is_refused(tmp_path: Path) -> None:
    """A store that was lost, is another run's or was put back from an older copy: what was trained is not in it."""
    base, folder = resolve("tiny-qwen3"), RunFolder.of(str(tmp_path), "e", "t", None, None)
    folder.create()
    made, about = Version(2, 10, "life"), {"origin": dict(take_up(config_of(base), folder).origin), "critic": False}
    path = folder_of(folder.checkpoints / "step-000010", 10, about=about | {"version": asdict(made)})
    start = take_up(config_of(base), folder)
    assert start.version == made
    async with await open_store(store_url(folder.store_path)) as store:
        with pytest.raises(
            ConfigError, match=r"step-000010 was saved as version 2 of 'life', .* store is empty: it is another"
        ):
            await check_store(start, store.training)
        await store.training.advance(Version(1, 9, "life"), [])
        with pytest.raises(ConfigError, match=rf"versions up to 1, and not this one.*actor\.path={path}"):
            await check_store(start, store.training)
        await store.training.advance(replace(made, incarnation="of another run"), [])
        with pytest.raises(ConfigError, match="versions up to 2, and not this one"):
            await check_store(start, store.training)
    async with await open_store(store_url(tmp_path / "own.sqlite")) as store:
        await store.training.advance(made, [])
        await check_store(start, store.training)
        await check_store(take_up(config_of(base), RunFolder.of(str(tmp_path), "e", "new", None, None)), store.training)


@pytest.mark.parametrize(
    ("file", "old", "new", "says"),
    [
        ("config.json", '"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05', "its architecture differs"),
        ("tokenizer.json", '"normalizer": null', '"normalizer": {"type": "NFC"}', "its tokenizer differs"),
        ("model.safetensors", "", "", "its weights differ"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(
    begun: tuple[RunFolder, Path], tmp_path: Path, file: str, old: str, new: str, says: str
) -> None:
    folder, base = begun
    other = tmp_path / "other"
    shutil.copytree(base, other)
    data = bytearray((other / file).read_bytes())
    if old:
        assert old.encode() in data
        data = data.replace(old.encode(), new.encode())
    else:
        data[-1] ^= 1
    (other / file).write_bytes(data)
    with pytest.raises(
        ConfigError, match=rf"step-000010 belongs to another model: the run began with .*{says}; set it back, or"
    ):
        take_up(config_of(other), folder)
    assert folder.checkpoints.joinpath("step-000010").is_dir(), "it is another run's, and no damage"


def test_an_adapter_goes_on_beside_the_very_model_it_began_with(begun: tuple[RunFolder, Path], tmp_path: Path) -> None:
    whole, base = begun
    folder = RunFolder.of(str(tmp_path), "e", "t", None, None)
    folder.create()
    origin = dict(take_up(config_of(base), folder).origin)
    kept = folder.checkpoints / "step-000010"
    folder_of(kept, 10, model=False, adapter=True, about={"origin": origin, "critic": False})
    start = take_up(config_of(base, "actor.lora.rank=8"), folder)
    assert (start.step, start.model_dir, start.adapter_dir) == (10, base, kept / "adapter")
    assert take_up(config_of(base), whole).adapter_dir is None
    for config, run, says in (
        (config_of(base), folder, "was trained with actor.lora: take the section back in"),
        (config_of(base, "actor.lora.rank=8"), whole, "was trained without actor.lora: take the section out"),
    ):
        with pytest.raises(ConfigError, match=says):
            take_up(config, run)
    shutil.copytree(base, tmp_path / "kept")
    data = bytearray((base / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (base / "model.safetensors").write_bytes(data)
    with pytest.raises(ConfigError, match="its weights differ"):
        take_up(config_of(base, "actor.lora.rank=8"), folder)
    assert take_up(config_of(base), whole).step == 10, "a whole checkpoint needs no base"
    shutil.rmtree(base)
    with pytest.raises(ConfigError, match="there is no model"):
        take_up(config_of(base, "actor.lora.rank=8"), folder)
    (tmp_path / "kept").rename(base)


def test_a_critic_that_comes_or_goes_is_refused(begun: tuple[RunFolder, Path]) -> None:
    folder, base = begun
    with pytest.raises(ConfigError, match=r"was saved without a critic; set the critic section as it was, or"):
        take_up(config_of(base, "critic.path=tiny-qwen3"), folder)


def test_modes(begun: tuple[RunFolder, Path], tmp_path: Path) -> None:
    folder, base = begun
    assert take_up(config_of(base, "recover.mode=on"), folder).step == 10
    with pytest.raises(ConfigError, match=r"recover\.mode is off: choose another trial_name"):
        take_up(config_of(base, "recover.mode=off"), folder)
    fresh = RunFolder.of(str(tmp_path), "e", "t", None, None)
    for mode in ("off", "auto"):
        start = take_up(config_of(base, f"recover.mode={mode}"), fresh)
        assert (start.found, start.model_dir) == (None, base)
    fresh.root.mkdir(parents=True)
    fresh.store_path.touch()  # begun, and killed before its first recovery state
    assert take_up(config_of(base), fresh).step == 0
