"""Says what goes with what. Refusals, the page docs/reference/combinations.md and the cases of tests come from this table.

What depends on the hardware, on the optimizer's own code or on the model's forward is not here: that is found out where it is
used.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import Enum

from swapper.errors import ConfigError, SwapperError, UnsupportedError


class Feature(Enum):
    """What a user can ask for, as messages and the documentation call it."""

    DEVICE = "a device"
    PARAMS_ON_DEVICE = "params='device'"
    STATE_ON_DEVICE = "optimizer_state='device'"
    GRADIENTS_ON_DEVICE = "gradients='device'"
    GRADIENTS_LEAVE = "gradients that leave a device, or go to NVMe, as they arrive"
    UPDATE_ON_DEVICE = "update_on='device'"
    KERNEL = "update_with='kernel'"
    STOCHASTIC_ROUNDING = "stochastic_rounding"
    ENCODED_MASTERS = "a codec of the masters"
    MASTERS = "master_weights"
    IN_FORWARD = "update='deferred'"
    IN_BACKWARD = "update='backward'"
    CLIPPING = "clipping by the norm of all gradients"
    SEVERAL = "several optimizers"
    SHARDED = "a model that fully_shard has sharded"
    REPLICATED = "DistributedDataParallel"
    RANKS_ALONE = "ranks='alone'"
    ONE_STEP = "one_step"
    ACCUMULATE_BATCHES = "accumulate_batches"
    PARKED = "manager.parked"
    KEEP = "snapshot(keep=)"
    REFERENCE = "snapshot(frozen='reference')"


@dataclass(frozen=True)
class Rule:
    """A feature that needs another one, or does not go with it.

    Attributes:
        why: the reason and the remedy, a clause.
        needs: `one` needs `other`; else they exclude each other.
        error: raised if the rule is broken.
    """

    one: Feature
    other: Feature
    why: str
    needs: bool = False
    error: type[SwapperError] = UnsupportedError

    def is_broken_by(self, features: Collection[Feature]) -> bool:
        return self.one in features and (self.other in features) is not self.needs

    @property
    def message(self) -> str:
        verb = "needs" if self.needs else "does not go with"
        return f"{self.one.value} {verb} {self.other.value}: {self.why}"


def _needs(one: Feature, other: Feature, why: str) -> Rule:
    return Rule(one, other, why, needs=True, error=ConfigError)


_F = Feature
_WITH_DEVICE = "say manager.offload(..., device='cuda')"
_UPDATE_THERE = "otherwise it is needed in host memory. Say device='cuda', and leave out update_on='cpu'"
_SHARDED = "FSDP2 gathers shards from host memory, and gradients go there. Leave it out"
_NOT_SHARDED = "it is for models that a rank has whole"
_IN_PASSING = "offload with update='step'"

RULES: tuple[Rule, ...] = (
    Rule(
        _F.STOCHASTIC_ROUNDING,
        _F.ENCODED_MASTERS,
        "they are stored as what is missing to parameters that are rounded to nearest. Leave one of them out: "
        "state_codec={'master': 'exact', ...}",
        error=ConfigError,
    ),
    Rule(_F.KERNEL, _F.SEVERAL, "have one optimizer, with param_groups, or leave update_with out"),
    Rule(_F.SHARDED, _F.SEVERAL, "have one optimizer, with param_groups"),
    *(Rule(one, _F.SHARDED, _SHARDED) for one in (_F.PARAMS_ON_DEVICE, _F.GRADIENTS_ON_DEVICE)),
    Rule(_F.MASTERS, _F.SHARDED, "with a mixed-precision policy the shards are the fp32 masters. Leave it out"),
    *(Rule(one, _F.SHARDED, _NOT_SHARDED) for one in (_F.ACCUMULATE_BATCHES, _F.PARKED, _F.KEEP, _F.REFERENCE)),
    Rule(_F.RANKS_ALONE, _F.SHARDED, "its ranks resume together: leave out ranks='alone'", error=ConfigError),
    Rule(
        _F.REPLICATED,
        _F.IN_BACKWARD,
        "gradients are averaged over processes during backward, and the update would use them before that. Offload with "
        "update='step' or update='deferred'",
    ),
    Rule(
        _F.REPLICATED,
        _F.GRADIENTS_LEAVE,
        "gradients are averaged where they are computed, and would have left before that. Offload with gradients='host', on "
        "a device with gradients='device', or shard the model with fully_shard",
    ),
    Rule(
        _F.CLIPPING,
        _F.IN_BACKWARD,
        "gradients are used in backward, group by group, before there is a norm of all. Offload with update='step' or "
        "update='deferred'; what needs one gradient alone (clipping its values) can be done in a hook, "
        "parameter.register_post_accumulate_grad_hook, which runs before the update",
    ),
    Rule(_F.ONE_STEP, _F.IN_BACKWARD, _IN_PASSING),
    _needs(_F.PARAMS_ON_DEVICE, _F.DEVICE, _WITH_DEVICE),
    _needs(_F.UPDATE_ON_DEVICE, _F.DEVICE, _WITH_DEVICE),
    _needs(_F.STATE_ON_DEVICE, _F.UPDATE_ON_DEVICE, _UPDATE_THERE),
    _needs(_F.GRADIENTS_ON_DEVICE, _F.UPDATE_ON_DEVICE, _UPDATE_THERE),
    _needs(
        _F.KERNEL,
        _F.UPDATE_ON_DEVICE,
        "say device='cuda', accelerator=swapper.Accelerator(update_with='kernel')",
    ),
    _needs(_F.STOCHASTIC_ROUNDING, _F.KERNEL, "torch's optimizers round to nearest"),
)


def broken_rule(features: Collection[Feature]) -> Rule | None:
    """Return the first rule that these features, all that are asked for, break; None: they go together.

    Exclusions come first: another option would not mend them.
    """
    return next((rule for rule in RULES if rule.is_broken_by(features)), None)


def check(features: Collection[Feature]) -> None:
    """Check that these features, all that are asked for, go together.

    Raises:
        ConfigError: one needs another, or options contradict each other.
        UnsupportedError: two do not go together.
    """
    rule = broken_rule(features)
    if rule is not None:
        raise rule.error(rule.message)


def rows() -> Iterator[tuple[str, str, str]]:
    """Yield the table for people: a feature, what it needs or excludes, and why."""
    for rule in RULES:
        yield rule.one.value, f"{'needs' if rule.needs else 'not with'} {rule.other.value}", rule.why
