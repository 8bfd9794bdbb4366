"""A tiny model of any type, with weights that make attention matter, and inputs for it."""

from __future__ import annotations

import importlib
import inspect
import math
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto import modeling_auto

from tests.integrations.zoo.configs import VARIANTS, WORDS, tiny

LENGTH, PADDING, LATER = 11, 3, 3
"""Tokens of a sequence, those of the first one that are padding, and those that come in a second step with a cache."""
MOST = 4_000_000  # parameters: more take seconds
TASKS = ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "IMAGE_TEXT_TO_TEXT", "SPEECH_SEQ_2_SEQ")


PARTS = {"blt_global_transformer": "a part of blt, which makes its mask"}
"""Types whose model is never called alone."""


class Unbuildable(Exception):
    """Why there is no tiny model of a type, or no inputs for it."""


def model_class(model_type: str) -> Any:
    """The class with a head for words if there is one, else the plain model, else any that takes the configuration."""
    config_class = CONFIG_MAPPING[model_type]
    module = importlib.import_module(config_class.__module__.replace(".configuration_", ".modeling_"))
    several = "text_config" in getattr(config_class, "sub_configs", {})
    for task in sorted(TASKS, key=lambda task: task != "IMAGE_TEXT_TO_TEXT") if several else TASKS:
        name = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").get(model_type)
        if isinstance(name, str) and hasattr(module, name):
            return getattr(module, name)
    name = modeling_auto.MODEL_MAPPING_NAMES.get(model_type)
    for choice in name if isinstance(name, (list, tuple)) else [name]:
        if choice is not None and hasattr(module, choice):
            return getattr(module, choice)
    fitting = [
        c
        for c in vars(module).values()
        if isinstance(c, type)
        and issubclass(c, PreTrainedModel)
        and c.config_class is config_class
        and c.forward is not PreTrainedModel.forward
        and c.__module__ == module.__name__
    ]
    if not fitting:
        raise Unbuildable("no model class takes this configuration")
    return fitting[0]


def prepare(model_type: str) -> tuple[Any, dict[str, Any], dict[str, Tensor]]:
    """A model on eager that runs, the variant of its configuration, and its inputs; else the first variant's trouble."""
    if model_type in PARTS:
        raise Unbuildable(PARTS[model_type])
    trouble: Exception | None = None
    for variant in VARIANTS:
        try:
            model = build(model_type, "eager", variant)
        except Exception as error:
            trouble = trouble or error
            continue
        for images in (False, True) if "pixel_values" in inspect.signature(model.forward).parameters else (False,):
            try:
                given = inputs(model, images)
                with torch.no_grad():
                    model(**given)
                return model, variant, given
            except Exception as error:
                trouble = trouble or error
    assert trouble is not None
    raise trouble


def build(model_type: str, implementation: str | dict[str, str], variant: dict[str, Any]) -> Any:
    """The model in float32, always with the same weights."""
    config = tiny(model_type, variant)
    kind = model_class(model_type)
    config._attn_implementation = implementation
    config._experts_implementation = "eager"  # the grouped matrix product of the experts has no float64
    with torch.device("meta"):
        count = sum(p.numel() for p in kind(config).parameters())
    if count > MOST:
        raise Unbuildable(f"{count / 1e6:.0f} million parameters at the smallest sizes that were tried")
    torch.manual_seed(0)
    model = kind(config).eval()
    draw(model)
    return model


@torch.no_grad()
def draw(model: Any) -> None:
    """Weights of the size 1.3/√(inputs), so that scores spread over a few units and no layer fades away."""
    g = torch.Generator().manual_seed(0)
    for name, p in model.named_parameters():
        if not p.is_floating_point():
            continue
        noise = torch.randn(p.shape, generator=g)
        if p.ndim >= 2:
            fan_in = 1 if "embed" in name and p.ndim == 2 else math.prod(p.shape[1:])
            p.copy_(noise * 1.3 / math.sqrt(fan_in))
        elif not p.isfinite().all() or not (p == p.flatten()[:1]).all() or p.flatten()[:1] == 0:
            p.copy_(noise * 0.3)
        else:
            p.mul_(1 + 0.2 * noise)


def inputs(model: Any, images: bool) -> dict[str, Tensor]:
    """Two sequences, with two images if asked for; or two images, or two sounds."""
    g = torch.Generator().manual_seed(1)
    names = inspect.signature(model.forward).parameters
    made: dict[str, Tensor] = {}
    if "input_ids" in names:
        made["input_ids"] = torch.randint(*WORDS, (2, LENGTH), generator=g)
        if "attention_mask" in names:
            made["attention_mask"] = torch.ones(2, LENGTH, dtype=torch.int64)
    if "pixel_values" in names and (images or not made):
        config = getattr(model.config, "vision_config", model.config)
        size = getattr(config, "image_size", 32)
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        made["pixel_values"] = torch.randn(2, getattr(config, "num_channels", 3), height, width, generator=g)
    elif made:
        pass
    elif "input_values" in names:
        made["input_values"] = torch.randn(2, 4000, generator=g)
    elif "input_features" in names:
        made["input_features"] = torch.randn(2, 8, 24, generator=g)
    elif "inputs_embeds" in names:
        made["inputs_embeds"] = torch.randn(2, LENGTH, model.config.hidden_size, generator=g)
    if "decoder_input_ids" in names:
        made["decoder_input_ids"] = torch.randint(*WORDS, (2, LENGTH), generator=g)
    if "bbox" in names:
        made["bbox"] = torch.tensor([1, 2, 5, 7]).expand(2, LENGTH, 4)
    needed = [
        n for n, p in names.items() if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and n not in made
    ]
    if needed or not made:
        raise Unbuildable(f"its forward needs {', '.join(needed) or 'inputs of a kind that is not made here'}")
    return made
