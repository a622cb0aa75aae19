"""Nothing is unpickled that a user did not ask for: a bomb in each file that is loaded, and no mark."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from bombs import Bomb, as_pickle, as_torch
from torch import nn

from kl_guard import KLGuardHalted
from kl_guard_lightning import KLGuardCallback, fit_with_rollback
from kl_guard_lightning.saves import reads_plainly
from kl_guard_torch.sharded import Shards
from lightning_runs import Policy, Resumable, each, trainer_of
from loops import Loop, trouble

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*exists and is not empty.*"),
    pytest.mark.filterwarnings("ignore:.*smaller than the logging interval.*"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*"),
    pytest.mark.filterwarnings("ignore:.*'set_vital' is deprecated.*"),
    pytest.mark.filterwarnings("ignore:.*no pre-optimization state was saved.*"),
]


def test_the_bomb_goes_off(tmp_path):
    """Else no mark would mean nothing."""
    pickle.loads(pickle.dumps(Bomb(tmp_path / "mark")))
    assert (tmp_path / "mark").exists()


@pytest.mark.parametrize("bare", [False, True], ids=["in a state", "bare"])
@pytest.mark.parametrize("name", ["weights.pt", "optimizers.pt", "progress.pt", "rank-0.pt"])
def test_no_file_of_a_loop_runs(tmp_path, name, bare):
    """`TorchGuard.resume` refuses the checkpoint, and says so."""
    out, mark = tmp_path / "run", tmp_path / "mark"
    Loop(out).run(5)
    path = out / "checkpoint-5" / name
    if bare:
        as_pickle(path, mark)
    else:
        as_torch(path, mark, torch.load(path, weights_only=True))
    with pytest.raises(ValueError, match="Weights only load failed"):
        Loop(out).guard.resume(out / "checkpoint-5")
    assert not mark.exists()


def test_a_loop_does_not_go_back_into_a_bomb(tmp_path):
    """Pins that were swapped together with their manifests' checksums: nothing runs, and training stops."""
    from kl_guard.checkpoints import FileRecord, Manifest, PinStore
    from kl_guard.checkpoints.manifest import checksum

    mark = tmp_path / "mark"
    loop = Loop(tmp_path / "run", action="rollback")

    def swapped(step, attempt):
        if step == 14:
            loop.guard.guard.checkpoints.wait()
            folder = tmp_path / "run" / "kl_guard" / "pins"
            for pin in folder.glob("step-*"):
                as_torch(pin / "progress.pt", mark)
                manifest = Manifest.read(pin)
                files = {n: FileRecord((pin / n).stat().st_size, checksum(pin / n)) for n in manifest.files}
                Manifest(**{**vars(manifest), "files": files}).write(pin)
                store = PinStore(folder, manifest.run_id)
                assert store.sound(next(p for p in store.pins() if p.path == pin))
        return trouble(12)(step, attempt)

    with pytest.raises(KLGuardHalted):
        loop.run(20, swapped)
    assert not mark.exists()


@pytest.fixture
def sharded(tmp_path):
    """A model cut by FSDP, one process, and its checkpoint."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    try:
        model = nn.Linear(4, 4)
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        shards = Shards({"model": model}, {"model": optimizer})
        shards.write(tmp_path / "shards")
        yield SimpleNamespace(shards=shards, folder=tmp_path / "shards", optimizer=optimizer)
    finally:
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
def test_the_list_of_a_sharded_checkpoint_does_not_run(tmp_path, sharded):
    """Torch unpickles `.metadata` as it is; the guard looks first, and what it wrote itself passes."""
    sharded.optimizer.param_groups[0]["lr"] = 0.5
    sharded.shards.put(sharded.folder)
    assert sharded.optimizer.param_groups[0]["lr"] == 1e-3
    as_pickle(sharded.folder / ".metadata", tmp_path / "mark")
    with pytest.raises(pickle.UnpicklingError, match="has no place in the list of what a checkpoint holds"):
        sharded.shards.put(sharded.folder)
    assert not (tmp_path / "mark").exists()


@pytest.mark.filterwarnings("ignore")
def test_a_value_in_a_sharded_checkpoint_does_not_run(tmp_path, sharded):
    """What is no tensor, such as a learning rate, is unpickled by torch's own planner."""
    sharded.optimizer.param_groups[0]["lr"] = Bomb(tmp_path / "mark")
    sharded.shards.write(sharded.folder)
    sharded.optimizer.param_groups[0]["lr"] = 1e-3
    with pytest.raises(RuntimeError, match=r"cannot be read: rank 0: Weights only load failed"):
        sharded.shards.put(sharded.folder)
    assert not (tmp_path / "mark").exists()


class Named:
    """A hyperparameter of a class of one's own."""


class WithObject(Policy):
    """Its checkpoints hold an object that only unpickling can read."""

    def on_save_checkpoint(self, checkpoint):
        checkpoint["mine"] = Named()


def lightning_run(folder, policy, swap=lambda: None):
    guard = KLGuardCallback(action="rollback")

    def kl(step):
        if step == 10 and not guard.rollbacks:
            guard.guard.checkpoints.wait()
            swap()
        return 1000.0 if step >= 8 and not guard.rollbacks else 0.01

    trainer = trainer_of(folder, [guard, each(2, dirpath=folder / "saved")])
    return guard, trainer, policy(kl)


@pytest.mark.parametrize("policy", [Policy, WithObject])
def test_lightning_goes_back_to_what_this_process_wrote(tmp_path, policy):
    """Plain or not: an object that the run itself put there comes back, since the checksum in memory fits."""
    guard, trainer, module = lightning_run(tmp_path, policy)
    fit_with_rollback(trainer, module, Resumable())
    assert [d.checkpoint.step for d in guard.rollbacks] == [4]
    assert trainer.global_step == 14
    assert reads_plainly(tmp_path / "saved" / "step=14.ckpt") == (policy is Policy)


@pytest.mark.parametrize("asked", [None, False])
def test_lightning_does_not_go_back_into_a_bomb(tmp_path, asked):
    """Files and manifests swapped alike: refused, unless the user said that pickles may run."""
    from kl_guard.checkpoints import FileRecord, Manifest
    from kl_guard.checkpoints.manifest import checksum

    mark = tmp_path / "mark"

    def swap():
        for pin in (tmp_path / "kl_guard" / "pins").glob("step-*"):
            (file,) = pin.glob("*.ckpt")
            state = torch.load(file, weights_only=True)
            file.unlink()  # it may be one file with the original
            as_torch(file, mark, state)
            record = {file.name: FileRecord(file.stat().st_size, checksum(file))}
            Manifest(**{**vars(Manifest.read(pin)), "files": record}).write(pin)

    guard, trainer, module = lightning_run(tmp_path, Policy, swap)
    fit_with_rollback(trainer, module, Resumable(), weights_only=asked)
    assert mark.exists() == (asked is False)
    assert guard.halted == (asked is None)
    if asked is None:
        assert "fit_with_rollback(..., weights_only=False) unpickles it" in guard.decision.note
