"""Prepares processes whose children run cases, and runs what the tests of all fuzzers do."""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import pytest

from fuzz import cases


@pytest.fixture
def prepared() -> Iterator[None]:
    """This process as `cases.run` prepares it, and as it was before."""
    with warnings.catch_warnings():
        cases.prepare()
        yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def run_some(prepared: None, capsys: pytest.CaptureFixture[str]) -> Callable[[cases.Kind, int], None]:
    """Runs some cases of this commit, none of which fails, and not all of which are refused."""

    def run(kind: cases.Kind, count: int) -> None:
        arguments = ["--cases", str(count), "--minutes", "2", "--seed", os.environ["SWAPPER_TEST_SEED"]]
        result, said = cases.run(kind, arguments), capsys.readouterr().out
        assert result == 0, said
        assert "'clean'" in said, said

    return run


@pytest.fixture
def check_noticed(prepared: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Checks that a fuzzer notices what is wrong, and makes the program smaller."""

    def check(
        kind: cases.Kind,
        program: cases.Program,
        actions: MutableMapping[str, Callable[..., Any]],
        name: str,
        said: str,
        act: Callable[..., Any],
    ) -> None:
        """Have the action `name` of a program that is clean do `act` first, without its source of chance if it is given one."""
        original = actions[name]

        def act_before(*given: Any) -> Any:
            act(*(given[:-1] or given))
            return original(*given)

        assert cases.watched(kind, program) is None
        monkeypatch.setitem(actions, name, act_before)
        problem = cases.watched(kind, program)
        assert problem is not None and said in problem, problem
        smaller, _ = cases.reduced(kind, program, problem)
        assert len(json.dumps(smaller)) < len(json.dumps(program))

    return check
