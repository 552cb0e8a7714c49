"""Range checks of card fields: every refusal names the field, what was found and what is allowed."""

from collections.abc import Collection, Sequence

from mirrorsd.graphs.errors import ConfigError


def require_one_of(field: str, found: str, allowed: Collection[str]) -> None:
    """Refuse a word that is not in `allowed`."""
    if found not in allowed:
        raise ConfigError(f"{field} is {found!r}; allowed: {', '.join(map(repr, allowed))}.")


def require_between(field: str, found: int, low: int, high: int) -> None:
    """Refuse a number outside `low .. high` (both included)."""
    if not low <= found <= high:
        raise ConfigError(f"{field} is {found}; allowed: {low} to {high}.")


def require_cores(field: str, found: tuple[int, ...], threads: int) -> None:
    """Refuse negative or repeated core numbers, and fewer cores than threads."""
    if any(core < 0 for core in found) or len(set(found)) != len(found):
        raise ConfigError(f"{field} is {list(found)}; allowed: different core numbers from 0, or [] for no pinning.")
    if found and len(found) < threads:
        raise ConfigError(f"{field} has {len(found)} core(s) for {threads} threads; name a core per thread, or [].")


def require_distinct(field: str, found: Sequence[str], allowed: Collection[str]) -> None:
    """Refuse an empty list, words that are not in `allowed`, and words that come twice."""
    if not found or len(set(found)) != len(found) or not set(found) <= set(allowed):
        raise ConfigError(f"{field} is {list(found)}; allowed: one or more of {', '.join(map(repr, allowed))}.")
