"""PTX scalar types: width, class and the LLVM element type that carries them."""

from typing import NamedTuple


class Ty(NamedTuple):
    """A PTX type: `kind` is u, s, b (integers and bits), f (IEEE float), h (bfloat16, tf32: bits only) or p."""

    name: str
    bits: int
    kind: str
    el: str

    @property
    def size(self) -> int:
        """Bytes in memory."""
        return self.bits // 8

    @property
    def signed(self) -> bool:
        return self.kind == "s"

    @property
    def iel(self) -> str:
        """The LLVM integer type of this width."""
        return f"i{self.bits}"


def _table() -> dict[str, Ty]:
    rows = [
        Ty("pred", 1, "p", "i1"),
        Ty("f16", 16, "f", "half"),
        Ty("f32", 32, "f", "float"),
        Ty("f64", 64, "f", "double"),
    ]
    rows += [Ty(f"{k}{b}", b, k, f"i{b}") for k in "usb" for b in (8, 16, 32, 64)]
    rows += [
        Ty("bf16", 16, "h", "i16"),
        Ty("tf32", 32, "h", "i32"),
        Ty("f16x2", 32, "b", "i32"),
        Ty("bf16x2", 32, "b", "i32"),
    ]
    rows += [Ty(f"{k}128", 128, k, "i128") for k in "usb"]
    rows += [Ty("u4", 4, "u", "i4"), Ty("s4", 4, "s", "i4")]
    rows += [Ty(name, 8, "b", "i8") for name in ("e4m3", "e5m2")]
    rows += [Ty(name, 16, "b", "i16") for name in ("e4m3x2", "e5m2x2")]
    return {t.name: t for t in rows}


TYPES = _table()
EL_BITS = {
    "i1": 1,
    "i4": 4,
    "i8": 8,
    "i16": 16,
    "i32": 32,
    "i64": 64,
    "i128": 128,
    "half": 16,
    "float": 32,
    "double": 64,
}
