"""Masks written as text: `causal & window(4096)`, `causal(top_left) | prefix(128)`, `~window(64, 0)`, `key_padding([5, 6])`.

A small recursive descent over names, integers, lists of them and the operators `~` > `&` > `|`; nothing is evaluated as Python.
The command line, the cases of the benchmarks and those of the compile checks all come through here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple, NoReturn

from tilewise.errors import MaskError
from tilewise.masks.algebra import Mask
from tilewise.masks.build import ANCHORS, causal, full, key_padding, prefix, window

_TOKEN = re.compile(r"\s*(?:(?P<number>-?[0-9]+)|(?P<name>[A-Za-z_]+)|(?P<sign>[()&|~,=\[\]]))")
_MAKERS: dict[str, Callable[..., Mask]] = {
    maker.__name__: maker for maker in (full, causal, window, prefix, key_padding)
}
Value = str | int | list[int]


class _Token(NamedTuple):
    kind: str
    text: str
    at: int


def parse(text: str) -> Mask:
    """The mask that `text` describes; masks that need large tensors (documents, blocks, dense) exist in Python only.

    >>> parse("causal & window(4096) | prefix(16)")
    >>> parse("causal(offset=[3, 170]) & key_padding([100, 64])")
    """
    try:
        return _Parser(text).parse()
    except RecursionError:
        raise MaskError(f"mask {text[:60]!r}…: nested too deeply; drop some parentheses or negations") from None


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = self._tokens()
        self.next = 0

    def parse(self) -> Mask:
        mask = self._or()
        if self._peek().kind != "end":
            self._fail(self._peek(), "expected &, | or the end")
        return mask

    def _or(self) -> Mask:
        mask = self._and()
        while self._accept("|"):
            mask = mask | self._and()
        return mask

    def _and(self) -> Mask:
        mask = self._unary()
        while self._accept("&"):
            mask = mask & self._unary()
        return mask

    def _unary(self) -> Mask:
        if self._accept("~"):
            return ~self._unary()
        if self._accept("("):
            mask = self._or()
            self._expect(")")
            return mask
        token = self._advance()
        if token.kind != "name" or token.text not in _MAKERS:
            self._fail(token, f"expected a mask ({', '.join(_MAKERS)}) or '('")
        arguments: list[Value] = []
        options: dict[str, Value] = {}
        if self._accept("("):
            while not self._accept(")"):
                self._argument(arguments, options)
                self._separator(")")
        try:
            return _MAKERS[token.text](*arguments, **options)
        except (TypeError, MaskError) as error:
            self._fail(token, str(error))

    def _argument(self, arguments: list[Value], options: dict[str, Value]) -> None:
        token = self._peek()
        if token.kind == "number" or token.text == "[":
            arguments.append(self._value())
            return
        self._advance()
        value: Value = token.text
        if token.kind == "name" and token.text in ANCHORS:
            name = "align"
        elif token.kind == "name" and self._accept("="):
            name, value = token.text, self._value()
        else:
            self._fail(token, "expected an integer, a list, bottom_right, top_left, or name=value")
        if name in options:
            self._fail(token, f"{name} is given twice")
        options[name] = value

    def _value(self) -> Value:
        """An integer, a list of integers, or a name."""
        token = self._advance()
        if token.text == "[":
            items: list[int] = []
            while not self._accept("]"):
                items.append(self._number(self._advance()))
                self._separator("]")
            return items
        if token.kind not in ("number", "name"):
            self._fail(token, "expected a value")
        return self._number(token) if token.kind == "number" else token.text

    def _separator(self, end: str) -> None:
        """A comma, unless the list ends here."""
        if self._peek().text != end and not self._accept(","):
            self._fail(self._peek(), f"expected ',' or '{end}'")

    def _number(self, token: _Token) -> int:
        if token.kind != "number":
            self._fail(token, "expected an integer")
        if len(token.text) > 20:  # Python refuses to read very long ones, and no length has so many digits
            self._fail(token, "expected an integer of at most 64 bits")
        return int(token.text)

    def _tokens(self) -> list[_Token]:
        tokens, at = [], 0
        while self.text[at:].strip():
            match = _TOKEN.match(self.text, at)
            if match is None:
                at += len(self.text[at:]) - len(self.text[at:].lstrip())
                self._fail(_Token("sign", self.text[at], at), "unknown character")
            kind = str(match.lastgroup)
            tokens.append(_Token(kind, match[kind], match.start(kind)))
            at = match.end()
        return [*tokens, _Token("end", "the end", len(self.text))]

    def _peek(self) -> _Token:
        return self.tokens[self.next]

    def _advance(self) -> _Token:
        token = self.tokens[self.next]
        self.next += token.kind != "end"
        return token

    def _accept(self, sign: str) -> bool:
        there = self._peek()[:2] == ("sign", sign)
        self.next += there
        return there

    def _expect(self, sign: str) -> None:
        if not self._accept(sign):
            self._fail(self._peek(), f"expected '{sign}'")

    def _fail(self, token: _Token, wanted: str) -> NoReturn:
        pointer = " " * token.at + "^"
        raise MaskError(
            f"mask {self.text!r}, position {token.at + 1}: got {token.text!r}; {wanted}\n  {self.text}\n  {pointer}"
        )
