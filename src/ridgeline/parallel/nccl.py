"""NCCL between GPUs, of one host or several, by calls of its library on torch's current stream.

torch's ProcessGroupNCCL is not used. It runs collectives on a stream of its own, with events and a watchdog thread that must be
kept apart from the capture of CUDA graphs. A call on the current stream is captured like a kernel, waits for nothing but its
stream, and has one communicator that any thread may abort.

Sums are bitwise equal on all ranks: rings and trees compute each element of a sum once, and hand it on. All ranks choose the same
algorithm, because NCCL chooses by the size of the message and the topology. NVLink multicast (NVLS) stays off.
Source: NCCL API, docs.nvidia.com/deeplearning/nccl/user-guide/docs/api.html.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import socket
import threading
from contextlib import suppress
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p
from datetime import timedelta
from fcntl import ioctl
from functools import cache
from ipaddress import IPv6Address
from pathlib import Path

import torch
import torch.distributed

from ridgeline.core.errors import ConfigError

SETTINGS = {
    # Registration of buffers during capture would need all ranks to reach it at once, and gains nothing without NVLS.
    "NCCL_GRAPH_REGISTER": "0",
    # Algorithms connect when the communicator is made, not at their first use, which may be a capture.
    "NCCL_RUNTIME_CONNECT": "0",
}
"""Defaults of variables that NCCL reads. NCCL_NVLS_ENABLE is always 0."""
# ncclDataType_t and ncclRedOp_t.
_BYTES, _SUM = 1, 0
_TYPES = {torch.int32: 2, torch.int64: 4, torch.float16: 6, torch.float32: 7, torch.float64: 8, torch.bfloat16: 9}
_ABORT_S = 2.0
"""Seconds to wait for an abort, which waits for threads of NCCL and for the other ranks of this host."""
_SIOCGIFADDR, _IFREQ = 0x8915, 40
"""Request for the first IPv4 address of an interface, and bytes of its argument (netdevice(7))."""
_INET6 = Path("/proc/net/if_inet6")
"""IPv6 addresses in 32 digits, and the names of their interfaces."""


class _UniqueId(ctypes.Structure):
    """ncclUniqueId."""

    _fields_ = (("internal", ctypes.c_char * 128),)


_SIGNATURES = {
    "ncclGetVersion": (c_void_p,),
    "ncclGetUniqueId": (c_void_p,),
    "ncclCommInitRank": (c_void_p, c_int, _UniqueId, c_int),
    "ncclCommAbort": (c_void_p,),
    "ncclAllReduce": (c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclAllGather": (c_void_p, c_void_p, c_size_t, c_int, c_void_p, c_void_p),
    "ncclSend": (c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclRecv": (c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
}


@cache
def library() -> ctypes.CDLL:
    """The NCCL that torch has loaded. Raises ConfigError if there is none."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    try:
        nccl = ctypes.CDLL("libnccl.so.2")
    except OSError as error:
        raise ConfigError(
            f"Several GPUs need NCCL, which this torch does not have ({error}): install torch for CUDA, or use --device cpu."
        ) from None
    for name, arguments in _SIGNATURES.items():
        function = getattr(nccl, name)
        function.argtypes, function.restype = arguments, c_int
    nccl.ncclGetErrorString.argtypes, nccl.ncclGetErrorString.restype = (c_int,), c_char_p
    return nccl


def version() -> int:
    """As NCCL_VERSION_CODE: 10,000 major + 100 minor + patch."""
    number = c_int()
    _call("ncclGetVersion", byref(number))
    return number.value


def version_text() -> str:
    """As in 2.28.9."""
    number = version()
    return f"{number // 10_000}.{number // 100 % 100}.{number % 100}"


def use_network(address: str) -> None:
    """Let NCCL of this process connect hosts by the interface that has this address. The user's NCCL_SOCKET_IFNAME goes first.

    Without it NCCL takes the first interface that it finds, which need not reach the other hosts. Data still goes by InfiniBand
    where NCCL finds it. NCCL reads the variable once, when its first communicator is made.
    """
    if name := interface_of(address):
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")


def interface_of(address: str) -> str:
    """The network interface of this host with an address or a host's name; "" if no interface has it as its first address."""
    try:
        family, *_, (number, *_) = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0]
    except OSError:
        return ""
    if family == socket.AF_INET6:
        digits = IPv6Address(str(number)).packed.hex()
        entries = (line.split() for line in _INET6.read_text().splitlines()) if _INET6.exists() else ()
        return next((name for digit, *_, name in entries if digit == digits), "")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no address
                request = ioctl(sock, _SIOCGIFADDR, name.encode().ljust(_IFREQ, b"\0"))
                if socket.inet_ntoa(request[20:24]) == number:
                    return name
    return ""


def _call(name: str, *arguments: object) -> None:
    """Raises RuntimeError."""
    nccl = library()
    if status := getattr(nccl, name)(*arguments):
        raise RuntimeError(f"{name}: {nccl.ncclGetErrorString(status).decode()}")


class Communicator:
    """One rank's communicator on its GPU. Tensors are contiguous and on the device; calls enqueue work on the current stream."""

    def __init__(
        self, rank: int, size: int, store: torch.distributed.Store, timeout_s: float, device: torch.device
    ) -> None:
        """Waits for the other ranks. Raises RuntimeError if they do not come within timeout_s, ConfigError without NCCL."""
        self.rank, self.size = rank, size
        self._device, self._handle, self._lock = device, c_void_p(), threading.Lock()
        self._ending: threading.Thread | None = None
        store.set_timeout(timedelta(seconds=timeout_s))
        unique = _UniqueId()
        if rank == 0:
            _call("ncclGetUniqueId", byref(unique))
            store.set("nccl", bytes(unique).hex())
        else:
            unique = _UniqueId.from_buffer_copy(bytes.fromhex(store.get("nccl").decode()))
        failures: list[str] = []

        def join() -> None:
            torch.cuda.set_device(device)
            try:
                _call("ncclCommInitRank", byref(self._handle), size, unique, rank)
            except RuntimeError as error:
                failures.append(str(error))

        # A rank that ends meanwhile may leave the others waiting for ever.
        thread = threading.Thread(target=join, daemon=True)
        thread.start()
        thread.join(timeout_s)
        if thread.is_alive() or failures:
            raise RuntimeError(failures[0] if failures else f"NCCL found no other rank within {timeout_s:g} s")

    def all_reduce(self, x: torch.Tensor) -> None:
        """x becomes its sum over all ranks. Raises RuntimeError for a dtype that NCCL cannot add."""
        if x.dtype not in _TYPES:
            raise RuntimeError(f"NCCL does not add tensors of {x.dtype}")
        at = x.data_ptr()
        _call("ncclAllReduce", at, at, x.numel(), _TYPES[x.dtype], _SUM, self._open(), _stream())

    def all_gather(self, parts: torch.Tensor, x: torch.Tensor) -> None:
        _call("ncclAllGather", x.data_ptr(), parts.data_ptr(), x.nbytes, _BYTES, self._open(), _stream())

    def exchange(self, received: torch.Tensor, x: torch.Tensor) -> None:
        """received[r] becomes what rank r has in x[this rank]."""
        received[self.rank].copy_(x[self.rank])
        _call("ncclGroupStart")
        try:
            for peer in range(self.size):
                if peer != self.rank:
                    self.send(x[peer], peer)
                    self.receive(received[peer], peer)
        finally:
            _call("ncclGroupEnd")

    def send(self, x: torch.Tensor, peer: int) -> None:
        _call("ncclSend", x.data_ptr(), x.nbytes, _BYTES, peer, self._open(), _stream())

    def receive(self, x: torch.Tensor, peer: int) -> None:
        _call("ncclRecv", x.data_ptr(), x.nbytes, _BYTES, peer, self._open(), _stream())

    def abort(self) -> None:
        """End kernels that wait for another rank, and free the communicator, in a thread. Later calls raise RuntimeError.

        ncclCommAbort tells the kernels at once. It returns when no CUDA graph uses the communicator any more.
        """
        with self._lock:
            handle, self._handle = self._handle, c_void_p()
        if handle.value is None:
            return

        def end() -> None:
            torch.cuda.set_device(self._device)
            library().ncclCommAbort(handle)

        self._ending = threading.Thread(target=end, daemon=True)
        self._ending.start()
        atexit.register(self.wait)

    def wait(self) -> None:
        """Wait until the communicator is freed, if it was aborted. A process that ends before, while threads of NCCL run, may
        crash."""
        if self._ending is not None:
            self._ending.join(_ABORT_S)

    def _open(self) -> c_void_p:
        if self._handle.value is None:
            raise RuntimeError("the connection was ended, because a rank is lost or the engine is closed")
        return self._handle


def _stream() -> int:
    return torch.cuda.current_stream().cuda_stream
