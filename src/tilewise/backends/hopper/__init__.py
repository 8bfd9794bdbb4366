"""Attention for Hopper GPUs (compute capability 9.0), in Gluon: the forward here, the gradients in `backward`.

One warp loads, two or three warpgroups compute: each owns 64 rows of a query tile, keeps their output accumulator in registers
and streams the keys past it. The roles are functions, one file each: `producer`, `consumer` (with `mainloop`, `softmax` and
`epilogue`); `work_tile` says which tile comes next and which keys it sees. `a` is a kernel's Arguments, `C` its config.
`plan` says what is served on a device and with which tiles; `arguments` makes a launch of that.
"""
