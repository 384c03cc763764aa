"""Differences between the newest transformers and the oldest supported one (`make test-oldest`)."""

import pytest
import transformers
from packaging.version import Version

needs_newer_transformers = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.19"),
    reason=f"transformers {transformers.__version__}: images need torchvision and are not packed, routers are other "
    "modules, and experts that are dealt to ranks are refused; 5.19 has all of it",
)
