"""Common parts of every page: packaged assets, embedded data that cannot become markup, and a content security policy.

A page allows only its own script and style (by hash), so nothing in a recording can run or fetch anything.
"""

import gzip
import json
import re
from base64 import b64encode
from collections.abc import Iterable
from functools import cache
from hashlib import sha256
from pathlib import Path
from string import Template

_DATA = Path(__file__).parent / "data"


@cache
def read_part(name: str) -> str:
    """Read a template, a style or a script."""
    return (_DATA / name).read_text(encoding="utf-8")


@cache
def colours() -> dict[str, str]:
    """Return the category colours by key: those of the light theme, which also suit the dark one."""
    return dict(re.findall(r"--c-(\w+): (#\w+)", read_part("page.css").partition("@media")[0]))


def embedded(figures: dict[str, object]) -> str:
    """Return JSON in which no markup can begin or end."""
    plain = json.dumps(figures, separators=(",", ":"))
    return plain.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def packed_json(columns: dict[str, object]) -> str:
    """Return compressed, base64-encoded JSON."""
    plain = json.dumps(columns, separators=(",", ":"))
    return b64encode(gzip.compress(plain.encode(), compresslevel=6, mtime=0)).decode()


def simple_page(
    title: str,
    *parts: str,
    styles: Iterable[str] = (),
    scripts: Iterable[str] = (),
    data: dict[str, object] | None = None,
) -> str:
    """Return a page of sections in the common style, with a script if it has a chart."""
    style = "".join(map(read_part, ("page.css", *styles)))
    script = "".join(map(read_part, scripts))
    figures = f'<script type="application/json" id="data">{embedded(data)}</script>' if data is not None else ""
    return Template(read_part("simple.html")).substitute(
        policy=policy([style], [script]),
        title=title,
        style=style,
        body="\n".join(filter(None, parts)),
        scripts=f"{figures}\n<script>{script}</script>" if script else "",
    )


def policy(styles: Iterable[str], scripts: Iterable[str]) -> str:
    """Return a content security policy that allows exactly these styles and scripts, and no connections."""
    allowed_styles, allowed_scripts = " ".join(map(_hash, styles)), " ".join(map(_hash, scripts))
    return (
        f"default-src 'none'; style-src {allowed_styles}; script-src {allowed_scripts}; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(source: str) -> str:
    return f"'sha256-{b64encode(sha256(source.encode()).digest()).decode()}'"
