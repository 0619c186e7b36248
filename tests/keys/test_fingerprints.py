"""Every bit of a key decides its fingerprint, and both forms agree on it."""

from __future__ import annotations

import itertools
import random
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.keys import fingerprint, fingerprints, fingerprints48
from moonpool.keys.fingerprints import FINAL_MULTIPLIER, MULTIPLIERS, XXH3_SEED

# docs/keys.md lists the same. Another implementation has to give these; a change of one is a new table layout version.
VECTORS = [
    (bytes(48), 0x0000000000000000),
    (bytes(range(48)), 0xBC5AC4232AD2F76F),
    (b"\xff" * 48, 0x91700CDD1C805CC7),
    (b"", 0x9F77B0D99678A744),
    (b"hello", 0x046CCE627FA37413),
    (bytes(256), 0xE5E2C41F4C1DAEE0),
]

paired_keys = st.binary(min_size=48, max_size=48)


@pytest.mark.parametrize(("key", "expected"), VECTORS)
def test_test_vectors(key: bytes, expected: int) -> None:
    assert fingerprint(key) == expected
    assert fingerprints([key] * 10).tolist() == [expected] * 10


def test_constants_are_odd_and_distinct() -> None:
    constants = [*MULTIPLIERS, FINAL_MULTIPLIER, XXH3_SEED]
    assert all(constant % 2 for constant in constants)
    assert len(set(constants)) == 14


@given(st.lists(paired_keys, max_size=50))
def test_the_vectorised_form_gives_what_the_scalar_form_gives(keys: list[bytes]) -> None:
    expected = [fingerprint(key) for key in keys]
    assert fingerprints(keys).tolist() == expected
    assert fingerprints48(b"".join(keys), len(keys)).tolist() == expected


@given(st.lists(st.binary(min_size=1, max_size=256), max_size=30))
def test_keys_of_mixed_lengths_give_what_they_give_alone(keys: list[bytes]) -> None:
    found = fingerprints(keys)
    assert found.dtype == np.uint64
    assert found.tolist() == [fingerprint(key) for key in keys]


def test_lengths_that_only_add_up_to_48_each_are_not_taken_for_paired_keys() -> None:
    keys = [b"a" * 47, b"b" * 49] * 10
    assert fingerprints(keys).tolist() == [fingerprint(key) for key in keys]


def test_joined_keys_of_the_wrong_length_are_refused() -> None:
    with pytest.raises(ValueError, match="2 keys of 48 bytes"):
        fingerprints48(bytes(95), 2)


def flipped(key: bytes, *bits: int) -> bytes:
    number = int.from_bytes(key, "little")
    for bit in bits:
        number ^= 1 << bit
    return number.to_bytes(48, "little")


def test_each_bit_of_the_key_changes_about_half_of_the_fingerprint() -> None:
    """Fails if a word is left out, or mixed so weakly that it moves only a few bits."""
    random_source = random.Random(2)
    keys = [random_source.randbytes(48) for _ in range(300)]
    plain = fingerprints(keys)
    for bit in range(384):
        changed = plain ^ fingerprints([flipped(key, bit) for key in keys])
        bits_changed = np.unpackbits(changed.view(np.uint8)).mean() * 64
        assert 24 < bits_changed < 40, f"bit {bit} moves {bits_changed:.1f} of 64 bits"


def test_no_two_bits_cancel_each_other() -> None:
    """Words of full width under odd multipliers fail this: their top bits cancel in pairs."""
    key = bytes(range(48))
    variants = [flipped(key, *pair) for pair in itertools.combinations(range(384), 2)]
    assert len(set(fingerprints(variants).tolist())) == len(variants)


@pytest.mark.parametrize("position", range(12))
def test_counters_in_any_word_give_fingerprints_of_their_own(position: int) -> None:
    keys = []
    for count in range(20_000):
        words = [7] * 12
        words[position] = count
        keys.append(struct.pack("<12I", *words))
    found = fingerprints(keys)
    assert len(np.unique(found)) == len(keys)
    # Spread, too: the table takes buckets from the low bits and tags from the high ones.
    for shift in (0, 24, 52):
        buckets = np.bincount((found >> np.uint64(shift)).astype(np.int64) & 1023, minlength=1024)
        assert buckets.max() < 60, "20,000 keys in 1,024 buckets: 20 expected, 60 is nine deviations away"


def test_counters_in_the_top_bytes_of_two_words_do_not_collide() -> None:
    keys = [bytes([a if i == 7 else b if i == 15 else 0 for i in range(48)]) for a in range(256) for b in range(256)]
    assert len(np.unique(fingerprints(keys))) == len(keys)


def test_the_same_block_in_another_key_space_has_another_fingerprint() -> None:
    blocks = [struct.pack("<Q24x", count) for count in range(1_000)]
    spaces = [struct.pack("<Q8x", count) for count in range(50)]
    keys = [space + block for space in spaces for block in blocks]
    assert len(np.unique(fingerprints(keys))) == len(keys)


def test_swapped_words_have_another_fingerprint() -> None:
    words = struct.unpack("<12I", random.Random(3).randbytes(48))
    swapped = []
    for a, b in itertools.combinations(range(12), 2):
        mixed = list(words)
        mixed[a], mixed[b] = mixed[b], mixed[a]
        swapped.append(struct.pack("<12I", *mixed))
    found = {fingerprint(key) for key in swapped} | {fingerprint(struct.pack("<12I", *words))}
    assert len(found) == len(swapped) + 1
