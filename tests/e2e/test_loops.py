"""Loops that people write, against plain torch: several models, compiled ones, two processes, looking at the optimizer's state."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import swapper
from e2e.early import train
from e2e.models import VOCABULARY, Net, tokens, train_step
from e2e.processes import run_python
from e2e.twins import Twins, adamw, assert_same

MakeTwins = Callable[..., Twins]


# --- several models ---------------------------------------------------------------------------------------------------


def distil(policy: Any, reference: Any, average: Any, optimizer: Any, gather: Any) -> torch.Tensor:
    """A policy held to a frozen reference, and a copy of it that follows by averaging."""
    batch = tokens()
    with torch.no_grad():
        expected = reference(batch).log_softmax(-1)
    logits = policy(batch)
    loss = F.cross_entropy(logits.view(-1, VOCABULARY), batch.view(-1))
    loss = loss + 0.1 * F.kl_div(logits.log_softmax(-1), expected, log_target=True, reduction="batchmean")
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    for ours, theirs in zip(average.parameters(), policy.parameters(), strict=True):
        with torch.no_grad(), gather([ours, theirs]):
            ours.lerp_(theirs, 0.1)
    return loss.detach()


@pytest.mark.parametrize("form", ["dictionary", "list"])
def test_several_models_under_one_manager_are_bit_equal(tmp_path: Path, form: str) -> None:
    policy, reference = Net(), Net(depth=3).requires_grad_(False)
    average = copy.deepcopy(policy).requires_grad_(False)
    plain = [policy, reference, average]
    swapped = copy.deepcopy(plain)
    names = ["policy", "reference", "average"]
    optimizers = [adamw(policy.parameters()), adamw(swapped[0].parameters())]
    given: Any = dict(zip(names, swapped, strict=True)) if form == "dictionary" else swapped
    with swapper.SwapManager(tmp_path, host_memory="9MiB") as manager:
        returned, optimizer = manager.offload(given, optimizers[1], params="nvme", optimizer_state="nvme")
        assert returned is given
        for _ in range(3):
            state = torch.get_rng_state()
            expected = distil(*plain, optimizers[0], lambda _: torch.no_grad())
            torch.set_rng_state(state)
            actual = distil(*swapped, optimizer, lambda target: manager.gather(target, write=True))
            assert torch.equal(actual, expected)
        for one, other in zip(plain, swapped, strict=True):
            for ours, theirs in zip(other.parameters(), one.parameters(), strict=True):
                with manager.gather(ours):
                    assert torch.equal(ours, theirs)
        manager.snapshot(tmp_path / "all.pt").wait()
        assert manager.counters.bytes_read > 0
        with pytest.raises(swapper.StateError, match="give several at once"):
            manager.offload(Net())
    content = torch.load(tmp_path / "all.pt")
    for name, key, model in zip(names, "012", plain, strict=True):
        assert_same(dict(content["model"][name if form == "dictionary" else key]), dict(model.state_dict()))


def test_a_model_without_an_optimizer_is_used_and_not_trained(tmp_path: Path) -> None:
    model = Net(depth=10).requires_grad_(False)
    swapped = copy.deepcopy(model)
    with swapper.SwapManager(tmp_path, host_memory="5MiB") as manager:
        _, optimizer = manager.offload(swapped, params="nvme")
        assert optimizer is None
        written = manager.counters.bytes_written
        for _ in range(3):
            batch = tokens()
            assert torch.equal(swapped(batch), model(batch))
        assert manager.counters.bytes_read > 0
        assert manager.counters.bytes_written == written  # what is frozen is never written again


# --- frozen weights ---------------------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """LoRA, by hand: a frozen layer and a small product added to it."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(4, layer.in_features) * 0.1)
        self.up = nn.Parameter(torch.zeros(layer.out_features, 4))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.layer(hidden) + hidden @ self.down.t() @ self.up.t()


def test_frozen_weights_beside_adapters_are_never_written(twins: MakeTwins) -> None:
    model = Net(depth=6).requires_grad_(False)
    for block in model.blocks:
        block.up, block.down = Adapted(block.up), Adapted(block.down)
    pair = twins(model)
    frozen = [
        page for section in pair.manager.current.run.sections for page in section.pages if section.plan.family == "param"
        and all(not pair.swapped.get_parameter(slot.spec.owner).requires_grad for slot in section.plan.slots)
    ]  # fmt: skip
    places = [(page.location, page.crc32) for page in frozen]
    pair.train(train_step, steps=4)
    assert [(page.location, page.crc32) for page in frozen] == places
    pair.finish(paged=False)
    assert pair.manager.counters.bytes_read > 0


def test_sparse_embeddings_are_refused(twins: MakeTwins) -> None:
    model = Net()
    model.embedding = nn.Embedding(VOCABULARY, 128, sparse=True)
    pair = twins(model, wait=True, budget=32 << 20)
    with pytest.raises(swapper.UnsupportedError, match=r"embedding makes sparse gradients.*sparse=False"):
        pair.offload()
    model.embedding.weight.requires_grad_(False)
    pair = twins(model)
    pair.train(train_step, steps=2)
    pair.close()


# --- compiled ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("update", ["step", "deferred", "backward"])
def test_a_compiled_model_is_bit_equal_and_its_graphs_hold_no_hooks(twins: MakeTwins, update: str, when: str) -> None:
    """With a backend that fuses nothing: between two hooks lies a graph, and other graphs may round in another way."""
    torch._dynamo.reset()
    pair = twins(Net(depth=3), update=update, wait=True)
    compiled = {id(pair.plain): torch.compile(pair.plain, backend="aot_eager")}
    if when == "before":
        compiled[id(pair.swapped)] = torch.compile(pair.swapped, backend="aot_eager")
    pair.offload()
    if when == "after":
        compiled[id(pair.swapped)] = torch.compile(pair.swapped, backend="aot_eager")
    early = train(pair, lambda model, optimizer: train_step(compiled[id(model)], optimizer), steps=3)
    assert update != "backward" or all(len(groups) >= 3 for groups in early)
    pair.finish(paged=False)
    assert pair.manager.counters.bytes_read > 0


# --- two processes ----------------------------------------------------------------------------------------------------


def run_ddp(directory: Path, updates: list[str], **variables: str) -> None:
    for update in updates:
        (directory / update).mkdir()
    script = Path(__file__).with_name("ddp_run.py")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = run_python(*torchrun, script, directory, *updates, **variables)
    assert done.returncode == 0, done.stderr[-4000:]
    said = sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))
    assert said == [f"rank {rank}, {update}: same" for rank in (0, 1) for update in sorted(updates)]
    for update in updates:
        assert sorted(path.name for path in (directory / update).iterdir()) == ["rank-0-of-2", "rank-1-of-2"]


def test_two_processes_under_torchrun_with_ddp_are_bit_equal(tmp_path: Path) -> None:
    run_ddp(tmp_path, ["step", "deferred", "device"])


@pytest.mark.gpu
def test_ddp_on_a_device_for_each_process_is_bit_equal(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("it needs two devices")
    run_ddp(tmp_path, ["cuda step", "cuda deferred"], FSDP_RUN_DEVICE="cuda")


# --- the optimizer's state --------------------------------------------------------------------------------------------


def test_the_optimizers_state_can_be_looked_at(twins: MakeTwins) -> None:
    pair = twins(Net())
    assert len(pair.optimizer.state) == 0
    pair.train(train_step, steps=2)
    for ours, theirs in zip(pair.swapped.parameters(), pair.plain.parameters(), strict=True):
        assert ours in pair.optimizer.state
        assert_same(dict(pair.optimizer.state[ours]), pair.plain_optimizer.state[theirs])
    weight = pair.swapped.head.weight
    kept = pair.optimizer.state[weight]["exp_avg"]
    same = kept.clone()
    pair.train(train_step, steps=2)
    assert torch.equal(kept, same)  # a copy, whatever happens
    assert len(list(pair.optimizer.state.items())) == len(list(pair.plain.parameters()))
    for state in pair.optimizer.state.values():  # as loops do that move it to the device where it is
        for key, value in state.items():
            state[key] = value.to("cpu") if isinstance(value, torch.Tensor) else value
    pair.finish()


def test_an_optimizer_built_from_named_parameters_is_bit_equal(twins: MakeTwins) -> None:
    pair = twins(Net(), select=lambda model: list(model.named_parameters()))
    pair.train(train_step, steps=3)
    assert pair.optimizer.param_groups[0]["param_names"] == [name for name, _ in pair.plain.named_parameters()]
    pair.finish()
