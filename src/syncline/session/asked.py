"""The arguments of `sl.init`, checked."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch

from syncline import environment
from syncline.checks import checked_choice, checked_seconds

TRANSPORTS = ("auto", "c10d", "shm")


def checked_transport(transport: str = "auto") -> str:
    """Check the name of a transport, and return it. "auto" becomes that of the environment variable, if there is one.

    Raises:
        TypeError, ValueError: the name, or the value of the environment variable, is invalid.
    """
    transport = checked_choice("transport", transport, TRANSPORTS)
    if transport == "auto" and (of_user := environment.transport()) is not None:
        return checked_choice(f"the environment variable {environment.TRANSPORT}", of_user, TRANSPORTS)
    return transport


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The arguments of one call of `sl.init`."""

    transport: str = "auto"
    timeout_seconds: float = 300.0
    device: torch.device | None = None

    @staticmethod
    def of(transport: str, timeout: timedelta | float, device: torch.device | str | int | None) -> Asked:
        """Check the arguments of `sl.init` and return them as one object.

        Raises:
            TypeError, ValueError: an argument is invalid.
        """
        return Asked(
            transport=checked_transport(transport),
            timeout_seconds=checked_seconds("timeout", timeout),
            device=_checked_device(device),
        )

    def lines(self, device: torch.device) -> list[str]:
        """Return the arguments as lines of text. The lines must be equal on all ranks.

        Args:
            device: the device on which this rank computes. Only the type of the device must be equal on all ranks.
        """
        return [
            f"transport: {self.transport!r}",
            f"timeout: {self.timeout_seconds:g} s",
            f"device: {device.type!r}",
        ]

    def __str__(self) -> str:
        device = None if self.device is None else str(self.device)
        return f"transport={self.transport!r}, timeout={self.timeout_seconds:g} s, device={device!r}"


def _checked_device(value: object) -> torch.device | None:
    """Return `value`, the argument `device` of `sl.init`, as a torch.device. Return None if `value` is None.

    Raises:
        TypeError: `value` is not a torch.device, a name of a device or an index of a GPU.
        ValueError: this machine has no such device.
    """
    if value is None:
        return None
    present = torch.accelerator.current_accelerator(check_available=True)
    kinds = ["cpu"] if present is None else ["cpu", present.type]
    text = f"expected device to be a device of this machine ({' or '.join(map(repr, kinds))}), got {value!r}"
    if isinstance(value, bool) or not isinstance(value, str | int | torch.device):
        raise TypeError(text)
    try:
        device = torch.device(value)  # torch takes a number as the index of an accelerator
    except RuntimeError as error:
        raise ValueError(text) from error
    if device.type not in kinds:
        raise ValueError(text)
    if device.type != "cpu" and device.index is not None:
        num_devices = torch.accelerator.device_count()
        if device.index >= num_devices:
            raise ValueError(f"{text}: this process sees {num_devices} of type {device.type!r}")
    return device
