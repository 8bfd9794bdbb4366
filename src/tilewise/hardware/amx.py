"""May this process use AMX's tiles? The processor must have them, and Linux gives their large state only to those who ask."""

from __future__ import annotations

import sys
from ctypes import CDLL, c_long, get_errno
from functools import cache

from tilewise.hardware.host import read_host
from tilewise.hardware.spec import MATRIX_UNITS

FLAGS = MATRIX_UNITS["amx"]
ARCH_PRCTL, REQUEST, TILE_DATA = 158, 0x1023, 18


@cache
def obstacle() -> str | None:
    """Why tiles cannot be used here; None if they can. Asking once is enough for all threads of a process and its children."""
    missing = [flag for flag in FLAGS if flag not in read_host().flags]
    if missing:
        return f"the processor has no {', '.join(missing)}"
    if sys.platform != "linux":
        return f"how to ask for AMX's state on {sys.platform} is not known here"
    try:
        system = CDLL(None, use_errno=True)
        refused = system.syscall(*(c_long(n) for n in (ARCH_PRCTL, REQUEST, TILE_DATA)))
    except (AttributeError, OSError) as error:
        return f"AMX's state could not be asked for: {error}"
    return f"the system refuses AMX's state (error {get_errno()})" if refused else None
