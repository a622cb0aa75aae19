"""Two gloo ranks, wrapped in each way that is given: an undisturbed run, and one in which rank 1 alone sees trouble."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from loops import AS_IT_WAS, Loop, trouble
from trl_state import digest, local, tensors_of


class Plain(nn.Module):
    """Layers that FSDP can cut."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 4))

    def forward(self, x):
        return self.layers(x)


def ddp(model, optimizer):
    return nn.parallel.DistributedDataParallel(model), optimizer


def fsdp(model, optimizer):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer.param_groups[0]["params"] = list(model.parameters())  # those of before are gone
    return model, optimizer


class RankLoop(Loop):
    """Rank by rank another loader and other noise; no scaler, which needs one that knows shards."""

    def __init__(self, *args, **knobs):
        super().__init__(*args, policy=Plain, **knobs)
        torch.manual_seed(100 + dist.get_rank())

    def train(self):
        self.optimizer.zero_grad()
        self.model(torch.randn(6, 8) + self.loader.next()).square().mean().backward()
        self.optimizer.step()
        self.scheduler.step()

    def state(self):
        return {
            "weights": digest(map(local, self.model.parameters())),
            "moments": digest(tensors_of([self.optimizer.state[p] for p in self.model.parameters()])),
            "rates": [group["lr"] for group in self.optimizer.param_groups],
            "streams": digest([torch.get_rng_state()]),
            "loader": (list(self.loader.order), self.loader.place),
        }


def both(kind, folder):
    wrap = {"ddp": ddp, "fsdp": fsdp}[kind]
    calm, disturbed = {}, {}
    RankLoop(folder / "calm", wrap=wrap, **AS_IT_WAS).run(18, record=calm)
    seen = trouble(12) if dist.get_rank() == 1 else (lambda step, attempt: 0.01)
    loop = RankLoop(folder / "disturbed", wrap=wrap, action="rollback", **AS_IT_WAS)
    made = loop.run(18, seen, record=disturbed)
    return {"kind": kind, "made": made, "same": calm == disturbed}


def main(folder, kinds):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for kind in kinds:
        print("RESULT " + json.dumps(both(kind, folder / kind)) + "\n", end="", flush=True)
    dist.barrier()
    os._exit(0)  # the destructor of a gloo group now and then waits for ever


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
