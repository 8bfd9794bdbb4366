"""FlexAttention as a peer: compiled for every case, however many came before it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo

from tilewise.lab.bench import peers
from tilewise.lab.bench.cases import Case


def test_flex_is_compiled_for_every_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch stops compiling a function after some forms of it; here after the first, with an error."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    settings: Any = {"recompile_limit": 1, "fail_on_recompile_limit_hit": True}
    with torch._dynamo.config.patch(**settings):
        for length in (128, 256, 384):
            case = Case("causal", heads=1, seqlen=length, head_dim=16, mask=f"causal & window({length // 2})")
            x = case.tensors()
            attend = peers.bind_flex(case, x)
            assert attend(x.q, x.k, x.v).shape == x.q.shape
