"""Parts of a whole, held to the oracle: calls whose sequences begin somewhere in a larger problem. Also a program of its own.

    TRITON_INTERPRET=1 python -m tests.backends.origins
"""

from __future__ import annotations

import sys
from dataclasses import replace

import torch

from tests.numerics import checks
from tilewise import dispatch
from tilewise.backends.base import BackwardInputs, Inputs, Needs
from tilewise.masks import causal, full
from tilewise.ops.tensors import tensor_fields
from tilewise.problem import Problem

ORIGINS = [(5, 3, 0, 0), (7, 4, 2, 1), (64, 33, 0, 5), (131, 130, 1, 2)]
"""q, k, head, batch; keys begin at each of the four words of a Philox block."""


def part(packed: bool, heads: int = 4) -> tuple[Problem, Inputs]:
    """Four parts of a whole with dropout and ALiBi, packed or as a batch."""
    g = torch.Generator().manual_seed(3)
    lengths = ([5, 17, 1, 9], [3, 20, 8, 9]) if packed else ([17] * 4, [20] * 4)
    cu = [torch.tensor([0, *n]).cumsum(0).int() if packed else None for n in lengths]
    batch, rows, keys = (1, sum(lengths[0]), sum(lengths[1])) if packed else (4, 17, 20)
    q, k, v = (
        torch.randn((batch, count, length, 16), generator=g)
        for count, length in ((heads, rows), (heads // 2, keys), (heads // 2, keys))
    )
    origins = torch.tensor(ORIGINS, dtype=torch.int32)
    alibi = torch.rand((4, heads), generator=g)
    inputs = Inputs(q, k, v, None, alibi, None, torch.tensor(77), *cu, origins)
    problem = Problem(**tensor_fields(inputs), mask=causal() if packed else full(), scale=0.25, dropout_p=0.4)
    return problem, inputs


def among_others(x: torch.Tensor) -> torch.Tensor:
    """The same rows as a part of more of them, as a rank has those of a stage."""
    nan = torch.full_like(x[:, :, :3], float("nan"))
    return torch.cat([nan, x, nan], 2)[:, :, 3:-3]


def excesses(backend: str, packed: bool, device: str = "cpu", heads: int = 4) -> list[checks.Excess]:
    """What forward and backward of a backend return outside their bounds."""
    problem, inputs = part(packed, heads)
    inputs = Inputs(*(None if x is None else x.to(device) for x in inputs))  # type: ignore[arg-type]
    problem = replace(problem, device=device)
    served = dispatch.judge(backend, problem, inputs)
    assert served.ok, served.reasons
    chosen = dispatch.get(backend)
    out, lse = chosen.forward(problem, inputs)
    g = torch.Generator().manual_seed(4)
    dout, dlse = (torch.randn(x.shape, generator=g).to(x) for x in (out, lse))
    training = replace(problem, needs_grad=True)
    grads = chosen.backward(training, inputs, BackwardInputs(*map(among_others, (out, lse, dout, dlse)), Needs()))
    return [
        *checks.check_forward(problem, inputs, out, lse),
        *checks.check_backward(problem, inputs, dout, dlse, grads),
    ]


if __name__ == "__main__":
    from tilewise.backends.triton import plan, run

    plan.splits_fp32 = run.splits_fp32 = lambda problem, hip: False  # parts take three times as long here
    wrong = excesses("triton", packed=True, heads=2)
    print("\n".join(map(str, wrong)))
    sys.exit(bool(wrong))
