"""Host copy: tensors whose content is in host memory for a while, so that another process can have their device.

The tensors stay what they are, with all that shares their memory: views, tied weights, parts of a sharded model, the
state of an optimizer. Only their storages are emptied, and filled again to the same bits. On a CPU, where nothing would
be gained, they are filled with NaNs meanwhile: whoever uses one out of turn is seen there.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

_FREE_S = 30.0
"""For the memory of a process that was killed to be free: its locks end a moment before."""
_LOOK_S = 0.1


class HostCopy:
    """Example: copy = HostCopy(tensors, device); ...; copy.back()"""

    def __init__(self, tensors: Iterable[Tensor], device: torch.device) -> None:
        """Take the content of those of `tensors` that are on the device."""
        self._device = device
        storages = {}
        for tensor in tensors:
            own = tensor.detach()
            own = own.to_local() if isinstance(own, DTensor) else own
            storage = own.untyped_storage()
            if storage.device.type == device.type and storage.nbytes():
                storages[storage.data_ptr()] = storage  # tied tensors share one
        on_gpu = device.type == "cuda"
        self._pairs = []
        for storage in storages.values():
            # Pinned, so that a GPU copies at the speed of its bus.
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
        """Of host memory."""
        return sum(copy.nbytes() for _, copy in self._pairs)

    def back(self) -> None:
        """Put the content back. Raises: torch.OutOfMemoryError: others still have the device."""
        on_gpu = self._device.type == "cuda"
        if on_gpu:
            deadline = time.monotonic() + _FREE_S
            while torch.cuda.mem_get_info(self._device)[0] < self.num_bytes and time.monotonic() < deadline:
                time.sleep(_LOOK_S)
        for storage, copy in self._pairs:
            if on_gpu:
                storage.resize_(copy.nbytes())
            storage.copy_(copy, non_blocking=on_gpu)
        if on_gpu:
            torch.cuda.synchronize(self._device)
        self._pairs = []


def release(device: torch.device) -> None:
    """Give memory that no tensor uses back to the device; the allocator would keep it for this process."""
    if device.type == "cuda":
        # What a cycle of objects holds, such as the frames of an error, is let go only by this.
        gc.collect()
        torch.cuda.empty_cache()
