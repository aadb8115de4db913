"""manager.accumulate_batches: micro-batches that pass group by group give what they give one after the other, bit for bit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import devices
import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import swapper
from e2e.architectures import MODELS, Size
from e2e.early import updated_early
from e2e.models import WIDTH, Biased, Block, Dropping, Net, Shuffled, Staged, tokens
from e2e.twins import Twins, adamw, assert_same, leased_pages

MakeTwins = Callable[..., Twins]
Loss = Callable[[Any, Any], torch.Tensor]

pytestmark = devices.without_device("manager.accumulate_batches refuses a model on a device")
COUNT = 4


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    logits = model(batch)
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch.flatten()) / COUNT


def accumulated(
    pair: Twins, model: Any, batches: list[Any], loss: Loss = loss_of, **options: Any
) -> list[torch.Tensor]:
    """Accumulate the batches' gradients: in the plain model one after the other, in the swapped one together."""
    if model is pair.swapped:
        assert pair.manager is not None
        return pair.manager.accumulate_batches(partial(loss, model), batches, **options)
    losses = []
    for batch in batches:
        losses.append(loss(model, batch))
        losses[-1].backward()
    return [one.detach() for one in losses]


def step(pair: Twins, model: Any, optimizer: Any, loss: Loss = loss_of, **options: Any) -> list[torch.Tensor]:
    losses = accumulated(pair, model, [tokens() for _ in range(COUNT)], loss, **options)
    if pair.options.get("update") != "backward":
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return losses


def train(pair: Twins, steps: int = 3, **options: Any) -> None:
    pair.train(lambda model, optimizer: step(pair, model, optimizer, **options), steps)
    assert not [thread for thread in threading.enumerate() if "(_work)" in thread.name]


NETS: dict[str, Callable[[], nn.Module]] = {
    "blocks": partial(Net, depth=8),
    "tied": partial(Net, depth=8, tied=True),
    "two passes": partial(Net, depth=6, passes=2),
    "checkpointing": partial(Net, depth=8, checkpointing=False),
    "a shared bias": Biased,
    "lists in a list": Staged,
    "other blocks each": partial(Dropping, depth=10),
    "another order each": partial(Shuffled, depth=6),
}


@pytest.mark.parametrize("net", NETS)
def test_steps_are_bit_equal_in_the_smallest_budget(twins: MakeTwins, net: str) -> None:
    pair = twins(NETS[net]())
    train(pair)
    pair.finish()


@pytest.mark.parametrize(
    "options",
    [
        {"update": "deferred"},
        {"update": "backward"},
        {"update": "backward", "gradients": "nvme"},
        {"gradients": "nvme"},
        {"optimizer_state": "host"},
        {"master": True, "state_codec": "split"},
    ],
    ids=[
        "deferred",
        "in backward",
        "in backward, gradients on NVMe",
        "gradients on NVMe",
        "state in memory",
        "masters split",
    ],
)
@pytest.mark.parametrize("net", ["tied", "another order each"])
def test_options_are_bit_equal_in_the_smallest_budget(twins: MakeTwins, net: str, options: dict[str, Any]) -> None:
    pair = twins(NETS[net](), **options)
    train(pair)
    pair.finish(paged=False)


@pytest.mark.parametrize("name", MODELS)
def test_architectures_of_transformers(twins: MakeTwins, name: str) -> None:
    make, loss = MODELS[name]
    model = make(Size()).eval()  # dropout is another test's
    pair = twins(model)

    def seeded(net: Any, seed: int) -> torch.Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            inputs = loss
            return inputs(net) / COUNT

    def run(net: Any, optimizer: Any) -> list[torch.Tensor]:
        losses = accumulated(pair, net, [1, 2, 3], seeded)
        optimizer.step()
        optimizer.zero_grad()
        return losses

    pair.train(run, 2)
    pair.finish(paged=False)


# --- bytes ----------------------------------------------------------------------------------------------------------------


def read_of_parameters(pair: Twins) -> int:
    assert pair.manager is not None
    return pair.manager.counters.read_bytes["param"]


def test_each_page_of_parameters_is_read_at_most_twice_a_step(twins: MakeTwins) -> None:
    pair = twins(Net(depth=12).bfloat16(), master=True, gradients="nvme")  # in memory they would cache parameters
    train(pair, steps=2)
    paged = sum(s.plan.nbytes for s in pair.manager.current.run.sections if s.plan.family == "param" and s.pages)
    before = read_of_parameters(pair)
    train(pair, steps=3)
    together = (read_of_parameters(pair) - before) / 3
    before = read_of_parameters(pair)
    pair.both(lambda model, optimizer: one_by_one(model, optimizer))
    assert together <= 2 * paged
    assert read_of_parameters(pair) - before > 2 * COUNT * (paged - pair.manager.counters.pool_bytes)
    pair.finish()


def one_by_one(model: Any, optimizer: Any) -> None:
    for _ in range(COUNT):
        loss_of(model, tokens()).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_each_page_is_leased_once_a_direction(twins: MakeTwins) -> None:
    """Whatever the budget: the pager is asked for a group once in forward and once in backward."""
    pair = twins(Net(depth=8))
    train(pair, steps=3)  # the schedule forgets in two what the first did
    asked = [
        access for access in pair.manager.current.run.pager._prefetcher._schedule.cycle if access.key[0] == "param"
    ]
    groups = {access.key for access in asked}
    assert len(groups) > 8
    assert max(asked.count(access) for access in set(asked)) == 2
    pair.finish()


# --- what goes together -----------------------------------------------------------------------------------------------


def test_frozen_parameters_autocast_and_a_scaler(twins: MakeTwins) -> None:
    net = Net(depth=8)
    net.blocks[2].requires_grad_(False)
    net.embedding.requires_grad_(False)
    pair = twins(net)
    scalers = {id(model): torch.amp.GradScaler("cpu", init_scale=64.0) for model in (pair.plain, pair.swapped)}

    def run(model: Any, optimizer: Any) -> list[torch.Tensor]:
        scaler = scalers[id(model)]

        def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return scaler.scale(loss_of(model, batch))

        losses = accumulated(pair, model, [tokens() for _ in range(COUNT)], loss)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return losses

    pair.train(run, steps=2)
    pair.finish(paged=False)


def test_several_calls_a_step_and_fewer_batches_at_once(twins: MakeTwins) -> None:
    pair = twins(Net(depth=8))

    def run(model: Any, optimizer: Any) -> list[torch.Tensor]:
        losses = accumulated(pair, model, [tokens() for _ in range(3)])
        losses += accumulated(pair, model, [tokens() for _ in range(5)], **together(pair, model, at_once=2))
        losses += accumulated(pair, model, [tokens()]) + accumulated(pair, model, [])
        optimizer.step()
        optimizer.zero_grad()
        return losses

    pair.train(run, steps=2)
    pair.finish()


def together(pair: Twins, model: Any, **options: Any) -> dict[str, Any]:
    return options if model is pair.swapped else {}


def test_activations_may_be_offloaded_and_the_callers_modes_hold(twins: MakeTwins) -> None:
    pair = twins(Net(depth=6))
    activations = swapper.offload_activations(pair.manager, host_memory="1MiB", to="nvme", min_bytes="16KiB")

    def run(model: Any, optimizer: Any) -> list[torch.Tensor]:
        with activations, torch.autocast("cpu", torch.bfloat16):
            return step(pair, model, optimizer)

    pair.train(run, steps=2)
    assert activations.counters.saved > 0
    pair.finish()


def test_dropout_draws_as_one_after_the_other(twins: MakeTwins, caplog: pytest.LogCaptureFixture) -> None:
    pair = twins(Net(depth=6, dropout=0.3))
    train(pair)
    assert sum("random numbers" in record.message for record in caplog.records) == 1
    pair.finish()


def test_dropout_under_checkpointing_is_recomputed_with_its_own_numbers(twins: MakeTwins) -> None:
    class Stage(nn.Module):
        """Checkpoints several units at once, so that a micro-batch is interrupted in the middle of a recomputation."""

        def __init__(self) -> None:
            super().__init__()
            self.net = Net(depth=6, dropout=0.3)

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            hidden = self.net.embedding(batch)
            for begin in (0, 3):
                hidden = checkpoint(self.part, hidden, begin, use_reentrant=False)
            return self.net.head(self.net.norm(hidden))

        def part(self, hidden: torch.Tensor, begin: int) -> torch.Tensor:
            for block in self.net.blocks[begin : begin + 3]:
                hidden = self.net.dropout(block(hidden))
            return hidden

    pair = twins(Stage(), room_bytes=2 << 20)
    train(pair)
    pair.finish(paged=False)


def test_batch_norm_and_parameters_outside_of_the_model(twins: MakeTwins) -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))
            self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(8))
            self.skipped = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer, norm in zip(self.layers, self.norms, strict=True):
                x = norm(layer(x)).relu()
            return x

    pair = twins(Normed())
    heads = {id(model): nn.Linear(WIDTH, 3) for model in (pair.plain, pair.swapped)}
    heads[id(pair.swapped)].load_state_dict(heads[id(pair.plain)].state_dict())

    def run(model: Any, optimizer: Any) -> Any:
        head = heads[id(model)]

        def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
            penalty = model.layers[1].weight.square().sum()  # outside of any forward
            with torch.no_grad():
                model.layers[2](batch)
            return head(model(batch)).square().mean() + penalty * 1e-3

        losses = accumulated(pair, model, [torch.randn(4, WIDTH) for _ in range(COUNT)], loss)
        gradients = [parameter.grad.clone() for parameter in head.parameters()]
        head.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
        return losses, gradients

    pair.train(run, steps=2)
    pair.finish(paged=False)


def test_a_loss_may_take_gradients_itself(twins: MakeTwins) -> None:
    pair = twins(Net(depth=6))

    def penalized(model: Any, batch: torch.Tensor) -> torch.Tensor:
        value = loss_of(model, batch)
        (gradient,) = torch.autograd.grad(value, [model.blocks[4].norm.weight], create_graph=True)
        return value + gradient.square().sum()

    train(pair, loss=penalized)
    pair.finish(paged=False)


def test_gradients_are_added_in_order_where_micro_batches_go_different_ways(twins: MakeTwins) -> None:
    """The first micro-batch comes last to layer 0, the others come there at once."""

    class Ways(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(10))

        def forward(self, x: torch.Tensor, way: list[int]) -> torch.Tensor:
            for number in way:
                x = self.layers[number](x).tanh()
            return x

    ways = [[0, 1, 2, 3, 4, 5, 6], [7, 8, 0], [9, 0, 9, 0], [0], [5, 4, 0, 3, 0]]
    pair = twins(Ways())

    def run(model: Any, optimizer: Any) -> Any:
        batches = [(torch.randn(5, WIDTH) * 10**number, way) for number, way in enumerate(ways)]
        losses = accumulated(pair, model, batches, lambda model, batch: model(*batch).square().sum())
        gradients = [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        return losses, gradients

    pair.train(run, steps=3)
    pair.finish(paged=False)


# --- failures -----------------------------------------------------------------------------------------------------------


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("from the backward of a micro-batch")


@pytest.mark.parametrize("gradients", ["host", "nvme"])
def test_a_failed_forward_leaves_gradients_and_a_failed_backward_clears_them(twins: MakeTwins, gradients: str) -> None:
    pair = twins(Net(depth=6), gradients=gradients)
    train(pair, steps=1)
    bad = tokens()

    def loss(model: Any, batch: torch.Tensor, at: Any) -> torch.Tensor:
        handle = model.blocks[3].register_forward_hook(lambda _, __, out: at(out) if batch is bad else out)
        try:
            return loss_of(model, batch)
        finally:
            handle.remove()

    def fail(_: torch.Tensor) -> torch.Tensor:
        raise ValueError("from the forward of a micro-batch")

    pair.both(lambda model, _: accumulated(pair, model, [tokens(), tokens()]))
    batches = [tokens(), bad, tokens()]
    for kind, match, at in ((ValueError, "from the forward", fail), (RuntimeError, "from the backward", _Fails.apply)):
        with pytest.raises(kind, match=match) as caught:
            pair.manager.accumulate_batches(partial(loss, pair.swapped, at=at), batches)
        assert any(entry.name in ("fail", "backward") for entry in caught.traceback), "the traceback is its own"
        del caught
        assert not [thread for thread in threading.enumerate() if "(_work)" in thread.name]
        assert leased_pages(pair.manager) == []
        if kind is ValueError:
            pair.assert_same_parameters()  # and gradients
    assert all(parameter.grad is None for parameter in pair.swapped.parameters())
    pair.plain_optimizer.zero_grad()
    train(pair, steps=2)
    pair.finish()


# --- updates in backward ------------------------------------------------------------------------------------------------


def test_groups_are_updated_in_backward_once_all_micro_batches_are_through(twins: MakeTwins) -> None:
    pair = twins(Net(depth=8), update="backward")

    def run(model: Any, optimizer: Any) -> list[torch.Tensor]:
        losses = accumulated(pair, model, [tokens() for _ in range(5)], **together(pair, model, at_once=2))
        if model is pair.swapped:
            assert len(updated_early(pair)) >= 8, "the blocks, by the last call's backward and by none before it"
            with pytest.raises(swapper.StateError, match=r"call optimizer\.step\(\) first"):
                pair.manager.accumulate_batches(partial(loss_of, model), [tokens(), tokens()])
        optimizer.step()
        optimizer.zero_grad()
        return losses

    pair.train(run, steps=3)
    pair.finish()


def test_backwards_within_accumulate_update_nothing(twins: MakeTwins) -> None:
    pair = twins(Net(depth=6), update="backward")

    def run(model: Any, optimizer: Any) -> list[torch.Tensor]:
        with pair.manager.accumulate():
            losses = accumulated(pair, model, [tokens(), tokens()])
        assert len(updated_early(pair)) == 0
        losses += accumulated(pair, model, [tokens(), tokens()])
        optimizer.step()
        optimizer.zero_grad()
        return losses

    pair.train(run, steps=2)
    pair.finish()


def test_a_backward_that_fails_after_updates_is_undone(twins: MakeTwins) -> None:
    pair = twins(Net(depth=6), update="backward", commit_every=1)
    train(pair, steps=2)
    bad, updated = tokens(), []

    def fail(gradient: torch.Tensor) -> torch.Tensor:
        updated.append(len(updated_early(pair)))
        raise RuntimeError("from the backward of a micro-batch")

    def loss(batch: torch.Tensor) -> torch.Tensor:
        def hook(_: Any, __: Any, out: torch.Tensor) -> None:
            if batch is bad:
                out.register_hook(fail)

        handle = pair.swapped.blocks[1].register_forward_hook(hook)
        try:
            return loss_of(pair.swapped, batch)
        finally:
            handle.remove()

    with pytest.raises(RuntimeError, match="from the backward of a micro-batch"):
        pair.manager.accumulate_batches(loss, [tokens(), bad, tokens()])
    assert updated[0] >= 3, "groups of the step that is undone"
    assert leased_pages(pair.manager) == []
    pair.optimizer.zero_grad()
    pair.assert_same_parameters()
    train(pair, steps=2)
    pair.finish()


def test_ctrl_c_ends_all_micro_batches(twins: MakeTwins) -> None:
    import _thread

    pair = twins(Net(depth=6))
    train(pair, steps=1)
    reached = threading.Event()

    def loss(batch: torch.Tensor) -> torch.Tensor:
        value = loss_of(pair.swapped, batch)
        if not reached.is_set():
            reached.set()
            _thread.interrupt_main()
        return value

    with pytest.raises(KeyboardInterrupt):
        pair.manager.accumulate_batches(loss, [tokens() for _ in range(3)])
    assert reached.is_set()
    assert not [thread for thread in threading.enumerate() if "(_work)" in thread.name]
    pair.optimizer.zero_grad()
    train(pair, steps=2)
    pair.finish()


# --- refused ------------------------------------------------------------------------------------------------------------


def in_a_setting(loss: Callable[[Any], torch.Tensor], batch: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return loss(batch)


def model_in_eval(model: nn.Module, batch: torch.Tensor) -> float:
    with torch.no_grad():
        return loss_of(model.eval(), batch).item()


def test_what_cannot_run_together_is_refused_by_name_and_the_next_call_works(twins: MakeTwins) -> None:
    pair = twins(Net(depth=6, checkpointing=True))
    batches = [tokens() for _ in range(3)]

    def refused(kind: type[BaseException], match: str, loss: Any) -> None:
        with pytest.raises(kind, match=match):
            pair.manager.accumulate_batches(loss, batches)
        assert all(parameter.grad is None for parameter in pair.swapped.parameters())
        assert leased_pages(pair.manager) == []

    def own_backward(batch: torch.Tensor) -> torch.Tensor:
        loss_of(pair.swapped, batch).backward()
        return loss_of(pair.swapped, batch)

    def step_inside(batch: torch.Tensor) -> torch.Tensor:
        pair.optimizer.step()
        return loss_of(pair.swapped, batch)

    def late_draw(batch: torch.Tensor) -> torch.Tensor:
        return loss_of(pair.swapped, batch) * (torch.rand(()) if batch is batches[1] else 1)

    good = partial(loss_of, pair.swapped)
    refused(swapper.UnsupportedError, "use_reentrant=False", good)
    pair.swapped.checkpointing = pair.plain.checkpointing = None
    refused(swapper.StateError, "let it return the loss", own_backward)
    refused(swapper.StateError, "returned float", lambda batch: good(batch).item())
    refused(swapper.StateError, "wait for the end", step_inside)
    refused(swapper.StateError, "wait for the end", lambda batch: pair.manager.accumulate_batches(good, batches)[0])
    refused(RuntimeError, "does not require grad", lambda batch: good(batch).detach())
    refused(swapper.UnsupportedError, "training mode", lambda batch: good(batch) + model_in_eval(pair.swapped, batch))
    pair.swapped.train()
    refused(swapper.UnsupportedError, "sdpa_kernel", partial(in_a_setting, good))
    before = torch.get_rng_state()
    refused(swapper.UnsupportedError, "call it again", late_draw)
    assert torch.equal(torch.get_rng_state(), before)
    pair.manager.accumulate_batches(late_draw, batches)
    pair.optimizer.zero_grad()
    for wrong in (0, -1, True, 1.5):
        with pytest.raises(swapper.ConfigError, match="at_once"):
            pair.manager.accumulate_batches(good, batches, at_once=wrong)
    with FlopCounterMode(display=False):
        refused(swapper.UnsupportedError, "modes and transforms", good)
    train(pair, steps=2)
    pair.finish()


@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_forwards_that_change_parameters_are_refused(twins: MakeTwins, max_norm: float | None) -> None:
    class Changing(Block):
        def forward(self, value: Any) -> torch.Tensor:
            with torch.no_grad():
                self.down.weight.clamp_(-0.1, 0.1)
            return super().forward(value)

    net = Net(depth=4) if max_norm else Net(depth=4, make_block=Changing)
    net.embedding.max_norm = max_norm
    pair = twins(net)
    with pytest.raises(swapper.UnsupportedError, match="change"):
        pair.manager.accumulate_batches(partial(loss_of, pair.swapped), [tokens(), tokens()])
    pair.close()


def test_ddp_is_refused_by_name(twins: MakeTwins, tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        pair = twins(nn.parallel.DistributedDataParallel(Net(depth=4)), wait=True)
        pair.swapped = nn.parallel.DistributedDataParallel(Net(depth=4))
        pair.original = adamw(pair.swapped.parameters())
        pair.offload()
        with pytest.raises(swapper.UnsupportedError, match="no_sync"):
            pair.manager.accumulate_batches(partial(loss_of, pair.swapped), [tokens(), tokens()])
        pair.close()
    finally:
        torch.distributed.destroy_process_group()


def test_a_loss_through_models_of_two_managers_is_refused_and_works_with_one(tmp_path: Path) -> None:
    """A micro-batch's backward would hold the second model while it waits for the others, which wait for that model."""

    def make() -> list[nn.Module]:
        torch.manual_seed(0)
        return [nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))) for _ in range(2)]

    def losses_of(one: nn.Module, other: nn.Module) -> list[torch.Tensor]:
        return [loss.detach() for loss in map(loss_through(one, other), batches) if loss.backward() is None]

    def loss_through(one: nn.Module, other: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda batch: other(one(batch)).square().mean()

    def gradients_of(models: list[nn.Module]) -> list[torch.Tensor | None]:
        return [parameter.grad for model in models for parameter in model.parameters()]

    batches = [torch.randn(4, WIDTH) for _ in range(3)]
    plain = make()
    expected = losses_of(*plain)
    pair = make()
    with swapper.SwapManager(tmp_path / "both", host_memory="16MiB") as manager:
        manager.offload({"one": pair[0], "other": pair[1]}, None, params="nvme")
        assert_same(manager.accumulate_batches(loss_through(*pair), batches), expected)
        assert_same(gradients_of(pair), gradients_of(plain))
    pair = make()
    with ExitStack() as stack:
        managers = [stack.enter_context(swapper.SwapManager(tmp_path / str(n), host_memory="16MiB")) for n in range(2)]
        for manager, model in zip(managers, pair, strict=True):
            manager.offload(model, None, params="nvme")
        with pytest.raises(swapper.UnsupportedError, match=r"of two managers.*give both models to one manager"):
            managers[0].accumulate_batches(loss_through(*pair), batches)
        for model in pair:
            model.zero_grad()
        assert_same(losses_of(*pair), expected)
        assert_same(gradients_of(pair), gradients_of(plain))
