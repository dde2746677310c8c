"""The site's pages that lie outside docs/, and links that leave it: a hook of mkdocs.

README becomes the front page. A link to a file that is no page leads to the repository.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
OUTSIDE = {"index.md": "README.md", **{name: name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")}}
_LINK = re.compile(r"(?<=\]\()(?!https?:|#|mailto:)([^)#\s]+)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from the repository's root."""
    for name, source in OUTSIDE.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Point each link to the site's page where there is one, and into the repository elsewhere."""
    name = page.file.src_uri
    source = OUTSIDE.get(name, f"docs/{name}")

    def lead(match: re.Match[str]) -> str:
        # Where the link leads in the repository, and which page of the site that is.
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[1]))
        known = {path: page_name for page_name, path in OUTSIDE.items()}
        site = known.get(target) or target.removeprefix("docs/")
        if files.get_file_from_path(site) and (target in known or target.startswith("docs/")):
            return posixpath.relpath(site, posixpath.dirname(name) or ".")
        return f"{config['repo_url']}/blob/main/{target}"

    return _LINK.sub(lead, markdown)
