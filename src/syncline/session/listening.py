"""Sockets that listen at one address only, for torch's stores.

Without such a socket, a store of torch listens on all network interfaces of the host.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import struct
import sys

LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915


NO_LOOPBACK = (
    "this host, container or network namespace has no IPv4 loopback address (127.0.0.1), by which the processes of a "
    "host connect. Switch the loopback interface on, as root, by: ip link set lo up"
)
"""The cause and the remedy, for errors if `has_loopback` returns False."""


def has_loopback() -> bool:
    """Return whether this process can use 127.0.0.1. In a new network namespace, the loopback interface is down."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((LOOPBACK, 9))  # which only looks for a route, and sends nothing
    except OSError as error:
        return error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.ENETUNREACH)
    return True


def is_loopback(address: str) -> bool:
    """Return whether only processes of this host can connect to `address`.

    For a host name other than "localhost", the result is False, because another host may resolve the name differently.

    Examples:
        >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("10.0.0.7"), is_loopback("node1")
        (True, True, False, False)
    """
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def bound_socket(address: str, port: int) -> socket.socket:
    """Return a TCP socket that is bound to one address of this host. A store can listen on this socket.

    Args:
        address: a host name or an IP address.
        port: the port. Pass 0 to use any free port.

    Raises:
        OSError: this host does not have the address, or the port is in use.
    """
    found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    family, kind, protocol, _, where = next((row for row in found if row[0] == socket.AF_INET), found[0])
    bound = socket.socket(family, kind, protocol)
    try:
        # As torch does. Otherwise connections of an ended job, which the kernel still remembers, would block the port.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(where)
    except BaseException:
        bound.close()
        raise
    return bound


def is_of_this_host(address: str) -> bool:
    """Return whether this host has an address, which is a host name or an IP address.

    Examples:
        >>> is_of_this_host("127.0.0.1"), is_of_this_host("192.0.2.1")
        (True, False)
    """
    try:
        family, kind, _, _, where = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(where)
    except OSError:
        return False
    return True


def interface_of(address: str) -> str | None:
    """Return the name of the network interface of this host that has the address `address`; None if none is found.

    Examples:
        >>> interface_of("127.0.0.1")
        'lo'
    """
    try:
        wanted = socket.getaddrinfo(address, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0]
        names = [name for _, name in socket.if_nameindex()]
    except OSError:
        return None
    if is_loopback(str(wanted)):
        return next((name for name in ("lo", "lo0") if name in names), None)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for name in names:
            if _address_of(name, any_socket) == wanted:
                return name
    return None


def _address_of(interface: str, any_socket: socket.socket) -> str | None:
    if sys.platform != "linux":  # the request has another number elsewhere, or does not exist
        return None
    import fcntl

    request = struct.pack("256s", interface.encode()[:15])
    try:
        answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)
    except OSError:  # the interface has no IPv4 address
        return None
    return socket.inet_ntoa(answer[20:24])
