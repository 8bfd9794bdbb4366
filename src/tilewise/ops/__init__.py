"""Attention bound to torch: autograd for eager calls, operators for compile, export and dispatch modes; one rule for all."""
