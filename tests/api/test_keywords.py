"""Arguments known from elsewhere, and typos: the error says what to write; what is shown of a function stays its own."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import tilewise as tw
from tilewise.api.keywords import INSTEAD
from tilewise.errors import ArgumentTypeError

Q = torch.randn(1, 2, 5, 8)
T = torch.randn(5, 2, 8)
CU = torch.tensor([0, 2, 5])
CALLS: dict[str, Any] = {
    "attention": lambda **options: tw.attention(Q, Q, Q, **options),
    "attention_varlen": lambda **options: tw.attention_varlen(T, T, T, CU, **options),
    "explain": lambda **options: tw.explain(Q, Q, Q, **options),
    "certify": lambda **options: tw.certify(Q, Q, Q, Q, **options),
    "trace_nonfinite": lambda **options: tw.trace_nonfinite(Q, Q, Q, **options),
}
WORDS = {
    "is_causal": ("mask=tw.causal()", "top_left", "tw.sdpa"),
    "attn_mask": ("mask=", "bias=", "tw.sdpa"),
    "enable_gqa": ("nothing", "tw.sdpa"),
    "dropout": ("dropout_p=",),
    "causal": ("mask=tw.causal()", "flash_attn"),
    "softmax_scale": ("scale=", "flash_attn"),
    "window_size": ("tw.window(left, right)", "flash_attn"),
    "key_padding_mask": ("tw.key_padding(lengths)", "[:, None, None, :]"),
    "sofcap": ("softcap=",),
    "zzz": ("mask", "scale", "return_lse"),
}


@pytest.mark.parametrize("function", CALLS)
@pytest.mark.parametrize("name", WORDS)
def test_the_error_says_what_to_write(function: str, name: str) -> None:
    CALLS[function]()  # a call like it has been seen
    with pytest.raises(ArgumentTypeError) as caught:
        CALLS[function](**{name: True})
    for word in (f"{name}:", "no such argument", *WORDS[name]):
        assert word in str(caught.value)


def test_two_at_once() -> None:
    with pytest.raises(ArgumentTypeError, match=r"(?s)is_causal: .*\nscal: .*scale="):
        tw.attention(Q, Q, Q, is_causal=True, scal=1.0)  # type: ignore[call-overload]


def test_no_name_of_ours_is_called_another_s() -> None:
    own = set(inspect.signature(tw.attention).parameters)
    assert not own & set(INSTEAD)


@pytest.mark.parametrize("function", [tw.attention, tw.attention_varlen])
def test_the_signature_is_what_the_function_takes(function: Any) -> None:
    parameters = inspect.signature(function).parameters
    assert not any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    assert {"q", "k", "v", "mask", "scale", "return_lse", "backend"} <= set(parameters)


def test_unknown_keywords_under_compile() -> None:
    compiled = torch.compile(lambda q: tw.attention(q, q, q, mask=tw.causal()), backend="eager", fullgraph=True)
    assert torch.allclose(compiled(Q), tw.attention(Q, Q, Q, mask=tw.causal()), atol=1e-6)
