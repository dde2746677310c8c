"""The space of configurations, the search for the fastest that fits, and the files that launch it."""


def divisors(number: int) -> list[int]:
    """Return all divisors in ascending order."""
    small = [k for k in range(1, int(number**0.5) + 1) if number % k == 0]
    return sorted({*small, *(number // k for k in small)})
