"""The figures of a command that an assistant needs (`data/answers.toml` lists them), and a sentence that sums them up."""

import re
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from tonnage.units import format_bytes, percent

_PART = re.compile(r"(?P<path>[\w.]+)(?::(?P<most>\d+)\((?P<keys>.*)\))?")
_KEY = re.compile(r"[\w.]+(?::\d+\([^()]*\))?")
_IS_SIZE = re.compile(r"(?<![^_])bytes$")
_TABLES_OF_SIZES = ("ledger", "phases")  # their keys are categories, which do not say that the values are bytes
_GIB = 2**30
_LONGEST_TEXT = 400

Figures = Mapping[str, Any]


def small(command: str, figures: Figures) -> dict[str, Any]:
    """Return the relevant figures of a command, in GiB, without empty ones."""
    return _picked(figures, _table()[command])


def sentence(command: str, figures: Figures) -> str:
    """Return the result in one line."""
    if command in _SENTENCES:
        return _SENTENCES[command](figures)
    said = next((figures[key] for key in ("sentence", "words", "outcome") if figures.get(key)), "Done.")
    return _one_line(said)


@cache
def _table() -> dict[str, list[str]]:
    return tomllib.loads(files("tonnage.assistant").joinpath("data/answers.toml").read_text())


def _picked(figures: Figures, keys: Sequence[str]) -> dict[str, Any]:
    """Return these keys of the figures, formatted as the table says."""
    kept: dict[str, Any] = {}
    for key in keys:
        part = _PART.fullmatch(key)
        assert part, key
        *parents, last = part["path"].split(".")
        found: Any = figures
        for name in (*parents, last):
            found = found.get(name) if isinstance(found, Mapping) else None
        if isinstance(found, list) and part["most"]:
            entries = [entry for entry in found if isinstance(entry, Mapping)]
            found = [_picked(entry, _KEY.findall(part["keys"])) for entry in entries[: int(part["most"])]]
        told, inner = _told(last, found), kept
        for parent in parents if told else ():
            inner = inner.setdefault(parent, {})
        inner |= told
    return kept


def _told(key: str, value: Any) -> dict[str, Any]:
    """Return one figure with its unit: sizes in GiB, numbers rounded; empty if it has no value."""
    if value in (None, "", [], {}):
        return {}
    if isinstance(value, Mapping):
        sizes = "_bytes" * (key in _TABLES_OF_SIZES and not any(name.endswith("_bytes") for name in value))
        inner = [_told(name + sizes, entry) for name, entry in value.items()]
        return {key: {name: entry for entries in inner for name, entry in entries.items()}}
    if isinstance(value, int | float) and not isinstance(value, bool) and _IS_SIZE.search(key):
        return {_IS_SIZE.sub("gib", key): _rounded(value / _GIB)} if value else {}
    if isinstance(value, float):
        return {key: _rounded(value)}
    return {key: _one_line(value) if isinstance(value, str) else value}


def _rounded(number: float) -> float:
    return round(number) if abs(number) >= 1000 else float(f"{number:.4g}")


def _ran(figures: Figures) -> str:
    """Describe a run or a recording."""
    name, card = Path(figures.get("script") or "the script").name, figures.get("gpu") or "its card"
    peak, oom, capacity = figures.get("peak") or {}, figures.get("oom"), figures.get("capacity_bytes")
    if figures.get("outcome") == "error":
        return f"{name} failed for reasons of its own: {_one_line(figures.get('error') or 'it did not say which')}"
    if figures.get("outcome") == "depends":
        advice = (figures.get("depends_on") or {}).get("advice", "")
        return f"{name} {_one_line(figures.get('error') or '')}. {advice}".strip()
    if oom:
        asked, free = format_bytes(oom["requested_bytes"]), format_bytes(oom["free_bytes"])
        place = oom["line"] or "a line that is not known"
        total = figures.get("total") or {}
        batch = f"; a batch of {total['batch']} fits" if total.get("batch") else ""
        in_all = f" In all it needs {format_bytes(total['needed_bytes'])}{batch}." if total else ""
        return f"{name} runs out of memory on {card} at {place}: it asked for {asked}, and {free} were free.{in_all}"
    verdict = "does not fit on" if figures.get("fits") is False else "fits on" if figures.get("fits") else "ran on"
    size = f"{format_bytes(figures['peak_process_bytes'])}{f' of {format_bytes(capacity)}' if capacity else ''}"
    ahead = "".join(f" {_one_line(line)}" for line in (figures.get("outlook") or [])[:1])
    step = f" in step {peak['step']}, {peak['phase']}," if peak.get("step") else ""
    return f"{name} {verdict} {card}: {size} at the peak{step}{' at ' * bool(peak.get('line'))}{peak.get('line', '')}.{ahead}"


def _planned(figures: Figures) -> str:
    """Describe a plan, or the GPUs that hold a model."""
    model, best, cluster = figures["model"]["name"], figures.get("best") or {}, figures.get("cluster") or {}
    if "cards" in figures:
        holding = [card["gpus"] for card in figures["cards"] if card["fits"]]
        smallest = figures.get("smallest") or (holding or ["none"])[0]
        return f"{model}: {len(holding)} of {len(figures['cards'])} kinds of cards hold it, the smallest is {smallest}."
    cards = f"{figures.get('gpus') or cluster.get('gpus', 1)} × {figures.get('gpu') or cluster.get('gpu')}"
    total = best.get("total_bytes") or (best.get("peak") or {}).get("total_bytes") or figures.get("needed_bytes") or 0
    words = [f"{format_bytes(int(total))} of {format_bytes(figures['capacity_bytes'])} a GPU"] if total else []
    if figures["fits"]:
        rates = {"tokens_per_s": "tokens/s", "images_per_s": "images/s"}
        words += [f"{_rounded(best[key]):,} {unit}" for key, unit in rates.items() if best.get(key)]
        words += [f"at most {most:,} users" for most in [figures.get("most_users")] if most]
    verdict = "fits" if figures["fits"] else "does not fit"
    return f"{model} {verdict} on {cards}: {', '.join(words) or 'no way was found'}."


def _grew(figures: Figures) -> str:
    peak = figures["peaks"][0]
    grew, before = peak["grew_bytes"], peak["before_bytes"]
    if not grew:
        return f"The peak of {peak['name']} memory did not change: {format_bytes(before)}."
    line = next((line["name"] for line in figures["lines"] if line["grew_bytes"] * grew > 0), "")
    words = f"The peak of {peak['name']} memory {'grew' if grew > 0 else 'fell'} by {format_bytes(abs(grew))}"
    share = f" ({percent(abs(grew) / before)})" if before else ""
    return f"{words}{share}, from {format_bytes(before)}{f'; most of it at {line}' if line else ''}."


def _found(figures: Figures) -> str:
    names = [str(card.get("key") or card.get("name")) for card in figures.get("gpus", [])]
    return f"{len(names)} {'card' if len(names) == 1 else 'cards'}: {', '.join(names)}"


def _one_line(text: object) -> str:
    words = " ".join(str(text).split())
    return words if len(words) <= _LONGEST_TEXT else f"{words[:_LONGEST_TEXT]}…"


_SENTENCES = {"run": _ran, "show": _ran, "plan": _planned, "diff": _grew, "gpu": _found}
