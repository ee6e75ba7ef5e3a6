"""How much memory there is under the limits of control groups, read from made-up files."""

from __future__ import annotations

from pathlib import Path

import pytest

from syncline.transport.shared_memory import memory as room


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(room, "_PROCESS", tmp_path / "process")
    monkeypatch.setattr(room, "_MACHINE", tmp_path / "machine")
    monkeypatch.setattr(room, "_ROOT", tmp_path / "groups")
    (tmp_path / "machine").write_text("MemTotal: 9000 kB\nMemAvailable: 8000 kB\n")
    return tmp_path


def group(directory: Path, files: dict[str, str]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name).write_text(text)


def version_2(directory: Path, limit: str, used: int, parts: str = "anon 1\n") -> None:
    group(directory, {"memory.max": limit, "memory.current": str(used), "memory.stat": parts})


def version_1(directory: Path, limit: int, used: int, parts: str = "total_rss 1\n") -> None:
    files = {"memory.limit_in_bytes": str(limit), "memory.usage_in_bytes": str(used), "memory.stat": parts}
    group(directory, files)


def test_without_limits_it_is_what_the_machine_has(system: Path) -> None:
    assert room.available_bytes() == 8_192_000


def test_pages_of_files_do_not_count_as_used(system: Path) -> None:
    version_2(system / "groups", "1000000", 900_000, "anon 1\nactive_file 300000\ninactive_file 50000\n")
    assert room.available_bytes() == 450_000
    version_2(system / "groups", "max", 900_000)
    assert room.available_bytes() == 8_192_000


@pytest.mark.parametrize("where", ["groups", "groups/unified"])
def test_the_narrowest_group_on_the_way_to_the_root_counts(system: Path, where: str) -> None:
    (system / "process").write_text("4:cpu,cpuacct:/elsewhere\n0::/slurm/job 7/step:0\n")
    job = system / where / "slurm" / "job 7"
    version_2(job / "step:0", "max", 5)
    version_2(job, "700000", 100_000)
    version_2(job.parent, "5000000", 100_000)
    version_2(system / where / "elsewhere", "10", 1)
    assert room.available_bytes() == 600_000


def test_groups_of_the_first_version(system: Path) -> None:
    (system / "process").write_text("9:name=systemd:/\n4:memory,hugetlb:/docker/3f\n0::/\n")
    version_1(system / "groups/memory", 2**63 - 4096, 100_000)
    assert room.available_bytes() == 8_192_000
    version_1(system / "groups/memory/docker/3f", 900_000, 800_000, "total_inactive_file 1000\ntotal_rss 2\n")
    assert room.available_bytes() == 101_000


def test_a_container_sees_its_own_group_as_the_root(system: Path) -> None:
    (system / "process").write_text("4:memory:/docker/3f\n")  # named as the host names it
    version_1(system / "groups/memory", 900_000, 800_000)
    assert room.available_bytes() == 100_000


def test_a_system_that_does_not_say(system: Path) -> None:
    (system / "machine").unlink()
    assert room.available_bytes() is None
