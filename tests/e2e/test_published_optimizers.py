"""Optimizers of packages: those with train() and eval(), with whole matrices as state, and those refused by name at `offload`.

The packages are not among the tests' dependencies: `pip install schedulefree prodigyopt pytorch_optimizer torchao bitsandbytes`
runs what is skipped here without them. Classes of tests/e2e/third_party.py stand for them otherwise.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import devices
import pytest
import torch
from torch import nn

import swapper
from e2e import third_party
from e2e.models import Net, train_step
from e2e.twins import Twins
from swapper.train.optimizer.optimizer_proxy import is_same

MakeTwins = Callable[..., Twins]
PLACES: dict[str, dict[str, Any]] = {
    "on the drive": {},
    "parameters in memory": {"params": "host"},
    "in backward": {"update": "backward"},
    "gradients on the drive": {"gradients": "nvme"},
}
ADVICE = r"state_codec='8bit', which stores that in 8 bits"


def published(package: str, name: str, **settings: Any) -> Callable[[Any], Any]:
    """Return a maker of the package's optimizer; skips the test without the package."""

    def make(parameters: Any) -> Any:
        module = pytest.importorskip(package, reason=f"needs {package}", exc_type=ImportError)
        return getattr(module, name)(parameters, **settings)

    return make


def training(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return `make` with a call of train() behind it."""

    def made(parameters: Any) -> Any:
        optimizer = make(parameters)
        optimizer.train()
        return optimizer

    return made


SCHEDULE_FREE = {
    "a small one": third_party.ScheduleFree,
    "schedulefree.AdamW": published("schedulefree", "AdamWScheduleFree", lr=1e-3),
    "schedulefree.SGD": published("schedulefree", "SGDScheduleFree", lr=1e-2),
    "schedulefree.RAdam": published("schedulefree", "RAdamScheduleFree", lr=1e-3),
    "pytorch_optimizer.AdamW": published("pytorch_optimizer", "ScheduleFreeAdamW", lr=1e-3),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", SCHEDULE_FREE)
def test_schedule_free_optimizers_are_bit_equal_with_train_and_eval(twins: MakeTwins, name: str, place: str) -> None:
    if name != "a small one" and place != "on the drive":
        pytest.skip("one place for each of the others")
    pair = twins(Net(), training(SCHEDULE_FREE[name]), **PLACES[place])

    def step(model: Any, optimizer: Any) -> torch.Tensor:
        optimizer.train()
        return train_step(model, optimizer)

    def evaluate(model: Any, optimizer: Any) -> torch.Tensor:
        optimizer.eval()
        with torch.no_grad():
            return model(torch.arange(16).view(2, 8))

    for _ in range(2):
        pair.train(step, steps=2)
        average = pair.both(evaluate)
        assert torch.equal(pair.both(evaluate), average)
    pair.both(lambda model, optimizer: optimizer.train())
    values = pair.both(lambda model, _: model(torch.arange(16).view(2, 8)).detach())
    assert "RAdam" in name or not torch.equal(values, average)  # whose first steps are none
    pair.finish(paged=place in ("on the drive", "gradients on the drive"))


def test_a_step_in_the_wrong_mode_is_refused_before_anything_changes(twins: MakeTwins) -> None:
    pair = twins(Net(), third_party.ScheduleFree, wait=True, budget=16 << 20)
    with pytest.raises(swapper.UnsupportedError, match=r"Call its train\(\) before manager\.offload"):
        pair.offload()
    pair = twins(Net(), training(third_party.ScheduleFree))
    pair.train(train_step, steps=1)
    pair.both(lambda _, optimizer: optimizer.eval())
    state = torch.get_rng_state()
    with pytest.raises(swapper.UnsupportedError, match=r"call train\(\) first"):
        train_step(pair.swapped, pair.optimizer)
    torch.set_rng_state(state)
    pair.swapped.zero_grad()
    pair.both(lambda _, optimizer: optimizer.train())
    pair.train(train_step, steps=1)
    pair.finish()


def test_masters_would_not_follow_train_and_eval(twins: MakeTwins) -> None:
    pair = twins(Net().bfloat16(), training(third_party.ScheduleFree), master=True, wait=True, budget=32 << 20)
    with pytest.raises(swapper.UnsupportedError, match=r"train\(\) and eval\(\).*leave out master_weights"):
        pair.offload()


def test_settings_that_a_step_changes_do_not_cost_a_trial_each_step(twins: MakeTwins) -> None:
    pair = twins(Net(), training(third_party.ScheduleFree))
    pair.train(train_step, steps=2)
    [forms] = pair.manager.current.run.plan.inventory.probe._forms
    tried = set(forms)
    pair.train(train_step, steps=2)
    assert set(forms) == tried
    pair.finish()


def vectors() -> nn.Module:
    return nn.ParameterList(nn.Parameter(torch.randn(size)) for size in (300, 2048, 17))


def random_gradients(model: Any, optimizer: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape)
    optimizer.step()


def test_a_matrix_for_each_vector_is_paged_without_a_trial_of_a_large_one(twins: MakeTwins) -> None:
    pair = twins(vectors(), third_party.SquareOfVectors)
    pair.train(random_gradients, steps=3)
    pair.finish(paged=False)


@pytest.mark.whole
@pytest.mark.parametrize("name", ["Shampoo", "AdaFactor", "Lion"])
def test_pytorch_optimizers_of_tensors_are_bit_equal(twins: MakeTwins, name: str) -> None:
    model = nn.Sequential(*(nn.Linear(96, 64, bias=False) for _ in range(6)))
    pair = twins(model, published("pytorch_optimizer", name))
    pair.train(random_gradients, steps=5)
    pair.finish(paged=False)


IN_LISTS = {
    "one like SOAP": third_party.Whitening,
    "pytorch_optimizer.SOAP": published("pytorch_optimizer", "SOAP", precondition_frequency=3),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", IN_LISTS)
def test_state_in_lists_is_bit_equal_and_shown_in_lists(twins: MakeTwins, name: str, place: str) -> None:
    pair = twins(layers(), IN_LISTS[name], **PLACES[place])
    pair.train(random_gradients, steps=8)
    theirs = pair.plain_optimizer.state[next(pair.plain.parameters())]
    ours = pair.optimizer.state[next(pair.swapped.parameters())]
    assert list(ours) == list(theirs)
    for key, value in theirs.items():
        assert is_same(value, ours[key])
    pair.finish(paged=False)


def layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(96, 64) for _ in range(4)))


def test_state_in_lists_goes_through_resume_snapshot_load_and_edit(twins: MakeTwins, tmp_path: Path) -> None:
    pair = twins(layers(), third_party.Whitening)
    pair.train(random_gradients, steps=4)
    pair.manager.snapshot(tmp_path / "snapshot.pt").wait()
    saved = torch.load(tmp_path / "snapshot.pt", weights_only=True)["optimizer"]["state"]
    assert is_same(saved[0]["bases"], pair.plain_optimizer.state_dict()["state"][0]["bases"])
    pair.resume(layers(), third_party.Whitening)
    pair.train(random_gradients, steps=2)
    pair.both(lambda model, optimizer: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())))
    pair.train(random_gradients, steps=2)

    def edit(model: Any, optimizer: Any) -> None:
        state = optimizer.state[next(model.parameters())]
        state["factors"][0].mul_(2)
        state["bases"] = [-basis for basis in state["bases"]]

    pair.both(edit)
    pair.train(random_gradients, steps=2)
    with pytest.raises(TypeError):
        pair.optimizer.state[next(pair.swapped.parameters())]["factors"][0] = torch.zeros(64, 64)
    pair.finish(paged=False)


@devices.without_device("a device copies back all of a slice, and tells no part that has not changed")
def test_factors_that_a_step_leaves_are_not_written(twins: MakeTwins) -> None:
    def written_bytes(basis_steps: int) -> int:
        model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(3)))
        pair = twins(model, lambda p: third_party.Whitening(p, basis_steps=basis_steps), commit_every=1)
        pair.train(random_gradients, steps=3)
        before = pair.manager.counters.written_bytes["state"]
        pair.train(random_gradients, steps=3)
        count = pair.manager.counters.written_bytes["state"] - before
        pair.finish(paged=False)
        return count

    assert 0 < written_bytes(basis_steps=100) < 0.7 * written_bytes(basis_steps=1)


REFUSED = {
    "Prodigy": (published("prodigyopt", "Prodigy"), "depends on the others.*Prodigy.*use AdamW with the rate"),
    "ScalableShampoo": (published("pytorch_optimizer", "ScalableShampoo"), "it keeps '.*' as a PreConditioner"),
    "bitsandbytes AdamW8bit": (published("bitsandbytes.optim", "AdamW8bit"), rf"'state1' as torch\.uint8.*{ADVICE}"),
    "bitsandbytes paged": (published("bitsandbytes.optim", "PagedAdamW8bit"), rf"'state1' as torch\.uint8.*{ADVICE}"),
    "torchao AdamW8bit": (published("torchao.optim", "AdamW8bit"), ADVICE),
    "torchao AdamW4bit": (published("torchao.optim", "AdamW4bit"), ADVICE),
    "torchao AdamWFp8": (published("torchao.optim", "AdamWFp8"), ADVICE),
    "one like bitsandbytes'": (third_party.LowBit, ADVICE),
    "one like torchao's": (third_party.LowBitTensors, ADVICE),
    "one like Prodigy": (third_party.Coupled, "use AdamW with the rate"),
}


@pytest.mark.whole
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_paged_is_refused_at_offload_with_what_to_use(twins: MakeTwins, name: str) -> None:
    make, words = REFUSED[name]
    pair = twins(Net(), make, wait=True, budget=32 << 20)
    with pytest.raises(swapper.UnsupportedError, match=words):
        pair.offload()
    assert not pair.run_files()


def test_bitsandbytes_in_32_bits_is_bit_equal(twins: MakeTwins) -> None:
    pair = twins(Net(), published("bitsandbytes.optim", "AdamW", lr=1e-3))
    pair.train(train_step, steps=3)
    pair.assert_same_parameters()
    pair.close()
