"""The report of a recording, or of a cluster's, as one HTML page that works offline."""

from tonnage.report.html.cluster_page import render_cluster_page
from tonnage.report.html.page import render_page

__all__ = ["render_cluster_page", "render_page"]
