"""The functions of the flash_attn package (2.x), by the same names and signatures, on CPU and GPU.

>>> from tilewise.integrations.flash_attn import flash_attn_func
>>> from tilewise.integrations.flash_attn.bert_padding import pad_input, unpad_input

A parameter that cannot be honoured raises. What differs is what flash_attn leaves open or refuses: float32 and float64, head
dims up to 512 and value dims of their own work; a row that sees no key has LSE −inf and output 0; dropout draws other numbers.
"""

from tilewise.integrations.flash_attn.functions import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
]
