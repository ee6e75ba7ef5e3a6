"""What a rank computes with: facts that explain why another one gets other bits."""

from __future__ import annotations

import platform
import socket
from importlib import metadata

import torch

__all__ = ["facts"]


def facts() -> dict[str, str]:
    """By name: versions, hardware and settings of this process.

    Example:
        >>> facts()["torch"] == torch.__version__
        True
    """
    found = {
        "host": socket.gethostname(),
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "syncline": metadata.version("syncline"),
        "processor": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
        "threads": str(torch.get_num_threads()),
        "default dtype": str(torch.get_default_dtype()),
        "deterministic algorithms": _deterministic(),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
    }
    if torch.cuda.is_available():
        found["CUDA"] = f"{torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
        found["device"] = torch.cuda.get_device_name(torch.cuda.current_device())
        found["cuDNN"] = f"benchmark={torch.backends.cudnn.benchmark}, TF32={torch.backends.cudnn.allow_tf32}"
    return found


def _deterministic() -> str:
    if not torch.are_deterministic_algorithms_enabled():
        return "off"
    return "on, warn only" if torch.is_deterministic_algorithms_warn_only_enabled() else "on"
