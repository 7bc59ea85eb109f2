"""The one exception base that tegrad raises for its users."""


class TegradError(Exception):
    """Base of every error that tegrad raises on purpose: one sentence with the cause and the next step.

    "what is wrong: what to do", or "what: and why; what to do". It begins with a small letter, but for names, and ends
    without a period, so that it can stand in another sentence.

    `exit_code` is what the command line ends with: 1 for a failure on the way, 2 for bad input.
    """

    exit_code = 1


class SettingError(TegradError):
    """A variable of the environment has a value that means nothing."""

    exit_code = 2
