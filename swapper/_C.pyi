"""swapper's data plane: page-locked memory, files, and the engine that moves bytes between them.

It works with bytes, addresses and file offsets, and knows no tensors. All objects are thread-safe. In a forked child
none of them works: methods raise `IoError`, buffers raise `BufferError`, and destructors do nothing, so that the child
can exit. Numbers out of range, or misaligned for memory, raise `ConfigError` (a `ValueError`); refusals of the system
raise `IoError` (an `OSError`), both from `swapper.errors`.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import final

from swapper.errors import IoError

@final
class Arena:
    """Page-locked host memory: one shared mapping of a memfd, never copied into forked children.

    The memory is zero initially. It returns to the system when the arena is closed (or collected) and the last view,
    window, engine that registered it, and transfer is gone.
    """

    def __init__(
        self,
        nbytes: int,
        *,
        head_bytes: int | None = None,
        lock: bool = True,
        huge_pages: bool = True,
        filled_once: bool = False,
        node: int | None = None,
    ) -> None:
        """Allocates `nbytes` bytes, rounded up to 4096; with `huge_pages`, in pages of 2 MiB as far as there are any.

        If the system refuses to lock or has no huge pages, the arena works without; see `lock_reason`.

        Args:
            head_bytes: bytes to populate now; `prefault_rest`, or a touch, populates the others. None: all.
            lock: lock the memory.
            huge_pages: use pages of 2 MiB.
            filled_once: no memory is read into again and again, so skip huge pages where they prove expensive.
            node: the NUMA node that memory is taken from, as long as that has some. None: as the system decides.

        Raises:
            ConfigError: `nbytes` is 0 or too large for any machine.
            IoError: there is not enough address space, or the system refuses memory.
        """

    def prefault_rest(self) -> None:
        """Starts a thread of low priority that populates the memory beyond the head. Call it once."""

    @property
    def populated_bytes(self) -> int:
        """All bytes before this offset are populated."""

    def wait_populated(self, nbytes: int) -> None:
        """Waits until the first `nbytes` bytes are populated.

        Raises:
            IoError: the system refused some of them.
        """

    @property
    def nbytes(self) -> int: ...
    @property
    def address(self) -> int: ...
    @property
    def node(self) -> int | None:
        """The NUMA node that was asked for; None if the system refused it, too."""

    @property
    def locked(self) -> bool: ...
    @property
    def huge_bytes(self) -> int:
        """Bytes in pages of 2 MiB, which drives transfer faster."""
    @property
    def lock_reason(self) -> str:
        """Why the memory is not locked; empty if it is."""

    def view(self, offset: int, nbytes: int) -> View:
        """The bytes [offset, offset + nbytes), of any alignment."""

    def window(self, nbytes: int) -> Window:
        """A new range of addresses of `nbytes` bytes, rounded up to 4096, with nothing mapped."""

    def close(self) -> None:
        """Releases the memory; later uses of this object raise `IoError`. Views and windows stay valid."""

    def retire(self) -> None:
        """Closes, and gives the memory back at once, whatever has views of it. What was copied out is still there."""

@final
class View:
    """A part of an arena, as a writable buffer: `torch.frombuffer(view, dtype=...)` makes a tensor of it, uncopied.

    Keeps the arena's memory alive, and is itself kept alive by tensors and memoryviews made from it.
    """

    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def watch(self, write: Ticket) -> None:
        """Has every thread that changes the view wait until `write` is over. Begins on a page; the page of its end counts too.

        System calls that write there fail with EFAULT meanwhile. Call `unwatch` when it is over. Does nothing with
        SWAPPER_OFF=sigsegv.

        Raises:
            IoError: the system has no more mappings.
        """

    def unwatch(self) -> None:
        """Ends `watch`, if it was called. Raises IoError: as that."""

    def copy_out(self) -> None:
        """Has ordinary memory with the same bytes take the place of the arena's, at the same addresses. Begins on a page.

        Raises:
            IoError: there is no memory.
        """

    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class TruncationWatch:
    """Has accesses to a mapped range of a file that somebody truncates find zeros, and notes them; they would end the process.

    Goes before the mapping does. The range is no part of another one.
    """

    def __init__(self, address: int, nbytes: int) -> None: ...
    @property
    def is_lost(self) -> bool: ...

def ranges_lost() -> int:
    """Returns the number of ranges lost so far, of all watches."""

@final
class Window:
    """A fixed range of addresses into which parts of the arena are mapped and unmapped.

    Implements the writable buffer protocol over its whole range, mapped or not: making a tensor of it touches nothing.
    Touching an unmapped address is a segmentation fault. Begins on a 2 MiB boundary.
    """

    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def map(self, window_offset: int, arena_offset: int, nbytes: int, guarded: bool = False) -> bool:
        """Maps the arena's [arena_offset, arena_offset + nbytes) at `window_offset`, replacing the old mapping.

        The same memory is then at both addresses. All three numbers are multiples of 4096. Releases the GIL.

        Returns True if code wrote to the very same range while it was absent (`unmap`): the written bytes are copied
        into the arena's memory first, and the range is guarded and counts as written. `guarded`: as if `guard` had been
        called before any write.

        Raises:
            ConfigError: misaligned, or outside of the window or the arena.
            IoError: out of memory, or of mappings (`vm.max_map_count`).
        """

    def copy_out(self, window_offset: int, arena_offset: int, nbytes: int) -> None:
        """Has ordinary memory with the bytes that are mapped there take their place, as `View.copy_out` does."""

    def fill(self, window_offset: int, nbytes: int) -> bool:
        """Has ordinary memory with the bytes that reads of an unmapped range find take its place, until the window is gone.

        Returns False if nothing is behind the range, or it is mapped.

        Raises:
            IoError: there is no memory, or the bytes cannot be read.
        """

    def guard(self, window_offset: int, nbytes: int) -> None:
        """Makes the memory mapped at [window_offset, window_offset + nbytes) read-only, until the next `map` there.

        A write still succeeds: the first one makes the range writable again and is noted.
        """

    def written_at(self, window_offset: int) -> int:
        """The window offset of the first write into the range at `window_offset`, guarded or absent; -1 without one."""

    def unmap(self, window_offset: int, nbytes: int, source: File | View | None = None, source_offset: int = 0) -> None:
        """Unmaps [window_offset, window_offset + nbytes); the arena keeps the bytes.

        Args:
            source: has the same bytes from `source_offset` on. Until the next `map`, reads of the addresses return
                them, and writes there are kept (see `map`, `written_at`), as are writes since `guard`. Without it every
                access is a segmentation fault. The window keeps the file open, or the view's arena alive.
        """

    def promise(
        self, window_offset: int, nbytes: int, arena_offset: int, write: Ticket, source: File, source_offset: int = 0
    ) -> None:
        """Unmaps the range, as `unmap` does, while `write` is still in flight to `source`.

        Until `write` is over, reads of the addresses return the bytes from the arena, and afterwards from `source`;
        still from the arena if the write failed. So the next use of the arena's memory can be submitted with
        `after=write`.
        """

    def __buffer__(self, flags: int, /) -> memoryview: ...

def writes_noted() -> int:
    """The number of noted writes in guarded or absent ranges of all windows of the process; see `Window.written_at`."""

@final
class File:
    """An open file, direct (O_DIRECT, past the page cache) if the filesystem supports it.

    Its descriptor stays open until the transfers in flight are done, even after `close`. Every use after `close` raises
    `IoError` with errno EBADF, except `path`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        create: bool = False,
        read_only: bool = False,
        direct: bool | None = None,
        at: int = -1,
    ) -> None:
        """Opens `path`, a regular file or a block device; anything else raises `IoError` at once, a FIFO included.

        Args:
            create: make it, with mode 0600; it must not exist.
            read_only: refuse writes.
            direct: True insists (`IoError` if refused), False uses the page cache, None tries and falls back.
            at: a directory's descriptor; opens the last part of `path` in that directory, unless it is a link.
        """

    @property
    def path(self) -> str: ...
    @property
    def direct(self) -> bool: ...
    @property
    def alignment(self) -> int:
        """Offsets and lengths of direct transfers are multiples of this, by statx; 4096 if the system does not say.

        The engine takes any; a read that does not fit is staged in a slot (see `Engine`).
        """

    @property
    def memory_alignment(self) -> int:
        """Addresses of direct transfers are multiples of this. The engine takes any."""

    @property
    def reason(self) -> str:
        """Why the file is direct or buffered."""

    @property
    def nbytes(self) -> int:
        """The file's size now."""

    def allocate(self, nbytes: int, *, offset: int = 0) -> None:
        """Makes the file at least `nbytes` long, with space on the drive (ENOSPC raises here, not later).

        If the filesystem cannot allocate, only the size is set. Releases the GIL.
        """

    def truncate(self, nbytes: int) -> None:
        """Sets the size."""

    def sync(self) -> None:
        """fdatasync: returns when all written bytes are on the drive. Releases the GIL."""

    def close(self) -> None: ...

@final
class Engine:
    """Moves bytes between files and memory in the background, with one thread. One engine per drive.

    An operation is cut into pieces of `piece_bytes`, up to `depth` of which are in flight; while there are both reads
    and writes, each gets at most half. In each direction operations start in the order of submission, except that one
    that waits for another (`after`) lets later ones pass. The engine keeps the memory until the transfer is over: an
    arena's or a window's by itself, any other by `keep`. Until the ticket is done, do not change the memory of a write,
    nor use that of a read. Submitting waits, without the GIL, while 4096 operations wait to be started.

    Any address, any offset, any size. What direct I/O cannot transfer as it is goes chunk by chunk through a fixed ring
    of slots, allocated at its first use; edges of writes go through the page cache. A write changes exactly its bytes
    and leaves exactly the file size that pwrite would, even next to other writes into the same sector.
    """

    def __init__(
        self,
        *,
        backend: str = "auto",
        depth: int = 32,
        piece_bytes: int = 1 << 20,
        arena: Arena | None = None,
        staging_bytes: int = 32 << 20,
        stage: bool = False,
        chaos: Mapping[str, float] | None = None,
        debug: bool = False,
    ) -> None:
        """Starts the engine.

        Args:
            backend: "uring" (io_uring), "aio" (libaio's system calls), "threads" (pread and pwrite), or "auto": the
                first of them that works here. "chaos", or "chaos:" and one of these names: that one, with injected
                faults.
            depth: kernel calls in flight, 1 to 4096.
            piece_bytes: bytes of one kernel call, a multiple of 4096 up to 1 GiB.
            arena: memory to register with the kernel, if the backend can and may. The engine keeps it alive.
            staging_bytes: maximum memory of the ring of slots, at least 256 KiB; none until it is needed.
            stage: True stages every transfer of a direct file, unless its memory is an arena or a window; for tests.
                False stages only where safety needs it: reads into other memory on kernels before 6.5, where a
                concurrent fork could lose bytes.
            chaos: seed and rates of injected faults, each optional: "seed"; "short", "interrupt" (EINTR), "again"
                (EAGAIN), "delay", "reorder", and the ones that fail operations, "eio" and "enospc", from 0 to 1.
                Without this, the "chaos" backend has the first five at 0.1 and the others at 0, from seed 0. With it,
                any backend gets them. "until" is the number of an open descriptor, a pipe's or an eventfd's, which the
                engine duplicates: no transfer ends while it is not readable, and `drain`, `close` and the interpreter's
                end wait until it is.
            debug: fail an operation whose memory somebody changed while it was in flight. For a write the CRC-32 of its
                memory is compared; the memory of a read is filled with 0xA5 at once and checked before the bytes
                arrive. Both from submission on, or from the end of `after`. Costs time.

        Raises:
            ConfigError: an option is out of range, or the requested backend does not work here (with the reason).
        """

    @property
    def backend(self) -> str: ...
    @property
    def reason(self) -> str:
        """The reason for this backend, and its features on this machine."""

    @property
    def depth(self) -> int:
        """Kernel calls in flight, at most."""

    @property
    def piece_bytes(self) -> int:
        """Bytes of one kernel call, at most."""

    @property
    def bytes_read(self) -> int:
        """Bytes of completed pieces, since the start; what was read only to round to sectors does not count."""

    @property
    def bytes_written(self) -> int: ...
    @property
    def in_flight(self) -> int:
        """Tickets that are not done."""

    @property
    def staging_bytes(self) -> int:
        """Bytes of the ring of slots: 0 until it is needed."""

    def read(
        self,
        file: File,
        offset: int,
        address: int,
        nbytes: int,
        *,
        keep: object = None,
        after: Ticket | None = None,
        checksum: bool = False,
        expected: int | None = None,
    ) -> Ticket:
        """Submits a read of file[offset : offset + nbytes] into memory at `address`.

        Args:
            keep: the owner of memory that is neither an arena's nor a window's, such as a tensor: it is kept until the
                transfer is over, even if the ticket is dropped earlier.
            after: begin only when this ticket is done (of any engine); if it failed, fail without touching anything.
            checksum: compute the CRC-32 of the bytes, on the I/O thread; see `Ticket.crc32`.
            expected: the CRC-32 that the bytes must have: otherwise the transfer fails (EBADMSG).

        Raises:
            ConfigError: the memory is neither an arena's nor a window's, and there is no `keep`.
            IoError: file or engine closed (EBADF); a range beyond the maximum of a file (EINVAL); forked child. Later
                failures are the ticket's error.
        """

    def write(
        self,
        file: File,
        offset: int,
        address: int,
        nbytes: int,
        *,
        keep: object = None,
        after: Ticket | None = None,
        checksum: bool = False,
    ) -> Ticket:
        """Submits a write of memory at `address` to file[offset : offset + nbytes]. Otherwise as `read`.

        Of two writes into the same bytes, neither of which waits for the other, either may come last.
        """

    def drain(self) -> None:
        """Waits until all tickets are done. Does not raise for those that failed. Releases the GIL; Ctrl-C works."""

    def close(self) -> None:
        """Refuses new operations, drains, and ends the thread. May be called again. Done at exit if forgotten."""

@final
class Ticket:
    """The completion of one operation. Holds the operation's memory (`keep`) until it is seen to be done."""

    @property
    def done(self) -> bool:
        """The operation has finished, successfully or not. Takes no lock."""

    @property
    def nbytes(self) -> int:
        """The requested bytes."""

    @property
    def crc32(self) -> int:
        """CRC-32 of the bytes transferred. Raises `ValueError` if not requested or not done, `IoError` if failed."""

    @property
    def error(self) -> IoError | None:
        """The `IoError` of a failed operation; None while pending, and when all is well."""

    @property
    def cancelled(self) -> bool:
        """`cancel` was in time."""

    def cancel(self) -> bool:
        """Calls the operation off if it has not begun; returns True if it is called off.

        The ticket is done very soon after, with an `IoError` that says so, and operations that wait for it fail too. Its
        memory and its file are not touched.
        """

    def exception(self, timeout_s: float | None = None) -> IoError | None:
        """Waits as `wait` does, and gives the `IoError` of a failed operation, or None, instead of raising it.

        Raises:
            TimeoutError: not done after `timeout_s` seconds.
        """

    def notify(self, fd: int) -> None:
        """Adds 1 to the eventfd `fd` when the ticket is done; at once if it is.

        This is how an event loop awaits it, without a thread: `fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)`,
        `loop.add_reader(fd, callback)`, and `notify(fd)` for each ticket of interest. The callback calls `os.eventfd_read(fd)`
        and then looks which tickets are `done`. One eventfd serves any number of tickets, of any engines; `fd` may be closed
        at any time. Python code is never called from the I/O thread.

        Raises:
            IoError: `fd` is not an open descriptor, or there are no more to be had.
        """

    @property
    def submitted_s(self) -> float:
        """The time of submission, on the clock of `time.monotonic()`."""

    @property
    def completed_s(self) -> float:
        """The time of completion, on the same clock. Raises `ValueError` before that."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until done, without the GIL; Ctrl-C works. False if `timeout_s` seconds pass first.

        Raises:
            IoError: the operation failed; the same error as `error`.
        """

def crc32(buffer: object, value: int = 0) -> int:
    """CRC-32 of a contiguous buffer, continued from `value`: the same numbers as `zlib.crc32`, several times faster."""

def crc32_address(address: int, nbytes: int, value: int = 0) -> int:
    """CRC-32 of the memory at `address`."""

def crc32_combine(a: int, b: int, nbytes_b: int) -> int:
    """CRC-32 of A followed by B, given `a` of A and `b` of B; B has `nbytes_b` bytes."""

def codec_isas() -> list[str]:
    """The instruction sets that the codecs' kernels can use on this processor, fastest first."""

def codec_encode(
    codec: str, value: int, count: int, parts: Sequence[int], parameter: int, threads: int = 1, isa: str = ""
) -> int:
    """Codes `count` floats at the address `value` into the addresses `parts`; gives how many elements they cannot hold.

    `swapper.codecs` checks sizes and dtypes and holds the memory; `parameter` is 0 where the codec needs none. `isa` is one of
    `codec_isas()`, the fastest if empty: the bits are the same.

    Raises:
        ConfigError: there is no such codec or instruction set, or parts are missing.
    """

def codec_decode(
    codec: str, parts: Sequence[int], count: int, value: int, parameter: int, threads: int = 1, isa: str = ""
) -> None:
    """The reverse of `codec_encode`."""

def dequantise(
    rows: int, count: int, columns: int, block: int, bits: int, value: tuple[int, str], threads: int = 1, isa: str = ""
) -> None:
    """Writes the values of `count` rows of a weight in 8 or 4 bits, at the address `rows`, to the address `value`.

    `swapper.checkpoint.quantization` has the format, checks sizes and holds the memory; `value` is an address and "fp32" or
    "bf16". `isa` as of `codec_encode`.

    Raises:
        ConfigError: there is no such instruction set, or the rows or values have another kind or shape.
    """

def codec_adamw(
    count: int,
    parameter: tuple[int, str],
    gradient: tuple[int, str],
    states: Sequence[tuple[str, Sequence[int]]],
    numbers: tuple[float, ...],
    threads: int = 1,
    isa: str = "",
) -> int:
    """Decodes, updates by AdamW, rounds the parameters and encodes, in one pass; gives how many elements codes cannot hold.

    `parameter` and `gradient` are an address and "fp32" or "bf16". `states` are (codec, addresses of its parts) of the masters,
    unless the parameters are fp32 and their own, and of the two moments. `numbers` are the gradients' factor, decay, beta1,
    1 - beta1, beta2, 1 - beta2, root_scale, eps, step_size.
    """

def codec_torch_adam(
    count: int,
    parameter: tuple[int, str],
    gradient: tuple[int, str],
    states: Sequence[tuple[str, Sequence[int]]],
    numbers: tuple[float | bool, ...],
    uses_fma: bool,
    roots: int,
    threads: int = 1,
    isa: str = "",
) -> int:
    """The same in the order of operations of torch.optim's Adam and AdamW. Parameters and gradients may be "fp16" too.

    `numbers` are decay, l2, 1 - beta1, beta2, 1 - beta2, root_scale, eps, step_size (negative), maximize. `uses_fma` adds
    products before they are rounded. `roots` is the address of MKL's vmsSqrt, or 0 for correctly rounded ones.
    """

@final
class DeferredSignals:
    """A context manager, which may be nested: in its thread handlers of signals are deferred to the end of the outermost one.

    Its entry and its exit cannot be interrupted: no exception is raised between one of them and the context's body.

    Args:
        prepare: called at each entry until it returns True; has signals handled by `DeferredHandler`.
    """

    def __init__(self, prepare: Callable[[], bool]) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, type: object, value: object, traceback: object) -> None:
        """Leaves the context; if it was the outermost, calls handlers of the signals that came, and raises what they raise."""

@final
class DeferredHandler:
    """A handler of a signal that calls `handler`, or has it called later. Of SIGINT it calls the second of a context at once."""

    def __init__(self, handler: Callable[[int, FrameType | None], object]) -> None: ...
    @property
    def handler(self) -> Callable[[int, FrameType | None], object]: ...
    def __call__(self, number: int, frame: FrameType | None) -> object: ...

@final
class SteadyLock:
    """A mutex whose holder is within `signals`.

    Args:
        expected: the class of errors that leave whole what the lock guards.

    Attributes:
        broken_by: name of the class of the last other exception that was raised within; empty: there was none.
    """

    def __init__(self, signals: DeferredSignals, expected: type[BaseException]) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, type: object, value: object, traceback: object) -> None: ...
    def locked(self) -> bool: ...
    @property
    def broken_by(self) -> str: ...
