"""Replaces a session: by one that trains more, or, after the manager was parked, by one of the same files.

[Note: a relayout] A session is replaced by one that trains more if a group was added to the optimizer, or a frozen parameter is
trained, or its state is loaded: then the user's optimizers keep that state until the new session has space for it.

Trained parameters have space for gradients and state, so the layout changes, and with it the swap files. Between two
steps everything is written and committed in the old layout, and the old session closes. A new one opens with new files
and fills them from the old ones (each page is read twice, to be compared with its checksum and to be copied, and written
once). It is committed, and then the old files are removed. Memory is never that of two sessions.

[Note: before or after] Until the new commit is published the directory holds the old session, then the new one: a
process that is killed at any instant leaves one of them whole. If the new session cannot be opened or filled, the old
one is opened again from its files, which are unchanged. Of ranks that run together each keeps the old session with the
new one until all have that: its record as that of the previous commit, to which a rank that is ahead returns ([Note: one
step for all ranks], durability/ranks.py). The new commit counts as a change since the step, so that the two differ.
If a rank does not arrive there, the others cannot know which of the two it has: they leave both, and end.

[Note: parking] While a manager is parked, the memory of its session is the system's.
What memory has and the files do not is written first, and committed if the run commits. Then the session closes as in a
relayout: pool, windows, page-locked memory, device memory and engines are released. Parameters
stay the same objects, with shape and dtype and without data, and refuse every access. Afterwards the session is opened
on the same files: resident sections are read at once, pages at their next use. The directory, its lock and its last
commit are untouched meanwhile, so a process that is killed while it is parked resumes from the last step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import NoReturn, cast

from torch import nn

from swapper.capabilities import Feature, check
from swapper.durability.commit import named_files, publish_commit
from swapper.durability.directory import FALLBACK_NAME
from swapper.durability.ranks import Ranks
from swapper.errors import BudgetError, StateError
from swapper.io import beneath
from swapper.modules.cold import leave_cold, set_cold, unguard
from swapper.modules.guarded import FaultHandler, guard
from swapper.modules.turns import is_in_backward
from swapper.paging.store.swap_files import first_free_number
from swapper.runtime.free_memory import return_free_memory
from swapper.runtime.interrupts import defer_signals
from swapper.tensors.torch_private import without_data
from swapper.train.gradients.grads import GradientStash
from swapper.train.planning.plan import Plan, plan_run
from swapper.train.session.origin import Given, Origin, check_alike
from swapper.train.session.session_slot import SessionSlot
from swapper.train.session.training_session import TrainingSession
from swapper.train.state.optim import StateOwner

log = logging.getLogger("swapper")

VERB = "train more parameters"
DETACHED = (
    "this graph was made before the optimizer got more to train (add_param_group), which moved what it refers to: run the forward "
    "again, and add groups where no backward is still to come"
)

PARK = "manager.parked"
REMEDY = "park between two steps"
PARKED = "the manager is parked: do this after `with manager.parked():`"
REOPEN = "close it, and resume from the last commit (resume='auto') or a snapshot"
OLD_GRAPH = "this graph was made before manager.parked(), which released what it refers to: run the forward again"


def train_more(current: SessionSlot, add: Callable[[], None]) -> None:
    """Train all parameters in the optimizers' groups after `add`. If that fails, nothing has changed.

    Args:
        current: holds the session, which is replaced; empty if neither the new one nor the old one could be opened.
        add: adds the optimizer's new group, if any.

    Raises:
        StateError: in the middle of a step, a forward, a backward or a gather; or other ranks come to another result.
        BudgetError: the budget is too small; names the smallest that works.
        UnsupportedError: the optimizer has parameters that are not of the model, or cannot be paged with its new group.
        DirectoryError: the drive has no space for the new files.
        IoError: a transfer failed.
    """
    with current.turns.turn():
        current.check_usable()
        current.check_between_steps("training more parameters")
        counters = current.clock.counters
        with counters.waiting("rank", f"to {VERB}, which another does not, or not yet"):
            current.running("add_param_group").model.model.prepare_more(current.directory.ranks)
        try:
            _train_more(current, add, counters.step)
        except BaseException as error:
            if current.run is None:
                current.training_step.fail(None, error, ahead=0)
            raise


def _train_more(current: SessionSlot, add: Callable[[], None], step: int) -> None:
    run = current.running(VERB)
    before, members, ranks = run.plan, run.plan.request.optimizers.members, _ranks_of(current, run.plan)
    with current.clock.counters.waiting("rank", f"to {VERB}, which another does not, or not yet"):
        ranks.settle(VERB, partial(_write_all, run, step), lambda _: None)
    run.committer.before_change_of_layout("add trained parameters")
    run.publisher.raise_failure()
    del run  # or a traceback would keep it
    counts = [len(member.param_groups) for member in members]

    def undo() -> None:
        for member, count in zip(members, counts, strict=True):
            del member.param_groups[count:]

    def prepare() -> tuple[Plan | None, Given]:
        add()
        plan = _plan_more(before)
        if plan is not None:
            current.directory.require_space(plan.space_by_drive())
        return plan, Given.of(before.request)

    try:
        (plan, ours), told = ranks.settle(VERB, prepare, lambda found: found[1].digests())
        check_alike(ours, ranks, told, "add_param_group")
        if plan is not None:
            _change(current, plan, undo)
    except BaseException:
        undo()
        raise
    finally:
        for group in before.inventory.groups:
            for _, parameter in group.parameters:
                before.request.optimizers.drop_state(parameter)


def _ranks_of(current: SessionSlot, plan: Plan) -> Ranks:
    """Return those that change their layouts together. Others may do so alone."""
    are_together = plan.request.model.is_sharded or plan.commit_every is not None
    return current.directory.ranks if are_together else Ranks()


def _change(current: SessionSlot, plan: Plan, undo: Callable[[], None]) -> None:
    run, ranks, directory = current.running(VERB), _ranks_of(current, plan), current.directory.path
    old_plan, old = run.plan, run.to_reopen()
    with (
        closing(GradientStash(directory)) as stash,
        closing(run.carried(plan.request.optimizers)) as content,
    ):
        stash.fill(run.model.gradients)
        del run
        current.detach(VERB, DETACHED)
        try:
            new = old.relaid(content, first_free_number(directory), ranks.are_together)
            ranks.settle(VERB, lambda: current.open(plan, new, stash), lambda _: None)
        except BaseException:
            undo()
            if current.run is not None:
                current.detach(VERB, DETACHED)
            if not ranks.lacks_one:
                _reopen(current, old_plan, old, stash)
            raise
        finally:
            if current.run is not None and not ranks.lacks_one:
                _remove_old_files(current, ranks)


def _reopen(current: SessionSlot, plan: Plan, old: Origin, stash: GradientStash) -> None:
    directory = current.directory.path
    try:
        run = current.open(plan, old, stash)
        if old.last is not None and named_files(directory) - run.file_names:  # the new one failed after its commit
            publish_commit(directory, old.last.data, plan.request.manager.fsync)
    except BaseException:
        current.drop()
        raise


def _remove_old_files(current: SessionSlot, ranks: Ranks) -> None:
    """Remove files that neither the session nor the commit names. [Note: before or after]"""
    directory = current.directory
    if ranks.are_together:
        beneath.unlink(directory.path / FALLBACK_NAME)
    directory.remove_strays(current.running(VERB).file_names | named_files(directory.path))


def _write_all(run: TrainingSession, step: int) -> None:
    check_between_steps(run, "add_param_group", "add the group between two steps")
    run.committer.write_all(step)


def _plan_more(before: Plan) -> Plan | None:
    """Return the plan for training the optimizer's present groups; None if they have no more than in `before`.

    Parameters and state keep their placement if the budget allows that.
    """
    request = before.request
    inventory = request.inventory(before=before.inventory)
    if inventory.forms.keys() == before.inventory.forms.keys():
        return None
    try:
        places = before.places["param"], before.places["state"]
        return plan_run(request, inventory, places, tuning=before.tuning)
    except BudgetError:
        found = plan_run(request, inventory, tuning=before.tuning)
        if before.commit_every is not None and found.commit_every is None:
            raise  # a run that is committed must not become one that is not
        return found


def check_between_steps(run: TrainingSession, verb: str, remedy: str) -> None:
    """Raise StateError in the middle of a forward, a backward or a gather, or if an alias would be cut off.

    Of parameters on NVMe, views and graphs raise when they are used. Arrays cannot: a warning is logged.

    Args:
        verb: what the user called, for the message.
        remedy: for a call in the middle of something.
    """
    doing = "manager.gather" if run.model.gathering.is_open else ""
    if is_in_backward() or run.model.passes.is_open:
        doing = "a forward or backward"
    if doing:
        raise StateError(f"{verb} in the middle of {doing}: {remedy}")
    if not run.plan.request.model.is_sharded:
        aliased = [(group.paged, name) for group in run.model.groups for name in group.aliased()]
        for is_paged, name in aliased:
            if not is_paged:
                raise StateError(
                    f"{verb}: something refers to the memory of parameter {name} (a view, .data, an array, the graph of a "
                    "forward), which moves: it would keep the values of now, while in plain torch it follows the parameter. Drop "
                    f"it, or keep a copy (`p.detach().clone()`), before {verb}"
                )
        if aliased:
            log.warning(
                "%s: something refers to the memory of parameter %s: a view or the graph of a forward raises when it is used; an "
                "array keeps the values of now, while in plain torch it follows the parameter",
                verb, aliased[0][1],
            )  # fmt: skip


# --- parking ------------------------------------------------------------------------------------------------------------


class ParkedParameters(FaultHandler):
    """Refuses all accesses to the parameters of a parked model.

    Args:
        parameters: by name; they have no data.
    """

    answers = False
    advice = PARKED + ", or take a copy of it before"

    def __init__(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        self._parameters = parameters
        self._names = {id(parameter): name for name, parameter in parameters}
        for _, parameter in parameters:
            parameter.data = without_data(parameter)
            guard(parameter, self)
            set_cold(parameter)

    def release(self) -> None:
        """Return the parameters to the session that adopts them."""
        for _, parameter in self._parameters:
            unguard(parameter)

    def leave(self) -> None:
        """Leave the parameters as those of a closed manager."""
        for _, parameter in self._parameters:
            leave_cold(parameter)

    def fault_in(self, parameter: nn.Parameter) -> NoReturn:
        raise StateError(f"parameter {self.describe(parameter)} has no data now: {self.advice}")

    def read(self, parameters: Sequence[nn.Parameter], function: object, run: object) -> NoReturn:
        self.fault_in(parameters[0])

    write, whole, detached = read, fault_in, fault_in

    def in_part(self, parameter: nn.Parameter, *_: object) -> NoReturn:
        self.fault_in(parameter)

    def describe(self, parameter: nn.Parameter) -> str:
        return self._names[id(parameter)]


class _ParkedState:
    """The state of a parked model's optimizers: refuses all accesses."""

    def __getattr__(self, name: str) -> NoReturn:
        raise StateError(f"the optimizer's state was accessed: {PARKED}")


@contextmanager
def parked(current: SessionSlot) -> Iterator[None]:
    """See SwapManager.parked."""
    old: tuple[Plan, Origin, ParkedParameters] | None = None
    with current.clock.leave_out():
        try:
            with current.turns.turn(), defer_signals:
                old = _park(current)
            yield
        finally:
            if old is not None:
                with current.turns.turn(), defer_signals:
                    _unpark(current, *old)


def _park(current: SessionSlot) -> tuple[Plan, Origin, ParkedParameters]:
    current.check_usable()
    run = current.running(PARK)
    _check_to_park(current, run)
    _write_rest(run, current.clock.counters.step)
    device = run.plan.request.device
    names = [entry for group in run.plan.inventory.groups for entry in group.parameters]
    plan, origin = run.plan, run.to_reopen()
    del run  # or its memory would stay
    try:
        current.detach(PARK, OLD_GRAPH, cast("StateOwner", _ParkedState()))
    except BaseException as error:
        current.leave(f"the manager could not be parked ({error}): {REOPEN}")
        raise
    parameters = ParkedParameters(names)
    current.leave(PARKED, [parameter for _, parameter in names])
    if device is not None:
        device.device.release_cached()
    return_free_memory()
    return plan, origin, parameters


def _check_to_park(current: SessionSlot, run: TrainingSession) -> None:
    """Raise unless the session may be parked now. Changes nothing."""
    check({*run.plan.request.features, Feature.PARKED})
    current.check_between_steps(PARK)
    check_between_steps(run, PARK, REMEDY)
    if run.model.updates.has_begun_early:
        raise StateError(f"{PARK} before the optimizer.step() of a backward that has updated parameters: {REMEDY}")
    if run.publisher.is_publishing or run.committer.has_snapshot:
        raise StateError(f"{PARK} while a snapshot is being written: wait for it before, `ticket.wait()`")
    for name, parameter in run.model.model.given.named_parameters():
        if parameter.grad is not None:
            raise StateError(f"{PARK} with gradients ({name} has one): call optimizer.zero_grad() before")


def _write_rest(run: TrainingSession, step: int) -> None:
    """Write what only memory has, and commit it if the run commits."""
    run.model.passes.abandon()
    run.committer.finish()
    run.committer.take_in_unannounced()
    if run.committer.committed != step:
        run.committer.write_all(step)
    run.pager.flush()
    run.committer.before_change_of_layout(PARK)
    run.publisher.raise_failure()


def _unpark(current: SessionSlot, plan: Plan, origin: Origin, parameters: ParkedParameters) -> None:
    if current.is_over:  # closed in the context, or another process's
        return
    parameters.release()
    try:
        current.open(plan, origin)
    except BaseException as error:
        parameters.leave()
        current.drop()
        current.leave(f"the manager could not take its memory back after manager.parked() ({error}): {REOPEN}")
        raise
    current.leave("")
