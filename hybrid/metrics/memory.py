"""The most memory a process has held."""

from __future__ import annotations

import resource
from pathlib import Path

import torch


def peak_memory_bytes(device: torch.device) -> int:
    """Bytes of tensors on a GPU at their peak; on the CPU the peak resident set, mapped files included."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    # Only where there is no /proc: Linux hands this figure down from parent to child.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
