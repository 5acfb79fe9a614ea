"""How much memory is free where a process computes."""

import os
import re
from contextlib import suppress
from pathlib import Path

import torch


def free_bytes(device: torch.device | None = None) -> int:
    """The bytes that are free on a device; on the CPU, by the kernel and by the control group.

    >>> free_bytes() > 0
    True
    """
    if device is not None and device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, TypeError):
        free = int(re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())[1]) * 1024  # type: ignore[index]
    with suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        allowed = int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
        free = min(free, allowed)
    return free
