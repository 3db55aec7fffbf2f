"""Mutated messages: the bytes of `packing.pack`, changed as a stranger or a bad line may change them."""

import json
import math

import numpy as np

from sparsekit_fl.packing import pack, unpack

ODD = [
    None, True, 0, -1, 1, 2**31, 2**63, 2**64, 10**30, 10**400, math.inf, -math.inf, math.nan, 0.5, 1e308, "", "x", [], {}, [8],
    [[]], {"a": 1}, [2, 4], [4, 6], [-1], [2**62, 2], [10**9, 10**9], [10**13], [0, 2**63], [0, 2**64], "F16", "BF16", "F64",
    "I32", "BOOL", "U8", "F8_E4M3", "C64", "weight", "unit",
]  # fmt: skip
NAMES = ["evil", "mask", "cost", "", "first.weight", "tensor", "dict", "0"]
DEEP = ["[" * 100_000, '{"a":' * 2000, '{"a":' + "[" * 2000 + "]" * 2000 + "}"]
# What numpy's reader, zip or pickle would open.
BOMBS = [
    b"",
    b"\x93NUMPY",
    b"\x93NUMPY\x01\x00\x46\x00" + b"{'descr': '<f4', 'fortran_order': False, 'shape': (10000000000000,), }".ljust(70),
    b"PK\x03\x04 nonsense",
    b"PK\x05\x06" + bytes(18),
    b"\x80\x04.",
    (2**40).to_bytes(8, "little") + bytes(40),
]


def split(payload):
    """Header as an object, and the bytes after it."""
    size = int.from_bytes(payload[:8], "little")
    return json.loads(payload[8 : 8 + size]), payload[8 + size :]


def join(header, body):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def one_of(rng, items):
    return items[int(rng.integers(len(items)))]


def mutated(payload, rng):
    """Other bytes: of another kind, cut, longer, flipped, with an edited header, or plausible and wrong."""
    how = one_of(rng, [_other, _cut, _flipped, _edited, _edited, _edited, _edited, _plausible, _plausible])
    return how(payload, rng)


def _other(payload, rng):
    return one_of(rng, [*BOMBS, rng.bytes(int(rng.integers(200)))])


def _cut(payload, rng):
    begin = one_of(rng, [0, 0, 0, 1, 8])
    return payload[begin : int(rng.integers(begin, len(payload) + 1))] + rng.bytes(int(rng.integers(1, 30)))


def _flipped(payload, rng):
    data = bytearray(payload)
    for _ in range(int(rng.integers(1, 7))):
        place = int(rng.integers(one_of(rng, [len(data), min(1600, len(data))])))
        data[place] = one_of(rng, [int(rng.integers(256)), data[place] ^ (1 << int(rng.integers(8)))])
    return bytes(data)


def _edited(payload, rng):
    """One place of header or metadata is changed, renamed or removed."""
    header, body = split(payload)
    header["__metadata__"] = json.loads(header["__metadata__"]["value"])
    place = header
    while True:
        key = one_of(rng, sorted(place) if isinstance(place, dict) else range(len(place)))
        if not (isinstance(place[key], dict | list) and place[key]) or rng.random() < 0.25:
            break
        place = place[key]
    value, what = place.pop(key), one_of(rng, ["value", "value", "value", "rename", "drop"])
    if isinstance(place, list):
        place.insert(key, one_of(rng, ODD))
    elif what != "drop":
        place[key if what == "value" else one_of(rng, NAMES)] = one_of(rng, ODD) if what == "value" else value
    text = json.dumps(header["__metadata__"]) if "__metadata__" in header else ""
    return join({**header, "__metadata__": {"value": one_of(rng, DEEP) if rng.random() < 0.1 else text}}, body)


def _plausible(payload, rng):
    """It reads well and says something wrong of itself, or holds a number that no training gives."""
    header, body = split(payload)
    if rng.random() < 0.5:
        value = unpack(payload)
        value["update"][one_of(rng, ["round", "client_id", "examples"])] = int(rng.integers(10**7))
        return pack(value)
    value = np.float32(one_of(rng, [math.nan, math.inf, -math.inf, 3e38, 0.0, -1.0])).tobytes()
    begin = header[one_of(rng, sorted(header.keys() - {"__metadata__"}))]["data_offsets"][0]
    return join(header, body[:begin] + value + body[begin + len(value) :])
