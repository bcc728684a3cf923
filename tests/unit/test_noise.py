import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagespec.noise import gumbel, philox4x32

KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter, key, expected):
    words = philox4x32(np.array(counter, dtype=np.uint64)[:, None], key)
    assert tuple(int(word) for word in words[:, 0]) == expected


def slow_gumbel(seed: int, position: int, token_id: int) -> float:
    """Straight from the definition, with Python's own integers."""
    c = [position, token_id // 4, 0, 0]
    k = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & 0xFFFFFFFF, (p0 >> 32) ^ c[3] ^ k[1], p0 & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    u = (c[token_id % 4] + 0.5) / 2**32
    return float(-np.log(-np.log(np.float64(u))))


@given(
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**31 - 1),
    token_ids=st.lists(st.integers(0, 2**20), min_size=1, max_size=20),
)
def test_noise_equals_its_definition_token_by_token(seed, position, token_ids):
    found = gumbel(seed, position, np.array(token_ids, dtype=np.int64))
    assert found.tolist() == [slow_gumbel(seed, position, token_id) for token_id in token_ids]
    assert np.isfinite(found).all()
