"""Loads NVIDIA's cuFile (GPUDirect Storage) at run time: no header and no library is needed to install swapper.

`open_cufile` opens the library and the driver once, or says what is missing. A `CuFile` reads and writes device memory
by blocking calls, which release the GIL; gds_handle.py runs them in threads.

[Note: compatibility mode] If cuFile cannot bypass host memory, it silently copies through it. That is refused twice:
`CuFile` checks what its driver supports, and `open_cufile` forbids the mode (CUFILE_ALLOW_COMPAT_MODE, unless the user
has set it), so that registering a file on an unsupported filesystem fails.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import sysconfig
import threading
from pathlib import Path

import torch

from swapper.errors import IoError, UnsupportedError

NAMES = ("libcufile.so.0", "libcufile.so")
_FD_TYPE = 1  # CU_FILE_HANDLE_TYPE_OPAQUE_FD
_FIRST_ERROR = 5000  # CUFILEOP_BASE_ERR; lower numbers are the system's errors
_ERRORS = {  # CUfileOpError in cufile.h; those caused by the machine or the file
    5001: "CU_FILE_DRIVER_NOT_INITIALIZED",
    5004: "CU_FILE_DRIVER_VERSION_MISMATCH",
    5005: "CU_FILE_DRIVER_VERSION_READ_ERROR",
    5007: "CU_FILE_PLATFORM_NOT_SUPPORTED",
    5008: "CU_FILE_IO_NOT_SUPPORTED",
    5009: "CU_FILE_DEVICE_NOT_SUPPORTED",
    5010: "CU_FILE_NVFS_DRIVER_ERROR",
    5011: "CU_FILE_CUDA_DRIVER_ERROR",
    5016: "CU_FILE_INVALID_MAPPING_SIZE",
    5018: "CU_FILE_INVALID_FILE_TYPE",
    5025: "CU_FILE_PERMISSION_DENIED",
    5029: "CU_FILE_DEVICE_NOT_FOUND",
    5030: "CU_FILE_INTERNAL_ERROR",
    5033: "CU_FILE_NVFS_SETUP_ERROR",
    5034: "CU_FILE_IO_DISABLED",
    5036: "CU_FILE_GPU_MEMORY_PINNING_FAILED",
}


class _Status(ctypes.Structure):
    _fields_ = (("error", ctypes.c_int), ("cuda_error", ctypes.c_int))


class _DriverProperties(ctypes.Structure):
    """The beginning of CUfileDrvProps_t, with space for later versions' fields."""

    _fields_ = (
        ("nvfs_major", ctypes.c_uint),
        ("nvfs_minor", ctypes.c_uint),
        ("poll_threshold", ctypes.c_size_t),
        ("largest_direct", ctypes.c_size_t),
        ("supported", ctypes.c_uint),
        ("control", ctypes.c_uint),
        ("features", ctypes.c_uint),
        ("later", ctypes.c_uint * 64),
    )


_P2P_DRIVES = 1 << 11  # in `supported`: drives by PCI peer-to-peer, without nvidia-fs
_P2P_FEATURE = 1 << 4  # in `features`: the same, in newer versions


class _HandleUnion(ctypes.Union):
    _fields_ = (("fd", ctypes.c_int), ("pointer", ctypes.c_void_p))


class _Descriptor(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("handle", _HandleUnion), ("operations", ctypes.c_void_p))


class CuFile:
    """The functions of one loaded libcufile, with their errors turned into Python's."""

    def __init__(self, library: ctypes.CDLL, device_type: str = "cuda") -> None:
        """Open the driver. `device_type` is the device of the memory that this library moves: "cpu" for a stand-in.

        Raises:
            UnsupportedError: the library lacks a function, its driver does not open, or only in its compatibility mode.
        """
        self.device_type = device_type
        status, size, pointer, offset = _Status, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int64
        declared = {
            "cuFileDriverOpen": (status, []),
            "cuFileDriverGetProperties": (status, [ctypes.POINTER(_DriverProperties)]),
            "cuFileHandleRegister": (status, [ctypes.POINTER(pointer), ctypes.POINTER(_Descriptor)]),
            "cuFileHandleDeregister": (None, [pointer]),
            "cuFileBufRegister": (status, [pointer, size, ctypes.c_int]),
            "cuFileBufDeregister": (status, [pointer]),
            "cuFileRead": (ctypes.c_ssize_t, [pointer, pointer, size, offset, offset]),
            "cuFileWrite": (ctypes.c_ssize_t, [pointer, pointer, size, offset, offset]),
        }
        for name, (result, arguments) in declared.items():
            function = getattr(library, name, None)
            if function is None:
                raise UnsupportedError(f"the cuFile library has no {name}: it is too old or not cuFile")
            function.restype, function.argtypes = result, arguments
        self._library = library
        opened = library.cuFileDriverOpen()
        if opened.error != 0:
            raise UnsupportedError(f"cuFile's driver does not open: {_words(opened)} (is the module nvidia-fs loaded?)")
        self._check_direct()

    def _check_direct(self) -> None:
        """See [Note: compatibility mode]."""
        properties = _DriverProperties()
        status = self._library.cuFileDriverGetProperties(ctypes.byref(properties))
        if status.error != 0:
            raise UnsupportedError(f"cuFile's driver does not report its features: {_words(status)}")
        has_module = properties.nvfs_major > 0 and properties.supported != 0
        if not (has_module or properties.supported & _P2P_DRIVES or properties.features & _P2P_FEATURE):
            raise UnsupportedError(
                "cuFile is in its compatibility mode, which goes through host memory: the kernel module nvidia-fs is not loaded "
                "(modprobe nvidia-fs), and this driver has no PCI peer-to-peer to drives"
            )

    def register_memory(self, address: int, nbytes: int) -> None:
        status = self._library.cuFileBufRegister(address, nbytes, 0)
        if status.error != 0:
            raise IoError("pin", "", 0, nbytes, 0, f"cuFileBufRegister: {_words(status)}")

    def unregister_memory(self, address: int) -> bool:
        return bool(self._library.cuFileBufDeregister(address).error == 0)

    def open(self, path: str, writing: bool) -> CuFileFile:
        """Open a file and register it.

        Raises:
            IoError: errno ENOTSUP if only host memory would work; else the system's error.
        """
        flags = os.O_CLOEXEC | os.O_DIRECT | (os.O_RDWR | os.O_CREAT if writing else os.O_RDONLY)
        try:
            descriptor = os.open(path, flags, 0o600)
        except OSError as error:
            number = errno.ENOTSUP if error.errno == errno.EINVAL else error.errno or errno.EIO  # no direct I/O there
            raise IoError("open", path, 0, 0, number, "for cuFile") from error
        try:
            return self.adopt(descriptor, path)
        except BaseException:
            os.close(descriptor)
            raise

    def adopt(self, descriptor: int, path: str) -> CuFileFile:
        """Register an open file by a descriptor, which the result then owns. Raises as `open`."""
        handle = ctypes.c_void_p()
        wanted = _Descriptor(type=_FD_TYPE, handle=_HandleUnion(fd=descriptor))
        status = self._library.cuFileHandleRegister(ctypes.byref(handle), ctypes.byref(wanted))
        if status.error != 0:
            raise IoError("open", path, 0, 0, errno.ENOTSUP, f"cuFileHandleRegister: {_words(status)}")
        return CuFileFile(self._library, handle, descriptor, path)


class CuFileFile:
    """One file, registered with cuFile, and its number of users: the last `close` ends the registration."""

    def __init__(self, library: ctypes.CDLL, handle: ctypes.c_void_p, descriptor: int, path: str) -> None:
        self._library = library
        self._handle = handle
        self._descriptor = descriptor
        self._users = 1
        self._lock = threading.Lock()
        self.path = path

    def use(self) -> CuFileFile:
        """Add a user, who must close it too."""
        with self._lock:
            self._users += 1
        return self

    @property
    def handle(self) -> int:
        """Return cuFile's own handle."""
        return self._handle.value or 0

    def transfer(self, op: str, address: int, offset: int, nbytes: int, registered: int | None = None) -> None:
        """Move all `nbytes` between the file and the memory at `address`, in as many calls as needed.

        Registered memory must be passed as its registered address, `registered`, and an offset, or cuFile does not
        recognize it; other memory takes no offset.

        Args:
            op: "read" or "write".
            address: of device memory.
            offset, nbytes: of the range of the file, in bytes.
            registered: address of the registered memory that has `address`; None: there is none.

        Raises:
            IoError: cuFile's error; errno 0 if the file ends too early.
        """
        call = self._library.cuFileRead if op == "read" else self._library.cuFileWrite
        moved = 0
        while moved < nbytes:
            ctypes.set_errno(0)
            here = address + moved
            base = here if registered is None else registered
            count = call(self._handle, base, nbytes - moved, offset + moved, here - base)
            if count > 0:
                moved += count
            elif count == 0:
                raise IoError(
                    op, self.path, offset + moved, nbytes, 0, "the file ends here" if op == "read" else "no progress"
                )
            elif ctypes.get_errno() != errno.EINTR:
                number = ctypes.get_errno() if count == -1 else -count if -count < _FIRST_ERROR else 0
                raise IoError(op, self.path, offset + moved, nbytes, number, f"cuFile says {count}")

    def close(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users:
                return
        self._library.cuFileHandleDeregister(self._handle)
        os.close(self._descriptor)


@functools.cache
def open_cufile() -> CuFile:
    """Return the cuFile of this machine.

    Raises:
        UnsupportedError: it is missing; names the missing part.
    """
    if not torch.cuda.is_available():
        built = "torch is built without CUDA" if torch.version.cuda is None else "torch finds no CUDA device or driver"
        raise UnsupportedError(f"GPUDirect Storage needs a CUDA device: {built}")
    os.environ.setdefault("CUFILE_ALLOW_COMPAT_MODE", "false")  # see [Note: compatibility mode]
    refusals = []
    for place in _places():
        try:
            library = ctypes.CDLL(place, use_errno=True)
        except OSError as error:
            refusals.append(str(error))
            continue
        return CuFile(library)
    raise UnsupportedError(
        f"GPUDirect Storage needs NVIDIA's libcufile, which is missing: {refusals[0]}; "
        "install the package libcufile of CUDA, or nvidia-cufile from PyPI"
    )


def _places() -> list[str]:
    """Return the library's names: as the system finds it, and in packages next to torch."""
    packages = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    return [*NAMES, *map(str, sorted(packages.glob("*/lib/libcufile.so*")))]


def _words(status: _Status) -> str:
    named = f" ({_ERRORS[status.error]})" if status.error in _ERRORS else ""
    return f"error {status.error}{named}" + (f", CUDA error {status.cuda_error}" if status.cuda_error else "")
