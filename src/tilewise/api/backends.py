"""`backends()`: what is usable on this machine, and why the rest is not."""

from __future__ import annotations

import torch

from tilewise import dispatch
from tilewise.backends.base import Verdict


def backends(device: str | None = None) -> dict[str, Verdict]:
    """Every backend's verdict in order of preference; `device` is "cuda" if there is one, else "cpu"."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return {name: dispatch.usable(name, device) for name in dispatch.REGISTRY}
