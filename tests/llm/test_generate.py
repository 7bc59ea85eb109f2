"""Text that ends at a string: never a part of it is shown, and never is sure text held back."""

from __future__ import annotations

import numpy as np
import pytest

from tegrad.llm.generate import Until


def shown(pieces: list[str], stops: tuple[str, ...]) -> tuple[list[str], str | None]:
    until = Until(stops)
    return [*(until.push(piece) for piece in pieces), until.finish()], until.found


@pytest.mark.parametrize(
    ("pieces", "stops", "expected", "found"),
    [
        (["one", " two"], (), ["one", " two", ""], None),
        (["one", " two"], ("",), ["one", " two", ""], None),
        (["one END two"], ("END",), ["one ", ""], "END"),
        (["one E", "N", "D two", "more"], ("END",), ["one ", "", "", "", ""], "END"),
        (["one E", "N", "O"], ("END",), ["one ", "", "ENO", ""], None),
        (["one E", "N"], ("END",), ["one ", "", "EN"], None),
        (["aab", "aac"], ("aaac", "abaac"), ["a", "", ""], "abaac"),
        (["x\n", "\n", "y"], ("\n\n", "User:"), ["x", "", "", ""], "\n\n"),
        (["say bcd"], ("cd", "bcd"), ["say ", ""], "bcd"),
        (["END"], ("END",), ["", ""], "END"),
    ],
)
def test_text_up_to_the_first_of_some_strings(
    pieces: list[str], stops: tuple[str, ...], expected: list[str], found: str | None
) -> None:
    assert shown(pieces, stops) == (expected, found)


def test_pieces_of_any_size_show_the_same_text_and_hold_back_no_more_than_they_must() -> None:
    rng = np.random.default_rng(4)
    for _ in range(2000):
        text = "".join(rng.choice(list("ab"), rng.integers(0, 24)))
        stops = tuple("".join(rng.choice(list("ab"), rng.integers(3, 7))) for _ in range(2))
        cuts = sorted(rng.integers(0, len(text) + 1, 3).tolist())
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        out, found = shown(pieces, stops)
        # The string that is complete first ends the text, and of two that end together the longer one.
        ends = [(text.index(stop) + len(stop), text.index(stop), stop) for stop in stops if stop in text]
        begin, expected = min(ends)[1:] if ends else (len(text), None)
        assert ("".join(out), found) == (text[:begin], expected)
        until, said = Until(stops), ""
        for piece in pieces:
            said += until.push(piece)
            if until.found is None:
                rest = text[len(said) : len(said) + len(until._held)]
                assert not rest or any(stop.startswith(rest) for stop in stops)
