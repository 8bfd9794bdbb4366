"""The portable GPU backend: one set of Triton kernels, complete in features, for every GPU that Triton serves.

Importing it imports no triton; the kernels load with the first call.
"""

from __future__ import annotations

from tilewise.backends.triton.host import backend

__all__ = ["backend"]
