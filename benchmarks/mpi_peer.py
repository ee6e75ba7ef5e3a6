"""The program of one rank of a measured MPI. It is started by `mpiexec -n N python mpi_peer.py SOCKET`.

It must run under any Python that has mpi4py and numpy, so it imports no module of Syncline. Between its turns it sleeps
in `recv`, so that the other competitors have the machine to themselves. It ends when the socket is closed.

When it has connected to the socket, it sends the number of ranks in its MPI world. It then answers requests. Each
request is a pair:

- ("prepare", N) allocates a buffer of N elements, and checks the result of one reduction. The reply is True if the
  result is right.
- ("sum", K) or ("mean", K) performs K reductions. The reply is their total time in seconds.
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
    """Connect to the socket at `path`, and answer the requests that arrive there until it is closed."""
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
