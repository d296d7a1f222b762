"""doctor tries things for real, says what follows, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from py_kvcache import layout
from py_kvcache.errors import ConfigError, KvCacheError, RootError
from py_kvcache.tools import doctor, doctor_fs, doctor_host, doctor_settings, doctor_view
from py_kvcache.tools.checks import Check, Status
from py_kvcache.tools.mounts import Mount, find_mount, parse_mountinfo
from py_kvcache.worker.probe import DirectProbe, RingProbe

RING_GOOD = RingProbe(True, "")
RING_EPERM = RingProbe(False, "io_uring is forbidden here: allow it [EPERM]")


@pytest.fixture(autouse=True)
def no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ring's own trial has its own tests; here its outcome is given."""
    monkeypatch.setattr(doctor, "probe_ring", lambda directory: RING_GOOD)
    for name in list(os.environ):
        if name.startswith("PY_KVCACHE_"):
            monkeypatch.delenv(name)


def found(report: doctor.DoctorReport, name: str) -> Check:
    return next(c for c in report.checks if c.name == name)


def text_of(report: doctor.DoctorReport) -> str:
    console = Console(file=io.StringIO(), width=200)
    doctor_view.show(report, console)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_an_ordinary_folder_is_good_and_left_as_it_was(tmp_path: Path) -> None:
    report = doctor.examine(str(tmp_path))
    assert report.is_good
    assert (report.ring, report.mode, report.publish) == ("io_uring", "loads and stores", "link")
    assert os.listdir(tmp_path) == []
    told = report.to_json()
    assert told["schema"] == "py-kvcache/doctor/1"
    names = [c["name"] for c in told["checks"]]
    for name in ("root", "file system", "space", "inodes", "permissions", "link", "rename", "direct I/O",
                 "io_uring", "memlock", "cpu", "kernel"):  # fmt: skip
        assert name in names
    assert "Will be used: io_uring" in text_of(report)


def test_a_missing_root_whose_parent_exists_is_examined_and_not_left_behind(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    report = doctor.examine(str(root))
    assert report.is_good
    assert not root.exists()
    assert "will be made" in found(report, "root").text


def test_a_missing_parent_is_one_sentence_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(RootError, match="mkdir -p"):
        doctor.examine(str(tmp_path / "a" / "b"))


@pytest.mark.parametrize("name", ["file", "file/below", "dangling"])
def test_a_root_that_is_no_folder_is_one_sentence(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(RootError, match="not a folder"):
        doctor.examine(str(tmp_path / name))


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_a_root_that_cannot_be_written_serves_loads_only_and_is_a_problem_unless_mounted_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    real = os.mkdir

    def refuse(path: Any, *args: Any) -> None:
        if str(tmp_path) in str(path) and ".py-kvcache-doctor" in str(path):
            raise OSError(code, os.strerror(code))
        real(path, *args)

    monkeypatch.setattr(os, "mkdir", refuse)
    monkeypatch.setattr(doctor, "probe_direct", lambda *_: DirectProbe(False, "no", code))
    report = doctor.examine(str(tmp_path))
    # A volume mounted read-only is a choice, and fine for a replica that only reads.
    good = code == errno.EROFS
    assert (report.mode, report.is_good, report.io, report.publish) == ("loads only", good, "direct", "")
    assert found(report, "permissions").remedy
    assert "loads only" in text_of(report)


def test_without_io_uring_the_threads_are_used_and_that_is_slow_but_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "probe_ring", lambda directory: RING_EPERM)
    report = doctor.examine(str(tmp_path))
    assert (report.ring, report.is_good) == ("threads", True)
    assert any(text.startswith("io_uring:") for text in report.faster)
    assert "a pool of threads" in text_of(report)
    assert "To get the faster way" in text_of(report)


def test_without_direct_io_buffered_io_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "probe_direct", lambda *_: DirectProbe(False, "fails", errno.EINVAL))
    report = doctor.examine(str(tmp_path))
    assert (report.io, report.is_good, found(report, "direct I/O").status) == ("buffered", True, Status.SLOW)


@pytest.mark.parametrize(("key", "value"), [("RING", "io_uring"), ("DIRECT_IO", "on")])
def test_a_setting_that_cannot_be_had_here_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: str
) -> None:
    monkeypatch.setenv(f"PY_KVCACHE_{key}", value)
    monkeypatch.setattr(doctor, "probe_ring", lambda directory: RING_EPERM)
    monkeypatch.setattr(doctor, "probe_direct", lambda *_: DirectProbe(False, "fails", errno.EINVAL))
    report = doctor.examine(str(tmp_path))
    assert not report.is_good
    assert found(report, "settings").status is Status.PROBLEM


def test_a_malformed_setting_in_the_environment_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PY_KVCACHE_RING", "nonsense")
    report = doctor.examine(str(tmp_path))
    assert "ring" in found(report, "settings").text
    assert not report.is_good


def test_settings_of_the_environment_decide_what_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PY_KVCACHE_RING", "threads")
    monkeypatch.setenv("PY_KVCACHE_DIRECT_IO", "off")
    report = doctor.examine(str(tmp_path))
    assert (report.ring, report.io, report.is_good) == ("threads", "buffered", True)


def test_a_config_decides_what_is_used_and_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PY_KVCACHE_RING", "io_uring")
    extra = {"root": str(tmp_path), "ring": "threads", "direct_io": "off", "dir_mode": "0750", "fsync": True}
    report = doctor.examine("", extra)
    assert (report.root, report.ring, report.io, report.is_good) == (
        str(tmp_path),
        "threads",
        "buffered",
        True,
    )
    assert report.to_json()["settings"]["dir_mode"] == "0750"
    assert found(report, "settings").status is Status.OK
    assert "as set: ring=threads" in text_of(report)


@pytest.mark.parametrize(
    ("wrong", "part"),
    [
        ({"rign": "threads"}, "did you mean 'ring'?"),
        ({"ring": "nonsense"}, "'nonsense'"),
        ({"block_size": 64}, "use block_tokens"),
        ({"dir_mode": 2775}, "octal"),
        ({"store_stop_at": 0.5}, "store_resume_at"),
    ],
    ids=str,
)
def test_a_wrong_setting_of_a_config_is_a_problem_and_the_rest_is_examined(
    tmp_path: Path, wrong: dict[str, Any], part: str
) -> None:
    report = doctor.examine("", {"root": str(tmp_path), **wrong})
    assert part in found(report, "settings").text
    assert not report.is_good
    assert found(report, "root").status is Status.OK


def outer(**changes: Any) -> dict[str, Any]:
    value = {
        "kv_connector": "PyKvCacheConnector",
        "kv_connector_module_path": "py_kvcache.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"root": "/cache"},
        **changes,
    }
    return {key: inner for key, inner in value.items() if inner is not None}


@pytest.mark.parametrize(
    ("value", "text", "remedy"),
    [
        (outer(kv_role="kv_producer"), "kv_role is 'kv_producer'", "kv_both"),
        (outer(kv_role=None), "kv_role is missing", "kv_both"),
        (
            outer(kv_connector="PyKvCacheConector"),
            "kv_connector is 'PyKvCacheConector'",
            "PyKvCacheConnector",
        ),
        (outer(kv_connector_module_path="py_kvcache.conector"), "module_path is", "py_kvcache.connector"),
        (
            outer(kv_connector_extra_config=None, kv_connector_extra_conf={}),
            "unknown key 'kv_connector_extra_conf'",
            "did you mean 'kv_connector_extra_config'",
        ),
        (
            {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": []}},
            "none of the MultiConnector's",
            "add one",
        ),
    ],
)
def test_what_is_wrong_around_an_extra_config_is_a_problem_with_its_remedy(
    tmp_path: Path, value: dict[str, Any], text: str, remedy: str
) -> None:
    given = doctor_settings.parse_option(json.dumps(value))
    report = doctor.examine(str(tmp_path), *given)
    check = found(report, "settings")
    assert check.status is Status.PROBLEM
    assert text in check.text and remedy in check.remedy


def test_an_extra_config_is_found_within_a_transfer_config_and_a_multi_connectors() -> None:
    several = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [{"kv_connector": "NixlConnector"}, outer()]},
    }
    for value in (outer(), several, {"root": "/cache"}):
        assert doctor_settings.parse_option(json.dumps(value)) == ({"root": "/cache"}, None)


def test_a_file_where_json_belongs_is_told_with_the_way_to_give_it(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"not a file: --config \"\$\(cat "):
        doctor_settings.parse_option(str(tmp_path / "c.json"))


def test_a_relative_root_of_a_config_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    report = doctor.examine("", {"root": "."})
    assert "absolute path" in found(report, "settings").text
    assert not report.is_good


@pytest.mark.parametrize("config", [{}, {"root": ""}, {"root": 5}, {"rooot": "/cache"}], ids=str)
def test_a_config_that_gives_no_root_is_one_sentence(config: dict[str, Any]) -> None:
    with pytest.raises(KvCacheError, match="root"):
        doctor.examine("", config)


def test_another_root_than_the_configs_is_noted(tmp_path: Path) -> None:
    report = doctor.examine(str(tmp_path), {"root": "/somewhere/else"})
    assert report.root == str(tmp_path)
    assert report.is_good
    assert "/somewhere/else" in found(report, "settings").text


def test_a_config_that_nobody_can_check_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "py_kvcache.config", None)
    assert doctor.examine(str(tmp_path)).is_good
    report = doctor.examine("", {"root": str(tmp_path)})
    assert "pydantic is missing" in found(report, "settings").text
    assert not report.is_good


def test_a_volume_above_the_watermark_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PY_KVCACHE_STORE_STOP_AT", "0.0001")
    monkeypatch.setenv("PY_KVCACHE_STORE_RESUME_AT", "0.0001")
    report = doctor.examine(str(tmp_path))
    assert found(report, "space").status is Status.PROBLEM
    assert not report.is_good


def full_tmpfs(path: Path, options: str) -> None:
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", path], capture_output=True).returncode:
        pytest.skip("may not mount here")
    with open(path / "filler", "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


@pytest.mark.parametrize("options", ["size=64k", "size=64k,nr_inodes=2"])
def test_a_full_volume_is_said_to_be_full_and_gets_no_other_advice(tmp_path: Path, options: str) -> None:
    full_tmpfs(tmp_path, options)
    try:
        report = doctor.examine(str(tmp_path))
        assert os.listdir(tmp_path) == ["filler"]
    finally:
        subprocess.run(["umount", tmp_path], check=True)
    assert (report.ring, report.io, report.mode, report.is_good) == (
        "io_uring",
        "buffered",
        "loads only",
        False,
    )
    assert (report.publish, report.faster, report.is_full) == ("", [], True)
    assert any("the volume is full" in c.text for c in report.checks if c.status is Status.PROBLEM)
    assert "the volume is full, and a trial needs space" in text_of(report)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_volume_is_no_lack_of_links_or_io_uring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refuse)
    ring = RingProbe(False, f"io_uring failed its trial at write: full [{errno.errorcode[code]}]")
    monkeypatch.setattr(doctor, "probe_ring", lambda directory: ring)
    report = doctor.examine(str(tmp_path))
    assert "link" not in [c.name for c in report.checks]
    assert report.is_full
    assert found(report, "io_uring").status is Status.NOTE
    assert report.faster == []
    assert os.listdir(tmp_path) == []


def test_no_links_means_publication_by_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(errno.EPERM, "no links")

    monkeypatch.setattr(os, "link", refuse)
    report = doctor.examine(str(tmp_path))
    assert (report.publish, report.is_good) == ("rename", True)
    assert "EPERM" in found(report, "link").text
    assert os.listdir(tmp_path) == []


def test_a_rename_that_replaces_is_no_way_to_publish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(errno.EPERM, "no links")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(doctor_fs, "rename_noreplace", os.rename)
    report = doctor.examine(str(tmp_path))
    assert "replaced" in found(report, "rename").text
    assert not report.is_good


def test_a_file_system_that_keeps_no_times_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(errno.EPERM, "no")

    monkeypatch.setattr(os, "utime", refuse)
    check = doctor_fs.check_times(str(tmp_path))
    assert check.status is Status.NOTE
    assert "EPERM" in check.text


def test_the_scratch_folder_is_removed_when_a_trial_fails(tmp_path: Path) -> None:
    def fail_inside() -> None:
        with doctor_fs.scratch_folder(str(tmp_path)) as scratch:
            Path(scratch, "left").write_text("x")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert os.listdir(tmp_path) == []


def test_a_real_volume_in_memory_is_told_from_a_direct_one() -> None:
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no /dev/shm")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        report = doctor.examine(folder)
    assert found(report, "file system").data["type"] == "tmpfs"
    assert report.io == "buffered"
    assert report.is_good


@pytest.mark.parametrize("mode", ["rw", "ro"])
def test_a_real_overlay_read_only_or_not_is_examined(tmp_path: Path, mode: str) -> None:
    for name in ("lower", "upper", "work", "cache"):
        (tmp_path / name).mkdir()
    root = tmp_path / "cache"
    layers = f"lowerdir={tmp_path}/lower,upperdir={tmp_path}/upper,workdir={tmp_path}/work,{mode}"
    done = subprocess.run(["mount", "-t", "overlay", "overlay", "-o", layers, root], capture_output=True)
    if done.returncode:
        pytest.skip("may not mount here")
    try:
        report = doctor.examine(str(root))
    finally:
        subprocess.run(["umount", root], check=True)
    assert found(report, "file system").data["type"] == "overlay"
    if mode == "ro":
        assert not {"rw"} & set(found(report, "file system").data["options"])
        assert "read-only" in found(report, "permissions").text
    assert (report.mode, report.is_good) == {
        "rw": ("loads and stores", True),
        "ro": ("loads only", True),
    }[mode]


@pytest.mark.parametrize("folder", ["/proc", "/sys"])
def test_a_file_system_of_the_kernels_own_is_no_place_for_a_cache(folder: str) -> None:
    report = doctor.examine(folder)
    assert not report.is_good
    assert "no place for files" in found(report, "file system").remedy


def test_a_relative_root_is_told_as_vllm_needs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cache").mkdir()
    report = doctor.examine("cache")
    assert report.is_good
    assert f'"root": "{tmp_path}/cache"' in found(report, "root").remedy


def test_modes_are_octal_text_as_in_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PY_KVCACHE_DIR_MODE", "0750")
    assert doctor.examine(str(tmp_path)).to_json()["settings"]["dir_mode"] == "0750"


# ---- mounts

MOUNTINFO = r"""
22 1 253:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard
40 22 0:35 / /mnt rw - tmpfs tmpfs rw
41 40 0:40 / /mnt/kv\040cache rw,noatime shared:9 - nfs4 10.0.0.1:/kv vers=4.2,lookupcache=pos,nconnect=8
42 40 0:41 / /mnt/kv\040cache/over rw,relatime - nfs 10.0.0.2:/x rw,vers=3,soft
broken line
43 22 0:50 / /c rw - overlay overlay rw,lowerdir=/a:/b,upperdir=/u
44 22 0:51 / /c rw - ext4 /dev/vdb rw
"""


@pytest.mark.parametrize(
    ("path", "fstype"),
    [
        ("/", "ext4"),
        ("/mntx", "ext4"),
        ("/mnt", "tmpfs"),
        ("/mnt/kv cache", "nfs4"),
        ("/mnt/kv cache/a/b", "nfs4"),
        ("/mnt/kv cache/over/b", "nfs"),
        ("/c/x", "ext4"),  # mounted over the overlay
    ],
)
def test_the_deepest_and_last_mount_holds_a_path(path: str, fstype: str) -> None:
    mount = find_mount(path, parse_mountinfo(MOUNTINFO))
    assert mount is not None
    assert mount.fstype == fstype


def test_nfs_options_that_hide_new_blocks_are_advised_against() -> None:
    mounts = parse_mountinfo(MOUNTINFO)
    good, bad = (find_mount(p, mounts) for p in ("/mnt/kv cache", "/mnt/kv cache/over"))
    assert good is not None
    assert bad is not None
    assert doctor_fs.check_nfs(good).status is Status.OK
    assert good.option("nconnect") == "8"
    check = doctor_fs.check_nfs(bad)
    assert check.status is Status.SLOW
    assert "lookupcache=positive,noatime" in check.remedy
    assert [c.name for c in doctor_fs.check_mount(bad)] == ["file system", "nfs options"]


def test_a_containers_own_layer_is_said_to_be_lost_with_it() -> None:
    overlay = Mount("/", "overlay", "overlay", "0:1", ("rw", "lowerdir=/a"))
    (check,) = doctor_fs.check_mount(overlay)
    assert "mount a volume" in check.remedy
    assert "lowerdir" not in check.text


# ---- host


def test_seccomp_and_sysctl_are_told_apart() -> None:
    assert "Localhost seccomp profile" in doctor_host.check_ring(RING_EPERM, "0", seccomp=True).remedy
    assert "seccomp" not in doctor_host.check_ring(RING_EPERM, "2", seccomp=True).text
    assert "io_uring_disabled=0" in doctor_host.check_kernel("6.8.0", "2").remedy


def test_a_reason_is_cut_in_two_only_where_its_remedy_begins() -> None:
    whole = RingProbe(False, "could not be started ([Errno 13] no: '/bin/python')")
    assert (doctor_host.check_ring(whole, "0", seccomp=False).text, whole.reason) == (whole.reason,) * 2
    check = doctor_host.check_ring(RingProbe(False, "no ring (old kernel): upgrade"), "0", seccomp=False)
    assert (check.text, check.remedy) == ("no ring (old kernel)", "upgrade")


@pytest.mark.parametrize(
    ("machine", "flags", "ring", "status"),
    [
        ("x86_64", {"avx512f"}, RING_GOOD, Status.OK),
        ("x86_64", {"avx2"}, RING_GOOD, Status.OK),
        ("x86_64", {"avx2"}, RING_EPERM, Status.SLOW),
        ("aarch64", set(), RING_EPERM, Status.NOTE),
    ],
)
def test_the_cpu_matters_only_where_the_wheel_fails(
    machine: str, flags: set[str], ring: RingProbe, status: Status
) -> None:
    assert doctor_host.check_cpu(machine, frozenset(flags), ring).status is status


@pytest.mark.parametrize(
    ("release", "status"),
    [
        ("5.4.0-generic", Status.SLOW),
        ("5.10.262", Status.OK),
        ("6.18.44-fc-v857", Status.OK),
        ("odd", Status.SLOW),
    ],
)
def test_old_kernels_are_named(release: str, status: Status) -> None:
    assert doctor_host.check_kernel(release, "0").status is status


def test_a_small_memlock_matters_only_when_the_ring_failed_of_it() -> None:
    small = RingProbe(False, "the locked-memory limit is too small for a ring: raise it [ENOMEM]")
    assert doctor_host.check_memlock(65_536, small).status is Status.SLOW
    assert doctor_host.check_memlock(65_536, RING_GOOD).status is Status.OK
    assert "none" in doctor_host.check_memlock(resource.RLIM_INFINITY, RING_GOOD).text


def test_few_descriptors_are_noted() -> None:
    assert doctor_host.check_files(256, 4096).status is Status.NOTE
    assert doctor_host.check_files(resource.RLIM_INFINITY, resource.RLIM_INFINITY).status is Status.OK


def test_cpu_flags_are_those_of_the_first_processor() -> None:
    assert doctor_host.cpu_flags("processor: 0\nflags\t\t: fpu avx512f\nflags: x") == {"fpu", "avx512f"}
    assert doctor_host.cpu_flags("Features: asimd") == frozenset()


def test_the_alignment_tried_is_the_one_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def probe(directory: str, alignment: int) -> DirectProbe:
        tried.append(alignment)
        return DirectProbe(True, "", 0, True, "ext4")

    monkeypatch.setattr(doctor, "probe_direct", probe)
    report = doctor.examine(str(tmp_path))
    assert tried == [layout.ALIGN]
    assert report.io == "direct"


def test_a_root_that_is_not_there_is_a_note_since_its_volume_may_not_be_mounted(tmp_path: Path) -> None:
    missing = doctor._root_check(str(tmp_path / "missing"), str(tmp_path / "missing"), existed=False)
    assert missing.status is Status.NOTE
    assert "mount it first" in missing.remedy
    assert doctor._root_check(str(tmp_path), str(tmp_path), existed=True).status is Status.OK


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"memory_bytes": 10**9, "memory_tier": "none"}, "memory_bytes does nothing"),
        ({"memory_bytes": 10**15}, "more than this machine's memory"),
        ({"preload": "on"}, "preload does nothing"),
        ({"preload": "on", "preload_bytes": 10**9}, "preload and preload_bytes do nothing"),
        ({"memory_bytes": 10**9, "preload_bytes": 10**10}, "preload_bytes is more than memory_bytes"),
        ({"preload_bytes": 10**9}, "preload_bytes does nothing"),
        ({"gate": "static"}, "loads every hit"),
        ({"gate": "static", "thresholds": "/none/t.json"}, "/none/t.json"),
        ({"gate": "off", "store_policy": "break_even"}, "stores everything"),
        ({"io_workers": 64, "io_depth": 16}, "ever have something to do"),
        ({"memory_bytes": 10**9, "preload": "on", "gate": "adaptive", "store_policy": "break_even"}, None),
        ({"preload": "off"}, None),
    ],
)
def test_settings_that_do_nothing_are_noted(
    tmp_path: Path, config: dict[str, Any], words: str | None
) -> None:
    pytest.importorskip("pydantic")
    _, checks = doctor_settings.read(str(tmp_path), config)
    notes = [check.text for check in checks if check.status is Status.NOTE]
    assert len(notes) == (words is not None) and all(words in note for note in notes if words)
