"""Plans a load without carrying it out, and predicts its seconds: of the first token, and of each token after it.

The first pass reads every weight; later ones read what does not stay.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from swapper.formats.sources import Rename, Source, open_source
from swapper.infer.matching import match
from swapper.infer.planning.infer_placement import fit
from swapper.infer.planning.planned_load import ExpertUse, LoadPrediction, PlannedLoad
from swapper.infer.planning.streaming_plan import build_streaming_plan
from swapper.io.drives import find_tuning
from swapper.options import parse_host_memory


@dataclass(frozen=True)
class LoadPlan(PlannedLoad):
    """The placement of a model's weights by `swapper.load`, for kernels on the CPU.

    Attributes:
        model, matched: the user's model, which is not changed, and the tensors of its parameters.
        source: the weights.
        host_bytes: the budget.
        fitting: what streams, and the pool.
    """

    def predict(
        self,
        tokens: int,
        *,
        batch: int = 1,
        example: Sequence[object] | None = None,
        experts: ExpertUse | None = None,
        drive_read: int | str | None = None,
    ) -> LoadPrediction:
        """Predict the seconds of the first token, after a prompt, and of each token after it.

        The computing is measured here and now, in some seconds: the operations of a forward, and the computing of weights that
        are stored otherwise. A cache of keys and values is not in it.

        Args:
            tokens: of the prompt, of one sample.
            batch: samples that pass together.
            example: arguments of the first pass. Default: integers of shape (batch, tokens), as of a language model.
            experts: for a mixture whose experts are read one by one: what it uses of them.
            drive_read: bytes a second, or "7GB/s". Default: what `swapper tune` measured.

        Raises:
            ConfigError: the drive's speed is not known, or a value is not positive; a mixture needs `experts`.
        """
        from swapper.forecast.load import predict_load
        from swapper.forecast.step import drive_rates

        drive = drive_rates(find_tuning(next(iter(self.source.stamps)).parent), (drive_read, drive_read))
        return predict_load(self, drive, tokens, batch=batch, example=example, experts=experts)


def plan_load(
    model: nn.Module,
    source: str | os.PathLike[str] | Source,
    *,
    host_memory: int | str = "auto",
    strict: bool = True,
    dtype: torch.dtype | None = None,
    rename: Rename = None,
) -> LoadPlan:
    """Return the plan of `swapper.load` with these arguments, for kernels on the CPU. Reads headers only, and changes nothing.

    Args:
        model, source, host_memory, strict, dtype, rename: as of `swapper.load`.

    Raises:
        As swapper.load, except errors that only transfers can cause.
    """
    opened = source if isinstance(source, Source) else open_source(source)
    host_bytes = parse_host_memory(host_memory)
    matched = match(model, opened, strict=strict, dtype=dtype, rename=rename)
    fitting = fit(build_streaming_plan(model, matched, opened.joined.keys()), host_bytes)
    return LoadPlan(model, matched, opened, host_bytes, fitting)
