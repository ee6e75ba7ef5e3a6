"""The program of one rank of an MPI that is measured: mpiexec -n N python mpi_peer.py SOCKET

It runs under any Python that has mpi4py and numpy, so it imports nothing of Syncline. Between its turns it sleeps in
`recv`, so that the other competitors have the machine for themselves. It ends when the socket is closed.

It first sends the number of ranks. Each request is a pair, and gets one reply:

- ("prepare", N) allocates a buffer of N elements. The reply is True if a test sum is right.
- ("sum" or "mean", K) makes K reductions. The reply is their time in seconds.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import time
from multiprocessing.connection import Client
from typing import Any


def main(path: str) -> None:
    """Answer the requests of the process that listens at the socket `path`."""
    mpi: Any = importlib.import_module("mpi4py.MPI")
    numpy: Any = importlib.import_module("numpy")
    ranks = mpi.COMM_WORLD
    factor = numpy.float32(1 / ranks.size)
    buffer = numpy.ones(1, dtype=numpy.float32)
    connection = Client(path)
    connection.send(ranks.size)
    with contextlib.suppress(EOFError):
        while True:
            request, number = connection.recv()
            if request == "prepare":
                buffer = numpy.ones(number, dtype=numpy.float32)
                ranks.Allreduce(mpi.IN_PLACE, buffer, op=mpi.SUM)
                connection.send(bool((buffer == ranks.size).all()))
                continue
            buffer[:] = 0
            ranks.Barrier()
            start = time.perf_counter()
            for _ in range(number):
                ranks.Allreduce(mpi.IN_PLACE, buffer, op=mpi.SUM)
                if request == "mean":
                    numpy.multiply(buffer, factor, out=buffer)
            ranks.Barrier()
            connection.send(time.perf_counter() - start)
    os._exit(0)  # other ranks may have ended already, and MPI_Finalize would wait for them


if __name__ == "__main__":
    main(sys.argv[1])
