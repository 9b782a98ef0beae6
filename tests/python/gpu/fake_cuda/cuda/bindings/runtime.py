"""The functions of `cuda.bindings.runtime` that tritonclient's `cuda_shared_memory` calls, over the simulated memory of `cuda.c`:
a file in the folder named by PHAROS_FAKE_CUDA, mapped into the process, with the file's name as its handle."""

import ctypes
import enum
import mmap
import os
import uuid
from pathlib import Path

CUDA_IPC_HANDLE_SIZE = 64
allocated = {}
"""Address -> the file and its mapping."""


class cudaError_t(enum.IntEnum):
    cudaSuccess = 0
    cudaErrorInvalidValue = 1


class cudaMemcpyKind(enum.IntEnum):
    cudaMemcpyDefault = 4


class cudaDeviceAttr(enum.IntEnum):
    cudaDevAttrUnifiedAddressing = 41


class cudaIpcMemHandle_t:
    """Exposes only its address, like version 13."""

    def __init__(self, name: str):
        self.content = ctypes.create_string_buffer(name.encode(), CUDA_IPC_HANDLE_SIZE)

    def getPtr(self):
        return ctypes.addressof(self.content)


FINE, WRONG = cudaError_t.cudaSuccess, cudaError_t.cudaErrorInvalidValue


def cudaGetErrorString(error):
    return FINE, str(error).encode()


def cudaGetDevice():
    return FINE, 0


def cudaSetDevice(_number):
    return (FINE,)


def cudaDeviceGetAttribute(_attribute, _device):
    return FINE, 1


def cudaStreamCreate():
    return FINE, object()


def cudaStreamDestroy(_stream):
    return (FINE,)


def cudaStreamSynchronize(_stream):
    return (FINE,)


def cudaMalloc(size):
    file = Path(os.environ["PHAROS_FAKE_CUDA"]) / uuid.uuid4().hex
    with open(file, "wb+") as opened:
        opened.truncate(size)
        mapped = mmap.mmap(opened.fileno(), size)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    allocated[address] = file, mapped
    return FINE, address


def cudaFree(address):
    file, _ = allocated.pop(address)
    file.unlink()
    return (FINE,)


def cudaIpcGetMemHandle(address):
    return FINE, cudaIpcMemHandle_t(allocated[address][0].name)


def cudaMemcpyAsync(to, source, size, _kind, _stream):
    """Both are addresses or objects with an address."""
    for place in (to, source):
        if isinstance(place, int) and any(start < place < start + len(m) < place + size for start, (_, m) in allocated.items()):
            return (WRONG,)
    ctypes.memmove(to, source, size)
    return (FINE,)
