"""Attention bound to torch: autograd for eager calls, operators for compile, export and dispatch modes; one rule for all."""

from tilewise.ops.autograd import attend
from tilewise.ops.run import backward, forward

__all__ = ["attend", "backward", "forward"]
