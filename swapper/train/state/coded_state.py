"""Reads, updates and writes encoded tensors of the optimizer's state, decoded to fp32. In one pass: one_pass.py.

[Note: decoded runs] The fp32 values of a run of the optimizer lie in one scratch memory that is reused for the next run: they
stay in the processor's cache between decoding, the optimizer's passes and encoding. The scratch is part of the budget. On an
accelerator the slices of the ring share it: updates run one after the other on their stream. Values that a codec cannot hold are
counted there, and the counts come down with the slice: reading them at once would wait for the kernels.

Outside of the order of a step a whole tensor is decoded or encoded in pieces that need no more pages than a slice of an update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from swapper.checkpoint.encoded_state import in_nameless_file
from swapper.device.device_memory import DEVICE_ALIGNMENT_BYTES, DeviceStorage
from swapper.errors import InvariantError, StateError
from swapper.io.tensor_bytes import round_up
from swapper.paging.layout import Slot
from swapper.paging.pager import Pager
from swapper.paging.schedule import Access
from swapper.train.layout.slices import CUT_ELEMENTS, CodedTensor, ParameterLocations, TensorLocation

CodecCounts = tuple[torch.Tensor, Callable[[torch.Tensor], StateError | None]]
"""Counts of what codecs cannot hold, on a device, and what finds the error in them once they are in host memory. As uint8."""
ALIGNMENT_ELEMENTS = DEVICE_ALIGNMENT_BYTES // torch.float32.itemsize
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


class CodedSlices(CodedRun):
    """Owns the scratch of decoded values on a device, as of the first slice with encoded state, until `free`.

    Args:
        nbytes: of the scratch; see `device_scratch_bytes`.
        part: of the slice's memory on the device.
        new_storage: returns memory there.
    """

    def __init__(self, nbytes: int, part: PartOf, new_storage: Callable[[int], DeviceStorage]) -> None:
        super().__init__(nbytes, part)
        self._nbytes = nbytes
        self._new_storage = new_storage
        self._storage: DeviceStorage | None = None
        self._encoded: list[tuple[CodedTensor, str, str]] = []  # of the slice
        self._unheld: torch.Tensor | None = None  # of each

    def begin_slice(self, coded_tensors: int) -> None:
        """Begin a slice with this number of pieces of encoded tensors, on the current stream.

        Raises:
            BudgetError: the device has no memory for the scratch.
        """
        self.begin_run()
        self._encoded.clear()
        self._unheld = None
        if not coded_tensors:
            return
        if self._storage is None:
            self._storage = self._new_storage(self._nbytes)
            self._memory = self._storage.memory.view(torch.float32)
        self._unheld = torch.zeros(coded_tensors, dtype=torch.int32, device=self._storage.memory.device)

    def encode(
        self, places: ParameterLocations, begin: int, end: int, param: torch.Tensor, values: Mapping[str, torch.Tensor]
    ) -> None:
        """Queue what `CodedRun.encode` does. What a codec cannot hold is counted: see `counts`."""
        if self._unheld is None:
            return
        for key, value in values.items():
            coded, number = places.coded[key], len(self._encoded)
            self._encoded.append((coded, places.name, key))
            coded.codec.encode_counting(
                value.reshape(-1), self.parts(coded, begin, end), param.view(-1), self._unheld[number : number + 1]
            )

    def counts(self) -> CodecCounts | None:
        """Return the slice's counts; None if nothing was encoded."""
        if self._unheld is None or not self._encoded:
            return None
        encoded = tuple(self._encoded)

        def error_in(counts: torch.Tensor) -> StateError | None:
            found = zip(counts.view(torch.int32).tolist(), encoded, strict=False)
            return next((not_held(lost, *which) for lost, which in found if lost), None)

        return self._unheld.view(torch.uint8), error_in

    def free(self) -> None:
        """Give the scratch back."""
        storage, self._storage, self._memory = self._storage, None, None
        self._unheld = None
        if storage is not None:
            storage.free()

    def _take(self, numel: int) -> torch.Tensor:
        return super()._take(round_up(numel, ALIGNMENT_ELEMENTS))[:numel]


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


RESIDENT_ELEMENTS = 1 << 20
"""Elements of a piece of a tensor in memory: a choice."""


class CodedTensors:
    """Owns nothing; knows which tensors are encoded.

    Args:
        trained: the locations of all trained parameters.
        pager: makes the leases.
        directory: for files of decoded tensors.
    """

    def __init__(self, trained: Iterable[ParameterLocations], pager: Pager, directory: Path) -> None:
        self._of = {places.name: places for places in trained if places.coded}
        coded = [each for places in self._of.values() for each in places.coded.values()]
        self._parts = {(place.slot.spec.owner, place.slot.spec.kind) for each in coded for place in each.parts}
        self._pager = pager
        self._make = in_nameless_file(directory)

    def has(self, name: str, key: str) -> bool:
        """Return True if this tensor is stored encoded."""
        return name in self._of and key in self._of[name].coded

    @property
    def names(self) -> dict[str, str]:
        """The names of the codecs in use, by key of the state."""
        return {key: coded.codec.name for places in self._of.values() for key, coded in places.coded.items()}

    def keys(self, name: str) -> list[str]:
        """Return the keys of a parameter's encoded state, without its master."""
        return [key for key in self._of[name].coded if key != "master"] if name in self._of else []

    def is_part(self, slot: Slot) -> bool:
        """Return True if a slot has a part of an encoded tensor."""
        return (slot.spec.owner, slot.spec.kind) in self._parts

    def stored(self, name: str, key: str) -> dict[str, Any]:
        """Return the name of the codec, and the parts by suffix: tensors in their sections, whose data may be cold."""
        coded = self._of[name].coded[key]
        suffixes = [suffix for suffix, _, _ in coded.codec.parts(coded.numel)]
        parts = [place.section.tensor(place.slot) for place in coded.parts]
        return {"codec": coded.codec.name, **dict(zip(suffixes, parts, strict=True))}

    def read(self, name: str, key: str, on_drive: bool = False) -> torch.Tensor:
        """Return a decoded copy; `on_drive`, in a file without a name, so that it takes no memory for long."""
        places = self._of[name]
        shape = places.param.slot.spec.shape
        found = self._make(places.numel) if on_drive else torch.empty(places.numel, dtype=torch.float32, device="cpu")
        for begin, end, parts, param in self._pieces(places, places.coded[key], write=False):
            places.coded[key].codec.decode(parts, found[begin:end], param)
        return found.view(shape)

    def check(self, name: str, key: str, value: torch.Tensor) -> None:
        """Raise ValueError if the codec cannot hold `value`."""
        places = self._of[name]
        coded, flat = places.coded[key], value.detach().reshape(-1)
        for begin in range(0, places.numel, RESIDENT_ELEMENTS):
            piece = flat[begin : begin + RESIDENT_ELEMENTS].float().contiguous()
            made = [
                torch.empty(count, dtype=dtype, device="cpu") for _, dtype, count in coded.codec.parts(piece.numel())
            ]
            lost = coded.codec.encode(piece, made)
            if lost:
                raise ValueError(
                    f"the state {key!r} of {name} has {lost} values that the codec {coded.codec.name!r} cannot hold: they are not "
                    f"finite, or negative in a second moment. Mend them, or offload with a state_codec that keeps {key!r} exact"
                )

    def write(self, name: str, key: str, value: torch.Tensor | None) -> None:
        """Encode `value`, of the parameter's shape; None for zeros."""
        places = self._of[name]
        coded = places.coded[key]
        flat = None if value is None else value.detach().reshape(-1)
        for begin, end, parts, param in self._pieces(places, coded, write=True):
            if flat is None:
                for part in parts:
                    part.zero_()
            else:
                encode(coded, parts, flat[begin:end].float().contiguous(), param, name, key)

    def _pieces(
        self, places: ParameterLocations, coded: CodedTensor, write: bool
    ) -> Iterator[tuple[int, int, list[torch.Tensor], torch.Tensor]]:
        """Yield (begin, end, parts, parameter) of all pieces, each leased meanwhile; the parameter only if needed."""
        step = _piece_elements(coded)
        for begin in range(0, places.numel, step):
            end = min(begin + step, places.numel)
            changed = coded.pages(begin, end)
            read = places.param.pages(begin, end) if coded.codec.needs_parameter else []
            access = Access(None, (*changed, *read), writes=frozenset(changed if write else ()))
            with self._pager.leased(access):
                parts = [_part(place, *coded.part_of(place, begin, end)) for place in coded.parts]
                yield begin, end, parts, _part(places.param, begin, end)


def _piece_elements(coded: CodedTensor) -> int:
    """Return how many elements make a page of the largest part."""
    pages = [place.section.pages[0].nbytes for place in coded.parts if place.section.pages]
    itemsize = max(place.slot.spec.dtype.itemsize for place in coded.parts)
    return max(min(pages, default=RESIDENT_ELEMENTS) // itemsize // CUT_ELEMENTS, 1) * CUT_ELEMENTS


def _part(place: TensorLocation, begin: int, end: int) -> torch.Tensor:
    return place.section.tensor(place.slot).view(-1)[begin:end]
