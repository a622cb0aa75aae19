"""Run in one process or by torchrun: a Lightning run that is halted, taken back by the guard, or resumed.

Prints one line of JSON per repetition or mode, and rank: the step at which training ended, what the guard said, and the
hashes of the state after each step. Several modes, with commas between them, are run in turn.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import sys
import warnings
from pathlib import Path

import torch

from kl_guard import KLGuardHalted
from kl_guard_lightning import KLGuardCallback, fit_with_rollback
from lightning_runs import Policy, Record, Resumable, each, trainer_of

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
MANY = {"strategy": "ddp", "devices": WORLD} if WORLD > 1 else {}


def broken(*_: object, **__: object) -> None:
    """A fault."""
    raise ZeroDivisionError("inserted")


def trainer(folder: Path, *callbacks: object, **settings: object) -> object:
    """Return a trainer whose ranks begin with noise of their own."""
    torch.manual_seed(RANK)
    return trainer_of(folder, callbacks, **{**MANY, **settings})


def data() -> Resumable:
    """Return this rank's share of the data."""
    return Resumable(rank=RANK, world=WORLD)


def halted(folder: Path, repeat: int) -> dict:
    """Train with a guard of which one rank alone sees the trouble, and another may be broken."""
    rng = random.Random(repeat)  # the same on both ranks
    seer, begin = rng.randrange(WORLD), rng.randrange(2, 9)
    guard = KLGuardCallback(save_halted=repeat % 2 == 0, on_halt="raise" if repeat % 3 == 1 else "return")
    if repeat % 3 == 2 and seer != RANK:
        guard._observe = broken
    fit = trainer(folder / str(repeat), guard, each(3, dirpath=folder / str(repeat) / "saved"), min_steps=13)
    with contextlib.suppress(KLGuardHalted):
        fit.fit(Policy(lambda step: 1000.0 if step >= begin and seer == RANK else 0.01), data())
    reason = guard.decision.reason
    return {
        "repeat": repeat,
        "expected": begin + 2,
        "ended": fit.global_step,
        "halted": guard.halted,
        "reason": reason and [reason.signature, reason.step],
        "way_back": guard.decision.checkpoint and guard.decision.checkpoint.step,
    }


def taken_back(folder: Path, mode: str) -> dict:
    """Train with a guard that goes back."""
    knobs = {} if mode == "changed" else {"lr_factor": 1.0, "new_noise": False}
    guard, record = KLGuardCallback(action="rollback", **knobs), Record()
    fit = trainer(folder / mode, record, guard, each(2, dirpath=folder / mode / "saved"))
    seen_here = RANK == WORLD - 1
    module = Policy(lambda step: 1000.0 if step >= 8 and seen_here and not guard.rollbacks else 0.01)
    fit_with_rollback(fit, module, data())
    return {
        "halted": guard.halted,
        "note": guard.decision.note,
        "rollbacks": [[d.reason.step, d.checkpoint.step, sorted(d.checkpoint.facts)] for d in guard.rollbacks],
        "steps": record.steps,
        "states": record.states,
        "rates": record.rates,
    }


def resumed(folder: Path) -> dict:
    """Resume from the checkpoint that the other run went back to."""
    record = Record()
    fit = trainer(folder / "resume", record, KLGuardCallback())
    fit.fit(Policy(), data(), ckpt_path=str(folder / "guarded" / "saved" / "step=4.ckpt"))
    return {"steps": record.steps, "states": record.states}


def main() -> None:
    """Train as asked."""
    modes, folder, repeats = sys.argv[1].split(","), Path(sys.argv[2]), int(sys.argv[3])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for mode, repeat in itertools.product(modes, range(repeats)):
        if mode == "halt":
            line = halted(folder, repeat)
        else:
            line = resumed(folder) if mode == "resume" else taken_back(folder, mode)
        print("RESULT " + json.dumps({"mode": mode, "rank": RANK, **line}) + "\n", end="", flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)  # the destructor of a gloo group now and then waits for ever at a normal exit


if __name__ == "__main__":
    main()
