"""How a run ended, in the words that its report begins with."""

_WORDS = {"ok": "fits", "oom": "does not fit", "error": "script failed"}
CLIMBS = "fits so far, but climbs"


def verdict_words(outcome: str, climbs: bool = False) -> str:
    """The verdict; one that went on, but whose steps climb, has not shown that it fits."""
    return CLIMBS if climbs and outcome == "ok" else _WORDS[outcome]
