"""Signatures by a key of the curve P-256, as cosign makes them, checked with integers alone.

ECDSA of FIPS 186-5, section 6.4.2, with SHA-256. Only public values are computed with, so time tells nobody anything.
"""

from __future__ import annotations

import base64
import binascii
import hashlib

# SEC 2, section 2.4.2
_P = 2**256 - 2**224 + 2**192 + 2**96 - 1
_A = _P - 3
_B = 0x5AC635D8AA3A93E7B3EBBD55769886BC651D06B0CC53B0F63BCE3C3E27D2604B
_N = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_G = (
    0x6B17D1F2E12C4247F8BCE6E563A440F277037D812DEB33A0F4A13945D898C296,
    0x4FE342E2FE1A7F9B8EE7EB4A7C0F9E162BCE33576B315ECECBB6406837BF51F5,
)
# SubjectPublicKeyInfo of RFC 5480: id-ecPublicKey on prime256v1, then the bits of an uncompressed point
_KEY_HEAD = bytes.fromhex("3059301306072a8648ce3d020106082a8648ce3d030107034200" + "04")


def is_signed(data: bytes, signature: str, key: str) -> bool:
    """Whether a signature over these bytes is by this key.

    Args:
        data: what is signed.
        signature: DER in base64, as cosign writes it.
        key: the public key in PEM.

    Raises:
        ValueError: the key is none of P-256; a signature that cannot be read is only not one.
    """
    point = read_key(key)
    try:
        r, s = _read_der(base64.b64decode(signature.strip(), validate=True))
    except (ValueError, binascii.Error):
        return False
    if not (0 < r < _N and 0 < s < _N):
        return False
    inverse = pow(s, -1, _N)
    hashed = int.from_bytes(hashlib.sha256(data).digest(), "big")
    found = _add(_times(hashed * inverse % _N, _G), _times(r * inverse % _N, point))
    return found is not None and found[0] % _N == r


def read_key(text: str) -> tuple[int, int]:
    """The point of a public key in PEM.

    Raises:
        ValueError: it is none, or none on P-256.
    """
    lines = [line.strip() for line in text.strip().splitlines()]
    if len(lines) < 3 or lines[0] != "-----BEGIN PUBLIC KEY-----" or lines[-1] != "-----END PUBLIC KEY-----":
        raise ValueError("it is no public key in PEM")
    der = base64.b64decode("".join(lines[1:-1]), validate=True)
    if der[: len(_KEY_HEAD)] != _KEY_HEAD or len(der) != len(_KEY_HEAD) + 64:
        raise ValueError("it is no key of the curve P-256, which is what cosign makes")
    x, y = int.from_bytes(der[-64:-32], "big"), int.from_bytes(der[-32:], "big")
    if x >= _P or y >= _P or (y * y - (x * x * x + _A * x + _B)) % _P:
        raise ValueError("its point does not lie on the curve P-256")
    return x, y


def _read_der(data: bytes) -> tuple[int, int]:
    """The two integers of an ECDSA-Sig-Value; in their one shortest form, nothing behind them."""
    values, rest = [], data[2:]
    if len(data) < 8 or data[0] != 0x30 or data[1] != len(rest):
        raise ValueError("no sequence")
    for _ in range(2):
        size = rest[1] if len(rest) > 1 and rest[0] == 2 else 0
        body = rest[2 : 2 + size]
        if not body or len(body) != size or body[0] & 0x80 or (size > 1 and not body[0] and not body[1] & 0x80):
            raise ValueError("no positive integer")
        values.append(int.from_bytes(body, "big"))
        rest = rest[2 + size :]
    if rest:
        raise ValueError("something behind it")
    return values[0], values[1]


def _add(one: tuple[int, int] | None, other: tuple[int, int] | None) -> tuple[int, int] | None:
    if one is None or other is None:
        return one or other
    if one[0] == other[0]:
        if (one[1] + other[1]) % _P == 0:
            return None
        slope = (3 * one[0] * one[0] + _A) * pow(2 * one[1], -1, _P)
    else:
        slope = (other[1] - one[1]) * pow(other[0] - one[0], -1, _P)
    x = (slope * slope - one[0] - other[0]) % _P
    return x, (slope * (one[0] - x) - one[1]) % _P


def _times(factor: int, point: tuple[int, int]) -> tuple[int, int] | None:
    """A multiple of a point, bit by bit from the highest, with one division at the end.

    In Jacobian coordinates (x, y, z) for (x / z^2, y / z^3): "dbl-2001-b" and "madd-2004-hmv" of the Explicit-Formulas
    Database, for curves whose `a` is -3; z is 0 at infinity.
    """
    total = (1, 1, 0)
    for bit in bin(factor)[2:]:
        total = _twice(total)
        if bit == "1":
            total = _and_point(total, point)
    x, y, z = total
    if not z:
        return None
    inverse = pow(z, -1, _P)
    square = inverse * inverse % _P
    return x * square % _P, y * square * inverse % _P


def _twice(one: tuple[int, int, int]) -> tuple[int, int, int]:
    x, y, z = one
    delta, gamma = z * z % _P, y * y % _P
    beta, alpha = x * gamma % _P, 3 * (x - delta) * (x + delta) % _P
    doubled = (alpha * alpha - 8 * beta) % _P
    return doubled, (alpha * (4 * beta - doubled) - 8 * gamma * gamma) % _P, ((y + z) ** 2 - gamma - delta) % _P


def _and_point(one: tuple[int, int, int], point: tuple[int, int]) -> tuple[int, int, int]:
    x, y, z = one
    if not z:
        return *point, 1
    square = z * z % _P
    apart, rise = (point[0] * square - x) % _P, (point[1] * square * z - y) % _P
    if not apart:
        return _twice(one) if not rise else (1, 1, 0)
    two = apart * apart % _P
    three, between = two * apart % _P, x * two % _P
    across = (rise * rise - three - 2 * between) % _P
    return across, (rise * (between - across) - y * three) % _P, z * apart % _P
