"""Recordings of a run's memory events: the records, queries on them, and the file format."""

from tonnage.recording.cluster import (
    ClusterRecording,
    ClusterSummary,
    RankSummary,
    ended_in_error,
    open_cluster,
    open_recording,
    write_cluster,
)
from tonnage.recording.groups import module_pattern, telling_lines
from tonnage.recording.recording import Recording
from tonnage.recording.records import Allocation, FailedRequest, Header, Mark, Note, SegmentEvent, StandIn
from tonnage.recording.store import read_recording, write_recording

__all__ = [
    "Allocation",
    "ClusterRecording",
    "ClusterSummary",
    "FailedRequest",
    "Header",
    "Mark",
    "Note",
    "RankSummary",
    "Recording",
    "SegmentEvent",
    "StandIn",
    "ended_in_error",
    "module_pattern",
    "open_cluster",
    "open_recording",
    "read_recording",
    "telling_lines",
    "write_cluster",
    "write_recording",
]
