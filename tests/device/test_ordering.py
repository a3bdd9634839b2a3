"""Rows from a device, however its streams run: every story in every order."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("torch")

from tests.device.fake import ORDERS
from tests.device.scenarios import STORIES, Make


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_rows_are_right(story: Callable[[Make], None], order: str, make_on: Callable[[str], Make]) -> None:
    """W1, W3, W5, W7, W8, S3, H6, H8"""
    story(make_on(order))
