"""The shared noise: one Gumbel number for each (seed, position, token), the same in every process.

By the Gumbel-max theorem, argmax over v of (score_v + g_v) is an exact draw from softmax(score). Because the
noise is a pure function of the request's seed and of the position, the draw is too: no drafter, tree or batch
can change it.
"""

import numpy as np
import numpy.typing as npt

_MULTIPLIER_0 = np.uint64(0xD2511F53)
_MULTIPLIER_1 = np.uint64(0xCD9E8D57)
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85
_LOW_32 = np.uint64(0xFFFFFFFF)
_SHIFT_32 = np.uint64(32)
_NUM_ROUNDS = 10


def philox4x32(counter: npt.NDArray[np.uint64], key: tuple[int, int]) -> npt.NDArray[np.uint64]:
    """Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).

    Args:
        counter: Four 32-bit words for each block, in 64-bit cells. [4, num_blocks]
        key: Two 32-bit words.

    Returns:
        Four 32-bit words for each block, in 64-bit cells. [4, num_blocks]
    """
    c0, c1, c2, c3 = counter
    for i in range(_NUM_ROUNDS):
        k0 = np.uint64((key[0] + i * _WEYL_0) & 0xFFFFFFFF)
        k1 = np.uint64((key[1] + i * _WEYL_1) & 0xFFFFFFFF)
        product_0 = _MULTIPLIER_0 * c0
        product_1 = _MULTIPLIER_1 * c2
        c0, c1, c2, c3 = (
            (product_1 >> _SHIFT_32) ^ c1 ^ k0,
            product_1 & _LOW_32,
            (product_0 >> _SHIFT_32) ^ c3 ^ k1,
            product_0 & _LOW_32,
        )
    return np.stack([c0, c1, c2, c3])


def gumbel(seed: int, position: int, token_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Shared Gumbel noise of some tokens at one position.

    g = -log(-log(u)) with u = (x + 0.5) / 2^32, and x word v mod 4 of the Philox block whose key is the seed
    and whose counter is (position, v div 4, 0, 0).

    Args:
        seed: The request's seed, in [0, 2^64).
        position: Index of the token that is drawn; the first generated one has the prompt's length.
        token_ids: Tokens to draw noise for. [num_tokens]

    Returns:
        The noise, in float64: in float32 u would round to 1. [num_tokens]
    """
    blocks, slots = np.unique(token_ids >> 2, return_inverse=True)
    counter = np.zeros((4, len(blocks)), dtype=np.uint64)
    counter[0] = position
    counter[1] = blocks
    words = philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32))  # [4, num_blocks]
    x = words[token_ids & 3, slots]
    noise: npt.NDArray[np.float64] = -np.log(-np.log((x.astype(np.float64) + 0.5) / 2.0**32))
    return noise
