"""Facts: computed from a snapshot on first use and remembered, the reason for their absence too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

from kvops.diag.model import Skip, Unseen
from kvops.errors import ParseError
from kvops.host import Sight

T = TypeVar("T")


PORTS_MAX = 512  # of one host; sysfs of a hostile snapshot may claim more


class fact(Generic[T]):  # noqa: N801 - used like property
    """A property that is computed once; an Unseen or Skip it raised is remembered and raised again."""

    def __init__(self, function: Callable[[Any], T]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._key = "_fact_" + name

    @overload
    def __get__(self, instance: None, owner: type) -> fact[T]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: object | None, owner: type) -> Any:
        if instance is None:
            return self
        memory = instance.__dict__
        if self._key not in memory:
            try:
                memory[self._key] = (self._function(instance), None)
            except (Unseen, Skip) as missing:
                memory[self._key] = (None, missing)
            except ParseError as error:
                memory[self._key] = (None, Unseen(error.what, Sight.FAILED))
        value, reason = memory[self._key]
        if reason is not None:
            raise reason
        return value


def attempt(function: Callable[[], T]) -> T | None:
    """The value, or None where it could not be seen: for one of several sources of the same fact."""
    try:
        return function()
    except (Unseen, Skip, ParseError):
        return None


def counter_step(before: int, after: int) -> int | None:
    """
    How far a counter moved. A 32-bit one may wrap; any other step back means a reset, and then there is no
    figure.

    The kernel widens most counters to 64 bits in software, the hardware's own are often 32 bits wide.
    """
    if after >= before:
        return after - before
    wrapped = before < 1 << 32 and before > (1 << 32) * 9 // 10 and after < (1 << 32) // 10
    return after + (1 << 32) - before if wrapped else None
