"""The one exception base that tegrad raises for its users."""


class TegradError(Exception):
    """Base of every error that tegrad raises on purpose: one sentence with the cause and the next step."""
