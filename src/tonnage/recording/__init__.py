"""The ordered memory events of one run: the records, the questions, the file."""

from tonnage.recording.groups import Group, group_alike, module_pattern
from tonnage.recording.recording import Recording
from tonnage.recording.records import Allocation, Header, Mark, Note, OutOfMemory, SegmentEvent, StandIn
from tonnage.recording.store import read_recording, write_recording

__all__ = [
    "Allocation",
    "Group",
    "Header",
    "Mark",
    "Note",
    "OutOfMemory",
    "Recording",
    "SegmentEvent",
    "StandIn",
    "group_alike",
    "module_pattern",
    "read_recording",
    "write_recording",
]
