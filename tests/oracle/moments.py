"""AdamW with int8 moments, an element at a time: docs/design/optim.md in Python's integers and floats."""

import math

import torch

MASK = (1 << 64) - 1
#: by moment: the exponent of the least normal code, the code of NaN, which array its random bits are of
FORMS = {"exp_avg": (122 - 127, 127, 1 << 32), "exp_avg_sq": (114 - 127, 255, 1)}


def mixed(bits):
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB & MASK
    return bits ^ (bits >> 31)


def random_bits(seed, number, which, step, element):
    key = mixed((mixed((mixed(seed) + 2 * number + which) & MASK) + step) & MASK)
    place = (key + element * 0x9E3779B9) & 0xFFFFFFFF
    return (((place ^ place >> 15) + (key >> 32)) * 0x846CA68B & 0xFFFFFFFF) >> 16


def record(values, key, random):
    """Return the 33 bytes of up to 32 elements. `random`: by element, in [0, 2**16)."""
    least, top, _ = FORMS[key]
    most = max((abs(v) for v in values if abs(v) < 2.0**127), default=0.0)
    fraction, exponent = math.frexp(most)  # the greatest is in (1, 2] times 2**exponent
    exponent = max(exponent - (2 if fraction == 0.5 else 1), -126) if most else -126
    codes = []
    for value, chance in zip(values, random, strict=True):
        code = top
        if abs(value) < 2.0**127:
            part = math.ldexp(abs(value), -exponent)
            binade = max(math.frexp(part)[1] - 1, least) if part else least
            code = math.floor(math.ldexp(part, 4 - binade) + chance / 2**16) + 16 * (binade - least)
            code = max(code, int(key == "exp_avg_sq" and value != 0))
        codes.append(code | (128 if key == "exp_avg" and math.copysign(1, value) < 0 else 0))
    return codes + [0] * (32 - len(codes)) + [exponent + 127]


def value_of(code, exponent, key):
    least, top, _ = FORMS[key]
    sign, code = (-1.0, code & 127) if key == "exp_avg" and code > 127 else (1.0, code)
    if code == top:
        return math.nan
    binade, part = (0, code) if code < 16 else (code // 16 - 1, 16 + code % 16)
    return sign * math.ldexp(part, binade + least - 4 + exponent - 127)


def decoded(records, key, numel):
    rows = records.tolist()
    flat = [value_of(code, row[32], key) for row in rows for code in row[:32]]
    return torch.tensor(flat[:numel])


def encoded(values, key, seed, number, step):
    flat, which = values.tolist(), FORMS[key][2]
    random = [random_bits(seed, number, which, step, i) for i in range(len(flat))]
    rows = [record(flat[i : i + 32], key, random[i : i + 32]) for i in range(0, len(flat), 32)]
    return torch.tensor(rows, dtype=torch.uint8)
