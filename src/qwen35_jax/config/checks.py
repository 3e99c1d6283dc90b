"""Checks of single values: each raises `ConfigError` with the field, what was found and what is expected."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NoReturn

from qwen35_jax.errors import ConfigError

MOST_LAYERS = 512  # several times the deepest published model


def refuse(field: str, found: object, expected: str, remedy: str = "correct it") -> NoReturn:
    """Raises `ConfigError` in the one form that every complaint about a field has."""
    raise ConfigError(f"{field}: found {found!r}, expected {expected}; {remedy}")


def check_integer(field: str, value: object, *, minimum: int = 1) -> None:
    """Accepts an `int` (not a `bool`) of at least `minimum`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        refuse(field, value, f"a whole number of at least {minimum}")


def check_layer_count(field: str, value: object, *, minimum: int = 1) -> None:
    """Accepts an `int` from `minimum` to `MOST_LAYERS`: layers are listed one by one wherever they are looked at."""
    check_integer(field, value, minimum=minimum)
    if value > MOST_LAYERS:  # pyright: ignore[reportOperatorIssue]
        refuse(field, value, f"at most {MOST_LAYERS} layers")


def check_number(field: str, value: object, *, minimum: float = 0.0, positive: bool = False) -> None:
    """Accepts a finite `int` or `float` of at least `minimum`, or above zero where `positive`."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < math.inf
    if positive:
        if not number or value <= 0:  # pyright: ignore[reportOperatorIssue]
            refuse(field, value, "a finite number above 0")
    elif not number or value < minimum:  # pyright: ignore[reportOperatorIssue]
        refuse(field, value, f"a finite number of at least {minimum:g}")


def check_flag(field: str, value: object) -> None:
    if not isinstance(value, bool):
        refuse(field, value, "true or false")


def check_choice(
    field: str, value: object, choices: Collection[str], remedy: str = "use one of these"
) -> None:
    if not isinstance(value, str) or value not in choices:
        refuse(field, value, " or ".join(repr(choice) for choice in choices), remedy)


def check_multiple(field: str, value: int, divisor_field: str, divisor: int) -> None:
    if value % divisor:
        refuse(field, value, f"a multiple of {divisor_field} ({divisor})", "correct one of the two")
