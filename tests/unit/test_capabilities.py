"""The table of what goes with what: refusals, the page of the documentation and the cases of tests are made from it."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from swapper.capabilities import RULES, Feature, Rule, broken_rule, check, rows

PAGE = Path(__file__).parents[2] / "docs/reference/combinations.md"


def with_needs(features: set[Feature]) -> set[Feature]:
    """Return the features with all that they need."""
    more = {rule.other for rule in RULES if rule.needs and rule.one in features}
    return features if more <= features else with_needs(features | more)


def test_the_page_shows_the_table() -> None:
    """Neighbors with the same rule and reason share a row."""
    shown = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")][1:]
    alike = itertools.groupby(rows(), key=lambda row: row[1:])
    assert shown == [f"| {'; '.join(row[0] for row in each)} | {what} | {why} |" for (what, why), each in alike]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.one.name} {rule.other.name}")
def test_what_breaks_a_rule_is_refused(rule: Rule) -> None:
    asked = with_needs({rule.one}) - {rule.other} if rule.needs else with_needs({rule.one, rule.other})
    broken = broken_rule(asked)
    assert rule.is_broken_by(asked) and broken is not None
    with pytest.raises(broken.error, match=f"^{re.escape(broken.message)}$"):
        check(asked)


def test_a_pair_has_one_rule() -> None:
    pairs = [frozenset({rule.one, rule.other}) for rule in RULES]
    assert len(pairs) == len(set(pairs))


@pytest.mark.parametrize("feature", Feature, ids=lambda feature: feature.name)
def test_each_feature_goes_with_what_it_needs(feature: Feature) -> None:
    assert broken_rule(with_needs({feature})) is None
