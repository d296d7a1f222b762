"""fio as the yardstick: the same files, sizes, depth and file system as our own passes."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass

from py_kvcache.errors import KvCacheError

JOBS = 16  # where I/O is a copy by the CPU, as many processes as our depth


@dataclass(frozen=True)
class Fio:
    """An installed fio."""

    path: str
    version: str


@dataclass(frozen=True)
class FioPass:
    """One run. Files are named ``<job>.<number>`` in ``folder``, each read or written with one request.

    ``seconds`` is how long to go on reading the same files; a write makes each file once.
    """

    folder: str
    file_bytes: int
    files: int
    direct: bool
    engine: str  # io_uring or psync
    depth: int
    seconds: float = 0.0
    write: bool = False

    @property
    def jobs(self) -> int:
        """Processes; psync has no depth of its own."""
        return 1 if self.engine == "io_uring" else JOBS

    def arguments(self) -> list[str]:
        """fio's command line without the program."""
        found = [
            "--name=bench",
            # "rw" with nothing but reads: for a plain read fio's buffers are memory never touched, and the
            # page faults of the first requests cost it half of a short pass. Ours are touched too.
            *(["--rw=write"] if self.write else ["--rw=rw", "--rwmixread=100"]),
            f"--ioengine={self.engine}",
            f"--iodepth={self.depth if self.engine == 'io_uring' else 1}",
            f"--direct={int(self.direct)}",
            f"--bs={self.file_bytes}",
            f"--filesize={self.file_bytes}",
            f"--nrfiles={self.files // self.jobs}",
            f"--numjobs={self.jobs}",
            "--filename_format=$jobnum.$filenum",
            "--thread",
            "--group_reporting",
            "--output-format=json",
            # What would only cost fio time: our own passes do none of it either.
            "--fallocate=none",
            "--scramble_buffers=0",
            "--invalidate=0",
        ]
        if self.write:
            found.append("--create_on_open=1")
        else:
            found += ["--allow_file_create=0", "--time_based=1", f"--runtime={int(self.seconds * 1000)}ms"]
        return found

    @property
    def summary(self) -> str:
        """For the report."""
        how = f"iodepth {self.depth}" if self.engine == "io_uring" else f"{self.jobs} jobs"
        return f"{self.engine}, {how}, direct={int(self.direct)}"


def find_fio() -> Fio:
    """Raise KvCacheError with the remedy if there is none."""
    path = shutil.which("fio")
    if path is None:
        raise KvCacheError(
            "fio is not installed, and without it there is nothing to compare with: "
            "`apt-get install fio` (Debian, Ubuntu), `dnf install fio` (Fedora, RHEL)"
        )
    said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    return Fio(path, said.stdout.strip())


def run_fio(fio: Fio, what: FioPass) -> float:
    """Run one pass and return bytes per second. Raises KvCacheError with what fio said if it fails."""
    # In the folder and without naming it: fio splits names at colons.
    done = subprocess.run(
        [fio.path, *what.arguments()], cwd=what.folder, capture_output=True, text=True, check=False
    )
    try:
        # fio may print notes before the object.
        (job,) = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
        side = job["write" if what.write else "read"]
        error, rate = int(job["error"]), float(side["bw_bytes"])
    except (ValueError, KeyError, TypeError) as problem:
        raise KvCacheError(f"fio gave no result: {_last(done.stderr or done.stdout)}") from problem
    if done.returncode or error or rate <= 0:
        raise KvCacheError(f"fio failed ({what.summary}): {_last(done.stderr or done.stdout)}")
    return rate


def _last(text: str) -> str:
    return (text.strip().splitlines() or ["no output"])[-1]
