"""Says what a session begins from: its origin, and what ranks that train together give to it, which must be alike.

What decides the bits of a step must be the same on all. Those that hold the same model are compared: the ranks of a
DDP model, or of an FSDP2 model's mesh. A model of neither may be one stage of several. Where bytes lie (placements,
budgets, drives) changes no bit, and may differ. So may the places of the files that initial values come from: they
are compared by what they have, of which a sample is read ([Note: the same values]).

[Note: the same values] What ranks give to `init=` and `external=` must have the same values, from whatever path: rows
of two models would be trained as one, or replicas apart. Each rank says of every parameter where its values come
from: the model, a function, by its name, or a file, by dtype and shape. Of some of the file's tensors a few bytes are
compared too: an older checkpoint of the same model, left on one machine, differs in most of them. To read all of a
file would cost what sharding saves.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from swapper.durability.commit import CommitRecord, encode_commit
from swapper.durability.ranks import Ranks
from swapper.durability.recovery import Commit
from swapper.errors import ConfigError
from swapper.formats.sources import Source, open_source, opened, read_at
from swapper.formats.stored import StoredTensor
from swapper.paging.section import Section
from swapper.train.layout.content import GivenSource, SectionSource
from swapper.train.layout.given_values import find_stored, ids_to_fill
from swapper.train.optimizer.optimizer_set import OptimizerSet
from swapper.train.planning.request import Request
from swapper.train.state.optim import packed_groups


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The beginning of a session.

    Attributes:
        content: fills the sections; None: the files have their content.
        init: fills a model without values; None: nothing does. See Values.
        is_new: the session begins a run: step 0 is due to be committed.
        commit: has the optimizer's settings, if they are to be restored; says where existing files have the content.
        sections: of an earlier session of the same plan in this process, which say so in place of a commit.
        entries: the optimizer's state that is in no section; None: as `content` has it.
        files: names of the existing swap files, by number.
        first_file: number of the first file, if none exists.
        rewrites: all is written to new files and committed at once; the old ones stay until then.
        committed: the committed step, if any.
        last: the commit before the session.
        fallback: the commit before `last`, if the run can still return to that.
        replaced: the commit that stays on disk as the previous one when the session commits: other ranks may need it.
        edits: number of changes of parameters from outside since the last step.
    """

    content: SectionSource | None = None
    init: object = None
    is_new: bool = False
    commit: CommitRecord | None = None
    sections: Sequence[Section] = ()
    entries: Mapping[str, object] | None = None
    files: Mapping[int, str] = field(default_factory=dict)
    first_file: int = 0
    rewrites: bool = False
    committed: int | None = None
    last: Commit | None = None
    fallback: Commit | None = None
    replaced: Commit | None = None
    edits: int = 0

    @classmethod
    def new(cls, optimizers: OptimizerSet, init: object) -> Origin:
        return cls(content=GivenSource(optimizers), init=init, is_new=True)

    @classmethod
    def resumed(cls, record: CommitRecord, fallback: Commit | None) -> Origin:
        return cls(
            commit=record,
            entries=record.state_entries,
            files=record.files,
            committed=record.step,
            last=Commit.of(record, encode_commit(record)),
            fallback=fallback,
            edits=record.edits,
        )

    @classmethod
    def resharded(cls, first: CommitRecord, content: SectionSource, first_file: int) -> Origin:
        """Continue the run of other ranks, whose files `content` reads; `first` is the first one's commit."""
        entries, edits = first.state_entries, first.edits
        return cls(content=content, commit=first, entries=entries, first_file=first_file, rewrites=True, edits=edits)

    def relaid(self, content: SectionSource, first_file: int, are_together: bool) -> Origin:
        """Return the origin of a session with another layout, in place of one that this would reopen."""
        last = self.last if are_together else None
        return Origin(
            content=content,
            entries=self.entries,
            first_file=first_file,
            rewrites=True,
            replaced=last,
            edits=self.edits + 1,
        )


# --- what ranks give --------------------------------------------------------------------------------------------------

MAX_SAMPLED = 256
"""Of a file's tensors: a choice. Each is a read of some 0.1 ms, or 1 ms over a network."""
SAMPLE_BYTES = 4096
"""From the middle of a tensor: a choice."""

Digests = tuple[tuple[int, ...], dict[str, str]]
"""The ranks that a rank is compared with, and digests of what it gives, by subject."""

_REMEDIES = {
    "model": "Build the same model on all ranks, from the same configuration",
    "fully_shard calls": "Call fully_shard on the same modules of all ranks, with the same options",
    "optimizer": "Make the same optimizer on all ranks, with the same settings",
    "options": "Pass the same to manager.offload on all ranks",
    "initial values": "Pass the same init= and external= on all ranks, or copies of the same files",
}


@dataclass(frozen=True)
class Given:
    """What a rank gives.

    Attributes:
        peers: the ranks that it is compared with.
        lines: of text, by subject.
        files: that initial values come from, for an error.
    """

    peers: tuple[int, ...]
    lines: Mapping[str, Sequence[str]]
    files: str

    @classmethod
    def of(
        cls, request: Request, ranks: Ranks | None = None, init: object = None, external: Collection[str] = ()
    ) -> Given:
        """Describe a request.

        Args:
            ranks: all of them, if the run is new; without others no file is read.
            init: the user's source of initial values, or None.
            external: names of the parameters that this rank reads in place.

        Raises:
            CheckpointError, IoError, UnsupportedError: a file of initial values cannot be read, or is of another model.
        """
        peers, lines, files = request.model.peers(), _subjects(request), ""
        if ranks is not None and ranks.are_together and peers:
            lines["initial values"] = list(_initial_values(request, init, external))
            named = {"init": init, "external": request.options.external and request.options.external.path}
            paths = {name: path for name, path in named.items() if isinstance(path, str | os.PathLike)}
            files = "".join(f", {name}={str(path)!r}" for name, path in paths.items())
        return cls(peers, lines, files)

    def digests(self) -> Digests:
        """Return a digest of each subject."""
        return self.peers, {
            name: hashlib.sha256("\n".join(lines).encode()).hexdigest() for name, lines in self.lines.items()
        }


def check_alike(given: Given, ranks: Ranks, told: Sequence[Digests], verb: str = "manager.offload") -> None:
    """Compare the digests of all ranks. All ranks must call it.

    Args:
        told: for each rank the result of `Given.digests`.
        verb: what they are about to call.

    Raises:
        ConfigError: they differ; names the first difference.
    """
    if not ranks.are_together:
        return
    for name, remedy in _REMEDIES.items():
        pairs = [(rank, peer) for rank, (peers, _) in enumerate(told) for peer in peers]
        differing = [(rank, peer) for rank, peer in pairs if told[rank][1].get(name) != told[peer][1].get(name)]
        if not differing:
            continue
        rank, other = differing[0]
        every = ranks.gather((given.lines.get(name, ()), given.files), "compare what ranks give")
        mine, theirs = _first_difference(every[rank][0], every[other][0])
        if name == "initial values":
            mine, theirs = mine + every[rank][1], theirs + every[other][1]
        raise ConfigError(
            f"ranks give different {name.rstrip('s')}s to {verb}: rank {rank} has {mine}, and rank {other} has {theirs}. "
            f"{remedy}"
        )


def _subjects(request: Request) -> dict[str, Sequence[str]]:
    optimizers, options = OptimizerSet(request.given_optimizers), request.options
    return {
        "model": [
            f"{name}: {tuple(p.shape)}, {p.dtype}{'' if p.requires_grad else ', frozen'}"
            for name, p in request.model.given.named_parameters()
        ],
        "fully_shard calls": request.model.gathers(),
        "optimizer": [optimizers.kind, *_settings(packed_groups(optimizers.param_groups))],
        "options": [
            f"update={options.update!r}",
            f"master_weights={options.master_weights}",
            f"state_codec={options.state_codec!r}",
            f"accelerator={options.accelerator}",
        ],
    }


def _initial_values(request: Request, init: object, external: Collection[str]) -> Iterator[str]:
    """Yield where each parameter's values come from, in a text that is the same for the same values."""
    given = request.model.given
    from_init = ids_to_fill(given, external) if init is not None else set()
    parameters = dict(given.named_parameters())
    absent = {name: p for name, p in parameters.items() if name in external and p.is_meta}  # other values were compared
    names = [name for name, p in parameters.items() if id(p) in from_init]
    texts: dict[str, str] = {}
    if absent and request.frozen is not None:
        texts = _file_texts(request.frozen.source, request.frozen.find(given, absent))
    if callable(init):
        function = f"{getattr(init, '__module__', '')}.{getattr(init, '__qualname__', type(init).__qualname__)}"
        texts.update(dict.fromkeys(names, f"the function {function}"))
    elif names and isinstance(init, str | os.PathLike):
        source = open_source(init)
        stored = find_stored(source, given, from_init)
        texts.update(_file_texts(source, {name: stored[name] for name in names}))
    for name in parameters:
        yield f"{name} from {texts.get(name, 'the model as it is')}"


def _file_texts(source: Source, stored: Mapping[str, StoredTensor]) -> dict[str, str]:
    """Return a text for the content of each tensor, by name."""
    sampled = set(sorted(stored)[:: len(stored) // MAX_SAMPLED + 1])
    with ExitStack() as stack:
        files: dict[object, int] = {}
        texts = {}
        for name, one in stored.items():
            texts[name] = f"a file, {one.dtype} {list(one.shape)}"
            if name not in sampled:
                continue
            sample = 0
            begin = max(one.nbytes - SAMPLE_BYTES, 0) // 2
            for _, extent in source.extents(one.path, one.offset + begin, min(one.nbytes, SAMPLE_BYTES)):
                if extent.path not in files:
                    files[extent.path] = stack.enter_context(opened(extent.path))
                sample = zlib.crc32(read_at(files[extent.path], extent.path, extent.offset, extent.nbytes), sample)
            texts[name] += f", sample {sample:08x}"
    return texts


def _settings(groups: Sequence[dict[str, Any]]) -> Iterator[str]:
    for number, group in enumerate(groups):
        yield from (f"{key}={_text(value)} in group {number}" for key, value in sorted(group.items()))


def _text(value: object) -> str:
    """Return a text that is the same for the same value in every process."""
    if isinstance(value, torch.Tensor):
        return str(value.tolist()) if value.numel() == 1 else f"a tensor of {tuple(value.shape)}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    return repr(value) if isinstance(value, (int, float, str, bool, type(None))) else type(value).__qualname__


def _first_difference(mine: Sequence[str], theirs: Sequence[str]) -> tuple[str, str]:
    for index in range(max(len(mine), len(theirs))):
        pair = tuple(lines[index] if index < len(lines) else "nothing there" for lines in (mine, theirs))
        if pair[0] != pair[1]:
            return pair[0], pair[1]
    return "what its digest says", "another"
