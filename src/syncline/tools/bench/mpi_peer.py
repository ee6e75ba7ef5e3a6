"""One rank of an MPI that is measured: mpiexec -n N python mpi_peer.py SOCKET

It runs under any Python that has mpi4py and numpy, so it imports nothing else. Between its turns it sleeps in `recv`,
so that the other competitors have the machine for themselves. It ends when the socket is closed.

Requests are lines of JSON: {"numel": N} allocates the buffer, {"op": "sum" or "mean", "calls": K} measures. Each is
answered by one line.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
import time
from typing import Any


def main(path: str) -> None:
    """Serve requests from the process that listens at the socket `path`."""
    mpi: Any = importlib.import_module("mpi4py.MPI")
    numpy: Any = importlib.import_module("numpy")
    ranks = mpi.COMM_WORLD
    share = numpy.float32(1 / ranks.size)
    buffer = numpy.ones(1, dtype=numpy.float32)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    lines = connection.makefile("rw", encoding="utf-8")

    def answer(words: dict[str, object]) -> None:
        lines.write(json.dumps(words) + "\n")
        lines.flush()

    answer({"rank": ranks.rank, "size": ranks.size})
    for line in lines:
        request = json.loads(line)
        if "numel" in request:
            buffer = numpy.ones(request["numel"], dtype=numpy.float32)
            ranks.Allreduce(mpi.IN_PLACE, buffer, op=mpi.SUM)
            answer({"is_right": bool((buffer == ranks.size).all())})
            continue
        divides = request["op"] == "mean"
        buffer[:] = 0
        ranks.Barrier()
        start = time.perf_counter()
        for _ in range(request["calls"]):
            ranks.Allreduce(mpi.IN_PLACE, buffer, op=mpi.SUM)
            if divides:
                numpy.multiply(buffer, share, out=buffer)
        ranks.Barrier()
        answer({"seconds": time.perf_counter() - start})
    os._exit(0)  # other ranks may have ended already, and MPI_Finalize would wait for them


if __name__ == "__main__":
    main(sys.argv[1])
