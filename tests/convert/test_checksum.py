"""The checksum against its definition, and what it notices."""

import numpy as np
import pytest

from hybrid.convert.checksum import BLOCK, JOIN, Checksum, checksum, file_checksum

MASK = (1 << 64) - 1


def splitmix64(i):
    z = i * 0x9E3779B97F4A7C15 & MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


def by_definition(content):
    state = 0
    for start in range(0, len(content), BLOCK):
        block = content[start : start + BLOCK].ljust(BLOCK, b"\0")
        words = [int.from_bytes(block[i : i + 8], "little") for i in range(0, BLOCK, 8)]
        total = sum((splitmix64(i) | 1) * word for i, word in enumerate(words, start=1))
        state = (state * JOIN + total) & MASK
    return f"{(state + len(content)) & MASK:016x}"


def content(size):
    return np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)


@pytest.mark.parametrize("size", [0, 1, 8, 1001, BLOCK, 2 * BLOCK + 13])
def test_definition(tmp_path, size):
    data = content(size)
    assert checksum(data) == checksum(data.tobytes()) == by_definition(data.tobytes())
    (tmp_path / "x").write_bytes(data.tobytes())
    assert file_checksum(tmp_path / "x") == checksum(data)


def test_parts_of_any_length():
    data, rng = content(3 * BLOCK + 5), np.random.default_rng(0)
    for _ in range(20):
        cuts = np.sort(rng.integers(0, data.size, 6))
        result = Checksum()
        for part in np.split(data, cuts):
            result.update(part)
        assert result.hexdigest() == checksum(data)


def test_what_it_notices():
    data = content(2 * BLOCK + 100)
    changed = [data[:-1], np.append(data, np.uint8(0)), np.concatenate([data[BLOCK:], data[:BLOCK]])]
    for place in (0, 7, BLOCK, data.size - 1):
        flipped = data.copy()
        flipped[place] ^= 128
        changed.append(flipped)
    swapped = data.copy()
    swapped[:8], swapped[8:16] = data[8:16], data[:8]
    changed.append(swapped)
    digests = {checksum(other) for other in changed}
    assert len(digests) == len(changed) and checksum(data) not in digests
