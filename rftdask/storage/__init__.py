"""Storage by URL: `open_storage(url)` and the interface it returns."""

from __future__ import annotations

from rftdask.storage.base import Storage
from rftdask.storage.open import open_storage

__all__ = ["Storage", "open_storage"]
