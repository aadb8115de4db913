"""Says how a session begins: new, resumed from a commit, resharded, relaid out to train more, or reopened from its files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from swapper.durability.commit import CommitRecord, encode_commit
from swapper.durability.recovery import Commit
from swapper.paging.section import Section
from swapper.train.layout.content import GivenSource, SectionSource
from swapper.train.optimizer.optimizer_set import OptimizerSet


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
    init: Any = None
    is_new: bool = False
    commit: CommitRecord | None = None
    sections: Sequence[Section] = ()
    entries: Mapping[str, Any] | None = None
    files: Mapping[int, str] = field(default_factory=dict)
    first_file: int = 0
    rewrites: bool = False
    committed: int | None = None
    last: Commit | None = None
    fallback: Commit | None = None
    replaced: Commit | None = None
    edits: int = 0

    @classmethod
    def new(cls, optimizers: OptimizerSet, init: Any) -> Origin:
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
