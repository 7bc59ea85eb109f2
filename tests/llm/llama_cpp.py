"""CPU llama.cpp for the tests: pytest.importorskip("llama_cpp") leaves out what needs it."""

from tegrad.bench.cpu_llama import F16, F32, Q8_0, Peer, peer

__all__ = ["F16", "F32", "Q8_0", "Peer", "peer"]
