"""Verdict: a backend's answer to whether it can serve a problem."""

from __future__ import annotations

from typing import NamedTuple

from tilewise.masks.program import Kind


class Verdict(NamedTuple):
    """Whether a backend can; if not, every obstacle it sees."""

    ok: bool
    reasons: tuple[str, ...] = ()

    @classmethod
    def of(cls, *reasons: str | None) -> Verdict:
        """Yes, unless there is a reason against."""
        against = tuple(reason for reason in reasons if reason)
        return cls(not against, against)


def cpu_only(device: str) -> str | None:
    return None if device == "cpu" else f"computes on the CPU; the tensors are on {device}"


def no_tiles(name: str, tile: tuple[object, ...], why: str) -> str | None:
    """Why a backend without tiles of its own cannot take the user's."""
    return (
        f"tile: {name} has none to choose, {why}; leave tile= out, or use tiled, cpu, triton or hopper"
        if tile
        else None
    )


def no_statistics(stats: tuple[str, ...]) -> str | None:
    """Why a backend that knows of none cannot take a call with statistics."""
    return f"has no statistics ({', '.join(stats)}); cpu, triton, tiled and reference have" if stats else None


def no_trees(kinds: list[Kind]) -> str | None:
    """Why a backend whose kernels read no trees cannot take one of a packed batch; elsewhere a tree is a dense mask."""
    known = not any(kind.is_tree for kind in kinds)
    return None if known else "tree: in packed batches it is served by cpu, tiled and reference, in caches also by triton"
