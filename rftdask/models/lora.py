"""LoRA: low-rank adapters beside the frozen weights of a model, by `peft`; their two files are PEFT's own.

The trainer and its engines both put adapters into a model by `add_adapter`, so that both compute the same. It knows
neither of them. Invariant: weights of the model itself are never changed, except by `merged`.
"""

from __future__ import annotations

import json
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
"""Begins all names in PEFT's files, for the two wrappers that it usually puts around a model."""

Model = TypeVar("Model", bound=torch.nn.Module)


def begin(model: PreTrainedModel, section: LoraConfig) -> dict[str, Any]:
    """Put the adapters to train into `model`, in place, and freeze the rest; returns PEFT's settings as JSON has them.

    Raises: DataError: no layer is meant, or the adapter to begin with does not fit or is not there.
    """
    if section.path is not None:  # its own settings win over those of the section
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
    # With PEFT's own defaults for what is not said, which are then written down: another version may have others.
    settings = add_adapter(model, settings)
    dtype = torch.float32 if section.lora_dtype == "auto" else getattr(torch, section.lora_dtype)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in adapter_names(model))
        if parameter.requires_grad:
            # PEFT makes adapters in the type of the layer they are put beside; the optimizer wants its own.
            parameter.data = parameter.data.to(dtype)
    if section.path is not None:
        load_adapter(model, load_file(Path(section.path) / ADAPTER_FILE), section.path)
    return {**settings, "base_model_name_or_path": model.config.name_or_path}


def needs_weights(section: LoraConfig) -> bool:
    """Whether the adapters that `begin` makes are made of the model's weights, as those of DoRA. Raises: DataError."""
    if section.path is None:
        return section.use_dora
    return bool(_read_settings(Path(section.path) / ADAPTER_CONFIG_FILE).get("use_dora"))


def add_adapter(model: PreTrainedModel, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Put adapters that change nothing into the layers that `settings` mean; returns the settings with all defaults.

    Raises: DataError: they mean no layer. UserError: `peft` is not installed.
    """
    try:
        import peft  # late: most runs need none of it
    except ImportError as error:
        raise UserError("model.lora_configs needs the extra lora: pip install 'rftdask[lora]'") from error
    try:
        config = peft.LoraConfig(**settings)
        peft.inject_adapter_in_model(config, model, _NAME)
    except (ValueError, TypeError) as error:
        raise DataError(f"LoRA adapters cannot be put into {type(model).__name__}: {error}") from error
    plain = config.to_dict() | {"peft_type": "LORA", "inference_mode": True}
    return {key: sorted(value) if isinstance(value, set) else value for key, value in plain.items()}


def adapter_names(model: torch.nn.Module) -> dict[str, str]:
    """Map the names of the adapters' tensors in the model to those in PEFT's file."""
    found = {}
    for name, _ in model.named_parameters():
        if f".{_NAME}" in name and ".lora_" in name:
            stem = name.replace(f".{_NAME}", "")
            # DoRA's vector is a module with one weight in the model, and a bare tensor in the file.
            found[name] = _PREFIX + (stem.removesuffix(".weight") if "lora_magnitude_vector" in stem else stem)
    return found


def load_adapter(model: torch.nn.Module, tensors: Mapping[str, Tensor], where: str) -> None:
    """Give the adapters in `model` the values of a PEFT file. Raises: DataError: names or shapes differ."""
    own = dict(model.named_parameters())
    names = adapter_names(model)
    # Names and shapes at once, before anything is copied: a file that does not fit changes nothing.
    wanted = {file_name: tuple(own[name].shape) for name, file_name in names.items()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if wanted != found:
        differ = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
        raise DataError(
            f"the adapter in {where} does not fit the model: {differ[0]} is {found.get(differ[0], 'not there')}, "
            f"must be {wanted.get(differ[0], 'not there')} ({len(differ)} such tensors)"
        )
    with torch.no_grad():
        for name, file_name in names.items():
            own[name].copy_(tensors[file_name])


def load_files(model: PreTrainedModel, config_file: Path, tensors_file: Path) -> None:
    """Take an adapter from its two files, which is put into the model first unless it has one.

    Raises: DataError: the files hold no adapter of this model.
    """
    # The adapters stay where they are from one version to the next: only their values change.
    if not adapter_names(model):
        add_adapter(model, _read_settings(config_file))
        # An engine trains nothing, and keeps no gradients.
        model.requires_grad_(False)
    load_adapter(model, load_file(tensors_file), str(tensors_file))


@contextmanager
def without_adapters(model: torch.nn.Module) -> Iterator[None]:
    """Turn the adapters off for the block, in evaluation mode: the reference of a policy that began without any."""
    layers = _tuned_layers(model)
    training = model.training
    model.eval()
    # Not by their `enable_adapters`: it also freezes the adapters, which sharded weights would not recover from.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False
        model.train(training)


def merged(model: Model) -> Model:
    """Add the adapters to the weights of the model, in place, and take them out; returns the model."""
    for name, module in list(model.named_modules()):
        # Asked anew each time: the names were listed before, and a layer may have been replaced with what was below it.
        if module in _tuned_layers(model):
            module.merge()
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, module.get_base_layer())
    return model


def _tuned_layers(model: torch.nn.Module) -> list[BaseTunerLayer]:
    from peft.tuners.tuners_utils import BaseTunerLayer  # late: only runs with adapters need PEFT

    return [module for module in model.modules() if isinstance(module, BaseTunerLayer)]


def _read_settings(path: Path) -> dict[str, Any]:
    try:
        return settings_of(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is no adapter configuration of PEFT: {error}") from error


def settings_of(data: bytes) -> dict[str, Any]:
    """Read the settings in adapter_config.json, to put an adapter into a model. Raises: ValueError: it is no LoRA."""
    settings: dict[str, Any] = json.loads(data)
    if settings.get("peft_type") != "LORA":
        raise ValueError(f"its peft_type is {settings.get('peft_type')}; only LORA can be trained")
    return {**settings, "inference_mode": False}
