"""Checkpoints of cut nets: each rank writes its pieces and reads its own from any layout's; the numbers are the same to the bit."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from areal.base.errors import CheckpointError
from areal.config.backend_spec import parse_backend
from areal.engine.checkpoint_files import checkpoints, damage, read_mark
from areal.engine.commands import Row
from areal.engine.engine import TrainEngine
from areal.engine.parallel.world import World, local
from areal.engine.piece_files import SavedPieces, own_pieces, write_pieces
from areal.engine.settings import EngineSettings
from tests.engine.parallel.conftest import WriteNet
from tests.engine.parallel.pool import Case, Pool, Result, alone
from tests.engine.parallel.twins import apart

GroupRows = Callable[..., list[Row]]


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(4) as pool:
        yield pool


def _run(pool: Pool, case: Case) -> Result:
    return alone(case) if parse_backend(case.backend).size == 1 else pool.run(case)


def _state(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, whole."""
    with SavedPieces(sorted(folder.glob("recovery/*.safetensors"))) as saved:
        state = {name: saved.whole(name) for name in saved.shapes}
    return state | load_file(folder / "model.safetensors")


def _goes_on(
    pool: Pool,
    saved: str,
    resumed: str,
    model: Path,
    rows: list[Row],
    tmp: Path,
    *,
    replicas: tuple[int, int] = (1, 1),
    **changes: object,
) -> None:
    """Saved after two steps; what another layout takes over is that to the bit, and its third step is that of a run without a break.
    replicas: of the one and of the other."""
    settings, other = (
        {"optimizer": {"lr": 1e-3, "gradient_clipping": 0.5}, "replicas": number, **changes} for number in replicas
    )
    first, again = tmp / "step-000002", tmp / "again"
    straight = _run(pool, Case(saved, str(model), rows, steps=3, settings=settings))
    _run(pool, Case(saved, str(model), rows, steps=2, settings=settings, saved_to=str(first)))
    assert damage(first, recovery=True) is None
    mark = read_mark(first)
    assert not list(first.glob(".weights*"))
    assert sum(name.startswith("recovery/pieces-") for name in mark.files) >= 1
    taken = Case(resumed, str(model), rows, steps=0, settings=other, restored_from=str(first), saved_to=str(again))
    _run(pool, taken)
    ours, theirs = _state(first), _state(again)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name
    after = _run(pool, Case(resumed, str(model), rows, steps=1, settings=other, restored_from=str(first)))
    assert after.weights.keys() == straight.weights.keys()
    assert after.replicas_equal
    for name, tensor in after.weights.items():
        if saved == resumed and settings == other:
            assert torch.equal(tensor, straight.weights[name]), name
        else:
            assert apart(tensor, straight.weights[name]) <= (1e-6 if tensor.dtype == torch.float32 else 1e-2), name


def test_a_checkpoint_of_two_ranks_is_gone_on_from_by_one(
    pool: Pool, tiny_dir: Path, group_rows: GroupRows, tmp_path: Path
) -> None:
    """Each rank wrote half of the moments and none has it all; the folder's model loads as any other."""
    from transformers import AutoModelForCausalLM

    _goes_on(pool, "archon:d2", "archon:d1", tiny_dir, group_rows(groups=3), tmp_path)
    files = read_mark(tmp_path / "step-000002").files
    sizes = [files[f"recovery/pieces-{rank}.safetensors"].bytes for rank in range(2)]
    assert max(sizes) < 0.7 * sum(sizes)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "step-000002")
    weights = load_file(tmp_path / "step-000002" / "model.safetensors")
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items() if name in weights)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        ("archon:d2", "archon:d2"),
        ("archon:d2", "archon:t2"),
        ("archon:p2", "fsdp:d2"),  # both ends of tied embeddings
        ("fsdp:d1", "archon:p2"),
        ("archon:d2t2", "fsdp:d4"),
        ("archon:d4", "archon:d2t2"),
        ("fsdp:d2t2", "fsdp:d1"),
        ("fsdp:t2", "archon:d2"),
        ("archon:d2", "fsdp:d2t2"),
    ],
)
def test_a_checkpoint_is_gone_on_from_in_another_layout(
    pool: Pool, tiny_dir: Path, group_rows: GroupRows, tmp_path: Path, saved: str, resumed: str
) -> None:
    _goes_on(pool, saved, resumed, tiny_dir, group_rows(groups=3), tmp_path)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("saved", "resumed", "replicas"),
    [
        ("archon:d2t2", "fsdp:d2", (2, 1)),
        ("fsdp:d2", "archon:d2t2", (1, 2)),
        ("fsdp:d4", "fsdp:d4", (2, 2)),
    ],
)
def test_replicas_come_and_go(
    pool: Pool,
    tiny_dir: Path,
    group_rows: GroupRows,
    tmp_path: Path,
    saved: str,
    resumed: str,
    replicas: tuple[int, int],
) -> None:
    _goes_on(pool, saved, resumed, tiny_dir, group_rows(groups=3), tmp_path, replicas=replicas, dtype="bfloat16")


@pytest.mark.heavy
def test_masters_of_bfloat16_weights_go_along(
    pool: Pool, tiny_dir: Path, group_rows: GroupRows, tmp_path: Path
) -> None:
    _goes_on(pool, "archon:t2", "archon:d2", tiny_dir, group_rows(groups=3), tmp_path, dtype="bfloat16")


@pytest.mark.heavy
@pytest.mark.parametrize(("saved", "resumed"), [("archon:d2e2", "archon:d2"), ("archon:d1", "archon:d2e2")])
def test_experts_their_balance_and_the_routers_biases_go_along(
    pool: Pool, moe_dir: Path, group_rows: GroupRows, tmp_path: Path, saved: str, resumed: str
) -> None:
    settings = {"moe_bias_rate": 0.01, "moe_aux_loss": 0.1}
    _goes_on(pool, saved, resumed, moe_dir, group_rows(groups=3), tmp_path, **settings)
    state = _state(tmp_path / "step-000002")
    assert any(name.endswith("e_score_correction_bias") and tensor.any() for name, tensor in state.items())


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("saved", "resumed"), [("fsdp:d2t2e2", "fsdp:d1"), ("fsdp:d1", "fsdp:d2e2"), ("fsdp:t2", "fsdp:t2")]
)
def test_what_transformers_plans_cut_goes_along(
    pool: Pool, write_net: WriteNet, group_rows: GroupRows, tmp_path: Path, saved: str, resumed: str
) -> None:
    folder = write_net("Mixtral", num_local_experts=4, num_experts_per_tok=2)
    _goes_on(pool, saved, resumed, folder, group_rows(groups=3), tmp_path)


def test_a_checkpoint_of_the_format_before_is_gone_on_from(
    pool: Pool, tiny_dir: Path, group_rows: GroupRows, tmp_path: Path
) -> None:
    """Format 2: all state whole in one file, of another name; and the mark without a checksum of its own."""
    rows, path = group_rows(groups=3), tmp_path / "step-000002"
    alone(Case("archon:d1", str(tiny_dir), rows, steps=2, saved_to=str(path)))
    straight = alone(Case("archon:d1", str(tiny_dir), rows, steps=3))
    (path / "recovery/pieces-0.safetensors").rename(path / "recovery/optimizer.safetensors")
    text = (path / "checkpoint.json").read_text().replace("pieces-0", "optimizer")
    (path / "checkpoint.json").write_text(json.dumps(json.loads(text) | {"format": 2, "checksum": ""}))
    assert damage(path, recovery=True) is None
    after = pool.run(Case("archon:d2", str(tiny_dir), rows, steps=1, restored_from=str(path)))
    assert all(apart(tensor, straight.weights[name]) <= 1e-6 for name, tensor in after.weights.items())


def _cuts(world: World, folder: Path) -> list[str]:
    """On 4 ranks: what cannot be read as it was, in any of the cuts that a tensor of its shape has here."""
    assert world.mesh is not None
    mesh, flat = world.mesh["d", "t"], init_device_mesh(world.device.type, (4,))
    torch.manual_seed(3)
    linear = torch.nn.Linear(3, 8, bias=False)
    full = linear.weight.detach().clone()
    parallelize_module(linear, mesh["t"], ColwiseParallel())
    fully_shard(linear, mesh=mesh["d"])
    own = {
        "strided": linear.weight.detach(),
        "rows": distribute_tensor(full, mesh, [Replicate(), Shard(0)]),
        "few": distribute_tensor(full, flat, [Shard(1)]),  # one rank has none
        "both": distribute_tensor(full, mesh, [Shard(1), Shard(0)]),
        "copies": distribute_tensor(full, mesh, [Replicate(), Replicate()]),
        "plain": full,
        "scalar": torch.tensor(2.5),
    }
    pieces = own_pieces(own.items(), world)
    write_pieces(folder / f"{world.rank}.safetensors", pieces)
    written = [json.loads(message) for message in world.gather(json.dumps(list(pieces)).encode())]
    assert [sum(name in names for names in written) for name in own] == [4, 2, 3, 4, 1, 1, 1]
    wrong = []
    with SavedPieces(sorted(folder.glob("*.safetensors"))) as saved:
        assert saved.shapes == {name: tuple(tensor.shape) for name, tensor in own.items()}
        for name in own.keys() - {"scalar"}:
            wrong += [name] * (not torch.equal(saved.whole(name).cpu(), full))
            cuts = [(cut, one) for cut, one in own.items() if cut != "scalar"]
            wrong += [
                f"{name} as {cut}"
                for cut, one in cuts
                if not torch.equal(saved.read(name, one).cpu(), local(one).cpu())
            ]
        assert saved.whole("scalar") == 2.5
    world.gather(b"")
    return wrong


@pytest.mark.heavy
def test_every_piece_is_written_once_and_read_in_every_cut(pool: Pool, tmp_path: Path) -> None:
    assert pool.call("archon:d2t2", _cuts, tmp_path) == [[]] * 4


def _torn(world: World, model: str, folder: Path) -> list[str]:
    """What each rank is told where one's disk is full, and of what is lost, cut, altered or of another save."""
    settings = EngineSettings.model_validate(
        {"backend": "archon:d2", "model_dir": model, "algorithm": "grpo", "threads": 1, "total_steps": 10}
    )
    engine, said = TrainEngine.load(settings, world), []
    good, later = folder / "step-000001", folder / "step-000002"
    for path, number in ((good, 1.0), (folder / "other", 2.0)):
        for tensor in engine._optimizer._masters.values():
            engine._optimizer._adamw.state[tensor] = {
                name: torch.full_like(tensor, number) for name in ("exp_avg", "exp_avg_sq")
            } | {"step": torch.tensor(1.0)}
        engine.save(str(path), 1, full=True)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if world.rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, before[1]))
    try:
        engine.save(str(later), 2, full=True)
    except CheckpointError as error:
        said.append(str(error))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    if world.leader:
        piece = "recovery/pieces-1.safetensors"
        data = (good / piece).read_bytes()
        for name, content in {
            "lost": None,
            "cut": data[: len(data) // 2],
            "altered": data[:-3] + bytes([data[-3] ^ 4]) + data[-2:],
            "foreign": (folder / "other" / piece).read_bytes(),
        }.items():
            shutil.copytree(good, folder / name)
            (folder / name / piece).unlink() if content is None else (folder / name / piece).write_bytes(content)
    for name in ("lost", "cut", "altered", "foreign"):
        world.gather(b"")
        try:
            engine.restore(str(folder / name))
        except CheckpointError as error:
            said.append(str(error))
    engine.restore(str(good))
    return said


def test_T081_a_rank_that_cannot_write_or_read_its_pieces_is_heard_by_all(
    pool: Pool, tiny_dir: Path, tmp_path: Path
) -> None:
    one, other = pool.call("archon:d2", _torn, str(tiny_dir), tmp_path)
    assert one == other
    for text, says in zip(
        one,
        (
            "step-000002 could not be written: File too large",
            "is missing",
            "bytes, not",
            "holds another",
            "another header",
        ),
        strict=True,
    ):
        assert says in text
    assert all("pieces-1.safetensors" in text and "earlier checkpoint" in text for text in one[1:])
    assert [found.step for found in checkpoints(tmp_path)] == [1]
    assert not list(tmp_path.glob(".*"))
