"""The reference implementation of the format reads our files, and we read its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybrid.data.indexed import IndexedDataset, IndexedWriter

DOCUMENTS = [[1, 2, 3], [], [60_000], [7, 8, 9, 10, 11], []]


@pytest.fixture(scope="module")
def megatron() -> Any:
    name = "megatron.core.datasets.indexed_dataset"
    return pytest.importorskip(name, reason="megatron-core is not installed (pip install --no-deps megatron-core)")


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_megatron_reads_our_files(megatron: Any, tmp_path: Path, dtype: type[np.integer]) -> None:
    with IndexedWriter(tmp_path / "ours", np.dtype(dtype)) as writer:
        for document in DOCUMENTS:
            writer.add(document)
            writer.end_document()
        writer.finish()
    dataset = megatron.IndexedDataset(str(tmp_path / "ours"))
    assert [dataset[i].tolist() for i in range(len(dataset))] == DOCUMENTS
    assert dataset[3].dtype == dtype
    assert dataset.document_indices.tolist() == list(range(len(DOCUMENTS) + 1))


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_we_read_megatrons_files_and_write_the_same(megatron: Any, tmp_path: Path, dtype: type[np.integer]) -> None:
    import torch

    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=dtype)
    with IndexedWriter(tmp_path / "ours", np.dtype(dtype)) as writer:
        for document in DOCUMENTS:
            builder.add_item(torch.tensor(document, dtype=torch.int64))
            builder.end_document()
            writer.add(document)
            writer.end_document()
        writer.finish()
    builder.finalize(str(tmp_path / "theirs.idx"))
    dataset = IndexedDataset(tmp_path / "theirs")
    assert [dataset.read(i).tolist() for i in range(len(dataset))] == DOCUMENTS
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"ours{suffix}").read_bytes() == (tmp_path / f"theirs{suffix}").read_bytes()
