"""Object files made ready to run, so that a cached kernel needs no LLVM to be loaded.

What LLVM emits for a kernel is code and constants that refer to each other by distance. Laid out in whole pages these distances
are known when the kernel is built; loading then means copying the pages and making them executable. `link` answers None for
anything else: references to the outside, writable data, an object format other than ELF's. LLVM's own loader takes those.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
import sys
from typing import NamedTuple

ALLOCATED, WRITABLE = 2, 1
SYMBOLS, RELOCATIONS = 2, 4
AARCH64, X86_64 = 183, 62
PAGE = 4096
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_RELOCATION = struct.Struct("<QQq")
_ENTRY = struct.Struct("<Q")


class Section(NamedTuple):
    name: int
    kind: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    align: int
    entry_size: int

    def rows(self, data: bytes, row: struct.Struct) -> list[tuple[int, ...]]:
        return list(row.iter_unpack(data[self.offset : self.offset + self.size]))


def link(data: bytes, symbol: str) -> bytes | None:
    """The entry's offset and the pages of an ELF object; None if they would depend on where they are loaded."""
    if data[:6] != b"\x7fELF\x02\x01":
        return None
    machine = struct.unpack_from("<H", data, 18)[0]
    (table,), (count,) = struct.unpack_from("<Q", data, 40), struct.unpack_from("<H", data, 60)
    sections = [Section(*_SECTION.unpack_from(data, table + n * _SECTION.size)) for n in range(count)]
    image, places = bytearray(), {}
    for number, section in enumerate(sections):
        if not section.flags & ALLOCATED or not section.size:
            continue
        if section.flags & WRITABLE or section.kind != 1:
            return None
        image += bytes(-len(image) % max(16, section.align))
        places[number] = len(image)
        image += data[section.offset : section.offset + section.size]
    symbols = next((s for s in sections if s.kind == SYMBOLS), None)
    if symbols is None:
        return None
    names, values, entry = sections[symbols.link].offset, {}, None
    for number, (name, _, _, home, value, _) in enumerate(symbols.rows(data, _SYMBOL)):
        if home in places:
            values[number] = places[home] + value
            start = names + name
            entry = values[number] if data[start : data.index(b"\0", start)] == symbol.encode() else entry
    for section in sections:
        if section.kind != RELOCATIONS or section.info not in places:
            continue
        for offset, info, addend in section.rows(data, _RELOCATION):
            target = values.get(info >> 32)
            if target is None or not _patch(machine, image, places[section.info] + offset, info & 0xFFFFFFFF, target + addend):
                return None
    return None if entry is None else _ENTRY.pack(entry) + bytes(image)


_SCALES = {277: 0, 278: 0, 284: 1, 285: 2, 286: 3, 299: 4}
"""AArch64: the low twelve bits of an address, in units of what is added, loaded or stored."""


def _patch(machine: int, image: bytearray, place: int, kind: int, target: int) -> bool:
    """Write one reference; False if it is of a kind that only a real address would settle."""
    distance = target - place
    if machine == X86_64 and kind in (2, 4):  # PC32, PLT32
        struct.pack_into("<i", image, place, distance)
        return True
    if machine != AARCH64:
        return False
    if kind == 261:  # PREL32
        struct.pack_into("<i", image, place, distance)
        return True
    (word,) = struct.unpack_from("<I", image, place)
    if kind == 275:  # ADRP: pages between here and there
        pages = (target // PAGE - place // PAGE) & 0x1FFFFF
        word |= (pages & 3) << 29 | (pages >> 2) << 5
    elif kind in _SCALES:
        word |= (target % PAGE >> _SCALES[kind]) << 10
    elif kind in (282, 283):  # B, BL
        word |= (distance >> 2) & 0x3FFFFFF
    else:
        return False
    struct.pack_into("<I", image, place, word)
    return True


class Mapped:
    """An image in executable memory; lives as long as this object."""

    def __init__(self, image: bytes) -> None:
        (entry,), code = _ENTRY.unpack_from(image), image[_ENTRY.size :]
        size = -(-len(code) // mmap.PAGESIZE) * mmap.PAGESIZE
        self.memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory[: len(code)] = code
        base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        # Linux makes instruction caches agree with the memory when it turns executable
        if protect(base, size, mmap.PROT_READ | mmap.PROT_EXEC):
            raise OSError(ctypes.get_errno(), "memory may not be made executable")
        self.address = base + entry


def supported() -> bool:
    return sys.platform == "linux" and mmap.PAGESIZE % PAGE == 0
