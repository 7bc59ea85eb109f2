"""What can be wrong with a model file or a request, as the user reads it."""

from tegrad.errors import TegradError


class ModelError(TegradError):
    """Base of every error about a model file or a request to it: bad input."""

    exit_code = 2


class GgufError(ModelError):
    """The file is missing, unreadable, not a GGUF, truncated or inconsistent."""


class UnsupportedModelError(ModelError):
    """The file is a sound GGUF that asks for something we do not run: an architecture, a quantization, a tokenizer."""


class UntunedChipError(UnsupportedModelError):
    """What asks for a tuning runs on chips that have one only."""


class OutOfMemory(ModelError):
    """The device has no room for the model or its cache."""

    exit_code = 1


class ContextError(ModelError):
    """More tokens than the context holds."""


class NoRoom(ModelError):
    """All slots or blocks of a batch are in use: there is room once a sequence has left."""

    exit_code = 1
