"""Ways to damage a file, or to make a hostile one of it: bytes anywhere, and what its format says, with checksums made right.

Each takes bytes and a random generator, and returns other bytes; the same generator gives the same bytes.
"""

from __future__ import annotations

import io
import json
import pickle
import pickletools
import random
import re
import struct
import zipfile
import zlib
from collections.abc import Callable
from typing import Any

from swapper.formats.container import _seal_tail

Mutate = Callable[[bytes, random.Random], bytes]
NUMBERS = (0, 1, -1, 127, 128, 255, 256, 1 << 15, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 40, (1 << 61) - 1,
           1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 80)  # fmt: skip
_SEAL = re.compile(rb"swapper-seal from ([0-9]{20}) crc32 ([0-9a-f]{8})\n")


def _span(data: bytes, chance: random.Random) -> tuple[int, int]:
    """A place, as often near the ends as between them, and a length."""
    at = chance.randrange(len(data) + 1)
    if chance.random() < 0.3:
        at = min(chance.randrange(1024), len(data))
    elif chance.random() < 0.4:
        at = max(0, len(data) - chance.randrange(4096))
    return at, chance.choice((1, 1, 2, 4, 8, 64, 512, 4096))


def mutate_bytes(data: bytes, chance: random.Random) -> bytes:
    at, length = _span(data, chance)
    part = data[at : at + length]
    kind = chance.choice(("flip", "flip", "flip", "random", "number", "zero", "remove", "duplicate", "cut", "append"))
    if kind == "flip":
        return data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :] if at < len(data) else data
    if kind == "cut":
        return data[: len(data) - chance.choice((1, 4, 22, 80, 512, len(data) // 2))]
    if kind == "append":
        return data + chance.choice((bytes(length), data[-length:], chance.randbytes(length)))
    if kind == "number":
        size = chance.choice((1, 2, 4, 8))
        number = chance.choice(NUMBERS) & (1 << 8 * size) - 1
        return data[:at] + number.to_bytes(size, chance.choice(("little", "big"))) + data[at + size :]
    new = {"random": chance.randbytes(len(part)), "zero": bytes(len(part)), "remove": b"", "duplicate": part + part}[
        kind
    ]
    return data[:at] + new + data[at + length :]


# --- pickles ----------------------------------------------------------------------------------------------------------


def _number(chance: random.Random) -> bytes:
    return pickle.dumps(chance.choice(NUMBERS), 2)[2:-1]


def _piece(chance: random.Random) -> bytes:
    """Opcodes that make something of what is there, or repeat it."""
    number = bytes([chance.randrange(12)])
    return chance.choice((
        b"q" + number, b"h" + number, b"h" + number, b"2", b"2\x86", b"2\x86" * 40, b"]", b"}", b")", b"(", b"t", b"l", b"d",
        b"a", b"e", b"s", b"u", b"R", b"b", b"0", b"1", b"\x81", b"\x85", b"\x87", b"\x8f", b"\x90", b"\x91", b"\x92", b"N",
        b"\x88", b"Q", b"]q\x00(h\x00h\x00e", b"X\x01\x00\x00\x00a", b"C\x01a", b"o", b"\x97", b"\x98",
        b"X\xff\xff\xff\x7f", b"\x8d" + b"\xff" * 8, b"r\xff\xff\xff\xff", b"ccollections\nOrderedDict\n", b"cposix\nsystem\n",
        b"ctorch\nSize\n", b"ctorch._utils\n_rebuild_tensor_v2\n", b"cbuiltins\nbytearray\n", b"cbuiltins\nset\n",
        b"ctorch\nfloat32\n",
        b"K\x01" + b"q\x09h\x09\x86" * 60, b"](" + b"K\x01q\x09" + b"h\x09" * 5000 + b"e",
        b"ctorch.storage\nUntypedStorage\n" + _number(chance) + b"\x85R", b"c_codecs\nencode\n", b"X\x03\x00\x00\x00hex",
        number + b"\x85K\x00\x85", b"J\x00\x00\x00\x40\x85K\x00\x85",
        b"ctorch\nFloatStorage\n", b"X\x02\x00\x00\x00\xed\xa0", _number(chance), _number(chance),
    ))  # fmt: skip


def mutate_pickle(data: bytes, chance: random.Random) -> bytes:
    """Change one pickle: its opcodes as such, or its bytes."""
    if chance.random() < 0.3:
        return mutate_bytes(data, chance)
    if chance.random() < 0.2:
        return b"\x80\x02" + b"".join(_piece(chance) for _ in range(chance.randrange(1, 60))) + b"."
    try:
        places = [at or 0 for _, _, at in pickletools.genops(data)]
    except Exception:
        return mutate_bytes(data, chance)
    begin = chance.randrange(len(places))
    end = min(begin + chance.choice((1, 1, 2, 5, 30)), len(places) - 1)
    at, behind = places[begin], places[max(end, begin)]
    kind = chance.choice(("insert", "replace", "duplicate", "remove", "move"))
    part = data[at:behind]
    new = {"insert": _piece(chance) + part, "replace": _piece(chance), "duplicate": part * chance.choice((2, 3, 50)),
           "remove": b"", "move": b""}[kind]  # fmt: skip
    other = chance.choice(places)
    if kind == "move" and other >= behind:
        return data[:at] + data[behind:other] + part + data[other:]
    return data[:at] + new + data[behind:]


# --- JSON -------------------------------------------------------------------------------------------------------------


def _value(chance: random.Random) -> Any:
    deep: Any = []
    for _ in range(chance.choice((3, 2000))):
        deep = [deep]
    return chance.choice((*NUMBERS, None, True, "", "x" * 300, "../x", "a\0b", "\ud800", "/etc/passwd", -1.5, 1e400, float("nan"),
                          [], {}, [1] * 100, [[]], deep, {"a": 1}, [1 << 62] * 40))  # fmt: skip


def _change(tree: Any, chance: random.Random) -> Any:
    """Change one node of a tree of JSON."""
    if not isinstance(tree, dict | list) or not tree or chance.random() < 0.15:
        return _value(chance)
    if isinstance(tree, list):
        at = chance.randrange(len(tree))
        return [*tree[:at], _change(tree[at], chance), *tree[at + 1 :]]
    key = chance.choice(list(tree))
    kind = chance.randrange(5)
    if kind == 0:
        return {k: v for k, v in tree.items() if k != key}
    if kind == 1:
        return {**tree, chance.choice(("", "\ud800", "k" * 300, "new")): tree[key]}
    return {**tree, key: _change(tree[key], chance)}


def mutate_json(data: bytes, chance: random.Random) -> bytes:
    try:
        text = json.dumps(_change(json.loads(data), chance))
    except (ValueError, RecursionError):
        return mutate_bytes(data, chance)
    return text.encode()


# --- files ------------------------------------------------------------------------------------------------------------


def mutate_safetensors(data: bytes, chance: random.Random) -> bytes:
    nbytes = int.from_bytes(data[:8], "little")
    header = mutate_json(data[8 : 8 + nbytes], chance)
    return struct.pack("<Q", len(header)) + header + data[8 + nbytes :]


def mutate_zip(data: bytes, chance: random.Random) -> bytes:
    """Change a record, or what is listed, and write the archive anew, with checksums that are right."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            records = [(info.filename, archive.read(info)) for info in archive.infolist()]
    except Exception:
        return mutate_bytes(data, chance)
    if not records:  # another change left the only one out
        return mutate_bytes(data, chance)
    kind = chance.choice(("pickle", "pickle", "pickle", "pickle", "record", "leave out", "twice", "rename", "compress"))
    at = chance.randrange(len(records))
    if kind == "pickle":
        at = next((n for n, (name, _) in enumerate(records) if name.endswith("data.pkl")), at)
        records[at] = records[at][0], mutate_pickle(records[at][1], chance)
    elif kind == "record":
        records[at] = records[at][0], mutate_bytes(records[at][1], chance)
    elif kind == "leave out":
        del records[at]
    elif kind == "twice":
        records.append(records[at])
    elif kind == "rename":
        records[at] = chance.choice(("x/../y", "/x", "x/data/0", "x/version", "y", "x/" + "n" * 300)), records[at][1]
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for number, (name, content) in enumerate(records):
            is_packed = kind == "compress" and (number == at or chance.random() < 0.3)
            archive.writestr(name, content, zipfile.ZIP_DEFLATED if is_packed else zipfile.ZIP_STORED)
    return made.getvalue()


def sealed(archive: bytes) -> bytes:
    """Return a zip with a seal over all of it, as a commit record has."""
    return _seal_tail(archive, 0)


def mutate_commit(data: bytes, chance: random.Random) -> bytes:
    """Change a record of a zip that is sealed as a whole, and seal it again."""
    changed = mutate_zip(data, chance)
    return sealed(changed) if changed.rfind(b"PK\x05\x06") >= 0 else changed


def mutate_sealed(data: bytes, chance: random.Random) -> bytes:
    """Change the tail of a sealed file (its small records, manifest, directory), and seal it again."""
    seal = max(_SEAL.finditer(data), key=lambda found: found.start(), default=None)
    if seal is None or int(seal[1]) >= seal.start():
        return mutate_bytes(data, chance)
    begin = int(seal[1])
    tail = data[begin : seal.start()]
    manifest = re.search(rb'\{"format":.*?\}\}', tail, re.DOTALL)
    if manifest is not None and chance.random() < 0.4:
        changed = mutate_json(manifest[0], chance)
        changed = changed[: len(manifest[0])].ljust(len(manifest[0]))
        tail = tail[: manifest.start()] + changed + tail[manifest.end() :]
        header = tail.rfind(b"PK\x03\x04", 0, manifest.start())
        descriptor = tail.find(b"PK\x07\x08", manifest.start())
        if header >= 0 and descriptor >= 0:
            tail = tail[: descriptor + 4] + struct.pack("<I", zlib.crc32(changed)) + tail[descriptor + 8 :]
    else:
        at = chance.randrange(len(tail))
        tail = tail[:at] + mutate_bytes(tail[at : at + 200], chance) + tail[at + 200 :]
        tail += bytes(max(0, seal.start() - begin - len(tail)))
        tail = tail[: seal.start() - begin]
    text = b"swapper-seal from %020d crc32 %08x\n" % (begin, zlib.crc32(tail))
    return data[:begin] + tail + text + data[seal.end() :]


def ways_for(name: str, data: bytes) -> list[Mutate]:
    """Return how a file of this name and content is changed."""
    ways: list[Mutate] = [mutate_bytes]
    if name.endswith(".safetensors"):
        ways += [mutate_safetensors] * 2
    elif data[:4] == b"PK\x03\x04":
        ways += [mutate_zip] * 2
        seal = max(_SEAL.finditer(data), key=lambda found: found.start(), default=None)
        if seal is not None:
            ways += [mutate_sealed] * 2 if int(seal[1]) else [mutate_commit] * 4
    elif data[:1] == b"\x80":
        ways += [mutate_pickle] * 3
    elif data[:1] in (b"{", b"["):
        ways += [mutate_json] * 3
    return ways
