"""The King James Bible out of Debian's package bible-kjv-text, as chapters, and its held-out part.

The package stores the text in /usr/lib/bible.data: a header, a table of big-endian offsets, and windows of 64 KiB of
text, each packed by compress(1) without its three-byte header. The translation of 1611 is in the public domain.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import struct
import subprocess
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

PACKAGE = "bible-kjv-text"
INSTALLED = Path("/usr/lib/bible.data")
TEXT_SHA256 = "e53aaf0af1e58f259e35d0d9f7ca1bbe154fd77bb95471279b37b34d3c397a98"
"""Of the unpacked text in version 4.38 (Debian 12); another text would make other figures."""

HELD_OUT_EVERY = 20
HELD_OUT_OFFSET = 7
"""The 8th, 28th, 48th, ... of 1,189 chapters are held out: whole chapters, spread over all kinds of books."""

_COUNT_AT = 0x58
_CLEAR = 256
_MAX_BITS = 16

BOOKS = {
    "Ge": "Genesis", "Exo": "Exodus", "Lev": "Leviticus", "Num": "Numbers", "Deu": "Deuteronomy", "Josh": "Joshua",
    "Jdgs": "Judges", "Ruth": "Ruth", "1Sm": "1 Samuel", "2Sm": "2 Samuel", "1Ki": "1 Kings", "2Ki": "2 Kings",
    "1Chr": "1 Chronicles", "2Chr": "2 Chronicles", "Ezra": "Ezra", "Neh": "Nehemiah", "Est": "Esther", "Job": "Job",
    "Psa": "Psalms", "Prv": "Proverbs", "Eccl": "Ecclesiastes", "SSol": "Song of Solomon", "Isa": "Isaiah",
    "Jer": "Jeremiah", "Lam": "Lamentations", "Eze": "Ezekiel", "Dan": "Daniel", "Hos": "Hosea", "Joel": "Joel",
    "Amos": "Amos", "Obad": "Obadiah", "Jonah": "Jonah", "Mic": "Micah", "Nahum": "Nahum", "Hab": "Habakkuk",
    "Zep": "Zephaniah", "Hag": "Haggai", "Zec": "Zechariah", "Mal": "Malachi", "Mat": "Matthew", "Mark": "Mark",
    "Luke": "Luke", "John": "John", "Acts": "Acts", "Rom": "Romans", "1Cor": "1 Corinthians", "2Cor": "2 Corinthians",
    "Gal": "Galatians", "Eph": "Ephesians", "Phi": "Philippians", "Col": "Colossians", "1Th": "1 Thessalonians",
    "2Th": "2 Thessalonians", "1Tim": "1 Timothy", "2Tim": "2 Timothy", "Titus": "Titus", "Phmn": "Philemon",
    "Heb": "Hebrews", "Jas": "James", "1Pet": "1 Peter", "2Pet": "2 Peter", "1Jn": "1 John", "2Jn": "2 John",
    "3Jn": "3 John", "Jude": "Jude", "Rev": "Revelation",
}  # fmt: skip


class CorpusError(Exception):
    """The text cannot be had; the message says what to do."""


@dataclass(frozen=True)
class Chapter:
    """One chapter: the book's full name, its number, and its verses in order."""

    book: str
    number: int
    verses: tuple[str, ...]

    @property
    def text(self) -> str:
        """As the model sees it: a title line, an empty line, one verse a line."""
        return f"{self.book} {self.number}\n\n" + "\n".join(self.verses) + "\n"


def unpack_lzw(data: bytes) -> bytes:
    """What compress(1) packed, given its codes alone: LZW, 9 to 16 bits a code, code 256 empties the table.

    Codes are written in groups of eight of one width, so a change of width skips to the end of the group.
    """
    table = [bytes([value]) for value in range(256)] + [b""]
    out = bytearray()
    previous = b""
    width, at, group = 9, 0, 0
    while at + width <= len(data) * 8:
        code = int.from_bytes(data[at >> 3 : (at >> 3) + 4], "little") >> (at & 7) & ((1 << width) - 1)
        at += width
        resize = code == _CLEAR
        if resize:
            del table[_CLEAR + 1 :]
            previous, new_width = b"", 9
        else:
            if code > len(table) or (code == len(table) and not previous):
                raise CorpusError(f"code {code} is not in the table of {len(table)}: the package's data is damaged")
            entry = table[code] if code < len(table) else previous + previous[:1]
            if previous and len(table) < 1 << _MAX_BITS:
                table.append(previous + entry[:1])
            out += entry
            previous, new_width = entry, width + 1
            resize = len(table) >= 1 << width and width < _MAX_BITS
        if resize:
            group = at = group + -(-(at - group) // (width * 8)) * width * 8
            width = new_width
    return bytes(out)


def unpack_bible(data: bytes) -> str:
    """The text in bible.data, one verse a line: 'Ge1:1 In the beginning ...'."""
    if data[:4] != b"EC02":
        raise CorpusError(f"bible.data begins with {data[:4]!r}, not EC02: this is another version of {PACKAGE}")
    count = struct.unpack_from(">I", data, _COUNT_AT)[0]
    offsets = struct.unpack_from(f">{count + 1}I", data, _COUNT_AT + 4)
    text = b"".join(unpack_lzw(data[start:end]) for start, end in pairwise(offsets))
    if hashlib.sha256(text).hexdigest() != TEXT_SHA256:
        raise CorpusError(f"{PACKAGE} holds another text than version 4.38: figures would not compare")
    return text.decode("ascii")


def read_package() -> bytes:
    """bible.data, from the installed package or else from Debian's archive through apt (no root needed)."""
    if INSTALLED.exists():
        return INSTALLED.read_bytes()
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        raise CorpusError(f"{INSTALLED} is missing and this is no Debian system: run this where apt can get {PACKAGE}")
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(["apt-get", "download", PACKAGE], cwd=folder, capture_output=True, text=True, check=False)
        packages = list(Path(folder).glob(f"{PACKAGE}_*.deb"))
        if done.returncode or not packages:
            raise CorpusError(
                f"apt-get could not download {PACKAGE} ({done.stderr.strip()[-200:]}): "
                f"run 'apt-get update' first, or 'apt-get install {PACKAGE}'"
            )
        subprocess.run(["dpkg-deb", "-x", str(packages[0]), folder], check=True)
        return (Path(folder) / INSTALLED.relative_to("/")).read_bytes()


def chapters(text: str) -> list[Chapter]:
    """The chapters of the text in order."""
    found: dict[tuple[str, int], list[str]] = {}
    for line in text.splitlines()[1:]:
        match = re.fullmatch(r"(\d?[A-Za-z]+)(\d+):(\d+) (.+)", line)
        if match is None:
            raise CorpusError(f"unexpected line in the text: {line[:80]!r}")
        book, chapter, verse, words = match.groups()
        verses = found.setdefault((BOOKS[book], int(chapter)), [])
        if len(verses) + 1 != int(verse):
            raise CorpusError(f"verse out of order: {line[:80]!r}")
        verses.append(words.strip())
    return [Chapter(book, number, tuple(verses)) for (book, number), verses in found.items()]


def split(book: list[Chapter]) -> tuple[list[Chapter], list[Chapter]]:
    """Chapters to train on, and chapters held out."""
    held = [chapter for i, chapter in enumerate(book) if i % HELD_OUT_EVERY == HELD_OUT_OFFSET]
    train = [chapter for i, chapter in enumerate(book) if i % HELD_OUT_EVERY != HELD_OUT_OFFSET]
    return train, held


def load() -> list[Chapter]:
    """Every chapter, from the package."""
    return chapters(unpack_bible(read_package()))
