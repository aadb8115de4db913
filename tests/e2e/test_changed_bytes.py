"""Bytes that change in the swap files during a run do not become part of a step, a commit or a snapshot."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import swapper
from e2e import changed_bytes
from e2e.changed_bytes import HARMS, Harm
from e2e.models import Net, loss_of, tokens, train_step
from e2e.twins import Twins, adamw, send_away
from swapper.durability.commit import read_commit
from swapper.durability.verify import verify
from swapper.runtime.process import rng_states, set_rng_states

UPDATES = ["step", "deferred", "backward"]
MakeTwins = Callable[..., Twins]


def named(error: BaseException) -> str:
    """Return what an error says; assert that it names file, offset, module and remedy."""
    assert isinstance(error, swapper.ChecksumError)
    assert error.path and error.nbytes > 0 and error.offset >= 0
    text = str(error)
    assert "these are not the bytes that were written" in text
    assert any(word in text for word in ("blocks.", "embedding", "position", "norm", "head")), text
    assert "Close the manager" in text or "close the manager" in text, text
    return text


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("family", ["param", "state"])
def test_a_changed_page_is_an_error_before_it_is_used(twins: MakeTwins, family: str, update: str, harm: Harm) -> None:
    pair = twins(Net(), update=update)
    pair.train(train_step, steps=2)
    pair.manager.current.run.committer.finish()
    send_away(pair.manager)
    committed = pair.manager.current.run.committer.committed
    changed_bytes.change(pair.manager, family, harm)
    with pytest.raises(swapper.ChecksumError) as failure:
        pair.train(train_step, steps=2)  # compares the losses too
    named(failure.value)
    with suppress(swapper.ChecksumError, swapper.StateError):
        pair.close()
    assert pair.manager.current.is_over
    # What is committed is the step before, whose checksums tell.
    record = read_commit(pair.directory / "rank-0-of-1")
    assert record is not None and record.step <= committed + 1
    assert verify(pair.directory)[0].faults


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("update", UPDATES)
def test_a_changed_gradient_is_an_error_before_it_is_used(twins: MakeTwins, update: str, harm: Harm) -> None:
    pair = twins(Net(), update=update, gradients="nvme")
    pair.train(train_step, steps=1)
    model = pair.swapped
    with pair.manager.accumulate():
        loss_of(model, tokens()).backward()
    send_away(pair.manager)
    changed_bytes.change(pair.manager, "grad", harm)
    with pytest.raises(
        swapper.ChecksumError, match=r"scratch.*(blocks|head|embedding|position).*it is no part.*resume='auto'"
    ):
        pair.optimizer.step()
        loss_of(model, tokens())  # uses them, where updates are deferred
    with suppress(swapper.ChecksumError):  # whose update is still to be done
        pair.close()


@pytest.mark.parametrize("options", [{}, {"optimizer_state": "nvme", "params": "host"}, {"gradients": "nvme"}])
@pytest.mark.parametrize("commit_every", ["free", None])
@pytest.mark.parametrize("update", UPDATES)
def test_without_damage_nothing_is_different(
    twins: MakeTwins, update: str, commit_every: Any, options: dict[str, Any]
) -> None:
    pair = twins(Net(), update=update, commit_every=commit_every, **options)
    pair.train(train_step, steps=3)
    pair.finish(paged=False)


def test_state_of_a_run_that_never_commits_is_compared_too(twins: MakeTwins) -> None:
    pair = twins(Net(), commit_every=None)
    pair.train(train_step, steps=2)
    send_away(pair.manager)
    changed_bytes.change(pair.manager, "state", changed_bytes.flip_bits)
    with pytest.raises(swapper.ChecksumError, match="snapshot"):
        pair.train(train_step, steps=1)


def test_check_reads_false_compares_nothing(twins: MakeTwins) -> None:
    """That is what it is for: it takes no time. And it shows that the harm is one."""
    pair = twins(Net(), commit_every=None, check_reads=False)
    pair.train(train_step, steps=2)
    send_away(pair.manager)
    assert all(page.crc32 is None for page in changed_bytes.stored_pages(pair.manager, "state"))
    changed_bytes.change(pair.manager, "param", changed_bytes.zero_a_block)
    with pytest.raises(AssertionError):
        pair.train(train_step, steps=1)  # another loss


def test_what_is_damaged_is_neither_committed_nor_a_snapshot(twins: MakeTwins, tmp_path: Path) -> None:
    pair = twins(Net())
    pair.train(train_step, steps=2)
    manager = pair.manager
    manager.current.run.committer.finish()
    send_away(manager)
    changed_bytes.change(manager, "param", changed_bytes.flip_bits)
    with pytest.raises(swapper.ChecksumError):
        pair.train(train_step, steps=1)
    record = read_commit(pair.directory / "rank-0-of-1")
    with pytest.raises(swapper.ChecksumError):
        manager.snapshot(tmp_path / "a.pt").result()
    assert not (tmp_path / "a.pt").exists()
    with suppress(swapper.ChecksumError):
        manager.close()
    again = read_commit(pair.directory / "rank-0-of-1")
    assert record is not None and again is not None and again.step == record.step
    assert again.sections == record.sections


@pytest.mark.parametrize("harm", HARMS)
def test_a_run_goes_on_from_the_last_commit_that_is_whole(twins: MakeTwins, harm: Harm) -> None:
    """Of a run that commits every second step, the step in between is damaged."""
    pair = twins(Net(), commit_every=2)
    pair.train(train_step, steps=2)
    random_state = rng_states()
    losses = pair.train(train_step, steps=1)
    manager = pair.manager
    manager.current.run.pager.flush()
    send_away(manager)
    changed_bytes.change(manager, "param", harm)
    with pytest.raises(swapper.ChecksumError, match=r"The last commit does not need them.*resume='auto'"):
        loss_of(pair.swapped, tokens())
    with suppress(swapper.ChecksumError):
        manager.close()
    model, plain = Net(), copy.deepcopy(pair.plain)
    with swapper.SwapManager(pair.directory, host_memory=manager._options.host_bytes, resume="auto") as second:
        assert second.step == 2
        model, optimizer = second.offload(model, adamw(model.parameters()), params="nvme", optimizer_state="nvme")
        set_rng_states(random_state)
        assert torch.equal(train_step(model, optimizer), losses[0])  # the third step again
        for name, parameter in model.named_parameters():
            with second.gather(parameter):
                assert torch.equal(parameter, plain.get_parameter(name)), name


@pytest.mark.parametrize("harm", HARMS[:3])
def test_a_run_that_goes_on_compares_what_the_commit_names(twins: MakeTwins, harm: Harm) -> None:
    pair = twins(Net())
    pair.train(train_step, steps=2)
    pair.manager.current.run.committer.finish()
    changed_bytes.change(pair.manager, "state", harm)
    budget = pair.manager._options.host_bytes
    with suppress(swapper.ChecksumError):
        pair.close()
    model = Net()
    with swapper.SwapManager(pair.directory, host_memory=budget, resume="auto") as second:
        model, optimizer = second.offload(model, adamw(model.parameters()), params="nvme", optimizer_state="nvme")
        with pytest.raises(swapper.ChecksumError, match=r"The last commit needs them.*resume='discard'"):
            train_step(model, optimizer)


def with_snapshot(twins: MakeTwins) -> tuple[Twins, Path]:
    """Return twins with a frozen embedding, and the snapshot of their second step."""
    model = Net()
    for parameter in model.embedding.parameters():
        parameter.requires_grad_(False)
    pair = twins(model)
    pair.train(train_step, steps=2)
    return pair, pair.manager.snapshot(pair.directory / "a.pt").result()


def test_a_snapshot_that_is_edited_with_its_time_put_back_is_noticed(twins: MakeTwins, tmp_path: Path) -> None:
    """By what is read of it, or by the next commit: its inode changed at a time that nobody can put back."""
    pair, path = with_snapshot(twins)
    if path.stat().st_nlink == 1:
        pytest.skip("the filesystem gives snapshots bytes of their own")
    pair.train(train_step, steps=2)
    pair.manager.current.run.committer.finish()
    before = path.stat()
    path.chmod(0o600)
    with path.open("r+b") as file:
        content = file.read()
        file.seek(0)
        file.write(changed_bytes.flip_bits(content, content))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises((swapper.ChecksumError, swapper.CheckpointError), match="embedding"):
        pair.train(train_step, steps=2)
        pair.manager.current.run.committer.finish()
    with suppress(swapper.SwapperError):
        pair.close()


def test_a_snapshot_that_is_renamed_or_removed_is_no_damage(twins: MakeTwins, caplog: Any) -> None:
    pair, path = with_snapshot(twins)
    pair.train(train_step, steps=1)
    path.rename(pair.directory / "b.pt")
    pair.train(train_step, steps=1)
    (pair.directory / "b.pt").unlink()
    pair.train(train_step, steps=2)
    pair.finish()
    assert "changed from outside" not in caplog.text


def test_what_is_damaged_is_not_carried_into_another_layout(twins: MakeTwins) -> None:
    """There it would get a checksum of its own. The run before is there still."""
    model = Net()
    model.blocks.requires_grad_(False)
    pair = twins(model, room_bytes=8 << 20)
    pair.train(train_step, steps=2)
    manager = pair.manager
    manager.current.run.committer.finish()
    send_away(manager)
    changed_bytes.change(manager, "param", changed_bytes.flip_bits)
    pair.swapped.blocks.requires_grad_(True)
    with pytest.raises(swapper.CheckpointError, match="do not have the checksum of their write"):
        pair.optimizer.add_param_group({"params": pair.swapped.blocks.parameters()})
    record = read_commit(pair.directory / "rank-0-of-1")
    assert record is not None and record.step == 2
    with suppress(swapper.SwapperError):
        pair.close()


def test_what_reads_well_a_second_time_is_not_damaged(twins: MakeTwins) -> None:
    """A page that was changed and is as it was again, as where a cable was to blame: the run goes on, exactly."""
    pair = twins(Net())
    pair.train(train_step, steps=2)
    manager = pair.manager
    manager.current.run.committer.finish()
    send_away(manager)
    changed_bytes.change(manager, "param", changed_bytes.flip_bits)
    random_state = rng_states()
    with pytest.raises(swapper.ChecksumError):
        train_step(pair.swapped, pair.optimizer)
    set_rng_states(random_state)
    changed_bytes.change(manager, "param", changed_bytes.flip_bits)  # back
    pair.train(train_step, steps=2)
    pair.finish()
