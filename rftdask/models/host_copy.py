"""Host copy: moves the content of tensors to host memory for a while, so that another process can use their device.

The tensor objects stay valid, with everything that shares their memory: views, tied weights, parts of a sharded model,
optimizer states. Only their storages are emptied, and later restored to the same bits. On a CPU, where this would save
nothing, they are filled with NaN instead, so that tests detect their use.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

_FREE_TIMEOUT_S = 30.0  # seconds to wait for the memory of a killed process, which is freed after its locks
_POLL_INTERVAL_S = 0.1


class HostCopy:
    """Example: copy = HostCopy(tensors, device); ...; copy.back()"""

    def __init__(self, tensors: Iterable[Tensor], device: torch.device) -> None:
        """Move the content of those `tensors` that are on the device."""
        self._device = device
        storages = {}
        for tensor in tensors:
            tensor = tensor.detach()
            storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
            if storage.device.type == device.type and storage.nbytes():
                storages[storage.data_ptr()] = storage  # once for tied tensors
        on_gpu = device.type == "cuda"
        self._pairs = []
        for storage in storages.values():
            # Pinned for the full bandwidth of the bus.
            copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=on_gpu).untyped_storage()
            copy.copy_(storage, non_blocking=on_gpu)
            self._pairs.append((storage, copy))
        if on_gpu:
            torch.cuda.synchronize(device)
        for storage, _ in self._pairs:
            if on_gpu:
                storage.resize_(0)
            else:
                torch.empty(0, dtype=torch.uint8).set_(storage).fill_(0xFF)  # NaN in every float type
        release(device)

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory in use."""
        return sum(copy.nbytes() for _, copy in self._pairs)

    def back(self) -> None:
        """Restore the content. Raises: torch.OutOfMemoryError: other processes still use the device."""
        on_gpu = self._device.type == "cuda"
        if on_gpu:
            deadline = time.monotonic() + _FREE_TIMEOUT_S
            while torch.cuda.mem_get_info(self._device)[0] < self.num_bytes and time.monotonic() < deadline:
                time.sleep(_POLL_INTERVAL_S)
        for storage, copy in self._pairs:
            if on_gpu:
                storage.resize_(copy.nbytes())
            storage.copy_(copy, non_blocking=on_gpu)
        if on_gpu:
            torch.cuda.synchronize(self._device)
        self._pairs = []


def release(device: torch.device) -> None:
    """Return memory that no tensor uses to the device; the allocator would keep it for this process."""
    if device.type == "cuda":
        # Frees tensors in reference cycles, such as those of an error's frames.
        gc.collect()
        torch.cuda.empty_cache()
