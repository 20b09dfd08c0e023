"""Keeps approximate KV out of the exact prefix cache.

    block        0       1       2       3        ...
    content      exact   exact   mixed   approximate      the first reused row lies in block 2
    hash         as is   as is   H(salt, as is)           from there on: other requests can never hit them

vLLM chains a request's block hashes, so exact blocks in front are shared with exact traffic and everything behind the
first reused row lives in a namespace of its own. The salt names what was reused, and holds a secret of this process,
so that no client can ask for it by ``cache_salt``.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import Any

from kvbaton.errors import Unsupported

_SECRET = secrets.token_bytes(32)


class _Unsalted:
    """A request as its block hasher sees it, with the exact hashes in place of the salted ones."""

    def __init__(self, request: Any, exact: list[bytes]) -> None:
        self._request, self.block_hashes = request, exact

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


class SaltedHasher:
    """Stands in for a request's block hasher: hashes of blocks from ``first`` on are salted with ``salt``."""

    def __init__(self, inner: Any, salt: str, first: int) -> None:
        self._inner, self._first = inner, first
        self._key = hashlib.blake2b(salt.encode(), key=_SECRET, digest_size=32).digest()
        self._exact: list[bytes] = []

    def __call__(self, request: Any) -> list[bytes]:
        """Hashes of the blocks of ``request`` that have none yet."""
        self._exact.extend(self._inner(_Unsalted(request, self._exact)))
        have = len(request.block_hashes)
        return [h if have + i < self._first else self._salted(h) for i, h in enumerate(self._exact[have:])]

    def _salted(self, exact: bytes) -> bytes:
        return hashlib.blake2b(exact, key=self._key, digest_size=len(exact)).digest()


def salt_request(request: Any, salt: str, first_block: int) -> None:
    """Give ``request`` salted block hashes from ``first_block`` on. Call before its prefix-cache lookup."""
    if request._block_hasher is None:
        return
    request._block_hasher = SaltedHasher(request._block_hasher, salt, first_block)
    request.block_hashes.clear()
    request.update_block_hashes()


def check_can_salt(request_class: Any) -> None:
    """Raise Unsupported unless requests of this vLLM hash their blocks the way `salt_request` relies on."""
    calls: list[int] = []

    def hasher(request: Any) -> list[bytes]:
        calls.append(len(request.block_hashes))
        return [bytes([n] * 32) for n in range(len(request.block_hashes), 3)]

    request = request_class.__new__(request_class)
    request.block_hashes, request._block_hasher = [], hasher
    try:
        request.update_block_hashes()
        plain = list(request.block_hashes)
        salt_request(request, "start", 1)
        salted = list(request.block_hashes)
    except (AttributeError, TypeError) as error:
        raise Unsupported(f"this vLLM hashes blocks in another way ({error}): {_WAY_OUT}") from error
    if len(salted) != 3 or salted[0] != plain[0] or set(salted[1:]) & set(plain) or calls != [0, 0]:
        raise Unsupported(f"this vLLM hashes blocks in another way: {_WAY_OUT}")


_WAY_OUT = ("approximate KV cannot be kept out of the prefix cache. Use vllm 0.32, or start with "
            "--no-enable-prefix-caching")
