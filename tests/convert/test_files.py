"""Directories that appear whole or not at all: full disks, kills, and what was there before."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from convert.cases import assert_same, make_source, read_folder

from hybrid.config.errors import ConfigError
from hybrid.convert import common
from hybrid.convert.common import Job
from hybrid.convert.files import staged
from hybrid.convert.hf import write_hf
from hybrid.convert.sharded import plan_layout, write_sharded
from hybrid.convert.sources import open_checkpoint


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def write(kind, source, **job):
    checkpoint = open_checkpoint(source)
    if kind == "hf":
        return write_hf(checkpoint, Job(**job))
    return write_sharded(checkpoint, plan_layout(checkpoint.config(), 2, 2), Job(**job))


KINDS = pytest.mark.parametrize("kind", ["hf", "sharded"])


@KINDS
@pytest.mark.parametrize("workers", [1, 2])
def test_the_disk_fills_up(tmp_path, monkeypatch, kind, workers):
    source = make_source(tmp_path / "source", "llama2")
    real, calls = os.pwrite, []

    def pwrite(fd, data, position):
        calls.append(position)
        if len(calls) > 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data, position)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(ConfigError, match=r"the disk is full.*nothing was left behind"):
        write(kind, source, output=tmp_path / "out", workers=workers)
    assert names(tmp_path) == ["source"]


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (30000, 30000))
from hybrid.convert.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_file_that_may_not_grow(tmp_path):
    source = make_source(tmp_path / "source", "llama2")
    command = [sys.executable, "-c", LIMITED, "to-hf", "--hf", source, "--output", tmp_path / "out"]
    done = subprocess.run(command, text=True, capture_output=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 2 and "the disk is full" in done.stderr and "Traceback" not in done.stderr
    assert names(tmp_path) == ["source"]


def test_a_disk_that_is_too_small(tmp_path):
    with pytest.raises(ConfigError, match=r"1,000,000,000,000,000 bytes are to be written, the disk has"):
        with staged(tmp_path / "out", overwrite=False, size=10**15):
            pytest.fail("it must not start")
    assert not names(tmp_path)


@KINDS
def test_a_shard_is_damaged_halfway(tmp_path, kind):
    source = make_source(tmp_path / "source", "llama2", shards=3)
    checkpoint = open_checkpoint(source)
    shard = sorted(source.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-4000])  # after its header was read
    with pytest.raises(ConfigError, match=rf"{shard}.*\n.*it ended at byte"):
        write_hf(checkpoint, Job(output=tmp_path / "out"))
    assert names(tmp_path) == ["source"]
    with pytest.raises(ConfigError, match="truncated: its header describes"):
        write(kind, source, output=tmp_path / "out")
    assert names(tmp_path) == ["source"]


KILLED = """
import sys, time
from hybrid.convert import writer
put = writer.TensorFileWriter._put
def slow(self, data, position):
    print("writing", flush=True)
    time.sleep(0.02)
    put(self, data, position)
writer.TensorFileWriter._put = slow
from hybrid.convert.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("command", [["to-hf"], ["to-sharded", "--tp", "2"]], ids=["hf", "sharded"])
def test_a_kill_leaves_nothing_that_looks_complete(tmp_path, command):
    source = make_source(tmp_path / "source", "llama2")
    arguments = [sys.executable, "-c", KILLED, *command, "--hf", source, "--output", tmp_path / "out"]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])
    for _ in range(5):
        process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert names(tmp_path) == [".out.writing", "source"]
    left = tmp_path / ".out.writing"
    assert not (left / "config.json").exists() and not (left / "manifest.json").exists()
    with pytest.raises(ConfigError):
        open_checkpoint(left).config()
    write("hf", source, output=tmp_path / "out")  # what was left is in nobody's way
    assert names(tmp_path) == ["out", "source"]


def test_an_interrupt_ends_the_workers(tmp_path):
    source = make_source(tmp_path / "source", "llama2")

    def interrupt(written):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write("hf", source, output=tmp_path / "out", progress=interrupt)
    assert names(tmp_path) == ["source"]


@KINDS
def test_what_is_there_is_not_replaced_unless_asked(tmp_path, kind):
    source, output = make_source(tmp_path / "source", "llama2"), tmp_path / "out"
    output.mkdir()
    write(kind, source, output=output)  # an empty folder is nothing
    (output / "mine").touch()
    with pytest.raises(ConfigError, match="it is there already: choose another folder, or --overwrite"):
        write(kind, source, output=output)
    with pytest.raises(ConfigError, match="no files of a model are mine: move them away"):
        write(kind, source, output=output, overwrite=True)
    assert (output / "mine").exists()
    (output / "mine").unlink()
    (output / "README.md").touch()
    write(kind, source, output=output, overwrite=True)
    assert not (output / "README.md").exists() and names(tmp_path) == ["out", "source"]


def test_only_a_model_is_replaced(tmp_path):
    source = make_source(tmp_path / "models" / "source", "llama2")
    data, made, linked = tmp_path / "data", tmp_path / "made", tmp_path / "linked"
    write("sharded", source, output=made)
    (made / "sub").mkdir()
    (made / "training.json").touch()
    linked.symlink_to(made)
    (tmp_path / "file").touch()
    data.mkdir()
    (data / "config.json").write_text("{}")
    refusals = {
        made: "no files of a model are sub/, training.json: move",
        data: "no config.json with weights",
        linked: "it is a link",
        tmp_path / "file": "it is a file",
        source: "it is the source",
        source / "inner": "it lies in the source",
        tmp_path / "models": "it contains the source",
    }
    before = sorted(tmp_path.rglob("*"))
    for output, message in refusals.items():
        with pytest.raises(ConfigError, match=message):
            write("hf", source, output=output, overwrite=True)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_failure_keeps_what_was_there(tmp_path):
    source, output = make_source(tmp_path / "source", "llama2"), tmp_path / "out"
    write("hf", source, output=output)
    with pytest.raises(RuntimeError):
        with staged(output, overwrite=True) as staging:
            (staging / "half").touch()
            raise RuntimeError
    assert_same(read_folder(output), read_folder(source))
    assert names(tmp_path) == ["out", "source"]


@KINDS
def test_a_place_that_cannot_be_written_is_said_before_the_work(tmp_path, monkeypatch, kind):
    source = make_source(tmp_path / "source", "llama2")
    (tmp_path / "file").touch()
    monkeypatch.setattr(common, "checked_weights", lambda *a: pytest.fail("work has begun"))
    for output, reason in (
        (tmp_path / "file" / "out", f"{tmp_path / 'file'} is a file, where a folder is needed"),
        (Path("/proc/out"), "/proc cannot be written to"),
    ):
        for overwrite in (False, True):
            with pytest.raises(ConfigError, match=f"it cannot be written, for {reason}"):
                write(kind, source, output=output, overwrite=overwrite)


def test_everything_is_on_the_disk_before_the_manifest(tmp_path, monkeypatch):
    events = []
    real = Path.write_text
    monkeypatch.setattr(os, "fsync", lambda fd: events.append(os.readlink(f"/proc/self/fd/{fd}")))
    monkeypatch.setattr(Path, "write_text", lambda self, text: (events.append(f"write {self.name}"), real(self, text)))
    write("sharded", make_source(tmp_path / "source", "llama2"), output=tmp_path / "out")
    manifest = events.index("write manifest.json")
    synced = {Path(event).name for event in events[:manifest] if not event.startswith("write")}
    assert set(names(tmp_path / "out")) - {"manifest.json"} <= synced
    assert any(event.endswith("manifest.json") for event in events[manifest + 1 :])
    assert events[-1] == str(tmp_path)
