"""`LoadedModel`: everything that belongs to a model that runs with its weights on NVMe.

[Note: order of opening and closing] Files and memory are opened first, then the engine, then the pager, then the hooks; unloading
goes backwards. Nothing of the model is changed before everything that can be refused was.
"""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from swapper.device.device import Device
from swapper.errors import BudgetError, ConfigError, InvariantError, StateError
from swapper.formats.sources import Source
from swapper.infer.mapping.adoption import MappedSource, Places, empty
from swapper.infer.mapping.matching import BufferPlace, Recipe
from swapper.infer.operators.embedding_rows import look_up_by_rows, stop_looking_up
from swapper.infer.operators.experts import Experts, ExpertWeights
from swapper.infer.operators.row_partitioned import RowPrefetcher, multiply_by_parts, stop_cutting
from swapper.infer.planning.fitting import Fit
from swapper.infer.planning.infer_placement import Placement
from swapper.infer.planning.pass_predictor import PassPredictor, is_cyclic
from swapper.infer.planning.streaming_plan import StreamingPlan
from swapper.infer.runtime.batched_pass import BatchedPass
from swapper.infer.runtime.checksums import Checksums
from swapper.infer.runtime.device_weights import DeviceGroup
from swapper.infer.runtime.group_making import GroupMaking
from swapper.infer.runtime.infer_device import InferenceDevice
from swapper.infer.runtime.infer_hooks import InferenceHooks
from swapper.infer.runtime.refusals import allow_changes, refuse_changes
from swapper.infer.runtime.streaming import Streaming
from swapper.infer.runtime.weights import CPU, FOR_INFERENCE, GroupWeights, make_room, refuse_gradient
from swapper.modules.groups import Models
from swapper.modules.guarded import Run
from swapper.modules.torch_functions import Function
from swapper.paging.planning.schedule import Access
from swapper.runtime.counters import Counters
from swapper.runtime.interrupts import defer_sigint
from swapper.runtime.sizes import format_bytes

log = logging.getLogger("swapper")

KEY = "_swapper_loaded"
"""Where in a model's `__dict__` its LoadedModel is: a model that is forgotten takes it along."""


def loaded(model: nn.Module) -> LoadedModel:
    """Return what belongs to a model that `load` returned: its figures, and `unload`."""
    found = model.__dict__.get(KEY)
    if not isinstance(found, LoadedModel):
        raise StateError("this model was not loaded by swapper.load, or is unloaded")
    return found


class LoadedModel:
    """Owns files, memory, engine, pager and hooks of one model. Made by `load`.

    Attributes:
        advice, answers: see swapper.modules.guarded.FaultHandler.
        counters: what was done so far.
    """

    advice = (
        "Its model was loaded for inference: run the model, or look at a weight in model.state_dict(), which maps the files and "
        "reads nothing. .to(), .half() and the like cannot be applied: say dtype= when loading."
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
        blueprint, placement = fitting.blueprint, fitting.placement
        self._model = weakref.ref(model)
        self._source = source
        self._checksums = Checksums(source)
        self._pid = os.getpid()
        self._closed = False
        self._names: dict[int, str] = {}
        self._recipes: dict[int, Recipe] = {}
        self._given = MappedSource(source)  # to users, who may write to it
        self._groups: list[GroupWeights] = []
        self._small: list[nn.Parameter] = []
        self._experts: Experts | None = None
        self._hooks: InferenceHooks | None = None
        self._passes = PassPredictor(
            [name for name, _ in model.named_children()] if isinstance(model, Models) else [""]
        )
        self._together = model if isinstance(model, Models) else None  # which nobody else has
        self._cut_bytes = sum(linear.stored_bytes for linear in blueprint.cuts)
        self._counters = Counters(
            pool_bytes=placement.pool_bytes,
            frame_bytes=placement.page_bytes,
            resident_bytes=blueprint.fixed_bytes,
            state_bytes=blueprint.fixed_bytes + blueprint.streamed_bytes,
        )
        self._streaming = Streaming(source, blueprint, placement, backend, self._counters, device)
        self._cycle = self._streaming.cycle
        self._device = device
        self._on_device: InferenceDevice | None = None
        try:
            self._take_over(model, fitting, buffers)
        except BaseException:
            self._close_streaming()
            raise
        self._experts = Experts(self._expert_layers(blueprint), self._streaming.read_part, cache_bytes, self._where)
        self._hooks = InferenceHooks(
            blueprint.units, self._groups, self._begin_pass, self._end_pass, self._drop_leases, self._make_room
        )
        log.info(
            "load: %s of weights from %s, at least %s of them read in each pass; %d frames of %s; %s",
            format_bytes(self._counters.state_bytes), source.path, format_bytes(self.read_bytes_a_pass), placement.frame_count,
            format_bytes(placement.page_bytes), self._streaming.describe(),
        )  # fmt: skip

    # --- for people -----------------------------------------------------------------------------------------------

    @property
    def counters(self) -> Counters:
        """Counters so far."""
        if not self._closed:
            self._streaming.count_bytes()
        return self._counters

    @property
    def read_bytes_a_pass(self) -> int:
        """What a pass over all weights reads from the files, after the first, which reads everything."""
        pages = {page.index: page for sections in self._streaming.sections for s in sections for page in s.pages}
        used = {index for access in self._cycle for index in access.pages}
        wanted = {index for group in self._groups for index in group.streamed_pages}
        streamed = sum(pages[index].nbytes for index in wanted if index in used)
        return streamed + self._cut_bytes

    def map(self, function: Callable[[Any], Any], batches: Iterable[Any], *, at_once: int | None = None) -> list[Any]:
        """Return `[function(batch) for batch in batches]`, with the weights read once for all of them.

        The batches go through each group of weights one after the other before the next group is read, so that reading costs
        as much as for one. Their activations are in memory together.

        Args:
            function: the model, its `generate`, or whatever runs it; called in threads, of which one runs at a time.
            batches: what it is called with, one argument each.
            at_once: so many batches go together. None: all.

        Raises:
            ConfigError: `at_once` is not positive.
            What the function raises: the first one, after all have been stopped.
        """
        if at_once is not None and (type(at_once) is not int or at_once < 1):
            raise ConfigError(f"at_once={at_once!r} must be a positive number of batches, or None for all")
        self._check_usable()
        left, results = list(batches), []
        while left:
            together, left = left[:at_once], left[len(left[:at_once]) :]
            if self._hooks is None:
                raise StateError("the model is unloaded: load it anew")
            convoy = BatchedPass(self._hooks, function, together, self._device)
            with self._hooks.turn_for(convoy) as is_streamed:
                results += convoy.run() if is_streamed else [function(batch) for batch in together]
        return results

    def verify(self) -> dict[Path, int]:
        """Read all of the files, and return the CRC-32 of each.

        Each pass looks at their sizes and times only. A second call finds what changed since the first, whatever those say.

        Raises:
            CheckpointError: a file was changed.
            IoError: a file cannot be read.
        """
        self._check_usable()
        return self._checksums.check()

    def unload(self) -> None:
        """Give back memory, files and hooks. The model has its shapes on the meta device then. May be called again.

        A forward that another thread runs is waited for. Weights that were in memory for good stay usable for whoever has them.

        Raises:
            StateError: it was called from inside of the model's forward.
        """
        if self._closed or os.getpid() != self._pid:
            return
        with contextlib.nullcontext() if self._hooks is None else self._hooks.turn_to_unload(), defer_sigint:
            if self._closed:  # by another thread, meanwhile
                return
            self._unload()

    def _unload(self) -> None:
        self._closed = True
        model = self._model()
        if self._hooks is not None:
            self._hooks.remove()
        stay, paged = self._stay(), [weight.parameter for group in self._groups for weight in group.weights]
        for group in self._groups:
            group.abandon()
        if model is not None:
            empty(Places(model), [*paged, *self._small])
            for module in model.modules():
                module.__dict__.pop(KEY, None)
                allow_changes(module)
                stop_looking_up(module)
                stop_cutting(module)
        self._together = None
        self._given.forget()
        if self._experts is not None:
            self._experts.forget()
        if self._on_device is not None:
            self._on_device.move_back()
        self._groups, self._small = [], []  # their tensors keep memory and files
        self._hooks = self._experts = None
        del paged
        self._close_streaming(stay)
        self._on_device = None

    def __enter__(self) -> LoadedModel:
        return self

    def __exit__(self, *exception: object) -> None:
        self.unload()

    # --- what cold parameters ask (swapper.modules.guarded.FaultHandler) ---------------------------------------------------

    def bring(self, parameter: nn.Parameter) -> bool:
        self._check_usable()
        return self._hooks is not None and self._hooks.bring(parameter)

    def catch_up(self, parameter: nn.Parameter) -> None:
        """Nothing: weights do not change."""

    def read(self, parameters: Sequence[nn.Parameter], function: Function, run: Run) -> Any:
        """The files are mapped in the place of the parameters."""
        return run({id(parameter): self.whole(parameter) for parameter in parameters})

    def write(self, parameters: Sequence[nn.Parameter], function: Function, run: Run) -> Any:
        name = getattr(function, "__name__", function)
        raise StateError(f"{name} would change parameter {self._names[id(parameters[0])]}, but {FOR_INFERENCE}")

    def whole(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return the weight as the file is mapped, where it is used. Nothing is read before it is looked at, but for a device."""
        if parameter.requires_grad and torch.is_grad_enabled():
            refuse_gradient()
        return self._shown(parameter, MappedSource(self._source)).to(self._where)  # what others wrote is not in it

    def detached(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """For state_dict: the weight as the file is mapped. Nothing is read before it is looked at; changes stay in memory."""
        self._check_usable()
        if self._hooks is not None and self._hooks.bring(parameter):
            return None  # within a forward
        return self._shown(parameter, self._given)

    def _shown(self, parameter: nn.Parameter, mapped: MappedSource) -> torch.Tensor:
        recipe = self._recipes[id(parameter)]
        self._source.check_unchanged(
            {e.path for p in recipe.parts for _, e in self._source.extents(p.path, p.offset, p.nbytes)}
        )
        return mapped.made(recipe)

    def indexed(self, parameter: nn.Parameter, index: Any) -> torch.Tensor | None:
        self._check_usable()
        return None if self._experts is None else self._experts.take(parameter, index)

    def note_change(self, group: object, names: list[str]) -> None:
        raise InvariantError("a group for inference notes changes by itself")

    def describe(self, parameter: nn.Parameter) -> str:
        return self._names[id(parameter)]

    # --- taking over, and passes ----------------------------------------------------------------------------------

    def _take_over(self, model: nn.Module, fitting: Fit, buffers: list[BufferPlace]) -> None:
        """Give the model what it is to have; its weights are read when they are used."""
        if self._device is not None and fitting.on_device is not None:
            self._on_device = InferenceDevice(self._device, self._streaming, fitting.on_device, self._counters)
        buffer_tensors = self._streaming.begin([place.recipe for place in buffers])
        self._adopt(model, fitting.blueprint, fitting.placement)
        for place, tensor in zip(buffers, buffer_tensors, strict=True):
            place.module._buffers[place.name] = tensor
        if self._on_device is not None:
            ours = self._recipes.keys() | {id(parameter) for parameter in self._small}
            self._on_device.move(model, [parameter for parameter in model.parameters() if id(parameter) not in ours])
            self._expect_images(sorted(fitting.blueprint.images))

    def _adopt(self, model: nn.Module, blueprint: StreamingPlan, placement: Placement) -> None:
        """Give every loaded parameter its place."""
        making = GroupMaking(
            model, blueprint, placement, self._streaming, self._on_device, self._where, self, self._cache
        )
        self._groups, self._small = making.groups, making.small
        self._names, self._recipes = making.names, making.recipes
        making.make_all()
        for embedding, recipe in blueprint.lookups:
            look_up_by_rows(embedding, recipe, self._streaming.read_part, self._where)
        if blueprint.cuts:
            bench = RowPrefetcher(self._streaming.take_memory(blueprint.parts_bytes), self._streaming.read_part)
            for linear in blueprint.cuts:
                multiply_by_parts(linear, bench, self._where)
        for name, module in model.named_modules():
            refuse_changes(module, name or type(model).__name__)

    @property
    def _where(self) -> torch.device:
        return CPU if self._device is None else self._device.device

    def _expect_images(self, order: Iterable[int]) -> None:
        if self._on_device is not None:
            found = [self._groups[index] for index in order]
            self._on_device.tier.expect([group.image for group in found if isinstance(group, DeviceGroup)])

    def _stay(self) -> list[int]:
        """Return the pages of weights that are plain ones by now: somebody may have them, or an output that is a view."""
        settled = [group for group in self._groups if group.settled]
        return [index for group in settled for access in group.kept_accesses for index in access.pages]

    def _close_streaming(self, stay: Collection[int] = ()) -> None:
        if self._on_device is not None:
            self._on_device.close()
        self._streaming.close(stay)

    def _cache(self) -> Experts:
        if self._experts is None:
            raise InvariantError("the experts are asked for while there is no memory for them")
        return self._experts

    def _expert_layers(self, blueprint: StreamingPlan) -> list[list[ExpertWeights]]:
        """The blueprint's, with the parameters that the model has now."""
        adopted = {w.name: w.parameter for group in self._groups for w in group.weights}
        names = {id(w.parameter): w.name for group in blueprint.groups for w in group.weights}
        return [
            [replace(weights, parameter=adopted[names[id(weights.parameter)]]) for weights in layer]
            for layer in blueprint.experts
        ]

    def _begin_pass(self) -> None:
        self._check_usable()
        self._source.check_unchanged()
        for group in self._groups:
            group.refuse_change()
        if self._on_device is not None:
            self._on_device.tier.keep_free_memory()

    def _end_pass(self, name: str, order: list[int]) -> None:
        """A pass is over: expect the next one to be like it, if it was the whole model's or came twice."""
        if all(group.settled for group in self._groups) and self._hooks is not None:
            self._hooks.remove()  # everything is in memory for good: it is a plain model from now on
            return
        expected = self._passes.note(name, order)
        if expected is None:
            return
        cycle = [access for index in expected for access in self._groups[index].accesses]
        if not is_cyclic(cycle, self._cycle):
            self._cycle = cycle
            self._streaming.pager.expect(cycle)
        self._expect_images(expected)

    def _drop_leases(self, kept: Iterable[Access]) -> None:
        if self._on_device is not None:
            self._on_device.tier.finish()
        self._streaming.pager.drop_leases(kept)

    def _make_room(self, wanted: GroupWeights, refusal: BudgetError) -> None:
        if self._on_device is not None:  # the tier has given up what stays already
            raise refusal
        make_room(wanted, self._groups, self._streaming.pool.frame_count, self._counters.frame_bytes)

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise StateError(
                "a model loaded by swapper was used in a forked child: it works only in the process that loaded it"
            )
        if self._closed:
            raise StateError("the model is unloaded: load it anew")
