"""How text is cut before byte-level BPE: the expressions that `tokenizer.ggml.pre` names.

They are those of the models' published tokenizers, in the form and under the names that llama.cpp gives them
(llama-vocab.cpp).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Cut:
    """Expressions applied one after the other, each isolating its matches in what those before left."""

    patterns: tuple[str, ...]
    whole_words: bool = False
    """A cut that is itself a token is taken as it is, without merging (llama.cpp's ignore_merges)."""
    begins: bool = False
    """A text begins with the begin token where the file does not say (llama.cpp's default by `pre`)."""


_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENDINGS: Final = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SPACES: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CL100K: Final = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_LOWER, _UPPER = r"(?:(?=\p{L})[^A-Z])", r"(?:(?=\p{L})[^a-z])"


def _by_case(ending: str, digits: str) -> str:
    """Words that begin anew at a capital letter, perhaps with an ending; so many digits at a time."""
    front = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{front}{_UPPER}*{_LOWER}+{ending}|{front}{_UPPER}+{_LOWER}*{ending}"
    return rf"{words}|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


_SEED: Final = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"

_DEEPSEEK_LETTERS: Final = (
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A 38C "
    "38E-3A1 3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B "
    "1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 "
    "1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 "
    "2115 2119-211D 2124 2126 2128 212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B "
    "2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 "
    "FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF "
    "1E900-1E943"
)
"""DeepSeek LLM's letters of scripts that have capitals: code points in hexadecimal, from its tokenizer.json."""


def _class(ranges: str) -> str:
    """A character class of ranges of code points."""
    return "[" + "".join("-".join(chr(int(end, 16)) for end in one.split("-")) for one in ranges.split()) + "]"


_DEEPSEEK_SCRIPTS: Final = _class("4E00-9FA5 800-4E00 AC00-D7FF")
"""Of scripts written without spaces."""
_DEEPSEEK_LLM: Final = (
    r"[\r\n]",
    rf"\s?{_class(_DEEPSEEK_LETTERS)}+",
    r"\s?" + _class("21-2F 3A-7E FF01-FF0F FF1A-FF5E 2018-201F 3000-3002") + "+",
    r"\s+$",
    rf"{_DEEPSEEK_SCRIPTS}+",
    r"\p{N}+",
)
_DEEPSEEK_CODER: Final = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", rf"{_DEEPSEEK_SCRIPTS}+", r"\p{N}")

_LLAMA3: Final = Cut((_CL100K % "{1,3}",), whole_words=True, begins=True)
_LLAMA3_MERGED: Final = Cut((_CL100K % "{1,3}",))
_QWEN2: Final = Cut((_CL100K % "",))
_GPT2_CUT: Final = Cut((_GPT2,))
_BY_DIGIT: Final = Cut((r"\p{N}", _GPT2))
_GPT4O: Final = Cut((_by_case(f"{_ENDINGS}?", "{1,3}"),))

SPLITS: Final[Mapping[str, Cut]] = {
    "default": Cut((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    **dict.fromkeys(("gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "modern-bert", "mpt", "olmo"), _GPT2_CUT),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "midm-2.0", "lfm2"), _LLAMA3),
    **dict.fromkeys(("smaug-bpe", "dbrx"), _LLAMA3_MERGED),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "stablelm2"), _QWEN2),
    **dict.fromkeys(("smollm", "refact", "starcoder", "command-r", "codeshell", "exaone"), _BY_DIGIT),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), _GPT4O),
    "tekken": Cut((_by_case("", ""),), whole_words=True, begins=True),
    "deepseek-llm": Cut(_DEEPSEEK_LLM),
    "deepseek-coder": Cut(_DEEPSEEK_CODER),
    "seed-coder": Cut((_SEED,)),
}
"""By `tokenizer.ggml.pre`."""
KINDS: Final = tuple(next(name for name, of in SPLITS.items() if of == cut) for cut in dict.fromkeys(SPLITS.values()))
"""A name of each way to cut; the others are other names of these."""
