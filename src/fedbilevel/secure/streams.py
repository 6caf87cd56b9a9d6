"""Masks and keys of a secure sum, from the primitives of `cryptography` and PyCryptodome.

Seeds have 16 bytes, the size of PyCryptodome's Shamir field GF(2^128) and the strength of X25519. A
mask is the key stream of AES-256 in counter mode, read as 64-bit words. Its key is derived from
one seed, one nonce and one name, and is used for one stream only, so the counter starts at zero.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import combinations, islice

import numpy as np
from Crypto.Protocol.SecretSharing import Shamir
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedbilevel.errors import WireError
from fedbilevel.secure.terms import digest

SEED = 16  # bytes
KEY = 32  # bytes of a public key, a mask's key or a commitment
SEALED = 12 + 16  # bytes that sealing adds
Share = tuple[int, bytes]
_CHUNK = 2**16  # words that stay in the cache between AES and the addition
_ZEROS = memoryview(bytes(8 * _CHUNK))
_ATTEMPTS = 100  # subsets of shares that are tried if some share is wrong


def derived(secret: bytes, *purpose: bytes | str) -> bytes:
    """Derive a key from a secret for one purpose."""
    return HKDF(SHA256(), KEY, None, digest(*purpose)).derive(secret)


def new_seed() -> bytes:
    return os.urandom(SEED)


def private_key(seed: bytes) -> X25519PrivateKey:
    """Return the key pair of one slot, which whoever restores the seed can compute again."""
    return X25519PrivateKey.from_private_bytes(derived(seed, "private key"))


def commitment(seed: bytes) -> bytes:
    """Return a value that binds a member to a seed and does not reveal it."""
    return derived(seed, "commitment")


def agreed(mine: X25519PrivateKey, other: bytes, *purpose: bytes | str) -> bytes:
    """Return the key that two members share for a purpose."""
    try:
        return derived(mine.exchange(X25519PublicKey.from_public_bytes(other)), *purpose)
    except ValueError:  # a point of low order, which gives the same secret with every key
        raise WireError("a public key of the secure sum is not usable.") from None


def add_mask(words: np.ndarray, key: bytes, sign: int) -> None:
    """Add a mask to a row of 64-bit words in place, or subtract it. Sums wrap."""
    encryptor = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    buffer = np.empty(8 * min(_CHUNK, len(words)) + 16, np.uint8)
    add = np.add if sign > 0 else np.subtract
    for start in range(0, len(words), _CHUNK):
        part = words[start : start + _CHUNK]
        encryptor.update_into(_ZEROS[: 8 * len(part)], buffer.data)
        add(part, buffer[: 8 * len(part)].view("<i8"), out=part)


# ---- shares --------------------------------------------------------------------------------------------------------


def split(seed: bytes, needed: int, num: int) -> list[bytes]:
    """Split a seed into shares with the numbers 1 to `num`, of which `needed` restore it."""
    return [share for _, share in Shamir.split(needed, num, seed)]


def restored(shares: Sequence[Share], needed: int, is_right: Callable[[bytes], bool]) -> bytes | None:
    """Return the seed that some of the shares give, or None if no tried subset gives the right one.

    Shares cannot be checked one by one; the seed can, by what its owner published.
    """
    for some in islice(combinations(shares, needed), _ATTEMPTS):
        seed = Shamir.combine([*some])
        if is_right(seed):
            return seed
    return None


def seal(key: bytes, content: bytes, context: bytes) -> bytes:
    """Encrypt and authenticate shares for one receiver."""
    number = os.urandom(12)
    return number + ChaCha20Poly1305(key).encrypt(number, content, context)


def unseal(key: bytes, sealed: bytes, context: bytes) -> bytes | None:
    """Return the content, or None if anything was changed."""
    try:
        return ChaCha20Poly1305(key).decrypt(sealed[:12], sealed[12:], context)
    except InvalidTag:
        return None
