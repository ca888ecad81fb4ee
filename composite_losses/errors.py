"""The exceptions of the package.

Every class also derives from the built-in exception that fits it, so that callers may catch either.
A message says where, what was expected, what was found and how to fix it.
"""


class CompositeLossError(Exception):
    """Base class: anything this package raises on purpose."""


class MissingKeyError(CompositeLossError, KeyError):
    """An entry that is needed is absent from the data."""

    def __str__(self) -> str:
        """The message as written.

        ``KeyError`` would show its ``repr``, with quotes and escaped line breaks.
        """
        return Exception.__str__(self)


class ShapeError(CompositeLossError, ValueError):
    """Two shapes that must agree do not, or a shape is not the expected one."""


class NonFiniteError(CompositeLossError, ValueError):
    """A value that counts is NaN or infinite."""


class ConfigError(CompositeLossError, ValueError):
    """An option has an unknown or inconsistent value."""


class GraphError(CompositeLossError, RuntimeError):
    """A stored entry carries an autograd graph although it must be data."""
