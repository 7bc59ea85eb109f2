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
_WORDS: Final = rf"[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_CL100K: Final = f"{_ENDINGS}|{_WORDS}"
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
    # Its tokenizer.json has 3000, the ideographic space, here as well, which llama.cpp takes for any other space.
    r"\s?" + _class("21-2F 3A-7E FF01-FF0F FF1A-FF5E 2018-201F 3001 3002") + "+",
    r"\s+$",
    rf"{_DEEPSEEK_SCRIPTS}+",
    r"\p{N}+",
)
_DEEPSEEK_CODER: Final = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", rf"{_DEEPSEEK_SCRIPTS}+", r"\p{N}")

_HAN_AND_KANA: Final = _class("4E00-9FA5 3040-309F 30A0-30FF")
_ASCII_SIGN: Final = r"[!-/:-@\[-`{-~]"
_BY_MARKS: Final = (
    rf"{_ASCII_SIGN}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
"""DeepSeek V3's words, with their accents; a sign clings to the Latin word after it."""
_DEEPSEEK_V3: Final = (r"\p{N}{1,3}", rf"{_HAN_AND_KANA}+", _BY_MARKS)
_THREES: Final = r"\P{N}*\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))|\P{N}+"
"""Digits by threes from the right; what stands in front of them is cut off later. Text after the last digit is a match
of its own: each of its letters would be tried as the beginning of one."""
_AFMOE: Final = (
    _THREES,
    _class(
        "4E00-9FFF 3400-4DBF F900-FAFF 3040-309F 30A0-30FF FF65-FF9F 2F00-2FDF E40-E7F E80-EFF 1780-17FF 1000-109F "
        "AA60-AA7F A9E0-A9FF AC00-D7AF 1100-11FF"
    )
    + "+",
    _BY_MARKS,
)


def _with_accents(digits: str) -> str:
    """Words of letters and accents, perhaps with an ending; so many digits at a time.

    The tokenizers' own expressions begin anew at capitals; llama.cpp, whose classes do not tell them apart, does not.
    """
    words = rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+{_ENDINGS}?"
    return rf"{words}|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


_YOUTU: Final = (
    "|".join(
        f"{_class(script)}+"
        for script in (
            "AC00-D7A3 3131-318E", "FF01 2026 201C 201D 2018 2019 2014 FF1A FF1B FF0C 3001-303F FE30-FE4F", "3105-312F",
            "4E00-9FA5 3040-309F 30A0-30FF",
        )
    ),
    _with_accents(""),
)  # fmt: skip
_HAN: Final = _class(
    "4E00-9FFF 3400-4DBF 20000-2A6DF 2A700-2B73F 2B740-2B81F 2B820-2CEAF 2CEB0-2EBEF F900-FAFF 2F800-2FA1F"
)
_KIMI: Final = (
    rf"{_HAN}+|[^\r\n\p{{L}}\p{{N}}]?(?:(?!{_HAN})\p{{L}})+{_ENDINGS}?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    rf"|{_SPACES}"
)
_QWEN35: Final = (
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_RUNS: Final = "|".join(rf"\s{{{length}}}(?!\S)" for length in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2"))
_JAIS2: Final = (
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{_RUNS}|\s"
)
_BAILING: Final = (
    r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]"
    r"|\s+(?!\S)|\s+"
)
_EXAONE_MOE: Final = (
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_BLOOM: Final = r" ?[^(\s|.,!?" + "\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c" + ")]+"
_CHAMELEON: Final = (
    "<sentinel:[0-9]+>", "IMGIMG[A-I]{1,4}Z", r"[\t\n]|    |  ", r"\p{N}", r"[\p{P}!-/:-@\[-`{-~]", _GPT2,
)  # fmt: skip

_LLAMA3: Final = Cut((_CL100K % "{1,3}",), whole_words=True, begins=True)
_LLAMA3_MERGED: Final = Cut((_CL100K % "{1,3}",))
_GLM4: Final = Cut((_CL100K % "{1,3}",), whole_words=True)
_QWEN2: Final = Cut((_CL100K % "",))
_GPT2_CUT: Final = Cut((_GPT2,))
_BY_DIGIT: Final = Cut((r"\p{N}", _GPT2))
_GPT4O: Final = Cut((_by_case(f"{_ENDINGS}?", "{1,3}"),))

SPLITS: Final[Mapping[str, Cut]] = {
    "default": Cut((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    **dict.fromkeys(
        (
            "gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "modern-bert", "mpt", "olmo", "jais", "trillion",
            "granite-docling", "exaone4",
        ),
        _GPT2_CUT,
    ),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), _LLAMA3
    ),
    **dict.fromkeys(("smaug-bpe", "dbrx", "chatglm-bpe"), _LLAMA3_MERGED),
    **dict.fromkeys(("glm4", "glm5"), _GLM4),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "kormo", "stablelm2", "megrez", "hunyuan", "solar-open", "grok-2", "f2llmv2"),
        _QWEN2,
    ),
    "qwen35": Cut((_QWEN35,)),
    "minicpm5": Cut((r"\p{N}{1,3}", _CL100K % "+"), whole_words=True),
    "ufakzeka": Cut((_WORDS % "",)),
    **dict.fromkeys(
        ("smollm", "refact", "starcoder", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"), _BY_DIGIT
    ),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2", "talkie"), _GPT4O),
    "tekken": Cut((_by_case("", ""),), whole_words=True, begins=True),
    "deepseek-llm": Cut(_DEEPSEEK_LLM),
    "deepseek-coder": Cut(_DEEPSEEK_CODER),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), Cut(_DEEPSEEK_V3)),
    "seed-coder": Cut((_SEED,)),
    "falcon": Cut((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), Cut((_BLOOM,))),
    "viking": Cut((_BLOOM, r"\p{N}")),
    "jais-2": Cut((_JAIS2,)),
    "youtu": Cut(_YOUTU, whole_words=True),
    "tiny_aya": Cut((_THREES, _with_accents("{1,3}"))),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), Cut((_BAILING,))),
    "exaone-moe": Cut((_EXAONE_MOE,)),
    "superbpe": Cut((r"\p{N}+", "(?=(?:[0-9]{3})+(?![0-9]))")),
    "kimi-k2": Cut((_KIMI,)),
    "afmoe": Cut(_AFMOE),
    "chameleon": Cut(_CHAMELEON, begins=True),
}  # fmt: skip
"""By `tokenizer.ggml.pre`."""
KINDS: Final = tuple(next(name for name, of in SPLITS.items() if of == cut) for cut in dict.fromkeys(SPLITS.values()))
"""A name of each way to cut; the others are other names of these."""
