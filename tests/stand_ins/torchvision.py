"""Stand-in for torchvision, which has no build for the CPU build of torch: the parts that image processors use.

Its folder is on the PYTHONPATH of processes with models that vLLM and transformers load only with torchvision.
"""

import sys
from enum import Enum
from types import ModuleType
from typing import Any

import numpy as np
import PIL.Image
import torch
from PIL.Image import Image
from torch import Tensor

__version__ = "0.28.0"
__path__: list[str] = []  # mark this module as a package that contains all submodules


class InterpolationMode(Enum):
    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BOX = "box"
    HAMMING = "hamming"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    LANCZOS = "lanczos"


def pil_to_tensor(image: Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


def to_pil_image(image: Tensor) -> Image:
    return PIL.Image.fromarray(image.permute(1, 2, 0).numpy())


def resize(image: Tensor, size: Any, interpolation: InterpolationMode, antialias: bool = True) -> Tensor:
    if tuple(image.shape[-2:]) == tuple(size):
        return image
    pixels = image.reshape(-1, *image.shape[-3:]).float()
    made = torch.nn.functional.interpolate(pixels, size=tuple(size), mode=interpolation.value, antialias=antialias)
    made = made.reshape(*image.shape[:-2], *size)
    return made if image.is_floating_point() else made.round().clamp(0, 255).to(image.dtype)


def normalize(image: Tensor, mean: Any, std: Any, inplace: bool = False) -> Tensor:
    mean, std = (torch.as_tensor(each, dtype=image.dtype)[:, None, None] for each in (mean, std))
    return (image - mean) / std


def grayscale_to_rgb(image: Tensor) -> Tensor:
    return image if image.shape[-3] == 3 else image.expand(*image.shape[:-3], 3, *image.shape[-2:])


_PUBLIC = (InterpolationMode, pil_to_tensor, to_pil_image, resize, normalize, grayscale_to_rgb)
_FUNCTIONS = {each.__name__: each for each in _PUBLIC}
for _name, _holds in {
    "io": {"ImageReadMode": None, "decode_image": None},
    "transforms": {"InterpolationMode": InterpolationMode, "__path__": []},
    "transforms.functional": _FUNCTIONS,
    "transforms.v2": {"__path__": []},
    "transforms.v2.functional": _FUNCTIONS,
}.items():
    _module = sys.modules[f"{__name__}.{_name}"] = ModuleType(f"{__name__}.{_name}")
    vars(_module).update(_holds)
    _parent, _, _last = _module.__name__.rpartition(".")
    setattr(sys.modules[_parent], _last, _module)
