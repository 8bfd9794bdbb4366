"""Kernels of rows on a GPU; `interpreted_partials` has them in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu


def test_rows_are_merged() -> None:
    from tests.backends.partials import check_merge

    check_merge(torch.device("cuda"))


def test_products_of_rows() -> None:
    from tests.backends.partials import check_products

    check_products(torch.device("cuda"))
