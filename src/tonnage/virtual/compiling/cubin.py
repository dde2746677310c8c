"""Reads the number of registers that a kernel uses from its cubin, the ELF file that ptxas writes.

See https://en.wikipedia.org/wiki/Executable_and_Linkable_Format for the layout of ELF; the attribute is the one that
cuobjdump prints as EIATTR_REGCOUNT.
"""

import struct

_SECTION_HEADER = struct.Struct("<IIQQQQIIQQ")
_ATTRIBUTE = struct.Struct("<BBH")
_REGISTER_COUNT = 0x2F
_SIZED_VALUE = 0x04  # the format whose third field is the size of the value that follows


def register_count(cubin: bytes) -> int:
    """Return the registers per thread, the maximum over all kernels in the file."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [_SECTION_HEADER.unpack_from(cubin, table + i * entry_size) for i in range(count)]
    names_at = headers[names_index][4]
    found = 0
    for name, _, _, _, offset, size, *_ in headers:
        start = names_at + name
        if cubin[start : cubin.index(b"\0", start)] == b".nv.info":
            found = max([found, *_counts(cubin[offset : offset + size])])
    return found


def _counts(section: bytes) -> list[int]:
    counts, at = [], 0
    while at < len(section):
        form, attribute, size = _ATTRIBUTE.unpack_from(section, at)
        at += _ATTRIBUTE.size
        if form == _SIZED_VALUE:
            if attribute == _REGISTER_COUNT:
                counts.append(struct.unpack_from("<II", section, at)[1])
            at += size
    return counts
