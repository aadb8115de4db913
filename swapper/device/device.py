"""One accelerator: streams, events, memory and copies. Only this module uses torch's device modules.

It calls them through `torch.get_device_module`, so CUDA, ROCm and XPU are alike. Calls are queued and return at once;
their later errors, as of a lost device, become `DeviceError`. Tests put a module in front of it whose copies run as
late as an event allows.

Finds the part of host memory (NUMA node) that a device is attached to: copies from others cross a link between processors.

CUDA graphs are refused where they cannot work: a graph has the addresses of what its kernels read, and runs no hooks.

[Note: graphs of compiled code] `torch.compile(mode="reduce-overhead")` records a graph of the code between two hooks, and again
whenever an address has changed: some 128 times, each with memory of its own, for a group that is copied for each use. A group
that stays on the device keeps its address, and its graphs work. Compiled code runs below a frame of torch's, which has the
compiler and its options.
"""

from __future__ import annotations

import os
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from swapper.errors import ConfigError, DeviceError, UnsupportedError
from swapper.io.registered import CudaRegistrar
from swapper.io.tensor_bytes import device_errors

SYSFS = Path("/sys")


def node_of_device(properties: object, sysfs: Path = SYSFS) -> int | None:
    """Return the number of the node of a device; None if there is only one node, or the system does not say.

    Args:
        properties: of the device, as torch has them: pci_domain_id, pci_bus_id, pci_device_id.
        sysfs: where the kernel describes devices.
    """
    try:
        domain, bus, device = (int(getattr(properties, f"pci_{part}_id")) for part in ("domain", "bus", "device"))
        if (sysfs / "devices/system/node/online").read_text().strip() == "0":
            return None
        text = (sysfs / f"bus/pci/devices/{domain:04x}:{bus:02x}:{device:02x}.0/numa_node").read_text()
        node = int(text)
    except (AttributeError, TypeError, ValueError, OSError):  # another kind of device, or a container that hides it
        return None
    return node if node >= 0 else None


OUT_OF_MEMORY = torch.OutOfMemoryError
RANGES = "SWAPPER_NVTX"
"""Environment variable: 1 for ranges in NVIDIA's profilers."""
_NOTHING: AbstractContextManager[object] = nullcontext()


@dataclass(frozen=True, slots=True)
class QueuedCopy:
    """Copies that were queued on one stream, one behind the other: the events before the first and after the last of them."""

    began: torch.Event
    over: torch.Event


class Device:
    """Streams, events and memory of one accelerator: `device` with its index, and torch's module for it.

    Attributes:
        is_there: it computes; False: it is only planned for.
    """

    is_there = True

    def __init__(self, device: torch.device, module: object = None) -> None:
        self.device = device
        self._module: Any = torch.get_device_module(device) if module is None else module
        # A thread that waits for an event sleeps: CUDA's own default lets it spin, on a core that computes or reads.
        self._event_options = {"blocking": True} if device.type == "cuda" else {}
        self._has_ranges = os.environ.get(RANGES) == "1" and hasattr(self._module, "nvtx")
        self._own_failures = 0  # allocations for which there was no memory
        self._borders: tuple[int, ...] = ()  # addresses where registered memory begins or ends, sorted

    def __str__(self) -> str:
        return str(self.device)

    # --- streams and events: as torch has them; none of these calls waits ------------------------------------------

    def current_stream(self) -> torch.Stream:
        """Return the stream on which the user's kernels are queued in this thread."""
        stream: torch.Stream = self._module.current_stream(self.device)
        return stream

    def new_stream(self) -> torch.Stream:
        with self.named("a new stream"):
            stream: torch.Stream = self._module.Stream(device=self.device)
        return stream

    def on(self, stream: torch.Stream) -> AbstractContextManager[Any]:
        """Return a context that queues on `stream`."""
        context: AbstractContextManager[object] = self._module.stream(stream)
        return context

    def record(self, stream: torch.Stream, is_timed: bool = False) -> torch.Event:
        """Return an event that passes when all that is queued on `stream` by now is done; `is_timed` for one that knows when."""
        with self.named("an event"):
            event: torch.Event = self._module.Event(enable_timing=is_timed, **self._event_options)
            event.record(stream)
        return event

    def let_wait(self, stream: torch.Stream, event: torch.Event) -> None:
        """Have what is queued on `stream` from now on wait for `event`. This thread does not."""
        with self.named("an event"):
            stream.wait_event(event)

    def has_passed(self, event: torch.Event) -> bool:
        with self.named("a copy"):
            return bool(event.query())

    def synchronize(self) -> None:
        """Wait, in this thread, until all that was queued is done."""
        with self.named("what was queued"):
            self._module.synchronize(self.device)

    def wait_for(self, event: torch.Event) -> None:
        """Wait, in this thread."""
        with self.named("a copy"):
            event.synchronize()

    def range(self, what: str, name: object = "") -> AbstractContextManager[object]:
        """Return a context that NVIDIA's profilers show as "swapper: `what` `name`", if the environment's SWAPPER_NVTX is 1."""
        return self._module.nvtx.range(f"swapper: {what} {name}") if self._has_ranges else _NOTHING

    def refuse_capture(self, name: str) -> None:
        """Raise UnsupportedError if the current stream records a graph, which would have no copy of the group `name`."""
        is_capturing = getattr(self._module, "is_current_stream_capturing", None)
        if is_capturing is not None and is_capturing():
            raise UnsupportedError(
                f"a CUDA graph is being captured, and {name} is copied to the device when it is needed, which a graph does not do: "
                "capture parts of the model without weights that swapper has, or run without torch.cuda.graph and "
                "make_graphed_callables"
            )

    # --- memory ---------------------------------------------------------------------------------------------------

    def resize(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Give `storage` memory of `nbytes` bytes, in the order of the current stream; 0 frees it.

        Raises:
            torch.OutOfMemoryError: the allocator has none.
        """
        with self.named(f"memory of {nbytes} bytes"), self._noting_failure():
            storage.resize_(nbytes)

    def empty(self, nbytes: int) -> torch.Tensor:
        """Return memory of any content: uint8 of shape (nbytes,).

        Raises:
            torch.OutOfMemoryError: there is none.
        """
        with self.named(f"memory of {nbytes} bytes"), self._noting_failure():
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def empty_on_host(self, nbytes: int) -> torch.Tensor:
        """Return page-locked memory, for copies that nobody waits for: uint8 of shape (nbytes,)."""
        with self.named(f"host memory of {nbytes} bytes"):
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.device.type != "cpu", device="cpu")

    def copy(self, pieces: Sequence[tuple[torch.Tensor, torch.Tensor]], stream: torch.Stream) -> QueuedCopy:
        """Queue copies on `stream`, and return them. Both sides must stay until they are over.

        Args:
            pieces: (target, source), uint8 of the same shape (nbytes,), one of them in host memory. [Note: slabs],
                io/registered.py
        """
        nbytes = sum(source.nbytes for _, source in pieces)
        began = self.record(stream, is_timed=True)
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            self.named(f"a copy of {nbytes} bytes"),
            self._copying(stream),
        ):
            for target, source in pieces:
                cuts = self._cuts(target) + self._cuts(source)
                if not cuts:
                    self._copy(target, source, stream)
                    continue
                for begin, end in pairwise(sorted({0, source.nbytes, *cuts})):
                    self._copy(target[begin:end], source[begin:end], stream)
        return QueuedCopy(began, self.record(stream, is_timed=True))

    def copy_seconds(self, copy: QueuedCopy) -> float:
        """Return how long copies took that are over, by the device's clock: from the first's beginning to the last's end."""
        with self.named("a copy's time"):
            return float(copy.began.elapsed_time(copy.over)) / 1000

    def _copying(self, stream: torch.Stream) -> AbstractContextManager[object]:
        """Return a context whose copies are queued on `stream`: entering it takes as long as queueing a copy."""
        return self.on(stream)

    def _copy(self, target: torch.Tensor, source: torch.Tensor, stream: torch.Stream) -> None:
        target.copy_(source, non_blocking=True)

    def _cuts(self, memory: torch.Tensor) -> list[int]:
        """Return the offsets in `memory`, but for 0, where memory that is registered begins or ends."""
        borders, begin = self._borders, memory.data_ptr()
        first = bisect_right(borders, begin)
        if first == len(borders) or borders[first] >= begin + memory.nbytes:
            return []
        return [border - begin for border in borders[first : bisect_left(borders, begin + memory.nbytes)]]

    def free_bytes(self) -> int:
        """Return what could still be allocated: free memory, and what torch's allocator caches."""
        with self.named("the memory's size"):
            free_bytes, _ = self._module.mem_get_info(self.device)
            kept_bytes = self._module.memory_reserved(self.device) - self._module.memory_allocated(self.device)
        return int(free_bytes) + int(kept_bytes)

    def max_allocated_bytes(self) -> int:
        """Return the peak of what torch's allocator has given out; 0 if it does not say."""
        peak = getattr(self._module, "max_memory_allocated", None)
        return 0 if peak is None else int(peak(self.device))

    def free_at_peak(self) -> int:
        """Return what could have been allocated in addition at the peak."""
        with self.named("the memory's size"):
            allocated_bytes = int(self._module.memory_allocated(self.device))
        return self.free_bytes() - max(self.max_allocated_bytes() - allocated_bytes, 0)

    def failures(self) -> int:
        """Return how often the allocator had no memory for others than this object, so far."""
        stats = getattr(self._module, "memory_stats_as_nested_dict", None)
        return 0 if stats is None else int(stats(self.device).get("num_ooms", 0)) - self._own_failures

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        try:
            yield
        except OUT_OF_MEMORY:
            self._own_failures += 1
            raise

    def total_bytes(self) -> int:
        """Return how much memory it has."""
        with self.named("the memory's size"):
            return int(self._module.mem_get_info(self.device)[1])

    @property
    def identity(self) -> tuple[object, ...]:
        """The same for all objects that are this accelerator."""
        return self.device, id(self._module)

    def release_cached(self) -> None:
        """Have torch's allocator free what it caches."""
        self._module.empty_cache()

    @cached_property
    def node(self) -> int | None:
        """The NUMA node that it is attached to, if there are several."""
        properties = getattr(self._module, "get_device_properties", None)
        return None if properties is None or self.device.type == "cpu" else node_of_device(properties(self.device))

    # --- page-locked memory -----------------------------------------------------------------------------------------

    @property
    def can_register(self) -> bool:
        """Whether host memory can be registered, so that copies need no staging."""
        return self.device.type == "cuda"  # ROCm too; torch has no such call for others

    def register(self, address: int, nbytes: int) -> str:
        """Register host memory. Returns "", or why it is not. For `swapper.io.registered.Registration` and its thread."""
        return CudaRegistrar(self.device, self._module).register(address, nbytes)

    def unregister(self, address: int) -> None:
        CudaRegistrar(self.device, self._module).unregister(address)

    def expect(self, address: int, nbytes: int) -> None:
        """Cut copies where memory that will be registered begins and ends. They stay cut there: that is never wrong."""
        self._borders = tuple(sorted({*self._borders, address, address + nbytes}))

    def named(self, what: str) -> AbstractContextManager[None]:
        """Return a context that turns what the device raises into a DeviceError that names `what`."""
        return device_errors(self.device, what)


def open_device(device: str | torch.device | Device) -> Device | None:
    """Return the accelerator that `device` names; None for the CPU, whose memory is host memory.

    Raises:
        ConfigError: it is no device's name, or none that can hold weights.
        DeviceError: there is no such device, or its driver does not work.
    """
    if isinstance(device, Device):
        return device
    try:
        named = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device={device!r} is not a device: use 'cpu', 'cuda', 'cuda:1', ...") from error
    if named.type == "cpu":
        return None
    if named.type == "meta":
        raise ConfigError(f"device={device!r} holds no weights: use 'cpu', 'cuda', 'cuda:1', ...")
    try:
        module = torch.get_device_module(named)
        count = int(module.device_count()) if module.is_available() else 0
        if count > (named.index or 0):
            return Device(torch.device(named.type, module.current_device() if named.index is None else named.index))
    except (RuntimeError, AssertionError, AttributeError) as error:  # torch built without it, a driver too old, ...
        raise DeviceError(f"device={device!r} cannot be used: {error}. device='cpu' can") from error
    if count == 0:
        raise DeviceError(
            f"device={device!r}: torch {torch.__version__} finds no such device here: {_why_none(module)}. device='cpu' runs "
            "anywhere"
        )
    raise DeviceError(f"device={device!r}: there are {count}, counted from 0")


def _why_none(module: Any) -> str:
    """Return why torch can use no device: initialization tells, counting devices does not."""
    try:
        module.init()
    except (RuntimeError, AssertionError, AttributeError) as error:  # AttributeError: it cannot say
        return str(error).strip().partition("\n")[0].rstrip(".")
    return "no driver, one too old, or a torch that was built without it"


_EVAL_FRAME = "torch._dynamo.eval_frame"
_KEY = "triton.cudagraphs"  # of inductor's options


def refuse_compiled_graphs(name: str) -> None:
    """Raise UnsupportedError if this thread runs compiled code that records graphs. [Note: graphs of compiled code]"""
    if _EVAL_FRAME in sys.modules and _records_graphs(sys._getframe(1)):
        raise UnsupportedError(
            f"torch.compile was told to record CUDA graphs, and the memory of {name} on the device is another one at each use: "
            "leave mode='reduce-overhead' out ('max-autotune-no-cudagraphs' works), or raise device_memory until all stays there"
        )


def _records_graphs(frame: FrameType | None) -> bool:
    file = sys.modules[_EVAL_FRAME].__file__
    while frame is not None:
        if frame.f_code.co_filename == file and (compiler := frame.f_locals.get("callback")) is not None:
            while hasattr(compiler, "_torchdynamo_orig_backend"):
                compiler = compiler._torchdynamo_orig_backend
            if getattr(compiler, "compiler_name", "") == "cudagraphs" or _asks_for_graphs(compiler):
                return True
        frame = frame.f_back
    return False


def _asks_for_graphs(compiler: object) -> bool:
    """Return True if inductor is to record graphs: it was said for this code, or for all."""
    config = getattr(compiler, "config", None)
    if not isinstance(config, dict):
        return False
    inductor = sys.modules.get("torch._inductor.config")
    return bool(config.get(_KEY, inductor is not None and inductor.triton.cudagraphs))
