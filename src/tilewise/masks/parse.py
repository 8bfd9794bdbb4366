"""Masks written as text, for the command line: `causal & window(4096)`, `causal(top_left) | prefix(128)`, `~window(64, 0)`.

A small recursive descent over names, integers and the operators `~` > `&` > `|`; nothing is evaluated as Python.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple, NoReturn

from tilewise.errors import MaskError
from tilewise.masks.algebra import Mask
from tilewise.masks.build import ANCHORS, causal, full, prefix, window

_TOKEN = re.compile(r"\s*(?:(?P<number>-?[0-9]+)|(?P<name>[A-Za-z_]+)|(?P<sign>[()&|~,=]))")
_MAKERS: dict[str, Callable[..., Mask]] = {"full": full, "causal": causal, "window": window, "prefix": prefix}


class _Token(NamedTuple):
    kind: str
    text: str
    at: int


def parse(text: str) -> Mask:
    """The mask that `text` describes; masks that need tensors (documents, blocks, …) exist in Python only."""
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
        while self._take("|"):
            mask = mask | self._and()
        return mask

    def _and(self) -> Mask:
        mask = self._unary()
        while self._take("&"):
            mask = mask & self._unary()
        return mask

    def _unary(self) -> Mask:
        if self._take("~"):
            return ~self._unary()
        if self._take("("):
            mask = self._or()
            self._expect(")")
            return mask
        token = self._advance()
        if token.kind != "name" or token.text not in _MAKERS:
            self._fail(token, f"expected a mask ({', '.join(_MAKERS)}) or '('")
        arguments: list[int] = []
        options: dict[str, str | int] = {}
        if self._take("("):
            while not self._take(")"):
                self._argument(arguments, options)
                if self._peek().text != ")" and not self._take(","):
                    self._fail(self._peek(), "expected ',' or ')'")
        try:
            return _MAKERS[token.text](*arguments, **options)
        except (TypeError, MaskError) as error:
            self._fail(token, str(error))

    def _argument(self, arguments: list[int], options: dict[str, str | int]) -> None:
        token = self._advance()
        if token.kind == "number":
            arguments.append(self._number(token))
            return
        if token.kind == "name" and token.text in ANCHORS:
            name, value = "align", token
        elif token.kind == "name" and self._take("="):
            name, value = token.text, self._advance()
            if value.kind not in ("number", "name"):
                self._fail(value, "expected a value")
        else:
            self._fail(token, "expected an integer, bottom_right, top_left, or name=value")
        if name in options:
            self._fail(token, f"{name} is given twice")
        options[name] = self._number(value) if value.kind == "number" else value.text

    def _number(self, token: _Token) -> int:
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

    def _take(self, sign: str) -> bool:
        found = self._peek().kind == "sign" and self._peek().text == sign
        self.next += found
        return found

    def _expect(self, sign: str) -> None:
        if not self._take(sign):
            self._fail(self._peek(), f"expected '{sign}'")

    def _fail(self, token: _Token, wanted: str) -> NoReturn:
        pointer = " " * token.at + "^"
        raise MaskError(
            f"mask {self.text!r}, position {token.at + 1}: got {token.text!r}; {wanted}\n  {self.text}\n  {pointer}"
        )
