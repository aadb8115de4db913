"""Cold parameters given to DTensor, which works beneath torch's functions: plain torch's bytes, and writes are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import devices
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import swapper
from e2e.models import Net, train_step
from e2e.twins import Twins, named_budget, send_away

MakeTwins = Callable[..., Twins]


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    meeting = tmp_path_factory.mktemp("meeting") / "file"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


PLACES = [Replicate(), Shard(0)]
MAKES: dict[str, Callable[..., DTensor]] = {
    "from_local": lambda p, mesh, place: DTensor.from_local(p, mesh, [place]),
    "checked": lambda p, mesh, place: DTensor.from_local(p, mesh, [place], run_check=True),
    "distributed": lambda p, mesh, place: distribute_tensor(p, mesh, [place]),
    "data": lambda p, mesh, place: distribute_tensor(p.data, mesh, [place]),
    "detached": lambda p, mesh, place: distribute_tensor(p.detach(), mesh, [place]),
}
ARRAYS = ("numpy", "local numpy")
"""What memory of a device has not."""
READS: dict[str, Callable[[Any], Any]] = {
    "full_tensor": lambda d: d.full_tensor(),
    "to_local": lambda d: d.to_local(),
    "numpy": lambda d: torch.from_numpy(d.detach().full_tensor().numpy().copy()),
    "local numpy": lambda d: torch.from_numpy(d.detach().to_local().numpy().copy()),
    "an operation": lambda d: (d * 2).sum().full_tensor(),
    "redistributed": lambda d: d.redistribute(placements=[Replicate()]).to_local(),
}


def outcome(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except swapper.SwapperError as error:
        return error


def assert_reads(cold: nn.Parameter, plain: nn.Parameter, mesh: DeviceMesh, away: Callable[[], Any]) -> None:
    for place in PLACES:
        for make in MAKES.values():
            for name, read in READS.items():
                if devices.NAME and name in ARRAYS:
                    continue
                away()
                found = outcome(lambda make=make, read=read, place=place: read(make(cold, mesh, place)))
                expected = read(make(plain, mesh, place))
                assert isinstance(found, swapper.SwapperError) or torch.equal(found, expected)
                assert isinstance(found, swapper.SwapperError) or found.requires_grad == expected.requires_grad


def test_of_a_model_in_training(twins: MakeTwins, mesh: DeviceMesh) -> None:
    if devices.IS_REAL:
        mesh = init_device_mesh(devices.NAME, (1,))
    pair = twins(Net(), room_bytes=3 << 20)
    pair.train(train_step, steps=1)
    cold, plain = pair.swapped.head.weight, pair.plain.head.weight
    assert_reads(cold, plain, mesh, lambda: send_away(pair.manager))
    for number, make in enumerate(MAKES.values()):
        for parameter in (cold, plain):
            make(parameter, mesh, Shard(0)).detach().to_local()[number] = number
        send_away(pair.manager)
        assert torch.equal(cold + 0, plain)
    pair.train(train_step, steps=1)
    pair.finish()


def test_of_a_loaded_model(tmp_path: Path, mesh: DeviceMesh) -> None:
    plain = Net().requires_grad_(False)
    torch.save(plain.state_dict(), tmp_path / "net.pt")

    def empty() -> nn.Module:
        with torch.device("meta"):
            return Net()

    with pytest.raises(swapper.BudgetError) as refused:
        swapper.load(empty(), tmp_path / "net.pt", host_memory=1)
    model: Any = swapper.load(empty(), tmp_path / "net.pt", host_memory=named_budget(refused.value))
    with swapper.loaded(model):
        assert_reads(model.head.weight, plain.head.weight, mesh, lambda: None)
        for make in MAKES.values():
            if make is not MAKES["detached"]:  # which is as a state_dict: what is written there is seen there
                make(model.head.weight, mesh, Shard(0)).detach().to_local().zero_()
        assert_reads(model.head.weight, plain.head.weight, mesh, lambda: None)


@pytest.mark.whole
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_parameters_that_are_dtensors_are_refused_by_name(tmp_path: Path, mesh: DeviceMesh, place: Any) -> None:
    layer = nn.Linear(64, 64)
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [place]))
    with swapper.SwapManager(tmp_path, host_memory="16MiB") as manager:
        with pytest.raises(swapper.UnsupportedError, match="parameter weight is a DTensor"):
            manager.offload(layer, torch.optim.AdamW(layer.parameters()))
