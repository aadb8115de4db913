"""Twins: the same model twice, one trained by plain torch and one swapped. Whatever is done is done to both and compared.

The swapped one gets the smallest budget that swapper names, so that its pages really come and go; `close` asserts that they
did, that both have the same parameters, gradients and optimizer state, bit for bit, and that no lease is left.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import devices
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

import swapper
from e2e.keywords import for_offload
from e2e.models import WIDTH, Net, finish_step, train_step
from swapper.paging.residency import Residency
from swapper.runtime.process import rng_states, set_rng_states
from swapper.train.gradients.cold_grad import ColdGradient

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


def adamw(parameters: Any) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


class PlainMasters:
    """The arithmetic of `master_weights=torch.float32`, in memory: fp32 copies are updated, then rounded to the model."""

    def __init__(self, model: nn.Module, make_optimizer: MakeOptimizer) -> None:
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.masters = [nn.Parameter(p.detach().float().clone()) for p in self.parameters]
        self.inner = make_optimizer(self.masters)
        self.param_groups = self.inner.param_groups

    @torch.no_grad()
    def step(self) -> None:
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
        self.inner.step()
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            parameter.copy_(master)

    def add_param_group(self, group: dict[str, Any]) -> None:
        added = list(group["params"])
        masters = [nn.Parameter(p.detach().float().clone()) for p in added]
        self.inner.add_param_group({**group, "params": masters})
        self.parameters += added
        self.masters += masters

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self.parameters:
            if set_to_none or parameter.grad is None:
                parameter.grad = None
            else:
                parameter.grad.zero_()

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()


class Twins:
    """A plain and a swapped run of one model.

    Args:
        directory: where the swapped one lives.
        others: further directories, one a drive.
        model: the plain one; the swapped one is its copy.
        make_optimizer: makes an optimizer over the parameters that it is given.
        master: `master_weights=torch.float32`.
        budget: bytes, or None for the smallest that works and `room_bytes` more.
        select: what the optimizer is given of a model.
        wait: True leaves the offload to the test, which calls `offload`, and may set `init` before.
        options: of SwapManager.offload. With SWAPPER_TEST_DEVICE=late (or another order of tests/infer/host_device.py) in the
            environment, or a real device's name, runs that can be are on it, with a small budget there: whole suites can be run
            so. With SWAPPER_TEST_STAYS too, gradients and state stay there (and tests fail that assert what was paged).
    """

    def __init__(
        self,
        directory: Path,
        model: nn.Module,
        make_optimizer: MakeOptimizer = adamw,
        *,
        others: Sequence[Path] = (),
        master: bool = False,
        budget: int | None = None,
        room_bytes: int = 0,
        backend: str = "auto",
        commit_every: int | str | None = "free",
        check_reads: bool = True,
        cold: str = "read",
        select: Callable[[nn.Module], Any] = lambda model: [p for p in model.parameters() if p.requires_grad],
        wait: bool = False,
        **options: Any,
    ) -> None:
        if devices.IS_REAL:  # also in processes, and in tests that make twins themselves
            torch.set_default_device(devices.NAME)
            model.to(devices.NAME)
        self.directory = directory
        self.others = list(others)
        self.plain = model
        self.swapped = copy.deepcopy(model)
        for ours, theirs in zip(self.swapped.parameters(), self.plain.parameters(), strict=True):
            ours.grad = None if theirs.grad is None else theirs.grad.clone()
        self.plain_optimizer: Any = (
            PlainMasters(self.plain, make_optimizer) if master else make_optimizer(select(self.plain))
        )
        self.original = make_optimizer(select(self.swapped))
        self.optimizer: Any = self.original
        self.options = {"params": "nvme", "optimizer_state": "nvme", **options}
        if master:
            self.options["master_weights"] = torch.float32
        devices.need_update_there(self.options)
        self.takes_device_memory = False
        if devices.NAME and "device" not in self.options:
            self.options["device"] = devices.device_of_tests(devices.NAME)
            if os.environ.get("SWAPPER_TEST_STAYS"):
                self.options.update(update_on="device", gradients="device", optimizer_state="device")
                self.options.setdefault("device_memory", 64 << 20)
            self.takes_device_memory = "device_memory" not in self.options
        self.budget = budget
        self.room_bytes = room_bytes
        self.backend = backend
        self.commit_every = commit_every
        self.check_reads = check_reads
        self.cold = cold
        self.init: Any = None
        self.manager: swapper.SwapManager | None = None
        if not wait:
            self.offload()

    def offload(self) -> None:
        """Offload the swapped one."""
        self.give_device_memory()
        self.manager = self.make_manager()
        init = {} if self.init is None else {"init": self.init}
        model, self.optimizer = self.manager.offload(self.swapped, self.original, **init, **for_offload(self.options))
        assert model is self.swapped
        self.written_at_start = self.manager.counters.bytes_written

    def give_device_memory(self) -> None:
        """Have a run on the device of SWAPPER_TEST_DEVICE take little memory there."""
        if self.takes_device_memory and "device_memory" not in self.options:
            smallest = smallest_device_budget(self.directory, self.swapped, self.original, **self.options)
            self.options["device_memory"] = smallest + (1 << 20) + self.room_bytes

    def resume(self, model: nn.Module, make_optimizer: MakeOptimizer = adamw, **options: Any) -> None:
        """Close the run, and go on with it in another model, as in another process; `options` replace some of the run's."""
        self.close()
        self.swapped, self.original = model, make_optimizer(model.parameters())
        self.manager = swapper.SwapManager(self.directory, host_memory=self.budget or "64MiB", resume="auto")
        options = {**self.options, **options}
        _, self.optimizer = self.manager.offload(self.swapped, self.original, **for_offload(options))

    def make_manager(self) -> swapper.SwapManager:
        budget = self.budget
        if budget is None:
            budget = self.smallest_budget(self.directory) + self.room_bytes
        directories = [self.directory, *self.others] if self.others else self.directory
        return swapper.SwapManager(
            directories,
            host_memory=budget,
            backend=self.backend,
            commits=swapper.CommitPolicy(every=self.commit_every),
            check_reads=self.check_reads,
            cold=self.cold,
        )

    def smallest_budget(self, directory: Path) -> int:
        """Return the smallest budget of what is to be offloaded, in bytes. A manager is made in `directory` for it."""
        return smallest_budget(directory, self.swapped, self.original, **self.options)

    def plan(self) -> swapper.Plan:
        """Return the plan of the offload to come."""
        self.give_device_memory()
        with self.make_manager() as manager:
            return manager.plan(self.swapped, self.original, **for_offload(self.options))

    def run_files(self) -> list[Path]:
        return sorted(self.directory.rglob("*.swap"))

    def both(self, run: Callable[[Any, Any], Any]) -> Any:
        """Call `run(model, optimizer)` for both, from the same random state; assert the same result and return it."""
        random_states = rng_states()
        expected = run(self.plain, self.plain_optimizer)
        set_rng_states(random_states)
        actual = run(self.swapped, self.optimizer)
        assert_same(actual, expected)
        return expected

    def train(self, run: Callable[[Any, Any], Any], steps: int) -> list[Any]:
        """Call `both(run)` `steps` times, checking the pager after each."""
        results = []
        for _ in range(steps):
            results.append(self.both(run))
            self.check_pager()
        return results

    def read_bytes_a_step(self, run: Callable[[Any, Any], Any], steps: int) -> float:
        """Return how many bytes of parameters a step reads, after two that do not count."""
        self.train(run, steps=2)
        before = self.manager.counters.read_bytes["param"]
        self.train(run, steps)
        return (self.manager.counters.read_bytes["param"] - before) / steps

    def check_pager(self) -> None:
        """Assert that no lease is left and that every frame is accounted for."""
        assert self.manager is not None
        self.manager.current.run.placed.processor.finish()
        self.manager.current.run.pager.check()
        assert leased_pages(self.manager) == []

    def assert_paged(self) -> None:
        """Assert that the run was one: what lives on the drive is larger than the pool, and came from there."""
        assert self.manager is not None
        stats = self.manager.counters
        on_drive = sum(page.nbytes for section in self.manager.current.run.sections for page in section.pages)
        least = 1 if self.takes_device_memory else 1.5  # slices on their way to a device take more of the pool
        assert on_drive > least * stats.pool_bytes, f"{on_drive} bytes on the drive, {stats.pool_bytes} of pool"
        # Each step uses all of it, and no more than the pool can stay from one to the next.
        assert stats.bytes_read >= (stats.step - 1) * (on_drive - stats.pool_bytes) > 0, stats

    def assert_same_parameters(self) -> None:
        assert self.manager is not None
        names = [name for name, _ in self.plain.named_parameters()]
        assert names == [name for name, _ in self.swapped.named_parameters()]
        for name in names:
            expected, actual = self.plain.get_parameter(name), self.swapped.get_parameter(name)
            with self.manager.gather(actual):
                assert same_bits(actual, expected), name
            assert_same(self.gradient(actual), expected.grad, f"gradient of {name}")

    def gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return a parameter's gradient, wherever it is."""
        if type(parameter.grad) is not ColdGradient:
            return parameter.grad
        assert self.manager is not None
        gradients = self.manager.current.run.model.gradients.paged
        return gradients._whole(gradients._slots[id(parameter)])

    def assert_same_state(self) -> None:
        assert_same_state(self.optimizer.state_dict(), self.plain_optimizer.state_dict())

    def assert_same_buffers(self) -> None:
        assert_same(dict(self.swapped.named_buffers()), dict(self.plain.named_buffers()))

    def finish(self, paged: bool = True) -> None:
        """Assert that both are the same, and close the manager."""
        assert self.manager is not None
        if paged:
            self.assert_paged()
        self.assert_same_parameters()
        self.assert_same_state()
        self.assert_same_buffers()
        self.check_pager()
        self.close()

    def close(self) -> None:
        if self.manager is not None:
            self.manager.close()


def penalty_of(pair: Twins, model: Any) -> torch.Tensor:
    """Return a term of a loss whose backward needs no parameters, so that it leases none."""
    assert pair.manager is not None
    penalty = torch.zeros(())
    for block in model.blocks:
        with pair.manager.gather(block) if model is pair.swapped else nullcontext():
            penalty = penalty + sum(parameter.float().sum() for parameter in block.parameters()) * 1e-3
    return penalty


def smallest_budget(directory: Path, model: nn.Module, optimizer: Optimizer, **options: Any) -> int:
    """Return the smallest budget that works, in bytes, as the error names it. Everything is left as it was."""
    with swapper.SwapManager(directory, host_memory=1) as manager:
        try:
            manager.plan(model, optimizer, **for_offload({n: v for n, v in options.items() if n != "init"}))
        except swapper.BudgetError as error:
            return named_budget(error)
    raise AssertionError("a budget of one byte was enough")


def smallest_device_budget(
    directory: Path, model: nn.Module, optimizer: Optimizer | None = None, **options: Any
) -> int:
    """Return the smallest budget of the device's memory that works, in bytes; of an AdamW where there is no optimizer."""
    with swapper.SwapManager(directory, host_memory="64GiB") as manager:
        try:
            manager.plan(model, optimizer or adamw(model.parameters()), **for_offload({**options, "device_memory": 1}))
        except swapper.BudgetError as error:
            return named_budget(error)
    raise AssertionError("a budget of one byte was enough")


def named_budget(error: swapper.BudgetError) -> int:
    assert error.smallest_bytes is not None and f"({error.smallest_bytes} bytes)" in str(error), error
    return error.smallest_bytes


def send_away(manager: swapper.SwapManager) -> None:
    """Evict every page, so that none is in memory by chance."""
    manager.current.run.placed.processor.finish()  # copies to a device, which lease pages
    pager = manager.current.run.pager
    pager.flush()
    while any(page.residency is not Residency.COLD for page in pager._pages):
        with pager._lock:
            pager._frames.settle()
            for page in pager._pages:
                if page.residency is Residency.CLEAN:
                    assert page.leases == 0, page
                    pager._frames.evict(page)
                elif page.residency is Residency.DIRTY:  # a gradient's, which no flush writes
                    assert page.leases == 0 and page.section.transient, page
                    pager._frames.write(page)


def leased_pages(manager: swapper.SwapManager) -> list[Any]:
    return [page for page in manager.current.run.pager._pages if page.leases]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same shape and the same bits; NaN is NaN, whose sign depends on the order of a sum."""
    one, other = (getattr(tensor, "_local_tensor", tensor) for tensor in (one, other))  # of DTensors
    return one.shape == other.shape and torch.equal(*(_bytes(tensor.detach()) for tensor in (one, other)))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_floating_point():
        tensor = tensor.masked_fill(tensor.isnan(), torch.nan)
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def assert_same(actual: Any, expected: Any, where: str = "result") -> None:
    """Assert that two trees have the same structure and the same tensors, bit for bit."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(actual, torch.Tensor), where
        assert actual.dtype == expected.dtype, where
        assert same_bits(actual.to(expected.device), expected), f"{where} differs"
        return
    leaves, spec = pytree.tree_flatten(expected)
    if len(leaves) == 1 and leaves[0] is expected:
        assert actual == expected, f"{where}: {actual!r} instead of {expected!r}"
        return
    actual_leaves, actual_spec = pytree.tree_flatten(actual)
    assert actual_spec == spec, where
    for number, (one, other) in enumerate(zip(actual_leaves, leaves, strict=True)):
        assert_same(one, other, f"{where}, leaf {number}")


def assert_same_state(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """Assert that an optimizer's state is what plain torch has.

    A parameter that has never had a gradient has no state in plain torch, and zeros here: both continue alike.
    """
    assert_same(actual["param_groups"], expected["param_groups"], "param_groups")
    for number, state in actual["state"].items():
        if number in expected["state"]:
            assert list(state) == list(expected["state"][number])
            assert_same(state, expected["state"][number], f"state {number}")
        else:
            assert all(not value.any() for value in state.values())
    assert expected["state"].keys() <= actual["state"].keys()


def scheduled(pair: Twins) -> Callable[[Any, Any], torch.Tensor]:
    """Return an ordinary step with a scheduler behind it, which halves the rate."""
    schedulers = {
        id(optimizer): torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for optimizer in (pair.plain_optimizer, pair.optimizer)
    }

    def run(model: Any, optimizer: Any) -> torch.Tensor:
        loss = train_step(model, optimizer)
        schedulers[id(optimizer)].step()
        return loss

    return run


def scalers_of(pair: Twins, init_scale: float) -> dict[int, torch.amp.GradScaler]:
    """Return a scaler for each of the twins, by its id."""
    return {
        id(model): torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=2)
        for model in (pair.plain, pair.swapped)
    }


def alternating_halves(pair: Twins) -> Callable[[Any, Any], torch.Tensor]:
    """Return a step that uses one half of the layers of `Halves`, each time the other one."""
    turns = {id(pair.plain): 0, id(pair.swapped): 0}

    def run(model: Any, optimizer: Any) -> torch.Tensor:
        turns[id(model)] += 1
        return finish_step(model(torch.randn(4, WIDTH), turns[id(model)] % 2).square().mean(), optimizer)

    return run


def before_each_update(sweep: Any, act: Callable[[], object]) -> Callable[[], None]:
    """Have `act` called before each run of elements is updated: by the optimizer, in one pass, or as part of a slice on a
    device. Return what ends that."""
    names = ("_apply", "_update_in_one_pass", "_place_others")  # the last one is a device's
    ways = [name for name in names if hasattr(sweep, name)]

    def acting(way: Callable[..., None]) -> Callable[..., None]:
        def update(*arguments: Any) -> None:
            act()
            way(*arguments)

        return update

    def end() -> None:
        for name in ways:
            vars(sweep).pop(name, None)

    for name in ways:
        setattr(sweep, name, acting(getattr(sweep, name)))
    return end


def fail_in_the_middle(pair: Twins) -> None:
    """Have the update of one of the next runs of elements fail, once."""
    calls = iter(range(100))

    def fail_once() -> None:
        if next(calls) == 5:
            end()
            raise RuntimeError("a fault in the middle")

    end = before_each_update(pair.manager.current.run.model._sweep, fail_once)


def assert_closed_runs_go_on(
    directory: Path,
    update: str,
    stops: Sequence[int],
    before_close: Callable[[nn.Module, swapper.SwapManager], Any] = lambda model, manager: None,
) -> None:
    """Train to each of `stops`, a step, by a manager that is closed there. All losses must be plain torch's.

    Args:
        before_close: called with the model and the manager before it is closed.
    """

    def make() -> tuple[Net, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = Net()
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

    losses: list[torch.Tensor] = []
    for stop in stops:
        with swapper.SwapManager(directory, host_memory="10MiB", resume="auto") as manager:
            model, optimizer = manager.offload(*make(), update=update, params="nvme", optimizer_state="nvme")
            while manager.step < stop:
                torch.manual_seed(manager.step)
                losses.append(train_step(model, optimizer))
            before_close(model, manager)
    model, optimizer = make()
    for number, loss in enumerate(losses):
        torch.manual_seed(number)
        assert_same(loss, train_step(model, optimizer))
    assert len(losses) == stops[-1]
