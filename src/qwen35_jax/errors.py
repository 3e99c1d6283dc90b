"""Errors that a person can act on. The command line prints them as one line and exits with status 2."""


class Qwen35Error(ValueError):
    """Base of every error that bad input raises: says what was found, what was expected and what to do.

    Its text is one line, whatever it quotes: a name in a file from elsewhere may hold line breaks, or sequences that
    steer a terminal.
    """

    def __str__(self) -> str:
        return "".join(map(_printable, super().__str__()))


def _printable(character: str) -> str:
    if character.isprintable():
        return character
    return " " if character.isspace() else character.encode("unicode_escape").decode()


class ConfigError(Qwen35Error):
    """A field of `config.json` is missing, invalid or contradicts another."""


class CheckpointError(Qwen35Error):
    """A weight file, its index or a tensor in it is missing, malformed or not what the config asks for."""


class PromptError(Qwen35Error):
    """A prompt or a generation setting that cannot be run: empty, too long, or out of range."""


class CapacityError(Qwen35Error):
    """A write would pass the end of the cache."""


class QueueFullError(Qwen35Error):
    """Too many requests wait already: the same request may be taken on later."""


class NonFiniteError(Qwen35Error):
    """Logits hold NaN or infinity: the weights or the numerics are broken, and any answer would be noise."""
