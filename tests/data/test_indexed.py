"""Megatron's token file format: bytes against its published description, round trips, faults."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid.data.indexed import IndexedDataset, IndexedWriter, bin_path, dtype_for_vocab, exists, idx_path, merge

UINT16, INT32 = np.dtype(np.uint16), np.dtype(np.int32)


def write(prefix: Path, documents: list[list[list[int]]], dtype: np.dtype = INT32) -> None:
    """Documents, each a list of sequences."""
    with IndexedWriter(prefix, dtype) as writer:
        for document in documents:
            for sequence in document:
                writer.add(sequence)
            writer.end_document()
        writer.finish()


def test_bytes_are_the_published_format(tmp_path: Path) -> None:
    write(tmp_path / "c", [[[1, 2, 65_535]], [[]], [[4], [5]]], UINT16)
    assert bin_path(tmp_path / "c").read_bytes() == struct.pack("<5H", 1, 2, 65_535, 4, 5)
    expected = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 4, 4)
    expected += struct.pack("<4i", 3, 0, 1, 1) + struct.pack("<4q", 0, 6, 6, 8) + struct.pack("<4q", 0, 1, 2, 4)
    assert idx_path(tmp_path / "c").read_bytes() == expected


@pytest.mark.parametrize(("dtype", "code"), [(np.uint8, 1), (np.int8, 2), (np.int16, 3), (np.int32, 4), (np.int64, 5)])
def test_dtype_codes_are_megatrons(tmp_path: Path, dtype: type[np.integer], code: int) -> None:
    write(tmp_path / "c", [[[7, 8]]], np.dtype(dtype))
    assert idx_path(tmp_path / "c").read_bytes()[17] == code
    assert IndexedDataset(tmp_path / "c").read(0).tolist() == [7, 8]


@settings(max_examples=40, deadline=None)
@given(
    documents=st.lists(st.lists(st.lists(st.integers(0, 200_000), max_size=5), max_size=3), max_size=8),
    cut=st.integers(0, 8),
)
def test_round_trip_and_merge(
    documents: list[list[list[int]]], cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("corpus")
    write(folder / "whole", documents)
    write(folder / "a", documents[:cut])
    write(folder / "b", documents[cut:])
    merge([folder / "a", folder / "b"], folder / "merged")
    for suffix in (".bin", ".idx"):
        assert (folder / f"merged{suffix}").read_bytes() == (folder / f"whole{suffix}").read_bytes()
    dataset = IndexedDataset(folder / "whole")
    flat = [[token for sequence in document for token in sequence] for document in documents]
    assert [dataset.read(i).tolist() for i in range(len(dataset))] == flat
    assert dataset.lengths.tolist() == [len(tokens) for tokens in flat]
    assert dataset.num_tokens == sum(map(len, flat))


def test_a_document_is_read_in_part(tmp_path: Path) -> None:
    write(tmp_path / "c", [[[9]], [[1, 2], [3, 4, 5]]])
    dataset = IndexedDataset(tmp_path / "c")
    assert dataset.read(1, 1, 3).tolist() == [2, 3, 4]
    assert dataset.read(1, 3).tolist() == [4, 5]


@pytest.mark.parametrize(("vocab", "dtype"), [(2048, UINT16), (65_535, UINT16), (65_536, INT32), (128_256, INT32)])
def test_dtype_follows_the_vocabulary(vocab: int, dtype: np.dtype) -> None:
    assert dtype_for_vocab(vocab) == dtype


def test_an_id_above_65535_needs_int32(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "c", UINT16) as writer, pytest.raises(ValueError, match="document 0 .*uint16"):
        writer.add([1, 65_536])
    with IndexedWriter(tmp_path / "c", UINT16) as writer, pytest.raises(ValueError, match="uint16"):
        writer.add(np.array([70_000], dtype=np.int32))
    write(tmp_path / "wide", [[[65_536, 128_255]]])
    assert IndexedDataset(tmp_path / "wide").read(0).tolist() == [65_536, 128_255]


def test_nothing_is_left_of_an_unfinished_file(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), IndexedWriter(tmp_path / "c", INT32) as writer:
        writer.add([1])
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    assert not exists(tmp_path / "c")


def test_faulty_files_are_named(tmp_path: Path) -> None:
    prefix = tmp_path / "c"
    with pytest.raises(ValueError, match="c.bin does not exist"):
        IndexedDataset(prefix)
    write(prefix, [[[1, 2, 3]], [[4]]])
    index, tokens = idx_path(prefix).read_bytes(), bin_path(prefix).read_bytes()
    faults = [
        (index[:20], tokens, "c.idx is truncated"),
        (index[:-8], tokens, "c.idx is truncated"),
        (b"X" + index[1:], tokens, "c.idx is no Megatron index"),
        (index, tokens[:-4], "c.bin has 12 bytes, but its index covers 16"),
        (index, tokens + b"\0", "c.bin has 17 bytes"),
        (index[:17] + b"\x06" + index[18:], tokens, "dtype code 6"),
    ]
    for bad_index, bad_tokens, message in faults:
        idx_path(prefix).write_bytes(bad_index)
        bin_path(prefix).write_bytes(bad_tokens)
        with pytest.raises(ValueError, match=message):
            IndexedDataset(prefix)
