"""Leases a rank's shards while FSDP2 gathers them, and takes the gradients that it has reduced to their places.

What of FSDP2 is private is used here and in shards.py alone, and looked for when a model is offloaded.

[Note: when a sharded group may be updated] With updates in backward (steps/backward_progress.py). FSDP2 reduces a group's
gradients in its `post_backward`, which autograd calls once for each `pre_forward`, or FSDP2 when the backward is over; after that
nothing gathers the group. So a use begins with `pre_forward` and ends with `post_backward`. Where FSDP2 calls that less often (a
module called twice), uses are left, and the group waits for `optimizer.step()`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from swapper.errors import StateError
from swapper.modules.module_hooks import OwnHook
from swapper.modules.turns import is_in_backward
from swapper.tensors.guarded_tensor import share_memory
from swapper.tensors.torch_private import after_backward, backward_task, replace_data
from swapper.train.gradients.cold_grad import ColdGradient, stand_for
from swapper.train.groups.parameter_group import GroupParameters
from swapper.train.layout.slices import TensorLocation
from swapper.train.passes.given_model import HookTargets
from swapper.train.sharded.buffers import EmptyTensors, give_memory, has_replicas, memory_bytes, take_memory
from swapper.train.sharded.local_tensors import LocalTensor, OpenShards, local_of
from swapper.train.sharded.shards import Shard, Shards, shard_count, sharded_like
from swapper.train.steps.executor import UpdateExecutor


class ShardHooks:
    """Has FSDP2 use the paged shards of one model.

    Args:
        targets: what the hooks act on; the groups are one for each FSDPParamGroup, in the same order.
    """

    def __init__(self, shards: Shards, targets: HookTargets) -> None:
        self._shards = shards
        self._lose_ranks = targets.events.lose_ranks
        self._passes = targets.passes
        self._updates = updates = targets.updates
        groups = targets.groups
        self._handles: list[Any] = []
        self._casts: Callable[[int], AbstractContextManager[Any]] = nullcontext  # in which FSDP2 casts what it gathers
        self._uses: dict[int, list[ShardUse]] = {}  # by id of an FSDPParamGroup: those whose backward is still to come
        self._tasks: set[int] = set()  # running backwards, one within the other
        group_of = {id(parameter): group for group in groups for parameter in group.parameters}
        self._paged = {key for key, group in group_of.items() if group.paged}
        for param_group, members in shards.by_group:
            for shard in members:
                _bind(shard, targets.places[shard.name, "param"])
                _stay_there(shard.fsdp_param)
                if shard.local.requires_grad:
                    hook = _take_gradient(shard, updates)
                    self._handles.append(shard.parameter.register_post_accumulate_grad_hook(hook))
            needed = list(dict.fromkeys(group_of[id(shard.local)] for shard in members))
            self._lease_around(param_group, needed)
            if targets.takes_on_device:
                _reduce_on_device(param_group, [shard for shard in members if shard.local.requires_grad])
            if updates.follows_backward:
                self._follow_backward(param_group, needed)
        nbytes = memory_bytes(shards)
        if nbytes is not None:
            kept = [
                group
                for group, members in shards.by_group
                if has_replicas(group)
                or targets.takes_on_device
                or any(shard.name in targets.kept_gradients for shard in members)
            ]
            memory = give_memory([param_group for param_group, _ in shards.by_group], nbytes, kept)
            self._casts = partial(EmptyTensors, memory)
        self._open_shards = []
        for group in groups:
            of_group = {id(local) for local in group.parameters}
            own = [shard for shard in shards.all if id(shard.local) in of_group]
            self._open_shards.append(OpenShards(own, targets.finish))
            group.show_with(self._open_shards[-1])
        self._handles.append(shards.model.register_forward_pre_hook(self._before_forward, prepend=True))

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        if not is_in_backward():
            for shard in self._shards.all:
                if shard.parameter.grad is None:
                    shard.local.grad = None  # its place is free
            self._tasks.clear()
            self._passes.enter_forward()
            if self._updates.has_begun_early:
                self._updates.finish()  # it refuses, before this rank enters a collective
            self._passes.clock.enter("forward")

    def shown(self) -> str | None:
        """Return the name of a parameter whose shard a tensor of the user's shows; None if there is none."""
        return next((name for shards in self._open_shards if (name := shards.shown()) is not None), None)

    def follow_gradients(self) -> None:
        """A step begins: the gradients of the model's parameters are those of the shards."""
        for shard in self._shards.all:
            gradient: Any = shard.parameter.grad
            shard.local.grad = None if gradient is None else local_of(gradient)

    def remove(self, keep_cold: bool) -> None:
        """Take the hooks out. Shards that were paged stay on NVMe: an operation on one raises.

        Args:
            keep_cold: else no shard keeps its memory, as others are to be bound instead.
        """
        for handle in self._handles:
            handle.remove()
        for open_shards in self._open_shards:
            open_shards.show()
        take_memory(param_group for param_group, _ in self._shards.by_group)
        for param_group, members in self._shards.by_group:
            for name in ("unshard", "wait_for_unshard", "pre_forward", "post_backward"):
                vars(param_group).pop(name, None)
            vars(param_group)["unshard"] = _refuse
            for shard in members:
                vars(shard.fsdp_param).pop("reset_sharded_param", None)
                shard.local.grad = None
                if shard.parameter.grad is not None and type(local_of(shard.parameter.grad)) is ColdGradient:
                    shard.parameter.grad = None
                if not keep_cold or id(shard.local) in self._paged:
                    shard.fsdp_param._sharded_param_data = torch.empty(0, dtype=shard.local.dtype, device="cpu")
                    shard.parameter._local_tensor = LocalTensor(shard.parameter._local_tensor, None, _refuse)  # type: ignore[attr-defined]

    def _lease_around(self, param_group: Any, groups: list[GroupParameters]) -> None:
        """Have the shards in memory while `param_group` copies them, which is in `unshard`, or after it where there is one rank."""
        vars(param_group).pop("unshard", None)  # of an earlier session
        unshard, wait_for_unshard = param_group.unshard, param_group.wait_for_unshard
        ranks = shard_count(param_group)
        alone = ranks == 1

        @contextmanager
        def leased(async_op: bool = False) -> Iterator[None]:
            taken = []
            try:
                if is_in_backward():
                    self._enter_backward()
                    self._updates.finish(in_order=True)
                else:
                    self._passes.clock.enter("forward")
                    self._updates.forward_reaches([group.index for group in groups])
                for group in groups:
                    group.lease()
                    taken.append(group)
                yield
                if param_group.device.type != "cpu":  # the copies to the accelerator are queued
                    state = param_group._training_state
                    param_group.comm_ctx.get_all_gather_streams(async_op or alone, state)[0].synchronize()
            except BaseException as error:
                if not alone or has_replicas(param_group):
                    self._lose_ranks(error)
                raise
            finally:
                for group in taken:
                    group.release()

        def unshard_leased(async_op: bool = False) -> None:
            if alone or not param_group.is_sharded or param_group._all_gather_result is not None:
                unshard(async_op)
                return
            with leased(async_op), self._casts(ranks):
                unshard(async_op)

        def wait_leased() -> None:
            if not alone or not param_group.is_sharded or param_group._all_gather_result is None:
                wait_for_unshard()
                return
            with leased():
                wait_for_unshard()

        param_group.unshard, param_group.wait_for_unshard = unshard_leased, wait_leased

    # --- updates in backward: see [Note: when a sharded group may be updated] -----------------------------------------

    def _follow_backward(self, param_group: Any, groups: list[GroupParameters]) -> None:
        """Tell `updates` of the uses of `param_group`, and when its gradients are reduced."""
        pre_forward, post_backward = param_group.pre_forward, param_group.post_backward
        uses = self._uses.setdefault(id(param_group), [])

        def begin_use(*arguments: Any) -> Any:
            use = ShardUse(id(param_group), [group.index for group in groups])
            count = self._updates.uses.called_again if is_in_backward() else self._updates.uses.called
            count(use, torch.is_grad_enabled())
            if torch.is_grad_enabled():
                uses[:] = [one for one in uses if self._updates.uses.counts(one)]
                uses.append(use)
            return pre_forward(*arguments)

        def end_use(*unused: Any) -> None:
            was_used = param_group._training_state.name == "PRE_BACKWARD"
            post_backward(*unused)
            try:
                self._enter_backward()
                if uses and was_used and not self._updates.uses.graph_stays:
                    self._updates.uses.end(uses.pop())
                self._updates.backward_goes_on()
            except BaseException as error:
                self._lose_ranks(error)
                raise

        param_group.pre_forward, param_group.post_backward = begin_use, end_use

    def _enter_backward(self) -> None:
        """Note that a backward goes on, and begin it if it is new."""
        task = backward_task()
        if task in self._tasks:
            return
        self._passes.clock.enter("backward")
        self._tasks.add(task)
        self._updates.backward_begins(task)
        after_backward(OwnHook(lambda: self._end_backward(task)))

    def _end_backward(self, task: int) -> None:
        self._tasks.discard(task)
        self._updates.backward_ends(task)
        if not self._tasks:
            self._passes.clock.enter("between")


class ShardUse:
    """A use of an FSDPParamGroup, from its forward to its backward. See pending_uses.Caller."""

    def __init__(self, module: int, groups: list[int]) -> None:
        self.module = module
        self.groups = groups
        self.use = -1


def _bind(shard: Shard, place: TensorLocation) -> None:
    """Have FSDP2's tensors at the shard's place. They share a storage, by which FSDP2 knows that they belong together."""
    section, slot = place.section, place.slot
    nbytes = shard.padded_numel * slot.spec.dtype.itemsize
    whole = section.own_bytes(slot.offset, slot.offset + nbytes) if nbytes else section.memory[:0]
    data = whole.view(slot.spec.dtype)
    local = data[: slot.spec.numel].view(slot.spec.shape)
    parameter = shard.parameter
    # See [Note: shards of a model on an accelerator]. A gradient comes when it is copied: hooks take it at once.
    shard.fsdp_param.offload_to_cpu, shard.fsdp_param.pin_memory = shard.fsdp_param.device.type != "cpu", False
    if parameter.device != local.device:
        replace_data(parameter, sharded_like(local, parameter))
    shard.fsdp_param._sharded_param_data = data
    parameter._local_tensor = local  # type: ignore[attr-defined]


def _reduce_on_device(param_group: Any, shards: list[Shard]) -> None:
    """Have FSDP2 leave reduced gradients on the device: `_take_gradient` copies them, and nobody waits for the copies.

    Args:
        shards: those whose gradients are taken: not what was frozen, of which FSDP2 makes gradients if it is unfrozen.
    """
    post_backward = param_group.post_backward

    def reduce(*unused: Any) -> None:
        own = [shard.fsdp_param for shard in shards if _may_stay(shard.parameter.grad)]
        offloads = [fsdp_param.offload_to_cpu for fsdp_param in own]
        for fsdp_param in own:
            fsdp_param.offload_to_cpu = False
            fsdp_param.to_sharded_dtensor = partial(_show, fsdp_param.to_sharded_dtensor)
        try:
            post_backward(*unused)
        finally:
            for fsdp_param, offload in zip(own, offloads, strict=True):
                fsdp_param.offload_to_cpu = offload
                del fsdp_param.to_sharded_dtensor

    param_group.post_backward = reduce


def _may_stay(earlier: Any) -> bool:
    """Return whether a gradient may come on the device: not if it is added to one that the user has assigned, in host memory."""
    return earlier is None or type(earlier._local_tensor) is LocalTensor


def _show(to_dtensor: Callable[[torch.Tensor], Any], gradient: torch.Tensor) -> Any:
    return to_dtensor(stand_for(gradient, "cpu"))


def _stay_there(fsdp_param: Any) -> None:
    """Have FSDP2 leave a shard where it is after `load_state_dict`: torch 2.7 copies one that it pads to memory of its own."""
    vars(fsdp_param).pop("reset_sharded_param", None)  # of an earlier session
    reset, of = fsdp_param.reset_sharded_param, fsdp_param._module_info

    def reset_if_moved() -> None:
        parameter = getattr(of.module, of.param_name)
        is_same = parameter is fsdp_param.sharded_param
        if not is_same or not share_memory(local_of(parameter), fsdp_param._sharded_param_data):
            reset()

    fsdp_param.reset_sharded_param = reset_if_moved


def _take_gradient(shard: Shard, updates: UpdateExecutor) -> Callable[[Any], None]:
    """FSDP2 calls this after a reduce-scatter: the gradient goes to its place, and FSDP2's DTensor shows it there."""
    of, pending = weakref.ref(shard), weakref.ref(updates)

    def hook(parameter: Any) -> None:
        alive, step = of(), pending()
        if alive is None or step is None:
            return
        step.finish(in_order=True)
        local = alive.local
        local.grad = local_of(parameter.grad)
        for take in (local._post_accumulate_grad_hooks or {}).values():
            take(local)
        if type(local.grad) is ColdGradient:
            parameter.grad._local_tensor = LocalTensor.of_gradient(local, local.grad)
        elif local.grad is not None:
            parameter.grad._local_tensor = local.grad

    return hook


def _refuse(async_op: bool = False) -> None:
    raise StateError(
        "the shards of this model stayed on NVMe when its manager was closed: read them before that, in manager.gather(model), or "
        "offload the model's run again with resume='auto'"
    )
