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
from collections import namedtuple

# names and numbers of the ELF standard and of the two processor supplements
SHT_PROGBITS, SHT_SYMTAB, SHT_RELA = 1, 2, 4
SHF_WRITE, SHF_ALLOC = 1, 2
EM_X86_64, EM_AARCH64 = 62, 183
R_X86_64_PC32, R_X86_64_PLT32 = 2, 4
R_AARCH64_PREL32, R_AARCH64_ADR_PREL_PG_HI21, R_AARCH64_ADD_ABS_LO12_NC = 261, 275, 277
R_AARCH64_JUMP26, R_AARCH64_CALL26 = 282, 283
R_AARCH64_LDST_ABS_LO12_NC = {8: 278, 16: 284, 32: 285, 64: 286, 128: 299}  # by the bits loaded or stored

PAGE = 4096
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_RELOCATION = struct.Struct("<QQq")
_ENTRY = struct.Struct("<Q")
Section = namedtuple("Section", "name type flags address offset size link info align entry_size")


def _content(data: bytes, section: Section) -> bytes:
    return data[section.offset : section.offset + section.size]


def link(data: bytes, symbol: str) -> bytes | None:
    """The entry's offset and the pages of an ELF object; None if they would depend on where they are loaded."""
    if data[:6] != b"\x7fELF\x02\x01":
        return None
    machine = struct.unpack_from("<H", data, 18)[0]
    (table,), (count,) = struct.unpack_from("<Q", data, 40), struct.unpack_from("<H", data, 60)
    sections = [Section(*_SECTION.unpack_from(data, table + n * _SECTION.size)) for n in range(count)]
    image, places = bytearray(), {}
    for number, section in enumerate(sections):
        if not section.flags & SHF_ALLOC or not section.size:
            continue
        if section.flags & SHF_WRITE or section.type != SHT_PROGBITS:
            return None
        image += bytes(-len(image) % max(16, section.align))
        places[number] = len(image)
        image += _content(data, section)
    symbols = next((s for s in sections if s.type == SHT_SYMTAB), None)
    if symbols is None:
        return None
    names, values, entry = sections[symbols.link].offset, {}, None
    for number, (name, _, _, home, value, _) in enumerate(_SYMBOL.iter_unpack(_content(data, symbols))):
        if home in places:
            values[number] = places[home] + value
            start = names + name
            entry = values[number] if data[start : data.index(b"\0", start)] == symbol.encode() else entry
    for section in sections:
        if section.type != SHT_RELA or section.info not in places:
            continue
        for offset, info, addend in _RELOCATION.iter_unpack(_content(data, section)):
            target, place = values.get(info >> 32), places[section.info] + offset
            if target is None or not _relocate(machine, image, place, info & 0xFFFFFFFF, target + addend):
                return None
    return None if entry is None else _ENTRY.pack(entry) + bytes(image)


_LOW12_UNITS = {R_AARCH64_ADD_ABS_LO12_NC: 1} | {r: bits // 8 for bits, r in R_AARCH64_LDST_ABS_LO12_NC.items()}
"""The low twelve bits of an address, in units of so many bytes."""
_DISTANCES = {EM_X86_64: (R_X86_64_PC32, R_X86_64_PLT32), EM_AARCH64: (R_AARCH64_PREL32,)}
"""A distance of 32 bits, on each machine."""


def _relocate(machine: int, image: bytearray, place: int, relocation: int, target: int) -> bool:
    """Write one reference; False if it is of a type that needs the address at which the image is loaded."""
    distance = target - place
    if relocation in _DISTANCES.get(machine, ()):
        struct.pack_into("<i", image, place, distance)
        return True
    if machine != EM_AARCH64:
        return False
    (instruction,) = struct.unpack_from("<I", image, place)
    if relocation == R_AARCH64_ADR_PREL_PG_HI21:
        pages = (target // PAGE - place // PAGE) & 0x1FFFFF
        instruction |= (pages & 3) << 29 | (pages >> 2) << 5
    elif relocation in _LOW12_UNITS:
        instruction |= target % PAGE // _LOW12_UNITS[relocation] << 10
    elif relocation in (R_AARCH64_JUMP26, R_AARCH64_CALL26):
        instruction |= (distance >> 2) & 0x3FFFFFF
    else:
        return False
    struct.pack_into("<I", image, place, instruction)
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
