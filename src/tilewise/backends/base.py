"""The protocol every backend speaks. Tensors are rank 4 views (B, H, S, D) of any strides; packed batches are (1, H, T, D)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from tilewise.backends.verdict import Verdict as Verdict
from tilewise.backends.verdict import cpu_only as cpu_only
from tilewise.errors import BackendError
from tilewise.numerics.inputs import Inputs as Inputs
from tilewise.numerics.merge import finite
from tilewise.problem import WIDE, Problem

if TYPE_CHECKING:
    from tilewise.backends.pages import NewTokens, PagedPart, Pages
    from tilewise.hardware.spec import DeviceSpec
    from tilewise.model.tile import TilePlan


class Needs(NamedTuple):
    """Which gradients are wanted."""

    dq: bool = True
    dk: bool = True
    dv: bool = True
    dbias: bool = False
    dsinks: bool = False


class Grads(NamedTuple):
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    dbias: Tensor | None = None
    dsinks: Tensor | None = None


class BackwardInputs(NamedTuple):
    """What a backward takes beside the inputs: what the forward left, what came back, and what is wanted."""

    out: Tensor
    lse: Tensor
    dout: Tensor
    dlse: Tensor | None = None
    needs: Needs = Needs()


class Statistics(NamedTuple):
    """What the rows of a call saw, in the dtype of the arithmetic; None for what `Problem.stats` does not name.

    Logits are those of the visible keys as the softmax sees them: scaled, capped, biased, without the sink. Entropy is that of
    their softmax. Weights are those before dropout, with the sink in their denominator.
    """

    max_logit: Tensor | None = None  # (B, Hq, M); -inf for a row that sees no key
    entropy: Tensor | None = None  # (B, Hq, M); 0 for such a row
    key_lse: Tensor | None = None  # (B, Hq, M): the log-sum-exp without the sink; beside the entropy
    key_mass: Tensor | None = None  # (B, Hq, N)
    weights: Tensor | None = None  # (B, Hq, M, k), falling; 0 beyond the visible keys
    indices: Tensor | None = None  # (B, Hq, M, k) int64, within the sequence; -1 beyond the visible keys


class EntropyCotangent(NamedTuple):
    """What comes back to the entropy H = lse - Σ P s: dS = -dentropy · P ∘ (s - mean)."""

    dentropy: Tensor  # (B, Hq, M); 0 for rows that see no key
    mean: Tensor  # (B, Hq, M): Σ P s, finite


class Tangents(NamedTuple):
    """A direction in which the differentiable inputs move, each in its input's dtype and shape; None for one that stays."""

    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None


class Jvp(NamedTuple):
    """The forward and its derivative along a direction."""

    out: Tensor
    lse: Tensor
    out_t: Tensor  # like out
    lse_t: Tensor  # like lse; 0 in rows that see nothing


class Direction(NamedTuple):
    """How the inputs of a backward move, and how its forward's results move with them; None where that is still to be found."""

    tangents: Tangents
    out_t: Tensor | None = None
    lse_t: Tensor | None = None


class PagedLaunch(NamedTuple):
    """What one launch over pages computes, and its kernels' tiles by pass; {}: those of the backend's plan for the problem."""

    problem: Problem
    inputs: Inputs
    pages: Pages
    tiles: Mapping[str, TilePlan]


PagedLauncher = Callable[[Tensor, "Pages", bool], tuple[Tensor, Tensor]]
"""Of q (B, Sq, Hq, D), the pages, and whether a log-sum-exp is wanted: out (B, Sq, Hq, Dv), and the log-sum-exp (B, Hq, Sq), or
anything if it is not. Lengths are int32 or int64, one after another, and within the pages where somebody may look."""


class CompileJob(NamedTuple):
    """A kernel that is to be compiled."""

    name: str
    make: Callable[[], object]
    """Compiles it and leaves it in a cache on disk; may be sent to another process."""
    adopt: Callable[[], object]
    """Loads it into this process, or compiles it here; raises what the compiler raises."""
    ahead: Callable[[], object] | None = None
    """Has a thread of this process compile it: whoever needs it first waits for that, and gets its error."""


DERIVATIVES = ("jvp", "double_backward")
"""What a backend may compute beside forward and backward; `docs/derivatives.md` has the formulas."""


class Backend(Protocol):
    name: str
    any_address: bool = False
    """Refuses no call for where its tensors begin in memory."""
    reads_pages: bool = False
    """Has `paged`."""
    writes_pages: bool = False
    """Has `append`."""
    joins_parts: bool = False
    """Has `join_parts`."""
    invariant: bool = False
    """Serves problems whose rows must have bits of their own: `Problem.invariant`."""
    finds_direction: bool = False
    """Its `double_backward` takes a direction without out_t and lse_t."""

    def usable(self, device: str) -> Verdict:
        """Can it run on this machine and kind of device at all?"""

    def supports(self, problem: Problem, inputs: Inputs | None = None, *, backward: bool = False) -> Verdict:
        """Can it compute this problem's output (or, with `backward`, its gradients)? Never raises; names every obstacle.

        `inputs` is given where strides or addresses matter.
        """

    def declines(self, problem: Problem, inputs: Inputs | None = None, *, backward: bool = False) -> str | None:
        """Why, although it could, the automatic choice had better pass on to the next backend; None to take the call."""
        return None

    def forward(self, problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """out (B, Hq, M, Dv) in the inputs' dtype; lse (B, Hq, M), natural log, in the dtype of the arithmetic."""

    def forward_packed(self, problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """`forward` of a packed batch with q, k, v and out as users have them, (T, H, D). Views take as long as launches: a
        backend that needs none to repeat a call makes its own."""
        out, lse = self.forward(problem, rank4_inputs(inputs))
        return from_rank4(out), lse

    def paged(self, problem: Problem, inputs: Inputs, pages: Pages) -> tuple[Tensor, Tensor]:
        """The same of a packed batch whose keys and values lie in pages: `k` and `v` of the inputs, with the heads first. What is
        `partial` may come in several parts, along the first dimension."""
        raise BackendError(f"backend {self.name!r} reads no pages", {self.name: ("reads no pages",)})

    def paged_launches(self, problem: Problem, inputs: Inputs, pages: Pages, spec: DeviceSpec) -> list[PagedLaunch]:
        """What `paged` launches on the machine `spec`. Nothing is computed."""
        return [PagedLaunch(problem, inputs, pages, {})]

    def join_parts(self, q: Tensor, parts: Sequence[PagedPart], sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """out (1, H, T, Dv) in the dtype of q (1, H, T, D) and lse (1, H, T): the parts merged, which are of fp32; a token whose
        first part saw no key is none and sees nothing. Sinks join at the end."""
        raise BackendError(f"backend {self.name!r} joins no parts", {self.name: ("joins no parts",)})

    def append(self, pages: Pages, new: NewTokens) -> Tensor | None:
        """Write new tokens into pages, and turn them and their queries; gives the queries. What has no place is not written."""
        raise BackendError(f"backend {self.name!r} writes no pages", {self.name: ("writes no pages",)})

    def backward(self, problem: Problem, inputs: Inputs, given: BackwardInputs) -> Grads:
        """The gradients asked for, each in its input's dtype and shape."""

    def backward_packed(self, problem: Problem, inputs: Inputs, given: BackwardInputs) -> Grads:
        """`backward` with q, k, v, out and dout as `forward_packed` has them, and their gradients."""
        given = given._replace(out=to_rank4(given.out), dout=to_rank4(given.dout))
        grads = self.backward(problem, rank4_inputs(inputs), given)
        dq, dk, dv = (None if x is None else from_rank4(x) for x in grads[:3])
        return grads._replace(dq=dq, dk=dk, dv=dv)

    def statistics(self, problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor, Statistics]:
        """out, lse and what `problem.stats` names; of a backend whose `supports` takes problems with statistics."""
        raise BackendError(f"backend {self.name!r} has no statistics")

    def entropy_backward(
        self, problem: Problem, inputs: Inputs, given: BackwardInputs, entropy: EntropyCotangent
    ) -> Grads:
        """`backward`, with what comes back to the entropy. The problem has no sinks."""
        raise BackendError(f"backend {self.name!r} has no gradient of the entropy")

    def derives(self, problem: Problem, inputs: Inputs | None = None, *, derivative: str) -> Verdict:
        """Can it compute this derivative, one of DERIVATIVES, of a problem whose backward it supports? Never raises."""
        return Verdict(False, (f"{self.name} has no {derivative}",))

    def jvp(self, problem: Problem, inputs: Inputs, tangents: Tangents) -> Jvp:
        """Output and log-sum-exp, and their derivatives along the tangents, of which one at least is given."""
        raise BackendError(f"{self.name} has no jvp")

    def double_backward(
        self, problem: Problem, inputs: Inputs, given: BackwardInputs, direction: Direction
    ) -> Grads:
        """The derivative of the gradients asked for along a direction of the inputs, while dout and dlse stay.

        Backward of the backward and forward over reverse are both made of it.
        """
        raise BackendError(f"{self.name} has no double_backward")

    def missing_kernels(
        self, problem: Problem, inputs: Inputs, given: BackwardInputs | None = None
    ) -> list[CompileJob]:
        """What a forward of a supported problem, or with `given` a backward, would have to compile first. Nothing is computed;
        of the tensors only shapes, strides and addresses count."""
        return []

    def launcher(self, problem: Problem, inputs: Inputs) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
        """A function of q, k and v that gives out alone, for calls of the same types, shapes, strides and dtypes that want
        neither gradient nor log-sum-exp: all but their addresses is prepared. None where nothing is gained."""
        return None

    def paged_launcher(self, problem: Problem, inputs: Inputs, pages: Pages) -> PagedLauncher | None:
        """A `PagedLauncher` for calls over pages of the same types, shapes, strides and dtypes, whose queries (B, Sq, Hq, D) lie
        in memory as those of `inputs`, with as many threads as torch has now: all but addresses is prepared. None where
        nothing is gained."""
        return None


def empty_out(q: Tensor, head_dim_v: int) -> Tensor:
    """Fresh memory for the output, its dimensions laid out in the order of q's strides: bshd in, bshd out."""
    if head_dim_v == q.shape[3] and (q.is_contiguous() or _tokens_first(q)):
        return torch.empty_like(q)  # laid out like a dense q; the cheapest way to memory that torch has
    shape = (*q.shape[:3], head_dim_v)
    order = sorted(range(3), key=lambda axis: (q.stride(axis), -axis), reverse=True)
    strides, step = [0, 0, 0, 1], head_dim_v
    for axis in reversed(order):
        strides[axis] = step
        step *= shape[axis]
    return q.new_empty_strided(shape, strides)


def _tokens_first(q: Tensor) -> bool:
    """Do all of q's numbers lie side by side, tokens before heads?"""
    (_, h, m, d), steps = q.shape, q.stride()
    return steps == (m * h * d, d, h * d, 1)


def to_rank4(x: Tensor) -> Tensor:
    """A packed tensor (T, H, D) as (1, H, T, D), by one call. Neither a graph nor a transform may see it."""
    (t, h, d), (step_t, step_h, step_d) = x.shape, x.stride()
    return x.as_strided((1, h, t, d), (t * step_t, step_h, step_t, step_d))


def from_rank4(x: Tensor) -> Tensor:
    """The other way."""
    (_, h, t, d), (_, step_h, step_t, step_d) = x.shape, x.stride()
    return x.as_strided((t, h, d), (step_t, step_h, step_d))


def rank4_inputs(inputs: Inputs) -> Inputs:
    """With q, k and v of rank 4, if they are not."""
    if inputs.q.ndim == 4:
        return inputs
    return inputs._replace(q=to_rank4(inputs.q), k=to_rank4(inputs.k), v=to_rank4(inputs.v))


def empty_packed(q: Tensor, head_dim_v: int) -> tuple[Tensor, Tensor]:
    """`empty_out` for a packed q (T, H, D), as it is laid out, and `empty_lse`."""
    (t, h, d), steps = q.shape, q.stride()
    lse = q.new_empty_strided((1, h, t), (h * t, t, 1), dtype=torch.float32)
    if head_dim_v == d and steps in ((h * d, d, 1), (d, t * d, 1)):
        return torch.empty_like(q), lse
    return from_rank4(empty_out(to_rank4(q), head_dim_v)), lse


def empty_lse(q: Tensor, precision: str = "default") -> Tensor:
    b, h, m, _ = q.shape
    dtype = torch.float64 if q.dtype is torch.float64 or precision in WIDE else torch.float32
    return q.new_empty_strided((b, h, m), (h * m, m, 1), dtype=dtype)


def empty_statistics(problem: Problem, lse: Tensor) -> Statistics:
    """The statistics of rows that see no key, to be written over; `lse` (B, Hq, M) is one of the call."""
    shape, k = tuple(lse.shape), problem.top
    asked = set(problem.stats)
    entropy = "entropy" in asked
    return Statistics(
        max_logit=torch.full_like(lse, float("-inf")) if "max_logit" in asked else None,
        entropy=torch.zeros_like(lse) if entropy else None,
        key_lse=torch.full_like(lse, float("-inf")) if entropy else None,
        key_mass=lse.new_zeros((*shape[:2], problem.seqlen_k)) if "key_mass" in asked else None,
        weights=lse.new_zeros((*shape, k)) if k else None,
        indices=torch.full((*shape, k), -1, device=lse.device) if k else None,
    )


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in the dtype of a result. From float64 to 16 bits torch goes by way of float32, and may round twice: here what the first
    step cuts off is kept in the last bit, so that the second one knows of it."""
    if x.dtype != torch.float64 or dtype.itemsize != 2:
        return x.to(dtype)
    near = x.float()
    back, bits = near.double(), near.view(torch.int32)
    bits = torch.where(back.abs() > x.abs(), bits - 1, bits)
    return torch.where(back == x, bits, bits | 1).view(torch.float32).to(dtype)


def row_products(dout: Tensor, out: Tensor, dtype: torch.dtype) -> Tensor:
    """rowsum(dO ∘ O) [B, Hq, M]. An output of 0 takes no part, whatever comes back to it: so have rows that see nothing."""
    return torch.where(out == 0, 0.0, dout.to(dtype) * out.to(dtype)).sum(dim=-1)


def sink_weight(sinks: Tensor, lse: Tensor) -> Tensor:
    """exp(z - L) [B, Hq, M]; 0 for an infinite sink."""
    sink = sinks.to(lse.dtype)[:, None]
    return torch.where(sink.isinf(), 0.0, torch.exp(sink - finite(lse)))


def sink_gradient_tangent(sinks: Tensor, sinks_t: Tensor | None, rows: tuple[Tensor, ...]) -> Tensor:
    """-Σ P_z ((z_t - L_t) delta + delta_t), summed over the rows of each head; `rows` are lse, lse_t, delta and delta_t."""
    lse, lse_t, delta, delta_t = rows
    moved = -lse_t if sinks_t is None else sinks_t.to(lse.dtype)[:, None] - lse_t
    return rounded(-(sink_weight(sinks, lse) * (moved * delta + delta_t)).sum(dim=(0, 2)), sinks.dtype)


def sink_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """A sink is a key with value 0, so dS = P_sink · (0 - delta), summed over the rows of its head; 0 for an infinite sink."""
    sink = sinks.to(lse.dtype)[:, None]
    p = torch.where(sink.isinf(), 0.0, torch.exp(sink - finite(lse)))  # [B, Hq, M]
    return rounded(-(p * delta).sum(dim=(0, 2)), sinks.dtype)
