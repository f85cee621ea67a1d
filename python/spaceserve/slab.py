"""The slab: one block of device memory for encoder features, mapped once by each process that reads it.

On a GPU it is a torch CUDA allocation of the encoder worker, shared through CUDA IPC; on the CPU it is a file of
`/dev/shm`. Rows are tokens: `[num_tokens, feature_dim]` in the model's dtype.
"""

from __future__ import annotations

import logging
import os
import pickle
from dataclasses import dataclass
from typing import Any

import torch

from spaceserve.shared_memory import SHM_DIR

logger = logging.getLogger(__name__)

_DTYPES = {"torch.float32": torch.float32, "torch.float16": torch.float16, "torch.bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class SlabHandle:
    """What another process needs to map a slab: its shape, dtype and where it lies."""

    num_tokens: int
    feature_dim: int
    dtype: str
    segment: str | None  # name in /dev/shm, on the CPU
    cuda_ipc: tuple[Any, ...] | None  # what UntypedStorage._share_cuda_ returned, on a GPU

    def dump(self) -> bytes:
        """Serialize for `WorkerUp`."""
        return pickle.dumps(self)

    @staticmethod
    def load(data: bytes) -> SlabHandle:
        """Inverse of `dump`; only for bytes from our own processes."""
        handle = pickle.loads(data)
        assert isinstance(handle, SlabHandle)
        return handle


def _open_cuda_ipc(handle: tuple[Any, ...], reader: int) -> tuple[int, torch.UntypedStorage]:
    """Open what `_share_cuda_` returned on device `reader`, or on the owner's where that is not possible.

    A tensor's device is where its kernels run, and CUDA maps the memory there when it opens the handle, so the
    handle's first element, the owner's device, is replaced. Its last asks to wait for an event of the owner's device:
    the owner has synchronised before it passed the handle on.

    Returns:
        The device's index and the storage.
    """
    owner, *middle, _ = handle
    try:
        return reader, torch.UntypedStorage._new_shared_cuda(reader, *middle, False)
    except RuntimeError as error:
        if reader == owner:
            raise
        logger.warning("GPU %d cannot read GPU %d's memory, features are copied (%s)", reader, owner, error)
        return owner, torch.UntypedStorage._new_shared_cuda(owner, *middle, False)


class Slab:
    """A mapped slab. `rows` is the tensor `[num_tokens, feature_dim]`; slices of it are zero-copy."""

    def __init__(self, rows: torch.Tensor, handle: SlabHandle) -> None:
        self.rows = rows
        self.handle = handle

    @staticmethod
    def create(
        num_tokens: int, feature_dim: int, dtype: torch.dtype, device: torch.device, segment: str | None
    ) -> Slab:
        """Allocate a slab. `segment` names the shared-memory file and is required on the CPU.

        Raises:
            ValueError: on the CPU without a segment name or without room for it; a dtype that no encoder produces.
        """
        if str(dtype) not in _DTYPES:
            raise ValueError(f"features of {dtype} are not supported")
        if device.type == "cuda":
            rows = torch.zeros(num_tokens, feature_dim, dtype=dtype, device=device)
            ipc = rows.untyped_storage()._share_cuda_()
            torch.cuda.synchronize(device)  # the zeros are there before anybody is told where
            return Slab(rows, SlabHandle(num_tokens, feature_dim, str(dtype), None, tuple(ipc)))
        if segment is None:
            raise ValueError("a slab on the CPU needs the name of a shared-memory segment")
        num_bytes = num_tokens * feature_dim * dtype.itemsize
        descriptor = os.open(SHM_DIR / segment, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            # Reserve now: a write into a sparse file of a full /dev/shm would end the process with SIGBUS.
            os.posix_fallocate(descriptor, 0, num_bytes)
        except OSError as error:
            os.unlink(SHM_DIR / segment)
            raise ValueError(
                f"no room for a feature store of {num_bytes / 1e9:.2f} GB in {SHM_DIR} ({error.strerror}): "
                "enlarge it, or give a smaller --encoder-feature-cache-gb"
            ) from error
        finally:
            os.close(descriptor)
        return Slab.attach(SlabHandle(num_tokens, feature_dim, str(dtype), segment, None))

    @staticmethod
    def attach(handle: SlabHandle) -> Slab:
        """Map a slab that another process (or `create`) allocated; on a GPU, for this process's current device.

        Where that is another device than the slab's, as for the second rank of a tensor-parallel group, the slab is
        mapped over the link between both, so that kernels read it in place. Devices without such a link get the slab
        on its own device, and SGLang copies what it reads.

        Raises:
            RuntimeError: it can be mapped on neither device.
        """
        dtype = _DTYPES[handle.dtype]
        shape = (handle.num_tokens, handle.feature_dim)
        if handle.cuda_ipc is not None:
            index, storage = _open_cuda_ipc(handle.cuda_ipc, torch.cuda.current_device())
            device = torch.device("cuda", index)
            rows = torch.empty(0, dtype=dtype, device=device).set_(storage, 0, shape)  # type: ignore[call-overload]
        else:
            assert handle.segment is not None
            path = str(SHM_DIR / handle.segment)
            rows = torch.from_file(path, shared=True, size=shape[0] * shape[1], dtype=dtype).view(shape)
        return Slab(rows, handle)

    def view(self, offset_tokens: int, num_tokens: int) -> torch.Tensor:
        """Rows `[offset_tokens, offset_tokens + num_tokens)`, without a copy."""
        return self.rows[offset_tokens : offset_tokens + num_tokens]
