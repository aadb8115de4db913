"""Defines LoadedModel, the owner of everything that a model with its weights on NVMe needs.

Resources are opened first (modules/resources.py), then the model gets its memory and hooks; unloading goes backwards.
The model is unchanged until nothing can be refused any more.
"""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from swapper.device.device import Device
from swapper.errors import BudgetError, ConfigError, DeviceError, InvariantError, StateError
from swapper.formats.sources import Source
from swapper.infer.adoption import MappedSource, Places, empty, fill
from swapper.infer.experts import Experts
from swapper.infer.infer_groups import GroupMaking, InferenceDevice
from swapper.infer.infer_hooks import InferenceHooks, PassPredictor, allow_changes, is_cyclic, refuse_changes
from swapper.infer.matching import BufferPlace, Recipe
from swapper.infer.planning.infer_placement import Fit
from swapper.infer.streaming import Streaming
from swapper.infer.weight_rows import PartialProduct, RowLookup, RowPrefetcher
from swapper.infer.weights import (
    CPU,
    FOR_INFERENCE,
    OTHER_MEMORY,
    GroupWeights,
    MadeMemory,
    make_room,
    refuse_gradient,
)
from swapper.io.engines import Transfer, wait_for_all
from swapper.io.tensor_bytes import has_same_bits
from swapper.modules.cold import ColdParameter
from swapper.modules.groups import Models
from swapper.modules.guarded import FaultHandler, RunWith
from swapper.modules.home import DeviceHome
from swapper.runtime.counters import Counters
from swapper.runtime.interrupts import defer_signals
from swapper.runtime.sizes import format_bytes
from swapper.tensors.guarded_tensor import Function, as_plain
from swapper.tensors.torch_private import never_trace

log = logging.getLogger("swapper")

KEY = "_swapper_loaded"
"""Key of a model's `__dict__` for its LoadedModel, which is freed with the model."""


def loaded(model: nn.Module) -> LoadedModel:
    """Return the LoadedModel of a model that `load` returned: counters, `map`, `verify`, `unload`.

    Raises:
        StateError: the model was not loaded, or is unloaded.
    """
    found = model.__dict__.get(KEY)
    if not isinstance(found, LoadedModel):
        raise StateError("this model was not loaded by swapper.load, or is unloaded")
    return found


class LoadedModel(FaultHandler):
    """Owns files, memory, engine, pager and hooks of one model. Made by `load`.

    Attributes:
        advice, answers: see swapper.modules.guarded.FaultHandler.
    """

    advice = (
        "Its model was loaded for inference: run the model, or look at a weight in model.state_dict(), which maps the files and "
        "reads nothing. .to(), .half() and the like cannot be applied: say dtype= when loading. To change a "
        f"weight, {OTHER_MEMORY}."
    )

    answers = True

    def __init__(
        self,
        model: nn.Module,
        source: Source,
        fitting: Fit,
        buffers: list[BufferPlace],
        cache_bytes: int,
        backend: str,
        device: Device | None,
    ) -> None:
        plan, placement = fitting.plan, fitting.placement
        self._model = weakref.ref(model)
        self._source = source
        self._pid = os.getpid()
        self._closed = False
        self._names: dict[int, str] = {}
        self._recipes: dict[int, Recipe] = {}
        self._given = MappedSource(source)  # who may write to it
        self._groups: list[GroupWeights] = []
        self._small: list[nn.Parameter] = []
        self._operators: dict[tuple[int, Function], Callable[..., object]] = {}  # by parameter: of some of its rows
        self._hooks: InferenceHooks | None = None
        self._passes = PassPredictor(
            [name for name, _ in model.named_children()] if isinstance(model, Models) else [""]
        )
        self._several = model if isinstance(model, Models) else None  # nobody else keeps it alive
        self._cut_bytes = sum(linear.stored_bytes for linear in plan.cuts)
        self._cache_bytes = cache_bytes
        self._counters = Counters(
            pool_bytes=placement.pool_bytes,
            frame_bytes=placement.page_bytes,
            resident_bytes=plan.fixed_bytes,
            state_bytes=plan.fixed_bytes + plan.streamed_bytes,
        )
        self._streaming = Streaming(source, plan, placement, backend, self._counters, device)
        self._cycle = self._streaming.cycle
        self._device = device
        self._made = MadeMemory(plan.made_at_once_bytes + plan.made_expert_bytes)
        self._experts: Experts | None = Experts(self._streaming.read_part, cache_bytes, self._made.empty)
        self._on_device: InferenceDevice | None = None
        try:
            self._take_over(model, fitting, buffers, self._experts)
            self._hooks = InferenceHooks(plan.units, self._groups, self._begin_pass, self._end_pass, self._make_room)
        except BaseException:
            self._close_streaming()
            raise
        log.info(
            "load: %s of weights from %s, at least %s of them read in each pass; %d frames of %s; %s",
            format_bytes(self._counters.state_bytes), source.path, format_bytes(self.read_bytes_a_pass), placement.frame_count,
            format_bytes(placement.page_bytes), self._streaming.describe(),
        )  # fmt: skip

    # --- for users ----------------------------------------------------------------------------------------------------

    @property
    def counters(self) -> Counters:
        """Counters so far."""
        if not self._closed:
            self._streaming.count_bytes()
        return self._counters

    @property
    def read_bytes_a_pass(self) -> int:
        """Bytes that a pass over all weights reads from the files, after the first, which reads everything."""
        pages = {page.index: page for sections in self._streaming.sections for s in sections for page in s.pages}
        used = {index for access in self._cycle for index in access.pages}
        wanted = {index for group in self._groups for index in group.home.streamed_pages}
        streamed = sum(pages[index].nbytes for index in wanted if index in used)
        return streamed + self._cut_bytes

    def map(self, function: Callable[[Any], Any], batches: Iterable[Any], *, at_once: int | None = None) -> list[Any]:
        """Return `[function(batch) for batch in batches]`, with the weights read once for all of them.

        All batches pass through a group of weights before the next group is read, so that reading costs as much as for one.
        Their activations are in memory together.

        Args:
            function: the model, its `generate`, or any function that runs it; called in threads, one of which runs at a time.
            batches: its arguments, one for each call.
            at_once: batches that pass together. None: all.

        Raises:
            ConfigError: `at_once` is not positive.
            The function's first exception, after all batches were stopped.
        """
        if at_once is not None and (type(at_once) is not int or at_once < 1):
            raise ConfigError(f"at_once={at_once!r} must be a positive number of batches, or None for all")
        self._check_usable()
        left, results = list(batches), []
        while left:
            some, left = left[:at_once], left[len(left[:at_once]) :]
            if self._hooks is None:
                raise StateError("the model is unloaded: load it again")
            results += self._hooks.map(function, some, self._device)
        return results

    def verify(self) -> dict[Path, int]:
        """Read all of the files, and return the CRC-32 of each.

        Each pass checks only their sizes and times. A second call detects any change since the first.

        Raises:
            CheckpointError: a file was changed.
            IoError: a file cannot be read.
        """
        self._check_usable()
        return self._streaming.store.verify()

    def unload(self) -> None:
        """Free memory, files and hooks. The model has its shapes on the meta device then. May be called again.

        Waits for a forward of another thread. Weights that stayed in memory remain usable by those who hold them.

        Raises:
            StateError: it was called from inside of the model's forward.
        """
        if self._closed or os.getpid() != self._pid:
            return
        with contextlib.nullcontext() if self._hooks is None else self._hooks.turn_to_unload(), defer_signals:
            if self._closed:  # by another thread, meanwhile
                return
            self._unload()

    def _unload(self) -> None:
        self._closed = True
        model = self._model()
        if self._hooks is not None:
            self._hooks.remove()
        paged = [weight.parameter for group in self._groups for weight in group.weights]
        if self._on_device is not None:
            with contextlib.suppress(DeviceError):  # which `close` raises
                self._on_device.tier.finish()  # else copies refer to what they fill, as a tensor of the user's does
        for group in self._groups:
            group.abandon()
        if model is not None:
            empty(Places(model), [*paged, *self._small])
            for module in model.modules():
                module.__dict__.pop(KEY, None)
                allow_changes(module)
        self._several = None
        self._given.forget()
        if self._experts is not None:
            self._experts.forget()
        if self._on_device is not None:
            self._on_device.move_back()
        self._groups, self._small = [], []  # their tensors keep memory and files
        self._hooks = self._experts = None
        self._operators.clear()
        del paged, self._made
        self._close_streaming()
        self._on_device = None

    def __enter__(self) -> LoadedModel:
        return self

    def __exit__(self, *exception: object) -> None:
        self.unload()

    # --- accesses to cold parameters: see swapper.modules.guarded.FaultHandler ----------------------------------------

    def fault_in(self, parameter: nn.Parameter) -> bool:
        self._check_usable()
        return self._hooks is not None and self._hooks.fault_in(parameter)

    def read(self, parameters: Sequence[nn.Parameter], function: Function, run: RunWith) -> object:
        """Run the operation on mappings of the files."""
        result = run({id(parameter): self.whole(parameter) for parameter in parameters})
        for parameter in parameters:
            self._check_files(self._recipes[id(parameter)])
        return result

    def write(self, parameters: Sequence[nn.Parameter], function: Function, run: RunWith) -> object:
        name = getattr(function, "__name__", function)
        raise StateError(
            f"{name} would change parameter {self._names[id(parameters[0])]}, but {FOR_INFERENCE}. To change it, {OTHER_MEMORY}"
        )

    def unmanage(self, parameter: nn.Parameter) -> bool:
        """Make `parameter` an ordinary one, which the user gives other data: it is read no more."""
        for group in self._groups:
            group.unmanage(parameter)
        return True

    def whole(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return the weight as a mapping of the file, on its device. For the CPU nothing is read before an access."""
        if parameter.requires_grad and torch.is_grad_enabled():
            refuse_gradient()
        mapped = as_plain(self._shown(parameter, MappedSource(self._source)))  # without writes of others
        return mapped.to(self._where)

    def detached(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return the weight as a mapping of the file, for state_dict: read on access; changes stay in memory."""
        self._check_usable()
        if self._hooks is not None and self._hooks.fault_in(parameter):
            return None  # within a forward
        return self._shown(parameter, self._given)

    def _shown(self, parameter: nn.Parameter, mapped: MappedSource) -> torch.Tensor:
        recipe = self._recipes[id(parameter)]
        self._check_files(recipe)
        return mapped.made(recipe)

    def _check_files(self, recipe: Recipe) -> None:
        """Raise CheckpointError if a file of `recipe` was changed."""
        self._streaming.store.check_unchanged(
            {e.path for p in recipe.parts for _, e in self._source.extents(p.path, p.offset, p.nbytes)}
        )

    def in_part(
        self, parameter: nn.Parameter, function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> object:
        self._check_usable()
        if function is torch.Tensor.copy_:  # load_state_dict, of the values that it has
            return parameter if has_same_bits(self.whole(parameter), args[1]) else NotImplemented
        operator = self._operators.get((id(parameter), function))
        if (
            operator is None or self._hooks is None or not self._hooks.is_inside
        ):  # outside, a mapping of the file is used
            return NotImplemented
        return operator(*args, **kwargs)

    def note_change(self, group: object, names: list[str]) -> None:
        raise InvariantError("a group for inference refuses changes")

    def describe(self, parameter: nn.Parameter) -> str:
        return self._names[id(parameter)]

    # --- taking over, and passes --------------------------------------------------------------------------------------

    def _take_over(self, model: nn.Module, fitting: Fit, buffers: list[BufferPlace], experts: Experts) -> None:
        """Give the model its memory and buffers; its weights are read when they are used."""
        if self._device is not None and fitting.on_device is not None:
            self._on_device = InferenceDevice(self._device, self._streaming, fitting.on_device, self._counters)
            if self._cache_bytes:
                experts.there = self._on_device.experts(self._cache_bytes, fitting.plan.min_experts_bytes)
        buffer_tensors = self._streaming.begin([place.recipe for place in buffers])
        self._adopt(model, fitting, experts)
        fill(buffers, buffer_tensors)
        if self._on_device is not None:
            ours = self._recipes.keys() | {id(parameter) for parameter in self._small}
            self._on_device.move(model, [parameter for parameter in model.parameters() if id(parameter) not in ours])
            self._expect_images(sorted(fitting.plan.images))

    def _adopt(self, model: nn.Module, fitting: Fit, experts: Experts) -> None:
        """Give every loaded parameter its memory."""
        plan = fitting.plan
        making = GroupMaking(model, fitting, self._streaming, self._on_device, self._where, self, experts, self._made)
        self._groups, self._small = making.groups, making.small
        self._names, self._recipes = making.names, making.recipes
        making.make_all()
        copies = None if self._on_device is None else self._on_device.copies
        read, operators = self._streaming.read_part, self._operators
        for table in map(making.adopted, plan.lookups):
            operators[id(table.parameter), F.embedding] = RowLookup(table, read, self._where, copies, self._wait_aside)
        if plan.cuts:
            parts = RowPrefetcher(self._streaming.take(plan.parts_bytes), read, copies, self._made.empty)
            for linear in plan.cuts:
                bias = None if linear.bias is None else making.adopted(linear.bias)
                linear = replace(linear, weight=making.adopted(linear.weight), bias=bias)
                operators[id(linear.weight.parameter), F.linear] = PartialProduct(linear, parts, self._where)
        for weights in (weights for layer in plan.experts for weights in layer):
            operators[id(making.adopted(weights).parameter), torch.Tensor.__getitem__] = experts.take
        wholes = {id(model), *map(id, model.children() if isinstance(model, Models) else ())}
        for name, module in model.named_modules():
            refuse_changes(module, name or type(model).__name__, id(module) in wholes)

    def _wait_aside(self, tickets: list[Transfer]) -> None:
        """Wait for a caller's own reads, while others run."""
        with contextlib.nullcontext() if self._hooks is None else self._hooks.aside():
            wait_for_all(tickets)

    @property
    def _where(self) -> torch.device:
        return CPU if self._device is None else self._device.device

    def _expect_images(self, order: Iterable[int]) -> None:
        if self._on_device is not None:
            found = [self._groups[index].home for index in order]
            self._on_device.tier.expect([home.image for home in found if isinstance(home, DeviceHome)])

    def _close_streaming(self) -> None:
        if self._on_device is not None:
            self._on_device.close()
        self._streaming.close()

    def _begin_pass(self) -> None:
        self._check_usable()
        self._streaming.store.check_unchanged()
        never_trace(ColdParameter)
        if self._streaming.pager.has_noted_writes:
            for group in self._groups:
                group.refuse_change()
        if self._on_device is not None:
            self._on_device.tier.keep_free_memory()

    def _end_pass(self, name: str, order: list[int]) -> None:
        """Record a pass: expect the next one to be like it, if it was the whole model's or happened twice."""
        if all(group.settled for group in self._groups) and self._hooks is not None:
            self._hooks.remove()  # everything stays in memory: it is a plain model from now on
            return
        expected = self._passes.note(name, order)
        if expected is None:
            return
        cycle = [access for index in expected for access in self._groups[index].home.accesses]
        if not is_cyclic(cycle, self._cycle):
            self._cycle = cycle
            self._streaming.pager.expect(cycle)
        self._expect_images(expected)

    def _make_room(self, wanted: GroupWeights, refusal: BudgetError) -> None:
        if self._on_device is not None:  # the tier has evicted resident images already
            raise refusal
        make_room(wanted, self._groups, self._streaming.pool.frame_count, self._counters.frame_bytes)

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise StateError("a loaded model works only in the process that loaded it, not in a forked child")
        if self._closed:
            raise StateError("the model is unloaded: load it again")
