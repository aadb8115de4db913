"""Finds out each optimizer's state for a parameter, and whether a parameter may be cut, once. See optimizer_trial.py.

[Note: tried once] The behavior of torch's own classes follows from their settings, and from torch's default dtype
(counters) at `offload`: one trial serves all instances. Other classes may depend on the instance, and each has trials of its own:
one for all values of the settings that a step itself changes (counters), else there would be one a step. Of numbers that only
scale (a rate, betas, decay) the type and the sign count: schedules change them at every step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import SGD, Optimizer

from swapper.errors import UnsupportedError
from swapper.train.optimizer.entries import StateForm
from swapper.train.optimizer.optimizer_proxy import NAMES, OptimizerProxy, Work
from swapper.train.optimizer.optimizer_set import OptimizerSet, check_settings, copy_for_trial
from swapper.train.optimizer.optimizer_trial import SHAPES, OptimizerTrial, Template, template_of
from swapper.train.optimizer.own_code import is_known

LR_NAMES = frozenset({"lr", "initial_lr", "max_lr", "min_lr"})
MAX_FORMS = 256
"""Of an optimizer, or of all of torch's: the oldest are tried again."""
_of_torch: dict[object, StateForm] = {}
"""See [Note: tried once]."""


class OptimizerProbe:
    """Finds the forms of the optimizers' state, each once."""

    def __init__(self, optimizers: OptimizerSet) -> None:
        self._optimizers = optimizers
        self._forms: list[dict[object, StateForm]] = [
            _of_torch if is_known(member) else {} for member in optimizers.members
        ]
        # Of each optimizer's groups, from before `offload` takes the state away:
        self._templates: list[list[Template | None]] = [[] for _ in optimizers.members]
        for number, member in enumerate(optimizers.members):
            self._template(number, len(member.param_groups) - 1)
        self._counters: list[set[str]] = [set() for _ in optimizers.members]  # see [Note: tried once]
        self._default_dtype = torch.get_default_dtype()

    def _template(self, member: int, local: int) -> Template | None:
        """Return the state that an optimizer's group began with, which is looked at when the group is new."""
        known = self._templates[member]
        while len(known) <= local:
            known.append(template_of(self._optimizers.members[member], len(known)))
        return known[local] if known else None

    def form(self, settings: int, dtype: torch.dtype, ndim: int) -> StateForm:
        """Return the form for parameters (or masters) of `dtype` with `ndim` dimensions in group `settings`.

        Raises:
            UnsupportedError: the optimizer cannot be paged; gives the reason.
        """
        return self.forms(settings, [(dtype, ndim)])[0]

    def forms(self, settings: int, kinds: Iterable[tuple[torch.dtype, int]]) -> list[StateForm]:
        """Return the forms for parameters of each dtype and number of dimensions in a group, by its settings of now.

        Raises:
            UnsupportedError: as `form`.
        """
        member, local = self._optimizers.locate(settings)
        optimizer, forms = self._optimizers.members[member], self._forms[member]
        template = self._template(member, local)
        found, group_key = [], self._key_of(member, local)
        for dtype, ndim in kinds:
            key = *group_key, template is not None, dtype, ndim, self._default_dtype
            if key not in forms:
                if ndim >= len(SHAPES):
                    raise UnsupportedError(
                        f"parameters of {ndim} dimensions cannot be paged: at most {len(SHAPES) - 1}"
                    )
                form = self._try(optimizer, local, dtype, ndim, template)
                self._counters[member] |= form.sets
                group_key = self._key_of(member, local)
                forms[key := (*group_key, template is not None, dtype, ndim, self._default_dtype)] = form
                while len(forms) > MAX_FORMS:
                    del forms[next(iter(forms))]
            found.append(forms[key])
        return found

    def _key_of(self, member: int, local: int) -> tuple[Any, ...]:
        """Return what of an optimizer's group decides about the forms in it."""
        optimizer = self._optimizers.members[member]
        group, known = optimizer.param_groups[local], self._forms[member] is _of_torch
        left_out = {"params", NAMES, *self._counters[member]}
        if known:  # torch's code reads no others
            left_out |= group.keys() - optimizer.defaults.keys()
        names = sorted(group.keys() - left_out)
        return type(optimizer), tuple([(name, _structure(group[name], name, known)) for name in names])

    def _try(
        self, optimizer: Optimizer, local: int, dtype: torch.dtype, ndim: int, template: Template | None
    ) -> StateForm:
        check_settings(optimizer, optimizer.param_groups[local], dtype)
        now = torch.get_default_dtype()
        torch.set_default_dtype(self._default_dtype)  # counters of state that exists have it, whatever it is now
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                return OptimizerTrial(optimizer, local, dtype, SHAPES[ndim], template).run()
        finally:
            torch.set_default_dtype(now)

    def skipped_state(self, settings: int, dtype: torch.dtype) -> dict[str, Any]:
        """Return the state of an element of `dtype` after a first step that torch.amp.GradScaler has skipped.

        It is empty if it would not be zeros, as new sections are. torch's SGD leaves memory without values there.
        """
        member, local = self._optimizers.locate(settings)
        if isinstance(self._optimizers.members[member], SGD):
            return {}
        clone = copy_for_trial(self._optimizers.members[member])
        vars(clone).update(found_inf=torch.ones((), dtype=torch.float32, device="cpu"), grad_scale=None)
        work = Work(local, torch.zeros(1, dtype=dtype, device="cpu"), torch.zeros(1, dtype=dtype, device="cpu"), {})
        with torch.no_grad():
            OptimizerProxy(clone).update([work])
        is_zero = not any(isinstance(value, torch.Tensor) and value.any() for value in work.state.values())
        return work.state if is_zero else {}


def _structure(value: Any, key: str, known: bool) -> Any:
    """Return what of a setting may decide about state and arithmetic. See [Note: tried once]."""
    if key in LR_NAMES:
        return type(value).__name__
    if isinstance(value, list | tuple):
        return tuple([_structure(one, key, known) for one in value])
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), bool(value.any())
    if isinstance(value, float) or (known and type(value) is int):
        return type(value).__name__, (value > 0) - (value < 0)
    return repr(value)
