"""Forwards that use weights as no plan expects it: outputs are right, or the error says how much memory it takes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

import swapper


class TiedByHand(nn.Module):
    """Rows of the table are looked up at the start, and all of it is used at the end."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(12000, 128)
        self.layers = nn.ModuleList(nn.Linear(128, 1024) for _ in range(24))

    def forward(self, ids):
        x = self.table(ids)
        for layer in self.layers:
            x = x + F.gelu(layer(x))[..., :128]
        return x @ self.table.weight.T


class Joined(nn.Module):
    """Takes the weights of three children at one time, and runs others meanwhile."""

    def __init__(self):
        super().__init__()
        self.three = nn.ModuleList(nn.Linear(256, 512) for _ in range(3))
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(20))

    def forward(self, ids):
        x = F.linear(ids[..., None] / torch.arange(1, 257), torch.cat([map_.weight for map_ in self.three]))[..., :512]
        for layer in self.layers:
            x = layer(x)
        return x


class AllExperts(nn.Module):
    """As Llama 4 has them: all are multiplied at one time, though they could be taken one by one."""

    def __init__(self):
        super().__init__()
        self.experts = Experts()

    def forward(self, ids):
        return self.experts(ids.view(4, -1, 1) / torch.arange(1, 257))


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 256, 512) / 16)
        self.down = nn.Parameter(torch.randn(4, 512, 256) / 16)

    def forward(self, x):
        return torch.bmm(F.gelu(torch.bmm(x, self.up)), self.down)


IDS = torch.arange(12).view(2, 6)


def saved(cls, path):
    torch.manual_seed(0)
    reference = cls().eval()
    save_file(reference.state_dict(), path)
    return reference


def loaded_with(cls, path, nbytes):
    with swapper.without_weights():
        model = cls()
    return swapper.load(model.eval(), path, host_memory=nbytes)


def number_in(error):
    return int(str(error).rpartition("(")[2].split(" bytes")[0])


def least(cls, path):
    with pytest.raises(swapper.BudgetError) as refusal:
        loaded_with(cls, path, 4096)
    return int(str(refusal.value).split("(")[1].split(" bytes")[0])


@pytest.mark.parametrize("share", [0.5, 0.7, 0.9])
@pytest.mark.parametrize("cls", [TiedByHand, Joined])
def test_what_was_to_stay_makes_room(tmp_path, cls, share):
    reference = saved(cls, tmp_path / "w")
    nbytes = sum(p.nbytes for p in reference.parameters())
    budget = max(int(share * nbytes), 8 << 20)
    model = loaded_with(cls, tmp_path / "w", budget)
    loaded = swapper.loaded(model)
    with torch.no_grad():
        expected = reference(IDS)
        for _ in range(4):
            assert torch.equal(model(IDS), expected)
        assert all(torch.equal(output, expected) for output in loaded.map(model, [IDS, IDS, IDS]))
    assert loaded.counters.pool_bytes <= budget
    loaded.unload()


@pytest.mark.parametrize("cls", [TiedByHand, Joined])
def test_where_there_is_no_room_the_error_says_how_much_it_takes(tmp_path, cls):
    reference = saved(cls, tmp_path / "w")
    budget, refusals = least(cls, tmp_path / "w"), 0
    while True:
        model = loaded_with(cls, tmp_path / "w", budget)
        try:
            with torch.no_grad():
                output = model(IDS)
            break
        except swapper.BudgetError as error:
            assert "is used as a whole" in str(error)
            budget += number_in(error)
            refusals += 1
        finally:
            loaded = swapper.loaded(model)
            del model
        loaded.unload()
    assert torch.equal(output, reference(IDS))
    assert 0 < refusals <= 4  # what is used after the first use that failed is not known then
    assert budget < sum(p.nbytes for p in reference.parameters())
    loaded.unload()


def test_experts_that_are_all_used_at_one_time_are_planned_for(tmp_path):
    reference = saved(AllExperts, tmp_path / "w")
    model = loaded_with(AllExperts, tmp_path / "w", least(AllExperts, tmp_path / "w"))
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(model(IDS), reference(IDS))
    swapper.loaded(model).unload()
