"""`attn_implementation="tilewise"` for transformers models.

>>> from tilewise.integrations.transformers import register
>>> register()
>>> model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="tilewise")
"""

from tilewise.integrations.transformers.context_parallel import ContextParallel, use_context_parallel
from tilewise.integrations.transformers.masks import describe_mask
from tilewise.integrations.transformers.promise import PromisedMask
from tilewise.integrations.transformers.registry import RegistryError, register, use_tilewise

__all__ = [
    "ContextParallel",
    "PromisedMask",
    "RegistryError",
    "describe_mask",
    "register",
    "use_context_parallel",
    "use_tilewise",
]
