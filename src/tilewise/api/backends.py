"""`backends()`: what is usable on this machine, and why the rest is not."""

from __future__ import annotations

import torch

from tilewise import dispatch
from tilewise.backends.base import Verdict
from tilewise.errors import DeviceError


def backends(device: str | None = None) -> dict[str, Verdict]:
    """What is usable here: every backend's verdict, with its reasons, in order of preference.

    device: "cpu" or "cuda"; None for "cuda" if there is one, else "cpu".

    >>> {name: verdict.reasons for name, verdict in tw.backends().items() if not verdict.ok}
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(device).type
    except (RuntimeError, TypeError):
        raise DeviceError(f"device: got {device!r}, need one of torch's, such as 'cpu' or 'cuda'") from None
    return {name: dispatch.usable(name, kind) for name in dispatch.REGISTRY}
