"""The report of a recording as one page that opens offline."""

from tonnage.report.html.page import render_page

__all__ = ["render_page"]
