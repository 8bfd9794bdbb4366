"""The machines tilewise knows by name."""

from __future__ import annotations

import itertools
import re
from functools import cache

from tilewise.errors import DeviceError
from tilewise.hardware.spec import DeviceSpec

ALIASES = {
    "a100": "a100-80",
    "a100-40gb": "a100-40",
    "a100-80gb": "a100-80",
    "h100-sxm": "h100",
    "h100-sxm5": "h100",
    "3090": "rtx3090",
    "4090": "rtx4090",
    "5090": "rtx5090",
    "altra": "altra-q80",
    "xeon": "xeon-8480",
    "epyc": "epyc-9654",
}


@cache
def catalogue() -> dict[str, DeviceSpec]:
    """Every catalogued machine by key, GPUs first."""
    from tilewise.hardware import nvidia, others  # a first call on a CPU waits for neither

    specs = sorted([*nvidia.specs(), *others.specs()], key=lambda spec: spec.kind != "gpu")
    return {spec.key: spec for spec in specs}


def names() -> list[str]:
    """The keys `--device` takes."""
    return list(catalogue())


def lookup(name: str) -> DeviceSpec:
    """A catalogued machine by key, alias or product name, whatever the case and separators."""
    wanted = _plain(name)
    by_plain = {_plain(spec.name): spec for spec in catalogue().values()}
    by_plain |= {_plain(alias): catalogue()[key] for alias, key in ALIASES.items()}
    by_plain |= {_plain(key): spec for key, spec in catalogue().items()}
    if wanted in by_plain:
        return by_plain[wanted]
    import difflib

    near = difflib.get_close_matches(wanted, by_plain, n=3, cutoff=0.5)
    keys = list(dict.fromkeys(by_plain[match].key for match in near))
    hint = f"did you mean {' or '.join(map(repr, keys))}? " if keys else ""
    known = ", ".join(names())
    raise DeviceError(f"device: unknown {name!r}; {hint}Known: {known}, or cpu and cuda for the live machine")


def closest_gpu(name: str, arch: str) -> DeviceSpec | None:
    """The catalogue entry for a live GPU: by the name the driver gives, else the same architecture."""
    parts = re.findall("[a-z0-9]+", name.lower())
    parts += ["".join(pair) for pair in itertools.pairwise(parts)]  # "RTX 4090"
    candidates = [spec for spec in catalogue().values() if spec.is_gpu]
    named = [spec for spec in candidates if spec.key.split("-")[0] in parts]
    if len(named) > 1:  # variants of one name: PCIe or SXM, 40 or 80 GB
        variants = [spec for spec in named if any(spec.key.split("-")[-1] in part for part in parts[1:])]
        named = sorted(variants, key=lambda spec: "-" not in spec.key) or named
    if named:
        return named[0]
    same = [spec for spec in candidates if spec.arch == arch]
    return same[0] if same else None


def _plain(name: str) -> str:
    return "".join(ch for ch in name.lower() if ch.isalnum())
