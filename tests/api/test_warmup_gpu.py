"""On a GPU: kept calls follow their tensors, backwards compile in the background, and a warmed call compiles nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tilewise as tw
from tilewise.errors import KernelError

pytestmark = pytest.mark.gpu


def qkv(dim: int = 64) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 2, 256, dim, device="cuda", dtype=torch.float16) for _ in range(3)]


def masks() -> dict[str, tuple[torch.Tensor, Callable[[torch.Tensor], tw.Mask], Callable[[torch.Tensor], Any]]]:
    """A tensor, the mask of it, and a change in place."""
    return {
        "padding": (torch.tensor([256, 100]), tw.key_padding, lambda x: x.fill_(31)),
        "offset": (torch.tensor([0, 9]), lambda x: tw.causal(offset=x), lambda x: x.fill_(40)),
        "documents": (torch.arange(256) // 99, lambda x: tw.causal() & tw.documents(x), lambda x: x.copy_(x // 2)),
        "dense": (torch.rand(256, 256) < 0.5, tw.dense, lambda x: x.logical_not_()),
    }


@pytest.mark.parametrize("backend", ["auto", "triton"])
@pytest.mark.parametrize("name", list(masks()))
def test_kept_masks_follow_their_tensors(name: str, backend: Any) -> None:
    tensor, make, change = masks()[name]
    tensor = tensor.cuda()
    mask, (q, k, v) = make(tensor), qkv()

    def check() -> None:
        got = tw.attention(q, k, v, mask=mask, backend=backend)
        want = tw.attention(q.float(), k.float(), v.float(), mask=make(tensor.clone()), backend="tiled")
        torch.testing.assert_close(got.float(), want, atol=5e-3, rtol=5e-3)

    for _ in range(3):
        check()
    change(tensor)
    for _ in range(2):
        check()


def test_a_warmed_call_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewise.backends.gpu.compiled import Kernels

    problem = tw.Problem.of(batch=2, heads=2, head_dim=64, seqlen=256, dtype="float16", mask=tw.causal(), scale=0.25, softcap=9.0)
    report = tw.warmup(problem, processes=2)
    assert report.ok, report

    def refuse(self: Any, name: str, make: Any) -> Any:
        raise AssertionError(f"{name} is compiled")

    monkeypatch.setattr(Kernels, "_try", refuse)
    q, k, v = (x.requires_grad_() for x in qkv())
    tw.attention(q, k, v, mask=tw.causal(), scale=0.25, softcap=9.0).sum().backward()


def test_errors_of_the_background_are_raised_by_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewise.backends.gpu import launch

    compile_for = launch.compile_for

    def failing(target: Any, kernel: Any, *rest: Any) -> Any:
        if kernel.__name__ == "keys_kernel":
            raise ValueError("no such instruction")
        return compile_for(target, kernel, *rest)

    monkeypatch.setattr(launch, "compile_for", failing)
    q, k, v = (x.requires_grad_() for x in qkv(48))
    out = tw.attention(q, k, v, mask=tw.window(77), backend="triton")
    with pytest.raises(KernelError, match=r"keys_kernel .*no such instruction"):
        out.sum().backward()
