"""Writes docs/accuracy.md, its figure and a page that opens offline, from what is kept in benchmarks/results/league alone.

python benchmarks/league/page.py [--results FOLDER] [--docs FOLDER] [--html FILE]
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from math import log10
from pathlib import Path
from statistics import median, quantiles
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT / "src"), str(HERE)]

from rows import NOT_ASKED  # noqa: E402

from league import RESULTS, SOURCES, relative  # noqa: E402

US = "tonnage"
OWN = ("h200",)  # measured for this project: no judge of Tonnage
METERS = {"allocated": "allocated", "reserved": "reserved", "process": "the process"}


@dataclass(frozen=True)
class Standing:
    """A source with what every predictor said of its rows."""

    key: str
    result: dict[str, Any]

    @property
    def rows(self) -> list[dict[str, Any]]:
        return self.result["rows"]

    @cached_property
    def predictors(self) -> list[str]:
        """Those that said anything, Tonnage first, then by the rows that they said."""
        said = Counter(name for row in self.rows for name in {*row["says"], *row["says_fits"]})
        return sorted(said, key=lambda name: (name != US, not name.startswith(US), -said[name], name))

    @property
    def measured(self) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["measured"]]

    def errors(self, predictor: str, beside: str | None = None) -> list[float]:
        """Absolute relative errors, smallest first; with `beside`, only on rows that this other one said too."""
        rows = (row for row in self.measured if predictor in row["says"] and (beside is None or beside in row["says"]))
        return sorted(abs(relative(row, predictor)) for row in rows)

    def verdicts(self, predictor: str) -> tuple[int, int]:
        """How many said rightly that a run fits or does not, of how many."""
        said = [row for row in self.rows if row["fits"] is not None and predictor in row["says_fits"]]
        return sum(row["says_fits"][predictor] == row["fits"] for row in said), len(said)


@dataclass(frozen=True)
class Table:
    """Columns and rows of plain text; the first column is words, the others are figures."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        def line(cells: Iterable[str]) -> str:
            return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"

        return "\n".join([line(self.columns), "|---" + "|--:" * (len(self.columns) - 1) + "|", *map(line, self.rows)])

    def html(self) -> str:
        def line(tag: str, cells: Sequence[str]) -> str:
            first, *others = map(escape, cells)
            return (
                f"<tr><{tag}>{first}</{tag}>" + "".join(f'<{tag} class="n">{cell}</{tag}>' for cell in others) + "</tr>"
            )

        body = "".join(line("td", row) for row in self.rows)
        return (
            f'<div class="scroll"><table><thead>{line("th", self.columns)}</thead><tbody>{body}</tbody></table></div>'
        )


def standings(folder: Path) -> list[Standing]:
    """Every source that was judged, in the league's order."""
    found = {path.stem: Standing(path.stem, json.loads(path.read_text("utf-8"))) for path in folder.glob("*.json")}
    order = [*SOURCES, *sorted(set(found) - set(SOURCES))]
    return [found[key] for key in order if key in found]


def errors_table(sources: Sequence[Standing]) -> Table:
    """Predictors across, sources down: the median error and how many of the rows with a figure were said."""
    predictors = in_order(sources)

    def cell(source: Standing, predictor: str) -> str:
        errors = source.errors(predictor)
        asked = sum(row["refused"].get(predictor) != NOT_ASKED for row in source.measured)
        return f"{share(median(errors))} · {len(errors):,}/{asked:,}" if errors else ""

    rows = [
        [source.result["title"], *(cell(source, name) for name in predictors)] for source in sources if source.measured
    ]
    return Table(["source", *map(title, predictors)], rows)


def duels_table(sources: Sequence[Standing]) -> Table:
    """Each rival beside Tonnage, on the rows that both said."""
    rows = []
    for source in sources:
        for rival in source.predictors:
            ours, theirs = source.errors(US, rival), source.errors(rival, US)
            if not rival.startswith(US) and ours:
                figures = f"{len(ours):,}", share(median(ours)), share(median(theirs))
                rows.append([source.result["title"], title(rival), *figures, share(ninth(ours)), share(ninth(theirs))])
    columns = [
        "source",
        "rival",
        "rows of both",
        "Tonnage",
        "rival's",
        "Tonnage, 90th percentile",
        "rival's, 90th percentile",
    ]
    return Table(columns, rows)


def verdicts_table(sources: Sequence[Standing]) -> Table:
    """How many were right about whether a run fits."""
    predictors = [name for name in in_order(sources) if any(source.verdicts(name)[1] for source in sources)]

    def cell(right: int, said: int) -> str:
        return f"{right:,}/{said:,} ({right / said:.1%})".replace("%", " %") if said else ""

    rows = [
        [source.result["title"], *(cell(*source.verdicts(name)) for name in predictors)]
        for source in sources
        if any(source.verdicts(name)[1] for name in predictors)
    ]
    # The others have rows of one source each, which is no total.
    total = cell(*map(sum, zip(*(source.verdicts(US) for source in sources), strict=True)))
    rows.append(["all", *(total if name == US else "" for name in predictors)])
    return Table(["source", *map(title, predictors)], rows)


def counts_table(sources: Sequence[Standing]) -> Table:
    """What each source is made of."""
    rows = []
    for source in sources:
        meters = Counter(METERS[row["meter"]] for row in source.rows)
        versions = sorted(
            {row["torch"] for row in source.rows} - {""}, key=lambda text: [int(part) for part in text.split(".")]
        )
        left_out = sum(source.result["left_out"].values())
        rows.append([
            source.result["title"], f"{source.result['read']:,}", f"{len(source.rows):,}", f"{left_out:,}",
            ", ".join(sorted({row["card"] for row in source.rows})), ", ".join(versions) or "not said", ", ".join(meters),
        ])  # fmt: skip
    return Table(["source", "rows read", "judged", "left out", "cards", "torch", "meter"], rows)


def silence(sources: Sequence[Standing]) -> Iterator[tuple[str, Counter[str]]]:
    """Rows that were left out, and rows of which Tonnage says nothing, by reason."""
    for source in sources:
        reasons = Counter(source.result["left_out"])
        reasons["not judged yet"] = source.result["read"] - reasons.total() - len(source.rows)
        reasons.update(
            f"Tonnage: {row['refused'][US].partition('. ')[0]}" for row in source.rows if US in row["refused"]
        )
        reasons = +reasons
        if reasons:
            yield source.result["title"], reasons


def in_order(sources: Sequence[Standing]) -> list[str]:
    """All predictors: Tonnage, then those of the most sources."""
    said = Counter(name for source in sources for name in source.predictors)
    return sorted(said, key=lambda name: (name != US, not name.startswith(US), -said[name]))


def title(predictor: str) -> str:
    return predictor.replace(US, "Tonnage")


def share(part: float) -> str:
    """A percentage with as many digits as one wants to see."""
    hundredths = 100 * part
    digits = 2 if hundredths < 1 else 1 if hundredths < 10 else 0
    return "0 %" if hundredths == 0 else "< 0.01 %" if hundredths < 0.005 else f"{hundredths:,.{digits}f} %"


def ninth(errors: Sequence[float]) -> float:
    return quantiles(errors, n=10, method="inclusive")[8] if len(errors) > 1 else errors[0]


WIDTH, LABELS, LINE, TOP = 880, 330, 20, 34
DECADES = range(-4, 2)  # 0.01 % to 1,000 %; an error below the first is drawn on it


def figure(sources: Sequence[Standing]) -> str:
    """Errors of each predictor by source: a line from the 5th to the 95th percentile, a bar over the middle half, the median."""

    def x(error: float) -> float:
        place = (log10(max(error, 10.0 ** DECADES[0])) - DECADES[0]) / len(DECADES[1:])
        return LABELS + min(place, 1.0) * (WIDTH - LABELS - 36)

    marks, y = [], TOP
    for source in sources:
        named = [(name, errors) for name in source.predictors if (errors := source.errors(name))]
        if not named:
            continue
        marks.append(f'<text x="0" y="{y + 14}" font-weight="600">{escape(source.result["title"])}</text>')
        y += LINE
        for name, errors in named:
            low, *_, high = tenths = quantiles(errors, n=20, method="inclusive") if len(errors) > 1 else errors * 19
            first, middle, third = tenths[4], tenths[9], tenths[14]
            colour, at = "#0b6fa8" if name == US else "#8b94a2", y + LINE / 2
            marks.append(
                f'<text x="14" y="{y + 14}">{escape(title(name))}</text><g fill="{colour}" stroke="{colour}">'
                f"<title>{escape(title(name))}: median {share(middle)} of {len(errors):,} rows</title>"
                f'<path d="M{x(low):.1f} {at}H{x(high):.1f}" stroke-width="1.5"/>'
                f'<rect x="{x(first):.1f}" y="{at - 4}" width="{max(1.0, x(third) - x(first)):.1f}" height="8" '
                'fill-opacity="0.45" stroke="none"/>'
                f'<circle cx="{x(middle):.1f}" cy="{at}" r="4" stroke="none"/></g>'
            )  # fmt: skip
            y += LINE
        y += 6
    grid = "".join(
        f'<path d="M{x(10.0**d):.1f} {TOP - 6}V{y}" stroke="#8b94a2" stroke-opacity="0.35"/>'
        f'<text x="{x(10.0**d):.1f}" y="{TOP - 12}" text-anchor="middle">{100 * 10.0**d:,g} %</text>'
        for d in DECADES
    )
    style = 'role="img" font-family="system-ui, DejaVu Sans, sans-serif" font-size="13" fill="#5b6474"'
    body = "".join([grid, *marks])
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 4}" {style}>{body}</svg>'


MADE_BY = """make league          # every row of every source, on the CPU alone; it goes on where it was stopped
make league-page     # this page, from benchmarks/results/league"""
INTRO = (
    "How far off are predictors of GPU memory on runs that others measured and published? Each source below is a publisher of "
    "such runs; each predictor was asked about the same rows, or its own published prediction stands beside the measurement. A "
    "cell has the median of the absolute relative error and, after the dot, of how many of the rows with a figure something was "
    "said. An error below what the publisher rounded away counts as none."
)
RIVALS = (
    "MemTracker is torch's own (`torch.distributed._tools.mem_tracker`), which has Tonnage's virtual GPU to run scripts on; "
    "accelerate is the arithmetic of `accelerate estimate-memory` in the row of the script's precision; DeepSpeed's are its "
    "estimators of model states on one GPU without offloading. The last two know weights, gradients and Adam's states, not "
    "activations, and say nothing of other optimizers."
)
APART = (
    "These runs are our own, on one H200 with torch 2.11, and the virtual GPU was made with them in sight: they are no proof of "
    "Tonnage's accuracy. They are here because every predictor that runs scripts can be asked about them."
)
EDGES = (
    "timm's rows are hard ones: each is the largest batch that fitted, or the next of the series, a third more, which did not. "
    "Most that are wrong need, by Tonnage's count, within 2 GiB of what the card has, and failed there: what else was on the "
    "card, and with which flags the benchmark was started, is not published."
)


def sections(sources: Sequence[Standing]) -> Iterator[tuple[str, str, Table | None]]:
    """Heading, words and table of each part of the page, in order."""
    others = [source for source in sources if source.key not in OWN]
    own = [source for source in sources if source.key in OWN]
    if others:
        rows = [row for source in others for row in source.rows]
        cards, versions = {row["card"] for row in rows}, {row["torch"] for row in rows} - {""}
        words = (
            f"{len(rows):,} rows of {len(others)} sources, {len(cards)} cards and {len(versions)} versions of torch."
        )
        yield "Median error by source", words, errors_table(others)
        yield "Beside each rival", "Medians and 90th percentiles over the rows that both said.", duels_table(others)
        yield (
            "Verdicts",
            f"How many were right about whether a run fits on its card, of those they said. {EDGES}",
            verdicts_table(others),
        )
    if own:
        yield "On our own measurements", f"{APART} {RIVALS}", errors_table(own)
        yield "On our own measurements, row by row", "Over the rows that both said.", duels_table(own)
    yield (
        "What was read",
        "Rows that cannot be predicted are counted by reason below; none is left out for being wrong.",
        counts_table(sources),
    )


def markdown(sources: Sequence[Standing], image: str) -> str:
    """docs/accuracy.md."""
    parts = ["# Accuracy: the league", "<!-- Made by benchmarks/league/page.py: `make league-page`. -->", INTRO]
    parts.append(f"```sh\n{MADE_BY}\n```")
    for heading, words, table in sections(sources):
        if table and table.rows:
            parts += [f"## {heading}", words, table.markdown()]
        if heading == "Median error by source":
            parts.append(f"![Errors of each predictor by source: 5th to 95th percentile, middle half, median]({image})")
    parts.append("## What was left out")
    for name, reasons in silence(sources):
        parts.append("\n".join([f"{name}:\n", *(f"- {count:,}: {reason}" for reason, count in reasons.most_common())]))
    parts.append("## Where the figures are from")
    parts.append("\n".join(f"- {source.result['title']}: {source.result['where']}" for source in sources))
    return "\n\n".join(parts) + "\n"


def page(sources: Sequence[Standing]) -> str:
    """The same as a page that opens offline."""
    from tonnage.report.html.markup import simple_page

    parts = [
        "<h1>Accuracy: the league</h1>",
        f"<p>{escape(INTRO)}</p>",
        f"<pre><code>{escape(MADE_BY)}</code></pre>",
        f"<figure>{figure(sources)}</figure>",
    ]
    for heading, words, table in sections(sources):
        if table and table.rows:
            parts += [f"<h2>{escape(heading)}</h2><p>{escape(words)}</p>", table.html()]
    parts.append("<h2>What was left out</h2>")
    for name, reasons in silence(sources):
        lines = "".join(f"<li>{count:,}: {escape(reason)}</li>" for reason, count in reasons.most_common())
        parts.append(f"<details><summary>{escape(name)}</summary><ul>{lines}</ul></details>")
    where = "".join(
        f"<li>{escape(source.result['title'])}: {escape(source.result['where'])}</li>" for source in sources
    )
    return simple_page("Accuracy: the league", *parts, f"<h2>Where the figures are from</h2><ul>{where}</ul>")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--docs", type=Path, default=ROOT / "docs")
    parser.add_argument("--html", type=Path, default=ROOT / "build" / "accuracy.html")
    options = parser.parse_args()
    sources = standings(options.results)
    if not sources:
        sys.exit(f"No results in {options.results}. Make them with: make league")
    written: dict[Path, Callable[[], str]] = {
        options.docs / "accuracy.md": lambda: markdown(sources, "images/accuracy.svg"),
        options.docs / "images" / "accuracy.svg": lambda: figure(sources) + "\n",
        options.html: lambda: page(sources),
    }
    for path, text in written.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text(), "utf-8")
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
