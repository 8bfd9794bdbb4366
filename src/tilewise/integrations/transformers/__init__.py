"""`attn_implementation="tilewise"` for transformers models.

>>> from tilewise.integrations.transformers import register
>>> register()
>>> model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="tilewise")
"""

from tilewise.integrations.transformers.masks import describe_mask
from tilewise.integrations.transformers.promise import PromisedMask
from tilewise.integrations.transformers.registry import RegistryError, register, use_tilewise

__all__ = ["PromisedMask", "RegistryError", "describe_mask", "register", "use_tilewise"]
