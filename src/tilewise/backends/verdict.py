"""Verdict: whether a backend can, and every reason why not."""

from __future__ import annotations

from typing import NamedTuple


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
