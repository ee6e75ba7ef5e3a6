"""The output of the launcher: the lines of the ranks, each with its rank in front, and the launcher's own messages.

Torch's elastic launcher can copy the ranks' output by means of log files. These files grow as long as the job runs, the
launcher polls them ten times a second, and it may read an incomplete line. Here, each rank has a named pipe for stdout
and one for stderr, and one thread reads all pipes. Lines are complete, appear at once, and use no disk space.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import sys
import tempfile
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from string import Template

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from syncline.tools.launch.display import Display
from syncline.tools.launch.failures import Failure, first_failure, is_in, read_error_file

Ended = dict[int, tuple[int, int]]
"""The process number and the exit code of each rank that has ended, by local rank, in the order of detection."""

DEFAULT_PREFIX = "[rank ${rank}] "

_PROGRESS_SECONDS = 5.0
"""The minimum time between two printed lines of one progress bar."""

_READ_BYTES = 1 << 16

_MAX_LINE_BYTES = 1 << 20

_TAIL_LINES = 200


def say(text: str) -> None:
    """Print a message of the launcher on stderr."""
    with contextlib.suppress(OSError, ValueError):
        print(f"syncline run: {text}", file=sys.stderr, flush=True)


class Lines:
    r"""A splitter that divides a stream of bytes into complete lines.

    A progress bar draws its text again and again, after carriage returns. The splitter returns the newest text as a
    line every few seconds, and when the bar ends.

    Examples:
        >>> lines = Lines()
        >>> lines.feed(b"one\ntw", now=0.0), lines.feed(b"o\n", now=0.0), lines.finish()
        ([b'one'], [b'two'], [])
    """

    def __init__(self) -> None:
        self._rest = b""
        self._drawn_at = 0.0

    def feed(self, data: bytes, now: float) -> list[bytes]:
        """Add bytes to the stream, and return the lines that are now complete, without line ends.

        Args:
            data: the next bytes of the stream.
            now: the current time in seconds, from any clock that does not go back.
        """
        *whole, self._rest = (self._rest + data).split(b"\n")
        lines = [_as_drawn(line) for line in whole]
        if b"\r" in self._rest:
            newest = _as_drawn(self._rest)
            self._rest = b"\r" + newest
            if newest.strip() and now - self._drawn_at >= _PROGRESS_SECONDS:
                self._drawn_at = now
                lines.append(newest)
        elif len(self._rest) > _MAX_LINE_BYTES:
            lines.append(self._rest)
            self._rest = b""
        return lines

    def finish(self) -> list[bytes]:
        """End the stream. Return a list of its last line if this line lacks a newline, or else an empty list."""
        rest, self._rest = _as_drawn(self._rest), b""
        return [rest] if rest.strip() else []


def _as_drawn(line: bytes) -> bytes:
    """Split a line at its carriage returns, and return the last part that is not empty.

    This is roughly the text that a terminal shows.
    """
    return next((part for part in reversed(line.split(b"\r")) if part), b"")


@dataclass
class _Stream:
    """The stdout or the stderr of one rank."""

    pipe_fd: int
    to_fd: int
    is_shown: bool
    prefix: bytes
    copy_fd: int | None
    lines: Lines = field(default_factory=Lines)
    tail: deque[bytes] = field(default_factory=lambda: deque(maxlen=_TAIL_LINES))


class Forwarder:
    """A thread that copies the contents of the ranks' pipes to the stdout and stderr of this process.

    Args:
        display: where the lines appear.
    """

    def __init__(self, display: Display) -> None:
        self._writer = display.writer
        self._print = display.show
        self._streams: list[_Stream] = []
        self._selector = selectors.DefaultSelector()
        self._stop_read_fd, self._stop_write_fd = os.pipe()
        self._selector.register(self._stop_read_fd, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="syncline-output", daemon=True)

    def add(
        self, pipe: Path, *, to_fd: int, prefix: str, copy: Path | None = None, is_shown: bool = True
    ) -> deque[bytes]:
        """Create a named pipe whose lines are copied to `to_fd`. Call this before `start`.

        Args:
            pipe: path of the new pipe.
            to_fd: the file descriptor of the target: 1 (stdout) or 2 (stderr).
            prefix: the text to print before each line.
            copy: a file to which the bytes of the pipe are also written, without the prefix. None means no file.
            is_shown: whether the lines are copied to `to_fd` at all.

        Returns:
            A deque with the last lines that were read from the pipe. The thread keeps it up to date.
        """
        os.mkfifo(pipe, 0o600)
        # The pipe is also opened for writing, so that it reports no end of file when a rank closes it.
        pipe_fd = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
        copy_fd = os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644) if copy else None
        stream = _Stream(pipe_fd, to_fd, is_shown, os.fsencode(prefix), copy_fd)
        self._streams.append(stream)
        self._selector.register(pipe_fd, selectors.EVENT_READ, stream)
        return stream.tail

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Copy what is left in the pipes, end the thread, and close the pipes. Call this after the ranks have ended."""
        os.write(self._stop_write_fd, b"x")
        self._thread.join()
        self._selector.close()
        for stream in self._streams:
            os.close(stream.pipe_fd)
            if stream.copy_fd is not None:
                os.close(stream.copy_fd)
        os.close(self._stop_read_fd)
        os.close(self._stop_write_fd)

    def _run(self) -> None:
        stopping = False
        while not stopping:
            for key, _ in self._selector.select():
                if key.data is None:
                    stopping = True
                else:
                    self._copy(key.data)
        for stream in self._streams:
            # A process that a rank left behind may write forever, so read no more than fits into a pipe.
            for _ in range(32):
                if not self._copy(stream):
                    break
            self._show(stream, stream.lines.finish())

    def _copy(self, stream: _Stream) -> bool:
        try:
            data = os.read(stream.pipe_fd, _READ_BYTES)
        except BlockingIOError:
            return False
        if stream.copy_fd is not None:
            self._writer.write(stream.copy_fd, data)
        self._show(stream, stream.lines.feed(data, time.monotonic()))
        return True

    def _show(self, stream: _Stream, lines: list[bytes]) -> None:
        stream.tail.extend(lines)
        if not lines or not stream.is_shown:
            return
        text = b"".join(stream.prefix + line + b"\n" for line in lines)
        try:
            self._print(stream.to_fd, text)
        except Exception as error:
            # If this thread ended, the ranks would block as soon as their pipes are full.
            self._print = self._writer.write
            note = f"syncline run: the display has failed ({error!r}); lines follow as they are\n"
            self._writer.write(2, note.encode())
            self._writer.write(stream.to_fd, text)


class RankLogs(LogsSpecs):
    """A specification for torch's launcher that sends the ranks' output through pipes to a `Forwarder`.

    If stdout or stderr is a terminal, no logs are kept and nothing else is drawn there, rank 0 writes to this terminal
    directly. Progress bars and colours of rank 0 then work as without a launcher.

    Args:
        scratch: a private folder for pipes and error files. The caller removes it.
        keep_in: a folder in which to keep log files of the output. None means that no logs are kept.
        prefix: the template of the text before each line, with torch's macros (rank, local_rank, role_name, hostname).
        display: where the lines appear.
    """

    def __init__(self, *, scratch: Path, keep_in: Path | None, prefix: str, display: Display) -> None:
        super().__init__(log_dir=str(keep_in or scratch))
        self.kept: Path | None = None
        """The folder with the logs of this job. It is None if no logs are kept or no rank was started."""
        self._scratch = scratch
        self._keep_in = keep_in
        self._prefix = Template(prefix)
        self._display = display
        self._forwarder: Forwarder | None = None
        self._num_attempts = 0
        self._stderr_tails: dict[int, deque[bytes]] = {}
        self._error_files: dict[int, str] = {}
        self._ranks: dict[int, int] = {}
        self._ended: Ended = {}

    @property
    def root_log_dir(self) -> str:
        return str(self._keep_in or self._scratch)

    def stderr_tail(self, local_rank: int) -> list[str]:
        """Return the last lines that a rank of the latest attempt wrote to stderr.

        If the rank wrote to the terminal directly, the list does not contain these lines.
        """
        return [line.decode(errors="replace") for line in self._stderr_tails.get(local_rank, ())]

    def has_shown(self, failure: Failure) -> bool:
        """Return whether the user has seen the error of a rank, or an equal one of another rank.

        A rank that writes to the terminal directly, which keeps no lines here, counts as if it had printed the error.
        """
        is_direct = len(self._stderr_tails) < len(self._ranks)
        shown = (local_rank for local_rank in self._stderr_tails if self._shows(self._ranks[local_rank]))
        printed = (line for local_rank in shown for line in self.stderr_tail(local_rank))
        is_known = self._shows(failure.rank) or failure.record
        return is_direct or (bool(is_known) and is_in(failure, printed))

    def _shows(self, rank: int) -> bool:
        return rank == 0 or not self._display.only_rank_0

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Create the pipes for one attempt to run the ranks, and start to copy them.

        Torch's launcher calls this method just before it starts the ranks.

        Args:
            envs: the environment variables of each rank, by local rank.

        Returns:
            The paths to which the launcher redirects the ranks' output, and the paths of their error files.
        """
        self.stop()
        if self._num_attempts:
            self._say_restart(next(iter(envs.values())))
        self._ended = {}
        self._ranks = {local_rank: int(env["RANK"]) for local_rank, env in envs.items()}
        self._stderr_tails = {}
        self._display.start_ranks([*self._ranks.values()])
        forwarder = Forwarder(self._display)
        dest = LogsDest()
        kept = self._folder_to_keep(envs)
        folder = self._scratch / f"attempt_{self._num_attempts}"
        self._num_attempts += 1
        for local_rank, env in envs.items():
            rank_folder = folder / str(local_rank)
            rank_folder.mkdir(parents=True)
            rank_kept = kept / str(local_rank) if kept else None
            if rank_kept:
                rank_kept.mkdir(parents=True)
            error_file = str((rank_kept or rank_folder) / "error.json")
            dest.error_files[local_rank] = env["TORCHELASTIC_ERROR_FILE"] = error_file
            prefix = self._prefix.safe_substitute(
                rank=env["RANK"],
                local_rank=local_rank,
                role_name=env.get("ROLE_NAME", ""),
                hostname=socket.gethostname(),
            )
            to_terminal = env["RANK"] == "0" and not rank_kept and not self._display.owns_terminal
            for name, fd, places in (("stdout", 1, dest.stdouts), ("stderr", 2, dest.stderrs)):
                if to_terminal and os.isatty(fd):
                    places[local_rank] = ""  # for torch, "" means inherit
                    continue
                pipe, copy = rank_folder / name, rank_kept / f"{name}.log" if rank_kept else None
                is_shown = self._shows(int(env["RANK"]))
                tail = forwarder.add(pipe, to_fd=fd, prefix=prefix, copy=copy, is_shown=is_shown)
                places[local_rank] = str(pipe)
                if name == "stderr":
                    self._stderr_tails[local_rank] = tail
        self._error_files = dest.error_files
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()  # from now on, the forwarder writes to the descriptor directly
        forwarder.start()
        self._forwarder = forwarder
        return dest

    def note_ended(self, ended: Ended) -> None:
        """Record the ranks that had ended before the launcher ended the others.

        In each attempt, only the first call with a non-empty `ended` has an effect.
        """
        self._ended = self._ended or ended

    def stop(self) -> None:
        """Copy what is left in the pipes, and close the pipes. Call this after the ranks have ended."""
        if self._forwarder is not None:
            self._forwarder.stop()
            self._forwarder = None

    def _say_restart(self, env: dict[str, str]) -> None:
        failures = self._failures()
        why = "a rank has ended"
        if failures:
            first = first_failure(failures)
            why = f"rank {first.rank} {first.ending}"
            if first.record is not None:
                why += ": " + first.record.summary.partition("\n")[0]
        count, most = env["TORCHELASTIC_RESTART_COUNT"], env["TORCHELASTIC_MAX_RESTARTS"]
        say(f"starting all ranks again ({why}); restart {count} of at most {most}")

    def _failures(self) -> list[Failure]:
        """Return the failures of the latest attempt, in the order in which the launcher detected them.

        Ranks that the launcher itself ended are left out, unless they have recorded an exception.
        """
        found = []
        for local_rank in dict.fromkeys([*self._ended, *self._error_files]):
            record = read_error_file(self._error_files[local_rank])
            pid, code = self._ended.get(local_rank, (0, 1 if record is not None else 0))
            if code:
                found.append(Failure(rank=self._ranks[local_rank], pid=pid, return_code=code, record=record))
        return found

    def _folder_to_keep(self, envs: dict[int, dict[str, str]]) -> Path | None:
        if self._keep_in is None:
            return None
        if self.kept is None:
            self._keep_in.mkdir(parents=True, exist_ok=True)
            run_id = next(iter(envs.values())).get("TORCHELASTIC_RUN_ID") or "run"
            self.kept = Path(tempfile.mkdtemp(prefix=f"{run_id}_", dir=self._keep_in))
        return self.kept / f"attempt_{self._num_attempts}"


class TorchLogs(LogsSpecs):
    """A specification that lets torch's launcher handle the ranks' output. Options such as --tee require it.

    Args:
        inner: torch's own specification of the ranks' output.
    """

    def __init__(self, inner: LogsSpecs) -> None:
        super().__init__()
        self.kept = Path(inner.root_log_dir)
        self._inner = inner
        self._stderrs: dict[int, str] = {}
        self._are_all_shown = False
        if (reconfigure := getattr(sys.stdout, "reconfigure", None)) is not None:
            reconfigure(line_buffering=True)  # otherwise, lines would reach a pipe late, in blocks

    @property
    def root_log_dir(self) -> str:
        return self._inner.root_log_dir

    def stderr_tail(self, local_rank: int) -> list[str]:
        path = self._stderrs.get(local_rank)
        if not path or not os.path.isfile(path):
            return []
        with open(path, errors="replace") as file:
            return [line.rstrip("\n") for line in deque(file, maxlen=_TAIL_LINES)]

    def has_shown(self, failure: Failure) -> bool:
        """Return whether the user has seen the error of a rank: ranks print to files, unless --tee copies them."""
        return self._are_all_shown and is_in(
            failure, (x for rank in self._stderrs for x in self.stderr_tail(rank))
        )

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        dest = self._inner.reify(envs)
        self._stderrs = dest.stderrs
        self._are_all_shown = all(
            dest.tee_stderrs.get(rank) or not path for rank, path in self._stderrs.items()
        )
        return dest

    def note_ended(self, ended: Ended) -> None:
        """Do nothing. With its own log files, torch's launcher itself reports why it restarts the ranks."""

    def stop(self) -> None:
        """Do nothing. Torch's launcher has already stopped the threads that read its log files."""
