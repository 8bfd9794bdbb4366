"""`merge`: partial attentions over disjoint keys, as one."""

from __future__ import annotations

from torch import Tensor

from tilewise.api.parse import LAYOUTS, check_device
from tilewise.errors import ArgumentError, ArgumentTypeError, LayoutError
from tilewise.numerics.merge import merge_many

PACKED = "(tokens, heads, dim)"


def merge(*parts: tuple[Tensor, Tensor], layout: str = "bhsd") -> tuple[Tensor, Tensor]:
    """The attention over all keys from attentions over some of them, which have no key in common. Differentiable.

    parts: pairs (out, lse) without sinks: out (B, H, S, D) or, packed, (T, H, D); lse (B, H, S) or (H, T), natural.
    layout: "bhsd", or "bshd" for outs with the sequence before the heads. Packed ones are told by their rank.

    Returns out in the dtype of the parts, and the log-sum-exp in float32; in float64 where a part has it.

    >>> near = tw.attention(q, k[:, :, 512:], v[:, :, 512:], return_lse=True)
    >>> far = tw.attention(q, k[:, :, :512], v[:, :, :512], return_lse=True)
    >>> out, lse = tw.merge(near, far)
    """
    if layout not in LAYOUTS:
        raise LayoutError(f"layout: got {layout!r}, need 'bhsd' (batch, heads, sequence, dim) or 'bshd'")
    if not parts:
        raise ArgumentError("merge: needs at least one pair (out, lse)")
    first = parts[0][0] if isinstance(parts[0], (tuple, list)) and parts[0] else None
    outs, lses = [], []
    for n, part in enumerate(parts):
        if not isinstance(part, (tuple, list)) or len(part) != 2 or not all(isinstance(x, Tensor) for x in part):
            raise ArgumentTypeError(f"part {n}: need a pair of tensors (out, lse), as return_lse=True gives them")
        out, lse = part
        assert isinstance(first, Tensor)
        if out.shape != first.shape or out.dtype != first.dtype or not out.is_floating_point():
            raise LayoutError(
                f"part {n}: out is {out.dtype} {tuple(out.shape)}, but the first is {first.dtype} {tuple(first.shape)}; "
                "they must agree"
            )
        check_device(f"part {n}", lse, first.device)
        inner = _inside(out, layout)
        if tuple(lse.shape) != tuple(inner.shape[:-1]):
            raise LayoutError(f"part {n}: lse has shape {tuple(lse.shape)}, need {tuple(inner.shape[:-1])} beside its out")
        outs.append(inner)
        lses.append(lse)
    merged, lse = merge_many(outs, lses)
    return _inside(merged.to(outs[0].dtype), layout), lse


def _inside(out: Tensor, layout: str) -> Tensor:
    """Heads before the sequence, or, of a tensor that has them so, the other way round."""
    if out.ndim == 3:
        return out.transpose(0, 1)
    if out.ndim != 4:
        raise LayoutError(f"out: rank {out.ndim}, shape {tuple(out.shape)}; need {LAYOUTS[layout]}, or packed {PACKED}")
    return out.transpose(1, 2) if layout == "bshd" else out


