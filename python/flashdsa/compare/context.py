"""The machine, build and command that all rows of a run share."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
from pathlib import Path
from typing import Optional

import torch

from .. import __version__, build_description


@dataclasses.dataclass(frozen=True)
class Context:
    """Fields of the same names in every record."""

    device: str
    clock: str
    driver: Optional[str]
    cuda: Optional[str]
    load: float
    build: str
    torch: str
    commit: str
    command: str


def describe_run(device: torch.device, threads: int, commit: str, command: str) -> Context:
    shared = {"load": os.getloadavg()[0], "build": f"{__version__} ({build_description()})",
              "torch": torch.__version__, "commit": commit, "command": command}
    if device.type == "cuda":
        driver, clock = _ask_driver(device)
        return Context(torch.cuda.get_device_name(device), clock, driver, torch.version.cuda,
                       **shared)
    name = _cpuinfo("model name") or "unknown CPU"
    clock = _cpuinfo("cpu MHz")
    return Context(f"{name}, {threads} threads", f"{clock} MHz" if clock else "unknown", None, None,
                   **shared)


def _cpuinfo(name: str) -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return ""
    found = re.search(rf"^{name}\s*:\s*(.*)$", text, re.MULTILINE)
    return found[1] if found else ""


def _ask_driver(device: torch.device) -> tuple[Optional[str], str]:
    """The driver's version, and the most that the SM clock may be."""
    identity = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    try:
        answer = subprocess.run(
            ["nvidia-smi", f"--id={identity}", "--query-gpu=driver_version,clocks.max.sm",
             "--format=csv,noheader,nounits"], check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None, "unknown"
    driver, megahertz = answer.strip().split(", ")
    return driver, f"up to {megahertz} MHz"
