"""Kernels of rows in Triton's interpreter, held to what torch computes: a process of its own.

    TRITON_INTERPRET=1 python -m tests.backends.interpreted_partials
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch

from tests.backends.partials import check_merge, check_products


def main() -> None:
    torch.set_num_threads(1)
    check_merge(torch.device("cpu"))
    check_products(torch.device("cpu"))


if __name__ == "__main__":
    main()
