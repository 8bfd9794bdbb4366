"""Attention for Hopper GPUs (compute capability 9.0), in Gluon: the forward here, the gradients in `backward`.

One warp loads, two or three warpgroups compute: each owns 64 rows of a tile of queries, keeps its share of the output in
registers and streams the keys past it. The roles are functions, one file each: `load`, `consume` (with `softmax`), `finish`;
`schedule` says which tile comes next and which keys it sees.
"""

from tilewise.backends.hopper.backend import Hopper, backend

__all__ = ["Hopper", "backend"]
