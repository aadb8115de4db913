"""Updates encoded state: it is decoded to fp32 for a run of the optimizer and encoded after it. In one pass: one_pass.py.

[Note: decoded runs] The fp32 values of a run lie in one scratch memory that is reused for the next run: they stay in the
processor's cache between decoding, the optimizer's passes and encoding. The scratch is part of the budget.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from swapper.errors import InvariantError, StateError
from swapper.train.layout.slices import CodedTensor, ParameterLocations, TensorLocation

PartOf = Callable[[TensorLocation, int, int], torch.Tensor]
"""Returns elements [begin, end) of the tensor at a location, flat."""


class CodedRun:
    """Owns the scratch of decoded values.

    Args:
        nbytes: of the scratch; see `scratch_bytes`.
        part: of a section's memory.
    """

    def __init__(self, nbytes: int, part: PartOf) -> None:
        self._numel = nbytes // torch.float32.itemsize
        self._part = part
        self._memory: torch.Tensor | None = None
        self._used = 0

    def begin_run(self) -> None:
        """Begin a run: decoded values of earlier ones are not used any more."""
        self._used = 0

    def decode(
        self, places: ParameterLocations, begin: int, end: int, param: torch.Tensor, known: Iterable[str]
    ) -> dict[str, torch.Tensor]:
        """Return elements [begin, end) of the encoded state, by key; of state that is not `known` yet any values."""
        values = {}
        for key, coded in places.coded.items():
            value = values[key] = self._take(end - begin)
            if key in known:
                coded.codec.decode(
                    self.parts(coded, begin, end), value, param.view(-1), threads=torch.get_num_threads()
                )
        return values

    def encode(
        self, places: ParameterLocations, begin: int, end: int, param: torch.Tensor, values: Mapping[str, torch.Tensor]
    ) -> None:
        """Store `values` of elements [begin, end), by key. Raises StateError: a codec cannot hold one."""
        for key, value in values.items():
            coded = places.coded[key]
            encode(coded, self.parts(coded, begin, end), value.reshape(-1), param.view(-1), places.name, key)

    def refresh_master(
        self, places: ParameterLocations, begin: int, end: int, before: torch.Tensor, run_elements: int
    ) -> None:
        """Encode elements [begin, end) of the master again, with the parameter that was changed from `before`."""
        for at in range(begin, end, run_elements):
            stop = min(at + run_elements, end)
            param = self._part(places.param, at, stop)
            old = before[at:stop].to(param.device)
            master = self.decode(places, at, stop, old, ("master",))["master"]
            is_same = old.view(torch.int16) == param.view(torch.int16)
            self.encode(places, at, stop, param, {"master": torch.where(is_same, master, param.float())})
            self.begin_run()

    def parts(self, coded: CodedTensor, begin: int, end: int) -> list[torch.Tensor]:
        """Return the parts of elements [begin, end) of an encoded tensor, flat."""
        return [self._part(place, *coded.part_of(place, begin, end)) for place in coded.parts]

    def _take(self, numel: int) -> torch.Tensor:
        if self._memory is None:
            self._memory = torch.empty(self._numel, dtype=torch.float32, device="cpu")
        begin, self._used = self._used, self._used + numel
        if self._used > self._numel:
            raise InvariantError(f"a run decodes {self._used} elements, and its scratch has {self._numel}")
        return self._memory[begin : self._used]


def encode(
    coded: CodedTensor, parts: Sequence[torch.Tensor], value: torch.Tensor, param: torch.Tensor, name: str, key: str
) -> None:
    """Encode `value` into `parts`. Raises StateError: the codec cannot hold it."""
    lost = coded.codec.encode(value, parts, param, threads=torch.get_num_threads())
    if lost:
        raise not_held(lost, coded, name, key)


def not_held(lost: int, coded: CodedTensor, name: str, key: str) -> StateError:
    """Return the error for `lost` values of a parameter's state that its codec cannot hold."""
    return StateError(
        f"{key!r} of {name} has {lost} values that the codec {coded.codec.name!r} cannot hold: they are not finite, or "
        "negative in what never is. Look for an infinite or NaN gradient (clip it, or skip the step), or store it exactly: "
        f"state_codec={{..., {key!r}: 'exact'}}"
    )
