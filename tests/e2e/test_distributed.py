"""DDP, collectives by hand, and shards that are changed by hand: on one rank. On several: tests/fuzz/ranks.py, ddp_run.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW

import swapper
from e2e.models import Net, finish_step
from e2e.twins import Twins
from swapper.durability.commit import read_commit

WIDTH = 160  # a layer's weight is larger than what stays in memory


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def step(model: nn.Module, optimizer: Any) -> torch.Tensor:
    return finish_step(model(torch.randn(4, WIDTH)).square().mean(), optimizer)


@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize(
    ("options", "remedy"), [({"update": "backward"}, "update='deferred'"), ({"gradients": "nvme"}, "gradients='host'")]
)
def test_ddp_is_refused_where_gradients_are_used_or_leave_before_it_averages_them(
    tmp_path: Path, options: dict[str, Any], remedy: str, is_before: bool
) -> None:
    model: Any = nn.parallel.DistributedDataParallel(Net()) if is_before else Net()
    with swapper.SwapManager(tmp_path, host_memory="10MiB") as manager:
        with pytest.raises(swapper.UnsupportedError, match=f"DistributedDataParallel does not go with.*{remedy}"):
            manager.offload(model, AdamW(model.parameters()), **options)
            nn.parallel.DistributedDataParallel(model)


@pytest.mark.parametrize("of", ["parameter", "state"])
def test_collectives_that_go_on_after_their_call_are_refused(twins: Callable[..., Twins], of: str) -> None:
    """They would use memory that is given back."""
    pair = twins(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))))
    pair.train(step, steps=1)
    parameter = pair.swapped[0].weight
    value = parameter.data if of == "parameter" else pair.optimizer.state[parameter]["exp_avg"]
    says = "all_reduce, which goes on.*async_op.*gather" if of == "parameter" else "leave async_op out"
    with pytest.raises(swapper.SwapperError, match=says):
        torch.distributed.all_reduce(value, async_op=True)
    torch.distributed.all_reduce(value)
    pair.train(step, steps=1)
    pair.finish(paged=False)


@pytest.mark.parametrize("update", ["step", "deferred"])
def test_what_a_script_changes_of_shards_after_a_step_is_in_its_commit(tmp_path: Path, update: str) -> None:
    """It is no change of the next forward, before which the step would have to be committed."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    commits = swapper.CommitPolicy(every=1)
    with swapper.SwapManager(tmp_path, host_memory="10MiB", commits=commits) as manager:
        model, optimizer = manager.offload(model, AdamW(model.parameters()), params="nvme", update=update)
        for number in range(3):
            step(model, optimizer)
            record = read_commit(manager.current.directory.path)
            assert record is not None and record.step == number
            with torch.no_grad():
                model[1].weight.mul_(0.5)
                model[1].bias.data.mul_(0.5)
