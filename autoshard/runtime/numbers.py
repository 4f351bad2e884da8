"""Random numbers that are a function of a key and of their position: a rank that holds a piece of a value draws that piece's numbers.

A value's dims are taken as rows and columns. Each row and each column has words of its own (murmur3's finalizer of its index, a bijection),
made once; per element two rounds of multiply, xor and shift mix them with the key's words. All of it is int32 arithmetic modulo 2^32, the
same on every device, and on a CPU it takes a third of the time of ``bernoulli_``.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch

COLUMNS = 256
"""As many trailing dims are columns as it takes to have this many. Global shapes decide, so that all layouts agree."""

WORDS = 4
"""Words that an element can have: a number in float64 takes two, one of a normal distribution twice as many."""

BLOCK = 2**16
"""Elements that a CPU draws at a time: what they need stays in its cache."""

DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
"""Bits of a uniform number: its multiples of 2^-bits below 1 are exact in the dtype."""

_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B - 2**32  # lowbias32 of https://github.com/skeeto/hash-prospector
_LOW = 0xFFFFFFFF


def indices(dims: tuple[torch.Tensor, ...], sizes: tuple[int, ...]) -> torch.Tensor:
    """Linear indices, in a tensor of these global ``sizes``, of the positions that ``dims`` gives for each of them; flat, int64."""
    found = torch.zeros(1, dtype=torch.int64)
    for position, size in zip(dims, sizes):
        found = (found[:, None] * size + position).flatten()
    return found


def row_dims(shape: tuple[int, ...]) -> int:
    """How many leading dims of a value of this global shape make its rows."""
    rows = len(shape)
    while rows and prod(shape[rows:]) < COLUMNS:
        rows -= 1
    return rows


def scrambled(index: torch.Tensor, salt: int) -> torch.Tensor:
    """int32 words of indices: murmur3's 32-bit finalizer."""
    x = (index + salt * 0x9E3779B9) & _LOW
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = ((x ^ (x >> shift)) * factor) & _LOW
    return _signed(x ^ (x >> 16))


def key_words(keys: torch.Tensor) -> torch.Tensor:
    """int32 ``[n, WORDS, 3]`` of int64 ``[n]`` keys: the stream of splitmix64 that starts at each."""
    steps = torch.arange(1, 1 + WORDS * 3 // 2, device=keys.device)
    z = keys[:, None] + steps * _wrapped(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ _right(z, shift)) * _wrapped(factor)
    z = z ^ _right(z, 31)
    return _signed(torch.stack((z & _LOW, _right(z, 32)), -1)).view(len(keys), WORDS, 3)


def _right(x: torch.Tensor, shift: int) -> torch.Tensor:
    """int64 shifted as if it were unsigned."""
    return (x >> shift) & ((1 << (64 - shift)) - 1)


def _wrapped(x: int) -> int:
    return x - 2**64 if x >= 2**63 else x


def _signed(x: torch.Tensor) -> torch.Tensor:
    """int64 below 2^32 as int32 of the same bits."""
    return ((x ^ 2**31) - 2**31).to(torch.int32)


class Numbers:
    """The numbers of one op on this rank, all of them functions of its key and of the elements' positions in the whole value.

    Args:
        rows, columns: words of this rank's rows ``[2, r]`` and columns ``[c]``, int32.
        key: words of the key, int32 ``[WORDS, 3]``.
        shape: of this rank's piece; r x c elements.
        whole: whether the piece is all of the value.
    """

    def __init__(self, rows: torch.Tensor, columns: torch.Tensor, key: torch.Tensor, shape: tuple[int, ...], whole: bool = True):
        self.rows, self.columns, self.key, self.shape, self.whole = rows, columns, key, shape, whole

    def keep(self, p: float) -> torch.Tensor:
        """A mask, true with probability ``p`` (to 2^-32)."""
        if p >= 1:
            return torch.ones(self.shape, dtype=torch.bool, device=self.key.device)
        limit = round(p * 2**32) - 2**31
        return self._fill(torch.bool, 1, lambda word: word < min(limit, 2**31 - 1))

    def uniform(self, dtype: torch.dtype) -> torch.Tensor:
        """Uniform in [0, 1)."""
        if dtype == torch.float64:
            return self._fill(dtype, 2, _double)
        shift = 32 - DIGITS[dtype]
        return self._fill(dtype, 1, lambda word: ((word >> shift) & ((1 << (32 - shift)) - 1)).to(dtype) * 2.0 ** (shift - 32))

    def normal(self, dtype: torch.dtype) -> torch.Tensor:
        """Normal with mean 0 and deviation 1, by Box and Muller."""
        if dtype == torch.float64:
            return self._fill(dtype, 4, lambda a, b, c, d: _box_muller(_double(a, b), _double(c, d)))
        return self._fill(dtype, 2, lambda a, b: _box_muller(*(((w >> 8) & 0xFFFFFF).to(torch.float32) * 2.0**-24 for w in (a, b))))

    def integers(self, low: int, high: int, dtype: torch.dtype) -> torch.Tensor:
        """Uniform among low, ..., high - 1 (to 2^-53)."""
        return self._fill(torch.int64, 2, lambda a, b: (_double(a, b) * (high - low)).to(torch.int64) + low).to(dtype)

    def _fill(self, dtype: torch.dtype, words: int, finish: Callable[..., torch.Tensor]) -> torch.Tensor:
        """``finish`` of so many words of each element."""
        rows, columns = self.rows.shape[1], len(self.columns)
        step = max(1, BLOCK // max(1, columns))
        if torch.compiler.is_compiling() or self.key.device.type != "cpu" or rows <= step:
            return finish(*(self._word(i, self.rows) for i in range(words))).to(dtype).view(self.shape)
        out = torch.empty(rows, columns, dtype=dtype)
        for start in range(0, rows, step):
            some = self.rows[:, start : start + step]
            out[start : start + step] = finish(*(self._word(i, some) for i in range(words)))
        return out.view(self.shape)

    def _word(self, number: int, rows: torch.Tensor) -> torch.Tensor:
        first, second, last = self.key[number].unbind()
        x = (rows[0] ^ first)[:, None] ^ self.columns
        x ^= x >> 15  # of the sign a shift makes a run of copies, and the highest bit is lost: 31 are enough
        x = torch.add((rows[1] + second)[:, None], x, alpha=_FIRST)
        x ^= x >> 13
        return torch.add(last, x, alpha=_SECOND)


def _double(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    bits = (high.to(torch.int64) & _LOW) << 21 | ((low.to(torch.int64) >> 11) & 0x1FFFFF)
    return bits.to(torch.float64) * 2.0**-53


def _box_muller(u: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.sqrt(-2 * torch.log1p(-u)) * torch.cos(v * (2 * torch.pi))
