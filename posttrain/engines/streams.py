"""Random streams: one for each completion, a function of (its key, the position in it, the token id).

The numbers are a hash, so there is no state, rows can leave and enter without changing another's stream, and CPU and
GPU give the same numbers.
"""

import zlib
from collections.abc import Sequence

import torch

WORD = 0xFFFFFFFF
# Odd multipliers of 32-bit integers, as signed integers, whose products spread every bit (Wellons, "lowbias32").
SPREAD_1, SPREAD_2 = 0x7FEB352D, 0x846CA68B - (1 << 32)
GOLDEN = 0x9E3779B9 - (1 << 32)  # 2^32 over the golden ratio: multiples of it are far apart
LARGEST = 1 - 2.0**-24  # below 1 in float32


def seed_of(*parts: int | str) -> int:
    """A 64-bit seed from numbers and names (by their CRC-32), such as a run's seed, the step and the row."""
    seed = 0
    for part in parts:
        number = zlib.crc32(part.encode()) if isinstance(part, str) else part & (1 << 64) - 1
        seed = _mix64(seed ^ _mix64(number))
    return seed


def keys(streams: Sequence[tuple[int, int]], device: torch.device) -> torch.Tensor:
    """Keys of streams, each of (seed, number of the completion): int32 (len(streams), 2)."""
    words = []
    for seed, number in streams:
        mixed = _mix64(_mix64(seed & (1 << 64) - 1) + number + 1)
        words.append([_signed(mixed & WORD), _signed(mixed >> 32)])
    return torch.tensor(words, dtype=torch.int32, device=device).view(-1, 2)


def _mix64(x: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014): every bit of the result depends on every bit of x."""
    x = (x + 0x9E3779B97F4A7C15) & (1 << 64) - 1
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
    x = (x ^ x >> 27) * 0x94D049BB133111EB & (1 << 64) - 1
    return x ^ x >> 31


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def _hash(x: torch.Tensor) -> torch.Tensor:
    """lowbias32 in place on int32: a bijection, every bit of whose result depends on every bit of x."""
    x ^= (x >> 16).bitwise_and_(0xFFFF)  # the shift of signed integers copies the sign, which the mask removes
    x *= SPREAD_1
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x *= SPREAD_2
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    return x


def token_words(vocabulary: int, device: torch.device) -> torch.Tensor:
    """A 32-bit word for each token id (V), the same for all streams."""
    return _hash(torch.arange(1, vocabulary + 1, dtype=torch.int32, device=device))


def exponentials(words_V: torch.Tensor, key_B2: torch.Tensor, place_B: torch.Tensor) -> torch.Tensor:
    """Standard exponential numbers (B, V), float32 above 0, of streams `key_B2` at the positions `place_B`."""
    first_B = _hash(key_B2[:, 0] + place_B.to(torch.int32) * GOLDEN)
    x = words_V[None, :] ^ first_B[:, None]
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    x *= SPREAD_1
    x ^= (first_B * SPREAD_2 ^ key_B2[:, 1])[:, None]
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x *= SPREAD_2
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    uniform = x.bitwise_and_(0x7FFFFFFF).to(torch.float32).add_(0.5).mul_(2.0**-31).clamp_(max=LARGEST)
    return uniform.neg_().log1p_().neg_()
