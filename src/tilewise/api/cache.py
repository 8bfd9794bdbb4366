"""`KVCache`: keys and values that attention has seen before, as a view of memory that somebody else owns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewise.api.cached_write import check_appended, check_lengths, even_steps, is_cumulative, write
from tilewise.api.lengths import readable
from tilewise.api.parse import LAYOUTS, check_dense, check_device, check_range
from tilewise.backends.pages import QUANTIZED, NewTokens, Pages
from tilewise.errors import ArgumentError, ArgumentTypeError, LayoutError
from tilewise.masks.arrays import INTEGERS
from tilewise.ops.tensors import dtype_name, plain
from tilewise.problem import ITEMSIZE

Table = Tensor | tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class KVCache:
    """Keys and values of a batch of sequences, in pages or in rows of their own. A view: it allocates nothing and owns no policy.

    Made by `KVCache.paged` or `KVCache.static`; `pages` is what kernels read of it. `lengths` is read by every call: whoever
    appends tokens raises it first.

    >>> cache = tw.KVCache.paged(k_pages, v_pages, table, lengths)     # pages (pages, 16, Hk, D), table (B, most)
    >>> out = tw.attention_cached(q, cache)                            # q (B, 1, Hq, D): one new token each
    """

    pages: Pages
    """What kernels read."""

    @classmethod
    def paged(
        cls,
        k_pages: Tensor,
        v_pages: Tensor | None,
        table: Table,
        lengths: Tensor,
        *,
        value_dim: int | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> KVCache:
        """Tokens in pages that a table lists.

        k_pages: (pages, page, Hk, D), of any strides: other orders of these sides are views of it.
        v_pages: (pages, page, Hk, Dv); None with `value_dim`: values are the first columns of the keys.
        table: (B, most), the pages of each sequence in order; or (indptr, indices), those of sequence b being
            indices[indptr[b]:indptr[b + 1]]. Entries behind the last token, and −1 for pages no query sees, are not read.
        lengths: (B,), the tokens of each sequence that attention sees, new ones included.
        value_dim: the columns of K that are V, where `v_pages` is None.
        k_scale: what int8 and float8 keys are multiplied by: (), (Hk,) or (pages, page, Hk).
        v_scale: the same of values; as `k_scale` where `v_pages` is None.

        >>> cache = tw.KVCache.paged(k_pages, v_pages, table, lengths)
        >>> latent = tw.KVCache.paged(pages, None, table, lengths, value_dim=512)     # K (…, 576), V its first 512 columns
        """
        _check_pages("k_pages", k_pages)
        latent = v_pages is None
        if v_pages is None:
            if value_dim is None or not 0 < value_dim <= k_pages.shape[3]:
                raise ArgumentError(
                    f"value_dim: got {value_dim}; without v_pages, need 1 to {k_pages.shape[3]} columns of k_pages"
                )
            v_pages, v_scale = k_pages[..., :value_dim], k_scale if v_scale is None else v_scale
        elif value_dim is not None:
            raise ArgumentError("value_dim: the values are v_pages; pass v_pages=None to take columns of k_pages")
        _check_pages("v_pages", v_pages)
        if v_pages.shape[:3] != k_pages.shape[:3] or v_pages.dtype != k_pages.dtype:
            raise LayoutError(
                f"v_pages: {v_pages.dtype} {tuple(v_pages.shape)}, but k_pages is {k_pages.dtype} {tuple(k_pages.shape)}; "
                "pages, page, heads and dtype must agree"
            )
        check_device("v_pages", v_pages, k_pages.device)
        entries, indptr = _check_table(table, k_pages.device)
        batch = entries.shape[0] if indptr is None else indptr.shape[0] - 1
        _check_integers("lengths", lengths, k_pages.device, (batch,))
        scales = {"k_scale": _scale("k_scale", k_scale, k_pages), "v_scale": _scale("v_scale", v_scale, k_pages)}
        return cls(Pages.of(k_pages, v_pages, entries, indptr, lengths, **scales, latent=latent))

    @classmethod
    def static(cls, k: Tensor, v: Tensor, lengths: Tensor, *, layout: str = "bshd") -> KVCache:
        """A row of memory for each sequence, as long as the longest may become.

        k: (B, S, Hk, D), or (B, Hk, S, D) with layout="bhsd".
        v: (B, S, Hk, Dv).
        lengths: (B,), the tokens of each sequence that attention sees, new ones included.
        layout: "bshd" or "bhsd".

        >>> cache = tw.KVCache.static(k, v, torch.full((8,), 100))     # k, v (8, 4096, Hk, D), 100 tokens in each
        """
        if layout not in LAYOUTS:
            raise LayoutError(f"layout: got {layout!r}, need 'bshd' (batch, sequence, heads, dim) or 'bhsd'")
        _check_pages("k", k)
        _check_pages("v", v)
        if layout == "bhsd":
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        table = torch.arange(k.shape[0], dtype=torch.int32, device=k.device)[:, None]
        return cls.paged(k, v, table, lengths)

    @property
    def lengths(self) -> Tensor:
        """(B,), the tokens that attention sees."""
        return self.pages.lengths

    def append(self, k: Tensor, v: Tensor, slots: Tensor | None = None, *, cu_seqlens: Tensor | None = None) -> None:
        """Write tokens into the pages.

        k: (B, n, Hk, D), or (T, Hk, D) with `cu_seqlens` or `slots`.
        v: the same with Dv columns.
        slots: (T,) or (B, n), the place of each token: page · page size + place within the page; −1 writes nothing. None: the
            last n of each sequence's `lengths`, which count the new tokens already.
        cu_seqlens: (B + 1,), where the tokens of each sequence begin in a packed k.

        >>> lengths += 1
        >>> cache.append(k, v)                                        # k, v (B, 1, Hk, D): token lengths − 1 of each sequence
        """
        rows = k.shape[1] if isinstance(k, Tensor) and k.ndim == 4 else 0
        k, v, cu = self._new_tokens(k, v, cu_seqlens, need_cu=slots is None)
        if slots is not None:
            _check_integers("slots", slots, k.device, None)
            slots = slots.reshape(-1).long().contiguous()
            if slots.shape[0] != k.shape[0]:
                raise LayoutError(f"slots: {slots.shape[0]} places for {k.shape[0]} tokens; need one each")
        write(self.pages.now(), NewTokens(k=k, v=v, cu=cu, rows=rows, slots=slots))

    def check(self, cu: Tensor | None = None) -> None:
        """Raise on lengths and pages that do not fit each other. Reads tensors: on a GPU that waits for it."""
        pages = self.pages.now()
        if cu is None:
            check_lengths(pages)
        else:
            check_appended(pages, cu)

    def _new_tokens(
        self, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, need_cu: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """New keys and values packed, (T, Hk, D), and where each sequence's begin."""
        pages = self.pages
        batch, heads, dims = pages.starts.shape[0], pages.k.shape[2], (pages.k.shape[3], pages.v.shape[3])
        for name, x, dim in (("k", k, dims[0]), ("v", v, dims[1])):
            if not isinstance(x, Tensor) or not x.is_floating_point():
                raise ArgumentTypeError(f"{name}: got {getattr(x, 'dtype', type(x).__name__)}, need a floating-point tensor")
            plain(name, x)
            check_dense(name, x)
            check_device(name, x, pages.k.device)
            if x.ndim not in (3, 4) or tuple(x.shape[-2:]) != (heads, dim) or x.shape[:-1] != k.shape[:-1]:
                raise LayoutError(
                    f"{name}: shape {tuple(x.shape)}, need (batch, tokens, {heads}, {dim}) or (tokens, {heads}, {dim}), "
                    "k and v with as many tokens"
                )
        if k.ndim == 4:
            if cu_seqlens is not None:
                raise LayoutError("cu_seqlens: goes with packed tokens (T, heads, dim); k has a batch side")
            if k.shape[0] != batch and need_cu:
                raise LayoutError(f"k: {k.shape[0]} sequences, but the cache has {batch}")
            return k.flatten(0, 1), v.flatten(0, 1), even_steps(k.shape[0], k.shape[1], k.device)
        if cu_seqlens is None and need_cu:
            raise ArgumentError("cu_seqlens: packed tokens need it, or `slots`, to say whose they are")
        if cu_seqlens is not None:
            _check_integers("cu_seqlens", cu_seqlens, k.device, (batch + 1,))
            if readable(cu_seqlens) and not is_cumulative(cu_seqlens.tolist(), k.shape[0]):
                raise ArgumentError(f"cu_seqlens: need 0 to {k.shape[0]}, never falling, got {cu_seqlens.tolist()}")
        return k, v, None if cu_seqlens is None else cu_seqlens.int()

    def __repr__(self) -> str:
        pages = self.pages
        count, page, heads, dim = pages.k.shape
        scaled = ", scaled" if pages.k_scale is not None else ""
        return (
            f"KVCache({pages.starts.shape[0]} sequences in {count} pages of {page}, {heads} heads of {dim}/{pages.v.shape[3]}, "
            f"{dtype_name(pages.k)}{scaled}, {pages.k.device})"
        )


def _check_pages(name: str, x: Any) -> None:
    if not isinstance(x, Tensor):
        raise ArgumentTypeError(f"{name}: got {type(x).__name__}, need a torch.Tensor")
    plain(name, x)
    check_dense(name, x)
    if x.ndim != 4:
        raise LayoutError(f"{name}: rank {x.ndim}, shape {tuple(x.shape)}; need rank 4, (pages, page, heads, dim)")
    if 0 in x.shape[1:]:
        raise LayoutError(f"{name}: shape {tuple(x.shape)}; a page, its heads and dims have at least 1 element each")
    if dtype_name(x) not in (*ITEMSIZE, *QUANTIZED):
        raise ArgumentTypeError(f"{name}: dtype {x.dtype}, need one of {', '.join((*ITEMSIZE, *QUANTIZED))}")
    if x.requires_grad:
        raise ArgumentError(f"{name}: requires a gradient, which a cache does not have; pass {name}.detach()")


def _check_table(table: Any, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """The table, or its entries and where each sequence's begin."""
    if not isinstance(table, (tuple, list)):
        _check_integers("table", table, device, None)
        if table.ndim != 2:
            raise LayoutError(f"table: shape {tuple(table.shape)}, need (batch, most) or a pair (indptr, indices)")
        return table, None
    if len(table) != 2:
        raise ArgumentError(f"table: got {len(table)} tensors, need a table (B, most) or a pair (indptr, indices)")
    indptr, indices = table
    _check_integers("table[0]", indptr, device, None)
    _check_integers("table[1]", indices, device, None)
    if indptr.ndim != 1 or indptr.shape[0] < 1 or indices.ndim != 1:
        raise LayoutError(f"table: indptr {tuple(indptr.shape)} and indices {tuple(indices.shape)}; need (B + 1,) and (n,)")
    return indices, indptr


def _check_integers(name: str, x: Any, device: torch.device, shape: tuple[int, ...] | None) -> None:
    if not isinstance(x, Tensor) or dtype_name(x) not in INTEGERS:
        raise ArgumentTypeError(f"{name}: got {getattr(x, 'dtype', type(x).__name__)}, need an integer tensor")
    plain(name, x)
    check_dense(name, x)
    check_device(name, x, device)
    check_range(name, x)
    if shape is not None and tuple(x.shape) != tuple(shape):
        raise LayoutError(f"{name}: shape {tuple(x.shape)}, need {tuple(shape)}")


def _scale(name: str, scale: Any, k_pages: Tensor) -> Tensor | None:
    """A scale as (pages, page, Hk), repeated where it is shared."""
    quantized = dtype_name(k_pages) in QUANTIZED
    if scale is None:
        if quantized:
            raise ArgumentError(f"{name}: {k_pages.dtype} pages need one: (), (heads,) or (pages, page, heads)")
        return None
    if not quantized:
        raise ArgumentError(f"{name}: pages of {k_pages.dtype} have none; it goes with {' and '.join(QUANTIZED)}")
    if not isinstance(scale, Tensor) or scale.dtype != torch.float32:
        raise ArgumentTypeError(f"{name}: got {getattr(scale, 'dtype', type(scale).__name__)}, need a float32 tensor")
    check_device(name, scale, k_pages.device)
    shape = tuple(k_pages.shape[:3])
    if tuple(scale.shape) not in ((), shape[2:], shape):
        raise LayoutError(f"{name}: shape {tuple(scale.shape)}, need (), {shape[2:]} or {shape}")
    return scale.expand(shape) if scale.ndim == 3 else _repeated(scale, shape)


def _repeated(scale: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A scale of the tensor or of each head for all tokens: strides of 0 say that they share it, also where there is one."""
    return scale.expand(shape[2:]).as_strided(shape, (0, 0, scale.stride(0) if scale.ndim else 0))
