"""Conversion in figures: time beside cp and a naive script, and the peak of anonymous memory.

python benchmarks/convert.py --layers 20 (2 GB of bf16 in 8 shards; each layer is 90 MB).
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

MODEL = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
}

CONVERT = """
import os, sys, time
if sys.argv.pop(1) == "cache":
    os.fsync = lambda fd: None  # cp does not wait for the disk either
from hybrid.convert.cli import main
print("ready", flush=True)
sys.stdin.readline()
start, cpu = time.perf_counter(), time.process_time()
status = main(sys.argv[1:])
print(time.perf_counter() - start, time.process_time() - cpu)
sys.exit(status)
"""

NAIVE = """
import os, sys, time, torch
from pathlib import Path
from safetensors.torch import load_file
print("ready", flush=True)
sys.stdin.readline()
start, cpu = time.perf_counter(), time.process_time()
source, output, disk = Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[1] == "disk"
tensors = {}
for path in sorted(source.glob("*.safetensors")):
    tensors.update(load_file(path))
output.mkdir()
for rank in range(2):
    def part(name, tensor):
        if tensor.dim() == 1:
            return tensor
        dim = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
        return tensor.chunk(2, dim)[rank].clone()
    with (output / f"{rank}.pt").open("wb") as file:
        torch.save({name: part(name, tensor) for name, tensor in tensors.items()}, file)
        if disk:
            os.fsync(file.fileno())
print(time.perf_counter() - start, time.process_time() - cpu)
"""


def make_checkpoint(folder: Path, layers: int, shards: int) -> tuple[int, int]:
    """Random bits as bf16; (bytes of all tensors, of the largest)."""
    import torch
    from safetensors.torch import save_file

    from hybrid.config.model import LlamaConfig
    from hybrid.convert.names import hf_shapes

    config = LlamaConfig.from_hf({**MODEL, "num_hidden_layers": layers})
    shapes = hf_shapes(config)
    folder.mkdir()
    weight_map, total, largest = {}, 0, 0
    for number in range(shards):
        names = list(shapes)[number * len(shapes) // shards : (number + 1) * len(shapes) // shards]
        tensors = {
            name: torch.randint(0, 1 << 14, shapes[name], dtype=torch.int16).view(torch.bfloat16) for name in names
        }
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(names, file))
        total += sum(tensor.nbytes for tensor in tensors.values())
        largest = max(largest, *(tensor.nbytes for tensor in tensors.values()))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config.to_hf("bf16")))
    return total, largest


def anonymous_bytes(pid: int) -> int:
    """RssAnon: mapped pages of files are the page cache's."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


Times = tuple[float, float]
"""Seconds by the clock, and of the processor."""


def settle(folder: Path) -> None:
    """Wait for what was written to the folder's disk before: it would slow down what comes next."""
    subprocess.run(["sync", "--file-system", str(folder)], check=True)


def run_child(program: str, *words: object) -> tuple[Times, int]:
    """Times, and peak of anonymous memory above what the imports took, of a program that waits when it is ready."""
    command = [sys.executable, "-c", program, *map(str, words)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert child.stdin is not None and child.stdout is not None
    if child.stdout.readline() != "ready\n":
        raise RuntimeError(f"{command[2:]} did not start")
    baseline = peak = anonymous_bytes(child.pid)
    child.stdin.write("\n")
    child.stdin.flush()
    while child.poll() is None:
        peak = max(peak, anonymous_bytes(child.pid))
        time.sleep(0.004)
    if child.returncode:
        raise RuntimeError(f"{command[2:]} ended with {child.returncode}")
    wall, cpu = child.stdout.read().split()[-2:]
    return (float(wall), float(cpu)), peak - baseline


def copy(source: Path, output: Path, disk: bool) -> Times:
    """Times of cp, and of waiting for the disk."""
    output.mkdir()
    files = sorted(map(str, source.glob("*.safetensors")))
    settle(output)
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(["cp", *files, str(output)], check=True)
    if disk:
        subprocess.run(["sync", *map(str, output.iterdir())], check=True)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def measure(layers: int, rounds: int, workers: int, disk: bool, folder: Path) -> dict[str, Any]:
    """Every figure, times interleaved; best and median of the rounds."""
    total, largest = make_checkpoint(folder / "hf", layers, shards=8)
    mode = "disk" if disk else "cache"
    times: dict[str, list[Times]] = {"cp": [], "naive": [], "to-sharded": [], "to-hf": []}
    peaks: dict[str, int] = {}
    for _ in range(rounds):
        for name in ("cp", "naive", "sharded", "back"):
            shutil.rmtree(folder / name, ignore_errors=True)
        times["cp"].append(copy(folder / "hf", folder / "cp", disk))
        settle(folder)
        seconds, peaks["naive"] = run_child(NAIVE, mode, folder / "hf", folder / "naive")
        times["naive"].append(seconds)
        options = ["--workers", workers, "--output"]
        for command, words in {
            "to-sharded": ["--hf", folder / "hf", "--tp", 2, *options, folder / "sharded"],
            "to-hf": ["--checkpoint", folder / "sharded", "--max_shard_size", "280MB", *options, folder / "back"],
        }.items():
            settle(folder)
            seconds, peak = run_child(CONVERT, mode, command, *words)
            times[command].append(seconds)
            peaks[command] = max(peak, peaks.get(command, 0))
    return {"bytes": total, "largest": largest, "seconds": times, "peaks": peaks}


def main() -> None:
    """Print a table, or the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--disk", action="store_true", help="wait for the disk, in every program")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--folder", help="where to write (default: the folder for temporary files)")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the folder is removed
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        figures = measure(args.layers, args.rounds, args.workers, args.disk, Path(folder))
    if args.json:
        print(json.dumps(figures))
        return
    gigabytes, seconds = figures["bytes"] / 1e9, figures["seconds"]
    where = "with the disk waited for" if args.disk else "page cache"
    print(f"{gigabytes:.2f} GB, the largest tensor {figures['largest'] / 1e6:.0f} MB, {where}")
    print(f"{'':12} {'best GB/s':>10} {'median':>8} {'of cp':>7} {'of naive':>9} {'CPU s':>7} {'RssAnon':>9}")
    medians = {name: statistics.median(wall for wall, _ in times) for name, times in seconds.items()}
    for name, times in seconds.items():
        speed = f"{gigabytes / min(wall for wall, _ in times):10.2f} {gigabytes / medians[name]:8.2f}"
        ratios = f"{medians['cp'] / medians[name]:7.0%} {medians['naive'] / medians[name]:8.1f}x"
        peak = f"{figures['peaks'][name] / 1e6:.0f} MB" if name in figures["peaks"] else ""
        print(f"{name:12} {speed} {ratios} {min(cpu for _, cpu in times):7.2f} {peak:>9}")


if __name__ == "__main__":
    main()
