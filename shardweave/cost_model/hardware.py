"""What a rank runs on and with, as plain types: what measurements are kept under."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch
import torch.distributed as dist


def hardware() -> dict[str, Any]:
    """What one rank runs on and with: where any of it differs, its times are others."""
    found: dict[str, Any] = {"torch": torch.__version__}
    if dist.is_available() and dist.is_initialized():
        found["backend"] = dist.get_backend()
    if torch.cuda.is_available() and found.get("backend") != "gloo":
        found["device"] = torch.cuda.get_device_name(torch.cuda.current_device())
        found |= {"cuda": torch.version.cuda or torch.version.hip, "nccl": _nccl()}
    else:
        found |= {"device": _cpu(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    return found


def _nccl() -> list[int]:
    return list(torch.cuda.nccl.version())  # type: ignore[no-untyped-call]


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass  # no Linux
    return platform.processor() or platform.machine()
