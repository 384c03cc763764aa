"""LoRA: low-rank adapters next to the frozen weights of a model, by `peft`; their two files are in PEFT's format.

The trainer and the engines both use `add_adapter`, so that they compute the same. Invariant: only `merged` changes the
weights of the model itself.
"""

from __future__ import annotations

import json
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from safetensors.torch import load_file
from torch import Tensor

from rftdask.config.schema.model import LoraConfig
from rftdask.errors import DataError, UserError

if TYPE_CHECKING:
    from peft.tuners.tuners_utils import BaseTunerLayer
    from transformers import PreTrainedModel

ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG_FILE = "adapter_config.json"
_NAME = "default"
_PREFIX = "base_model.model."
"""Prefix of all names in PEFT's files, from the two wrappers that it usually puts around a model."""

Model = TypeVar("Model", bound=torch.nn.Module)


def begin(model: PreTrainedModel, section: LoraConfig) -> dict[str, Any]:
    """Add the adapters to train to `model`, in place, and freeze the rest; returns PEFT's settings as JSON types.

    Raises: DataError: no layer matches, or the initial adapter is missing or does not fit.
    """
    if section.path is not None:  # its settings override those of the section
        settings = _read_settings(Path(section.path) / ADAPTER_CONFIG_FILE)
    else:
        target, exclude = section.target_modules, section.exclude_modules
        settings = {
            "r": section.lora_rank,
            "lora_alpha": section.lora_alpha,
            "target_modules": target if isinstance(target, str) else [*target],
            "exclude_modules": exclude if exclude is None or isinstance(exclude, str) else [*exclude],
            "use_rslora": section.use_rslora,
            "use_dora": section.use_dora,
            "task_type": "CAUSAL_LM",
        }
    # Includes PEFT's defaults, which may differ in another version.
    settings = add_adapter(model, settings)
    dtype = torch.float32 if section.lora_dtype == "auto" else getattr(torch, section.lora_dtype)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in adapter_names(model))
        if parameter.requires_grad:
            # PEFT creates adapters in the data type of their layer.
            parameter.data = parameter.data.to(dtype)
    if section.path is not None:
        load_adapter(model, load_file(Path(section.path) / ADAPTER_FILE), section.path)
    return {**settings, "base_model_name_or_path": model.config.name_or_path}


def needs_weights(section: LoraConfig) -> bool:
    """True if `begin` initializes adapters from the model's weights, as DoRA does. Raises: DataError."""
    if section.path is None:
        return section.use_dora
    return bool(_read_settings(Path(section.path) / ADAPTER_CONFIG_FILE).get("use_dora"))


def largest_rank(section: LoraConfig) -> int:
    """Return the largest rank of the adapters of a section: `lora_rank`, or that in its folder. Raises: DataError."""
    if section.path is None:
        return section.lora_rank
    settings = _read_settings(Path(section.path) / ADAPTER_CONFIG_FILE)
    ranks: list[int] = [settings.get("r", section.lora_rank), *(settings.get("rank_pattern") or {}).values()]
    return max(ranks)


def initial_files(section: LoraConfig) -> list[Path]:
    """Return the files of the adapter that training begins with. Empty: a new one. Raises: DataError."""
    if section.path is None:
        return []
    _read_settings(Path(section.path) / ADAPTER_CONFIG_FILE)
    return [Path(section.path) / name for name in (ADAPTER_CONFIG_FILE, ADAPTER_FILE)]


def add_adapter(model: PreTrainedModel, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Add adapters without effect to the layers that `settings` select; returns the settings with all defaults.

    Raises: DataError: no layer matches. UserError: `peft` is not installed.
    """
    try:
        import peft  # late: most runs need none of it
    except ImportError as error:
        raise UserError("model.lora_configs needs the extra lora: pip install 'rftdask[lora]'") from error
    try:
        config = peft.LoraConfig(**settings)
        with warnings.catch_warnings():
            # `merged` unties such layers.
            warnings.filterwarnings("ignore", ".*tie_word_embeddings=True. and a tied layer is part of the adapter")
            peft.inject_adapter_in_model(config, model, _NAME)
    except (ValueError, TypeError) as error:
        raise DataError(f"LoRA adapters cannot be added to {type(model).__name__}: {error}") from error
    plain = config.to_dict() | {"peft_type": "LORA", "inference_mode": True}
    return {key: sorted(value) if isinstance(value, set) else value for key, value in plain.items()}


def adapter_names(model: torch.nn.Module) -> dict[str, str]:
    """Map the names of the adapters' tensors in the model to those in PEFT's file."""
    names = {}
    for name, _ in model.named_parameters():
        if f".{_NAME}" in name and ".lora_" in name:
            stem = name.replace(f".{_NAME}", "")
            # DoRA's vector is the weight of a module in the model, and a bare tensor in the file.
            names[name] = _PREFIX + (stem.removesuffix(".weight") if "lora_magnitude_vector" in stem else stem)
    return names


def load_adapter(model: torch.nn.Module, tensors: Mapping[str, Tensor], where: str) -> None:
    """Load the values of a PEFT file into the adapters of `model`. Raises: DataError: names, shapes or base weights
    differ."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    names = adapter_names(model)
    # By default PEFT also saves the base weights of a head or of embeddings with adapters.
    base = {
        name: parameters[name.removeprefix(_PREFIX)] for name in tensors if name.removeprefix(_PREFIX) in parameters
    }
    for name, weight in base.items():
        if not _is_same(weight.detach(), tensors[name]):
            raise DataError(f"the adapter in {where} was trained on another base model: its {name} differs")
    tensors = {name: tensor for name, tensor in tensors.items() if name not in base}
    # Checked before anything is copied: a file that does not fit changes nothing.
    expected = {file_name: tuple(parameters[name].shape) for name, file_name in names.items()}
    actual = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if expected != actual:
        differ = sorted(name for name in expected.keys() | actual.keys() if expected.get(name) != actual.get(name))
        raise DataError(
            f"the adapter in {where} does not fit the model: the shape of {differ[0]} is "
            f"{actual.get(differ[0], 'missing')}, expected {expected.get(differ[0], 'none')} "
            f"({len(differ)} such tensors)"
        )
    with torch.no_grad():
        for name, file_name in names.items():
            parameters[name].copy_(tensors[file_name])


def _is_same(weight: Tensor, other: Tensor) -> bool:
    # Up to the rounding of the narrower data type. Of a weight that is spread over ranks only the shape is compared.
    if weight.shape != other.shape or hasattr(weight, "full_tensor"):
        return weight.shape == other.shape
    rounding = max(torch.finfo(weight.dtype).eps, torch.finfo(other.dtype).eps)
    return torch.allclose(weight.float(), other.to(weight.device).float(), rtol=rounding, atol=rounding**2)


def load_files(model: PreTrainedModel, config_file: Path, tensors_file: Path) -> None:
    """Load an adapter from its two files, and add it to the model first if the model has none.

    Raises: DataError: the files are not an adapter of this model.
    """
    if not adapter_names(model):
        add_adapter(model, _read_settings(config_file))
        model.requires_grad_(False)  # an engine does not train
    load_adapter(model, load_file(tensors_file), str(tensors_file))


@contextmanager
def without_adapters(model: torch.nn.Module) -> Iterator[None]:
    """Turn the adapters off for the block, in evaluation mode."""
    layers = _tuned_layers(model)
    training = model.training
    model.eval()
    # `enable_adapters` would also freeze the adapters, from which sharded weights do not recover.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False
        model.train(training)


def merged(model: Model) -> Model:
    """Add the adapters to the weights of the model, in place, and remove them; returns the model.

    A layer with an adapter no longer shares its weight with another layer, such as the head with the embeddings.
    """
    _untie(model)
    for name, module in list(model.named_modules()):
        # The list predates replacements, so a module may no longer be part of the model.
        if module in _tuned_layers(model):
            module.merge()
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, module.get_base_layer())
    return model


def _untie(model: torch.nn.Module) -> None:
    owners = defaultdict[torch.nn.Parameter, list[torch.nn.Module]](list)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners[parameter].append(module)
    bases = {layer.get_base_layer() for layer in _tuned_layers(model)}
    for parameter, modules in owners.items():
        # The first one keeps the parameter.
        for module in modules[1:] if bases.intersection(modules) else ():
            names = [name for name, value in module.named_parameters(recurse=False) if value is parameter]
            for name in names:
                setattr(module, name, torch.nn.Parameter(parameter.detach().clone(), parameter.requires_grad))
            config: Any = model.config
            config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False


def _tuned_layers(model: torch.nn.Module) -> list[BaseTunerLayer]:
    from peft.tuners.tuners_utils import BaseTunerLayer  # late: only runs with adapters need PEFT

    return [module for module in model.modules() if isinstance(module, BaseTunerLayer)]


def _read_settings(path: Path) -> dict[str, Any]:
    try:
        return settings_of(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is not an adapter configuration of PEFT: {error}") from error


def settings_of(data: bytes) -> dict[str, Any]:
    """Parse adapter_config.json for `add_adapter`. Raises: ValueError: the adapter is not a LoRA."""
    settings: dict[str, Any] = json.loads(data)
    if settings.get("peft_type") != "LORA":
        raise ValueError(f"its peft_type is {settings.get('peft_type')}; only LORA can be trained")
    return {**settings, "inference_mode": False}
