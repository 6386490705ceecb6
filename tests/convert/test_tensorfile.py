"""The safetensors format against the safetensors library, and files that are not whole."""

import json
import struct

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from hybrid.convert.errors import CheckpointError
from hybrid.convert.store import raw_array
from hybrid.convert.tensorfile import DTYPES, make_header, read_header
from hybrid.convert.writer import TensorFileWriter

TENSORS = {
    "b": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
    "a": torch.arange(5, dtype=torch.float32),
    "empty": torch.zeros(0, 4),
    "scalar": torch.tensor(3, dtype=torch.int64),
}


def test_reads_what_the_library_writes(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file(TENSORS, path, metadata={"format": "pt"})
    header, content = read_header(path), path.read_bytes()
    assert header.metadata == {"format": "pt"} and header.entries.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        entry = header.entries[name]
        assert (entry.dtype, entry.shape) == (tensor.dtype, tuple(tensor.shape))
        assert content[entry.position : entry.position + entry.nbytes] == bytes(
            tensor.reshape(-1).view(torch.uint8).tolist()
        )


def test_the_library_reads_what_is_written(tmp_path):
    path = tmp_path / "x.safetensors"
    tensors = {name: tensor for name, tensor in TENSORS.items() if name != "scalar"}
    offsets = {name: (2, 3)[: tensor.dim()] for name, tensor in tensors.items()}
    writer = TensorFileWriter(path, [(n, t.dtype, tuple(t.shape)) for n, t in tensors.items()], offsets)
    for name in sorted(tensors):  # in any order
        writer.write(name, [raw_array(tensors[name][i : i + 1]) for i in range(len(tensors[name]))])
    record = writer.finish()
    found = load_file(path)
    assert found.keys() == tensors.keys() and all(torch.equal(found[name], tensors[name]) for name in found)
    assert record.size == path.stat().st_size and record.tensors.keys() == tensors.keys()
    assert read_header(path).offsets() == offsets
    with safe_open(path, framework="pt") as file:
        assert file.metadata()["format"] == "pt"


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_every_dtype_has_the_librarys_code(tmp_path, dtype):
    save_file({"x": torch.zeros(2, 2).to(dtype)}, tmp_path / "x.safetensors")
    assert read_header(tmp_path / "x.safetensors").entries["x"].dtype == dtype


def test_tensors_are_aligned():
    tensors = [("half", torch.bfloat16, (3,)), ("full", torch.float32, (3,)), ("half2", torch.float16, (1,))]
    header = make_header(tensors, {})
    assert all(entry.position % entry.dtype.itemsize == 0 for entry in header.entries.values())


def damaged(content):
    """What can be wrong with a file: (its bytes, a part of the message)."""
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])

    def changed(**entry):
        text = json.dumps({**header, "a": {**header["a"], **entry}}).encode()
        return struct.pack("<Q", len(text)) + text + content[8 + length :]

    return {
        "truncated": (content[:-3], "truncated: its header describes"),
        "longer": (content + b"xx", "too long"),
        "no header": (content[:4], "starts with 8"),
        "half a header": (content[:20], "truncated, or not a safetensors file"),
        "huge header": (struct.pack("<Q", 1 << 40) + content[8:], "truncated, or not a safetensors file"),
        "no JSON": (content[:8] + b"?" * length + content[8 + length :], "not that of a safetensors file"),
        "dtype": (changed(dtype="F5"), "dtype F5, known are F64"),
        "shape": (changed(shape=[7]), "cannot lie at bytes"),
        "offsets": (changed(data_offsets=[4, 24]), "cannot lie at bytes"),
        "no offsets": (changed(data_offsets=None), "not that of a safetensors file"),
    }


@pytest.mark.parametrize("fault", damaged(struct.pack("<Q", 20) + b'{"a": {"dtype": ""}}'))
def test_damaged_files(tmp_path, fault):
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.arange(5, dtype=torch.float32), "b": torch.zeros(2)}, path)
    content, message = damaged(path.read_bytes())[fault]
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_header(path)
    assert str(path) in str(caught.value)
