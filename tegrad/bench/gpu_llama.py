"""llama.cpp on a GPU, from the package `llama-cpp-python` built with GGML_CUDA, as the peer of logits there.

It rounds a product's activations by 32 values, where the CPU's build rounds by 256 for the K formats.
Importing this raises ImportError where the package is missing, RuntimeError where its library is.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from llama_cpp import llama_cpp as lib

from tegrad.bench.record import RecordError

ON = 1
"""LLAMA_FLASH_ATTN_TYPE_ENABLED."""


@lib.llama_log_callback  # type: ignore[untyped-decorator]
def _silent(level: int, text: bytes, user_data: ctypes.c_void_p) -> None:
    """The library logs to stderr unless it is given something that does not."""


class Peer:
    """A model in llama.cpp, all of it on the GPU, freed at the end of a `with`: logits of every position.

    With 1 `at_once` it takes a text by steps, with more by prompts, which other kernels compute. RecordError if the
    library was built without CUDA.
    """

    def __init__(self, path: Path, context: int, keys: int, values: int, at_once: int) -> None:
        lib.llama_log_set(_silent, ctypes.c_void_p(0))
        lib.llama_backend_init()
        if not lib.llama_supports_gpu_offload():
            raise RecordError(
                "llama-cpp-python is built without CUDA: CMAKE_ARGS=-DGGML_CUDA=on pip install llama-cpp-python"
            )
        params = lib.llama_model_default_params()
        params.n_gpu_layers = 999
        self.model: Any = lib.llama_model_load_from_file(str(path).encode(), params)
        if not self.model:
            raise RecordError(f"llama.cpp cannot load {path}")
        self._size = int(lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model)))
        self._params = lib.llama_context_default_params()
        self._params.n_ctx = self._params.n_batch = context
        self._params.n_ubatch = at_once
        self._params.type_k, self._params.type_v, self._params.flash_attn_type = keys, values, ON

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        lib.llama_model_free(self.model)

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """Logits (len(tokens), vocab) after each token; RecordError if they do not fit."""
        context = lib.llama_init_from_model(self.model, self._params)
        if not context:
            raise RecordError("llama.cpp has no context of that size on this GPU")
        batch = lib.llama_batch_init(len(tokens), 0, 1)
        try:
            batch.n_tokens = len(tokens)
            for at, token in enumerate(tokens):
                batch.token[at], batch.pos[at], batch.n_seq_id[at], batch.seq_id[at][0] = token, at, 1, 0
                batch.logits[at] = True
            if error := lib.llama_decode(context, batch):
                raise RecordError(f"llama.cpp cannot decode: llama_decode returned {error}")
            return np.ctypeslib.as_array(lib.llama_get_logits(context), (len(tokens), self._size)).copy()
        finally:
            lib.llama_batch_free(batch)
            lib.llama_free(context)
