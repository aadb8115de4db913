"""Checks that a step, taken slice by slice, gives plain torch's results: groups, gradients and settings.

`param_groups` may be edited between two steps, as in plain torch. The trained parameters were found at `offload`; since
then the user may have taken a parameter out of its group, moved it, or removed, inserted, reordered and replaced groups.
The next step follows such edits, and so does every numbering of parameters. An edit that cannot be followed is refused
by name before anything changes, and can be undone.

Averages of gradients over processes are refused where a placement or an update time rules them out.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import distributed as torch_ddp

from swapper.capabilities import Feature, broken_rule
from swapper.errors import StateError, UnsupportedError
from swapper.tensors.torch_private import composed, is_sharded, running_ddp
from swapper.train.layout.inventory import Inventory, updated_dtype
from swapper.train.layout.slices import NO_GROUP, ParameterLocations, Trainable
from swapper.train.optimizer.entries import StateEntries, StateForm
from swapper.train.optimizer.optimizer_set import OptimizerSet


class Membership:
    """Keeps `settings` of the trained parameters equal to the optimizers' groups.

    Args:
        optimizers: the user's.
        trainables: the trained parameters.
        names: of all parameters of the model, by id.
        optimizer_of: for the name of each parameter in an optimizer at `offload`, the optimizer: it stays there.

    Attributes:
        edits: how often `follow` found that the groups had changed.
        untrained: parameters in a group that were frozen or in no group at `offload`.
        numbers: by id of a parameter in a group, its number in torch's state_dict; counted over all optimizers.
    """

    def __init__(
        self,
        optimizers: OptimizerSet,
        trainables: Sequence[Trainable],
        names: Mapping[int, str],
        optimizer_of: Mapping[str, int],
    ) -> None:
        self._optimizers = optimizers
        self._trainables = trainables
        self._names = names
        self._optimizer_of = optimizer_of
        self._trained = {id(parameter) for trainable in trainables for parameter in trainable.parameters}
        self._settings = [  # by optimizer: those that each of its groups has
            set.intersection(*(set(group) for group in member.param_groups)) for member in optimizers.members
        ]
        self._known: list[list[int]] | None = None
        self.edits = 0
        self.untrained: list[nn.Parameter] = []
        self.numbers: dict[int, int] = {}

    def follow(self) -> None:
        """Update everything here to the present groups. Requires that no step is open.

        Raises:
            StateError: an edit cannot be followed. Nothing has changed then.
        """
        members = self._members()
        if members == self._known:
            return
        self._check(members)
        group_of = {key: index for index, keys in enumerate(members) for key in keys}
        for trainable in self._trainables:
            trainable.settings[:] = [group_of.get(id(parameter), NO_GROUP) for parameter in trainable.parameters]
        self.numbers = {key: number for number, key in enumerate(group_of)}
        self.untrained = [
            p for group in self._optimizers.param_groups for p in group["params"] if id(p) not in self._trained
        ]
        self._known = members
        self.edits += 1

    def keep_state(self, states: Mapping[nn.Parameter, Mapping[str, Any]]) -> None:
        """Have the optimizers keep state of parameters, which are in their groups."""
        for parameter, state in states.items():
            self._optimizers.keep_state(parameter, state)

    def describe(self, number: int) -> str:
        """Return a group for people."""
        return self._optimizers.describe(number)

    @property
    def is_outdated(self) -> bool:
        """True if the groups were edited since `follow`."""
        return self._members() != self._known

    def _members(self) -> list[list[int]]:
        groups = self._optimizers.param_groups
        return list(map(members_of, groups, range(len(groups))))

    def _check(self, members: Sequence[Sequence[int]]) -> None:
        """Raise StateError unless each parameter is the model's, in one group of its optimizer, and groups are complete."""
        seen: dict[int, int] = {}
        for index, keys in enumerate(members):
            group, where = self._optimizers.param_groups[index], self._optimizers.describe(index)
            member, _ = self._optimizers.locate(index)
            for setting in sorted(self._settings[member] - group.keys()):
                raise StateError(f"{where} has no {setting!r}: use optimizer.add_param_group(), which fills it in")
            for number, key in enumerate(keys):
                if key not in self._names:
                    raise StateError(
                        f"parameter {number} of {where} {_describe(group['params'][number])} is not one of the offloaded model's: "
                        "train it with an optimizer of its own, or offload both models together, "
                        "offload([model, other], optimizer)"
                    )
                if key in seen:
                    again = "twice" if seen[key] == index else f"and in group {index}"
                    raise StateError(
                        f"parameter {self._names[key]} is in {self._optimizers.describe(seen[key])} {again}, where torch would "
                        "update it twice in a step: take it out of the one before it joins the other"
                    )
                if (before := self._optimizer_of.get(self._names[key], member)) != member:
                    raise StateError(
                        f"parameter {self._names[key]} is in {where}, and was in {self._optimizers.describe_member(before)}, with "
                        "which its state lies: leave it there, or close the manager and offload again from a snapshot"
                    )
                seen[key] = index


def members_of(group: Mapping[str, Any], index: int) -> list[int]:
    """Return the ids of a group's parameters, in order."""
    parameters = group.get("params")
    if not isinstance(parameters, list | tuple):
        raise StateError(f"group {index} of the optimizer: 'params' is no list, but a {type(parameters).__name__}")
    return list(map(id, parameters))


def names_by_group(param_groups: Iterable[Mapping[str, Any]], names: Mapping[int, str]) -> list[list[str]]:
    """Return the names of each group's parameters, in order; one without a name is refused at the next step."""
    return [[names[id(p)] for p in group.get("params", ()) if id(p) in names] for group in param_groups]


def _describe(value: Any) -> str:
    return f"(shape {list(value.shape)})" if isinstance(value, torch.Tensor) else f"(a {type(value).__name__})"


class Conditions:
    """Checks gradients and settings before a step begins.

    Args:
        inventory: the contents of the model and the optimizer.
        trainables: the trained parameters.
        membership: updates their `settings` to the optimizers' groups.
        entries: the optimizer's state of each parameter.
    """

    def __init__(
        self, inventory: Inventory, trainables: Sequence[Trainable], membership: Membership, entries: StateEntries
    ) -> None:
        self._inventory = inventory
        self._trainables = trainables
        self._membership = membership
        self._entries = entries
        self._edits = membership.edits
        self._look_at_groups()

    def _look_at_groups(self) -> None:
        """Collect the kinds of parameters, by group."""
        # For each kind in a group the forms for which its parameters have space, each with the name of one of them.
        self._kinds: dict[int, dict[tuple[torch.dtype, int], dict[StateForm, str]]] = {}
        self._of_kind: dict[tuple[int, torch.dtype], list[tuple[nn.Parameter, ParameterLocations]]] = {}
        for trainable in self._trainables:
            for parameter, places, settings in trainable.members:
                if settings == NO_GROUP:
                    continue
                dtype = updated_dtype(parameter, self._inventory.master_dtype)
                forms = self._kinds.setdefault(settings, {}).setdefault((dtype, parameter.dim()), {})
                forms.setdefault(self._inventory.forms[places.name], places.name)
                self._of_kind.setdefault((settings, dtype), []).append((parameter, places))
        self._starts_together = {
            (settings, dtype)
            for settings, kinds in self._kinds.items()
            for (dtype, _), forms in kinds.items()
            if any(form.starts_together for form in forms)
        }

    def check_step(self, groups: range) -> None:
        """Raise StateError if the optimizer with these groups would treat a slice differently from all parameters together.

        Its settings were changed so that it would keep other state, or need whole parameters; or a parameter has its
        first gradient later than others and must not.
        """
        self.check_settings()
        for kind in self._starts_together:
            if kind[0] not in groups:
                continue
            active = [places.name for parameter, places in self._of_kind[kind] if parameter.grad is not None]
            new = [name for name in active if not self._entries[name]]
            if new and len(new) < len(active):
                raise StateError(
                    f"parameter {new[0]} has its first gradient later than others, and with these settings the optimizer rounds "
                    "differently in such a step: build it with foreach=False"
                )

    def check_settings(self) -> None:
        """Do the part of `check_step` that needs no gradients. The membership has followed the groups."""
        if self._edits != self._membership.edits:
            self._look_at_groups()
            self._edits = self._membership.edits
        for settings, kinds in self._kinds.items():
            for now, forms in zip(self._inventory.probe.forms(settings, kinds), kinds.values(), strict=True):
                for form, name in forms.items():
                    if now is not form and (set(now.keys) - set(form.keys) or (form.may_cut and not now.may_cut)):
                        raise self._no_space(settings, name, now, form)

    def _no_space(self, settings: int, name: str, now: StateForm, form: StateForm) -> StateError:
        kept, space = (", ".join(sorted(map(str, of.keys))) or "none" for of in (now, form))
        return StateError(
            f"parameter {name} is in {self._membership.describe(settings)}, which keeps other state than there is "
            f"space for ({kept}; there is space for {space}) or may not update parameters in pieces: the group's "
            "settings were changed, or the parameter was in another group. Do that before manager.offload"
        )

    @property
    def all_gradients_matter(self) -> bool:
        """Return True if no parameter may be updated before it is known which ones have a gradient in this step."""
        starting = (places for kind in self._starts_together for _, places in self._of_kind[kind])
        return any(not self._entries[places.name] for places in starting)


def check_update(update: str, forms: Iterable[StateForm], optimizer: str) -> None:
    """Raise UnsupportedError if updates at this time cannot be exact.

    Args:
        update: "step", "deferred" or "backward".
        forms: of its optimizer's state.
        optimizer: its kind, for people.
    """
    names = sorted({name for form in forms for name in form.sets})
    if update == "deferred" and names:
        raise UnsupportedError(
            f"{optimizer} changes its own settings ({', '.join(names)}) in a step, which update='deferred' would show only when "
            "after the next forward: offload with update='step'"
        )


def is_replicated(module: nn.Module) -> bool:
    """Return whether DDP averages gradients of `module` over processes: its class, or torch's composable `replicate` of it."""
    by_ddp = "replicate" in composed(module) and not is_sharded(module)
    return by_ddp or isinstance(module, torch_ddp.DistributedDataParallel)


def averaging_refused(update: str, gradients_leave: bool) -> str:
    """Return why DistributedDataParallel cannot average a model's gradients; "" if it can.

    Args:
        update: when the model is updated.
        gradients_leave: they go from an accelerator to the host, or to NVMe, as they arrive.
    """
    asked = {Feature.REPLICATED}
    if update == "backward":
        asked.add(Feature.IN_BACKWARD)
    if gradients_leave:
        asked.add(Feature.GRADIENTS_LEAVE)
    rule = broken_rule(asked)
    return "" if rule is None else rule.message


def check_averaging(model: nn.Module, update: str, gradients_leave: bool) -> None:
    """Raise UnsupportedError if gradients of `model` are averaged, which needs a group of processes, and cannot be.

    Args: see `averaging_refused`.
    """
    refusal = averaging_refused(update, gradients_leave)
    if refusal and dist.is_initialized() and any(map(is_replicated, model.modules())):
        raise UnsupportedError(refusal)


def check_not_averaged(ids: Container[int], refusal: str) -> None:
    """Raise UnsupportedError in a forward of a DistributedDataParallel that `offload` was not given, as Lightning's is.

    Args:
        ids: of the parameters that were offloaded.
        refusal: why their gradients cannot be averaged. See `averaging_refused`.
    """
    outer = running_ddp()
    if outer is not None and any(id(parameter) in ids for parameter in outer.parameters()):
        raise UnsupportedError(refusal)
