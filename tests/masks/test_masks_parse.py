"""Masks written as text: precedence, options, and errors that point at their place."""

from __future__ import annotations

import pytest

import tilewise as tw
from tilewise.errors import MaskError, TilewiseError
from tilewise.masks import parse

MEANINGS = {
    "full": tw.full(),
    "causal": tw.causal(),
    "causal()": tw.causal(),
    "  causal ( ) ": tw.causal(),
    "causal(top_left)": tw.causal("top_left"),
    "causal(align=top_left)": tw.causal("top_left"),
    "causal(offset=3)": tw.causal(offset=3),
    "causal(offset=-3)": tw.causal(offset=-3),
    "window(4096)": tw.window(4096),
    "window(7, 2)": tw.window(7, 2),
    "window(7, 2, top_left)": tw.window(7, 2, align="top_left"),
    "window(7, right=2, align=bottom_right)": tw.window(7, 2),
    "window(7, offset=1)": tw.window(7, offset=1),
    "window(4,)": tw.window(4),
    "prefix(0)": tw.prefix(0),
    "~causal": ~tw.causal(),
    "~~causal": tw.causal(),
    "causal & window(4)": tw.causal() & tw.window(4),
    "causal&window(4)|prefix(2)": (tw.causal() & tw.window(4)) | tw.prefix(2),
    "prefix(2) | causal & window(4)": tw.prefix(2) | (tw.causal() & tw.window(4)),
    "(prefix(2) | causal) & window(4)": (tw.prefix(2) | tw.causal()) & tw.window(4),
    "~prefix(2) & causal": (~tw.prefix(2)) & tw.causal(),
    "~(prefix(2) & causal)": ~(tw.prefix(2) & tw.causal()),
    "prefix(1) | prefix(2) | prefix(3)": (tw.prefix(1) | tw.prefix(2)) | tw.prefix(3),
    "prefix(1) & prefix(2) & prefix(3)": (tw.prefix(1) & tw.prefix(2)) & tw.prefix(3),
    "causal\n| prefix(3)": tw.causal() | tw.prefix(3),
}


# masks that hold integers for each sequence are no values: compared as they are written
LISTS = {
    "key_padding([5, 6])": "key_padding([5, 6])",
    "causal & key_padding([5, 6,], start=[0, -1])": "causal() & key_padding([5, 6], start=[0, -1])",
    "causal(offset=[1, 2]) | prefix([3])": "causal(offset=[1, 2]) | prefix([3])",
}


@pytest.mark.parametrize("text", LISTS)
def test_lists(text: str) -> None:
    assert repr(parse(text)) == LISTS[text]


@pytest.mark.parametrize("text", MEANINGS)
def test_meaning(text: str) -> None:
    assert parse(text) == MEANINGS[text]


# text, the position (from 1) of what is wrong, and words of the message
ERRORS = [
    ("", 1, "expected a mask"),
    ("   ", 4, "expected a mask"),
    ("casual", 1, "'casual'"),
    ("documents(3)", 1, "'documents'"),
    ("causal &", 9, "expected a mask"),
    ("& causal", 1, "expected a mask"),
    ("causal causal", 8, "expected &, | or the end"),
    ("causal)", 7, "expected &, | or the end"),
    ("causal2", 7, "'2'"),
    ("(causal", 8, "expected ')'"),
    ("window(", 8, "expected an integer"),
    ("window(4", 9, "expected ',' or ')'"),
    ("window(4 5)", 10, "expected ',' or ')'"),
    ("window(,4)", 8, "','"),
    ("window(1.5)", 9, "unknown character"),
    ("causal $ window(3)", 8, "'$'; unknown character"),
    ("causal or prefix(3)", 8, "'or'"),
    ("causal && window(3)", 9, "'&'"),
    ("causal(=3)", 8, "'='"),
    ("causal(offset=)", 15, "expected a value"),
    ("causal(sideways)", 8, "bottom_right, top_left"),
    ("causal(align=sideways)", 1, "align is 'sideways'"),
    ("causal(top_left, bottom_right)", 18, "align is given twice"),
    ("causal(offset=2, offset=3)", 18, "offset is given twice"),
    ("causal(offset=top_left)", 1, "offset is 'top_left'"),
    ("causal & window(0)", 10, "n is 0, need at least 1"),
    ("causal & window(-1)", 10, "n is -1, need at least 1"),
    ("window(3, right=-1)", 1, "right is -1"),
    ("prefix(-1)", 1, "n is -1, need at least 0"),
    ("window(1099511627776)", 1, "at most"),
    (f"window({'9' * 5000})", 8, "at most 64 bits"),
    ("key_padding([1 2])", 16, "expected ',' or ']'"),
    ("key_padding([a])", 14, "expected an integer"),
    ("key_padding(3)", 1, "one integer for each sequence"),
    ("window()", 1, "'window'"),
    ("window(4, 2, 1)", 1, "'window'"),
    ("window(4, colour=3)", 1, "colour"),
    ("full(3)", 1, "'full'"),
    ("__import__", 1, "expected a mask"),
]


@pytest.mark.parametrize(("text", "position", "words"), ERRORS, ids=[repr(text[:40]) for text, _, _ in ERRORS])
def test_errors_point_at_their_place(text: str, position: int, words: str) -> None:
    with pytest.raises(MaskError) as caught:
        parse(text)
    message = str(caught.value)
    first, _, pointer = message.rpartition("\n")
    assert f"position {position}:" in first and words in first
    assert pointer.index("^") - 2 == position - 1, "the arrow stands under the position"
    assert isinstance(caught.value, TilewiseError) and isinstance(caught.value, ValueError)


@pytest.mark.parametrize("text", ["~" * 5000 + "causal", "(" * 5000 + "causal" + ")" * 5000])
def test_absurd_nesting_is_an_error_too(text: str) -> None:
    with pytest.raises(MaskError, match="nested too deeply"):
        parse(text)
