"""`python -m tests.fuzz`: run many programs, and print each that fails, shrunk."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from itertools import count as numbers
from itertools import islice

from .grammar import draw
from .runner import Runner, Tally, report_of
from .text import text_of


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--programs", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--having", default="", metavar="TEXT", help="skip programs without this text")
    parser.add_argument("--show", type=int, metavar="SEED", help="print one program")
    parser.add_argument("--as-drawn", action="store_true", help="do not shrink")
    options = parser.parse_args()
    if options.show is not None:
        print(text_of(draw(options.show)), end="")
        return 0
    runner, tally, known = Runner(), Tally(), Counter[tuple[str, ...]]()
    began = time.monotonic()
    try:
        drawn = (
            program for program in map(draw, numbers(options.seed)) if options.having in text_of(program)
        )
        for program, verdict in runner.verdicts(islice(drawn, options.programs)):
            tally.add(program, verdict)
            if tally.num_programs % 100 == 0:
                print(f"# {time.monotonic() - began:.0f} s: {tally}", flush=True)
            if not verdict.faults:
                continue
            fault = verdict.faults[0]
            confirmed = runner.fails_alike(program, verdict)
            print(
                f"# seed {program.seed}: {verdict.torch}; {fault.way}: {' '.join(fault.signature)}"
                f"{'' if confirmed else ' (once only)'}",
                flush=True,
            )
            if not confirmed:
                print(report_of(program, verdict), flush=True)
                continue
            known[verdict.torch, *fault.signature] += 1
            if known[verdict.torch, *fault.signature] <= 3:
                least, verdict = (program, verdict) if options.as_drawn else runner.shrunk(program, verdict)
                print(report_of(least, verdict), flush=True)
    finally:
        runner.close()
        print(f"{tally}\n{sum(known.values())} faulty, {time.monotonic() - began:.0f} s")
        for signature, count in known.most_common():
            print(f"  {count:5} torch's {' '.join(signature)}")
    return int(sum(known.values()) > 0)


if __name__ == "__main__":
    sys.exit(main())
