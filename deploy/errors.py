"""The failures that a person at the command line reads as one line."""


class SetupError(Exception):
    """Something is configured, installed or prepared wrongly; the text says what and what to do."""


class ConfigError(SetupError):
    """The configuration is wrong: its text names each setting, its value and its limit."""


class StageFailedError(SetupError):
    """A stage did not start; the text holds its own last words."""
