"""Key <-> path: the only place that knows names on disk (footer.py knows the bytes). Standard library only.

    <root>/<model>_<digest>/config.json                              what the namespace was made from
    <root>/<model>_<digest>_r<part>/<hhh>/<hh>_g<group>/<hash>.bin   one storage block
    <same folder>/.<hash>.<hostname>.<pid>.<token>.tmp               one being written

The tree is that of vLLM's own file tier and of llm-d. A block file is the payload, zeros up to a multiple
of 4,096 and one footer of 4,096 bytes (footer.py), so that a reader of the plain layout finds its bytes.
Keys are vLLM's OffloadKey: block hash, then the KV-cache group as 4 bytes big endian.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import re
import secrets
import socket
import stat
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

ALIGN: Final = 4096
FOOTER_BYTES: Final = 4096
FILE_MODE: Final = 0o664
DIR_MODE: Final = 0o2775
TEMP_DEAD_AFTER_S: Final = 900.0  # by the file system's own clock
CONFIG_NAME: Final = "config.json"
LAYOUT_NAME: Final = "py-kvcache/1"  # value of "layout" in config.json: the namespace is one of ours
MAX_CONFIG_BYTES: Final = 1 << 20

BlockId = tuple[str, bytes]  # namespace and OffloadKey: the same on every part

_GROUP_BYTES: Final = 4
_MIN_HASH, _MAX_HASH = 8, 64
KEY_BYTES: Final = range(_MIN_HASH + _GROUP_BYTES, _MAX_HASH + _GROUP_BYTES + 1)
_NUMBER = "(?:0|[1-9][0-9]{0,9})"
_NAMESPACE = r"(?P<namespace>(?P<model>[A-Za-z0-9_][A-Za-z0-9._-]{0,79})_(?P<digest>[0-9a-f]{12,64}))"
_NAMESPACE_RE = re.compile(rf"{_NAMESPACE}(?:_r(?P<part>{_NUMBER}))?")
_BLOCK_RE = re.compile(
    rf"(?:.*/)?{_NAMESPACE}_r(?P<part>{_NUMBER})/(?P<top>[0-9a-f]{{3}})/(?P<leaf>[0-9a-f]{{2}})"
    rf"_g(?P<group>{_NUMBER})/(?P<hash>(?:[0-9a-f]{{2}}){{{_MIN_HASH},{_MAX_HASH}}})\.bin",
    re.DOTALL,
)
_TOP_RE = re.compile("[0-9a-f]{3}")
_LEAF_RE = re.compile(f"[0-9a-f]{{2}}_g{_NUMBER}")
_TEMP_RE = re.compile(
    rf"\.(?P<stem>config|[0-9a-f]{{16,128}})\.(?P<host>[A-Za-z0-9._-]{{1,63}})"
    rf"\.(?P<pid>{_NUMBER})\.(?P<token>[A-Za-z0-9_-]{{1,32}})\.tmp"
)
_TOKEN_RE = re.compile("[A-Za-z0-9_-]{1,32}")
_UNSAFE_RE = re.compile(r"[^A-Za-z0-9._-]")


# ---- sizes


def padded(n: int) -> int:
    """Round a byte count up to the alignment that direct I/O needs."""
    return -(-n // ALIGN) * ALIGN


def file_bytes(payload_bytes: int) -> int:
    """Size of the file, and of the staging slot, that holds a payload of this many bytes."""
    return padded(payload_bytes) + FOOTER_BYTES


# ---- names


class NamespaceDir(NamedTuple):
    """A folder directly under the root; `part` is None for the one that holds config.json."""

    namespace: str
    model: str
    digest: str
    part: int | None


class ParsedBlock(NamedTuple):
    """What a block's path says."""

    namespace: str
    part: int
    group: int
    hash: bytes

    @property
    def key(self) -> bytes:
        """The OffloadKey: hash and group."""
        return self.hash + self.group.to_bytes(_GROUP_BYTES, "big")


class TempName(NamedTuple):
    """What a temporary's name says about who made it; `stem` is the block's hex hash or ``config``."""

    stem: str
    hostname: str
    pid: int
    token: str


def namespace_name(model: str, digest: str) -> str:
    """Folder name of a namespace. Raises ValueError unless digest is 12 to 64 lower-case hex digits.

    Of a long model name (a path, mostly) the end is kept, which says more. Two models that become equal
    here are told apart by the digest.
    """
    safe = _UNSAFE_RE.sub("_", model)[-80:]
    if safe[:1] in ("", ".", "-"):
        # hidden folders are skipped by scans, and a leading dash is an option to rm
        safe = "_" + safe[1:]
    name = f"{safe}_{digest}"
    if not re.fullmatch("[0-9a-f]{12,64}", digest):
        raise ValueError(f"namespace digest must be 12 to 64 hex digits, not {digest!r}")
    return name


def parse_namespace_dir(name: str) -> NamespaceDir | None:
    """Take apart the name of a folder under the root; None for names that are not ours."""
    match = _NAMESPACE_RE.fullmatch(name)
    if match is None:
        return None
    part = match["part"]
    return NamespaceDir(
        match["namespace"], match["model"], match["digest"], None if part is None else int(part)
    )


def part_dir(root: str, namespace: str, part: int) -> str:
    """Folder of one shard's blocks. Raises ValueError for a namespace not made by namespace_name()."""
    _check_namespace(namespace)
    if not 0 <= part < 10**10:
        raise ValueError(f"namespace part must be a small number, not {part}")
    return f"{root}/{namespace}_r{part}"


def config_path(root: str, namespace: str) -> str:
    """Where the namespace says in words what it holds. Raises ValueError like part_dir()."""
    _check_namespace(namespace)
    return f"{root}/{namespace}/{CONFIG_NAME}"


def block_path(part_dir: str, key: bytes) -> str:
    """Final name of a block. Raises ValueError unless the key is a hash of 8 to 64 bytes and a group."""
    size = len(key) - _GROUP_BYTES
    if not _MIN_HASH <= size <= _MAX_HASH:
        raise ValueError(f"block hash must have {_MIN_HASH} to {_MAX_HASH} bytes, not {size}")
    name = key[:size].hex()
    group = int.from_bytes(key[size:], "big")
    return f"{part_dir}/{name[:3]}/{name[3:5]}_g{group}/{name}.bin"


def parse_block_path(path: str) -> ParsedBlock | None:
    """Inverse of block_path(), from the last four components; None for every other path. Never raises."""
    match = _BLOCK_RE.fullmatch(path)
    if match is None:
        return None
    name, group = match["hash"], int(match["group"])
    if not name.startswith(match["top"] + match["leaf"]) or group >= 1 << 8 * _GROUP_BYTES:
        return None
    return ParsedBlock(match["namespace"], int(match["part"]), group, bytes.fromhex(name))


def block_id_of(path: str) -> BlockId:
    """Namespace and key of a path that block_path() made; four times as fast as parse_block_path()."""
    folder, _top, leaf, name = path.rsplit("/", 3)
    part = folder.rpartition("/")[2]
    group = int(leaf.rpartition("_g")[2]).to_bytes(_GROUP_BYTES, "big")
    return part.rpartition("_r")[0], bytes.fromhex(name.removesuffix(".bin")) + group


def is_top_dir(name: str) -> bool:
    """True for the first level of folders of a part (``hhh``)."""
    return _TOP_RE.fullmatch(name) is not None


def is_leaf_dir(name: str) -> bool:
    """True for the second level of folders of a part (``hh_g<group>``)."""
    return _LEAF_RE.fullmatch(name) is not None


@functools.lru_cache(maxsize=16)
def safe_hostname(hostname: str) -> str:
    """The host name as temporaries carry it: compare with TempName.hostname only through this."""
    return _UNSAFE_RE.sub("_", hostname)[:63] or "_"


def temp_path(final: str, *, hostname: str, pid: int, token: str) -> str:
    """Name to write under before publishing as `final`, in the same folder since link() needs that.

    The caller makes the token unique within its process. Raises ValueError for a token or a final name
    that would not parse back.
    """
    folder, _, base = final.rpartition("/")
    name = f".{base.rpartition('.')[0]}.{safe_hostname(hostname)}.{pid}.{token}.tmp"
    if _TEMP_RE.fullmatch(name) is None or _TOKEN_RE.fullmatch(token) is None:
        raise ValueError(f"no temporary name can be made for {base!r} with pid {pid} and token {token!r}")
    return f"{folder}/{name}" if folder else name


def parse_temp_name(name: str) -> TempName | None:
    """Take apart a temporary's base name; None for names that are not ours."""
    match = _TEMP_RE.fullmatch(name)
    return match and TempName(match["stem"], match["host"], int(match["pid"]), match["token"])


def _check_namespace(namespace: str) -> None:
    parsed = parse_namespace_dir(namespace)
    if parsed is None or parsed.part is not None:
        raise ValueError(f"not a namespace name: {namespace!r}")


# ---- folders and config.json


def make_dir(path: str, mode: int = DIR_MODE) -> bool:
    """mkdir that is content with an existing folder; True if this call made it.

    mkdir() drops the set-group-id bit and obeys the umask: only chmod gives a folder that every
    replica's identity can write to. Done by the maker alone, since others may not own the folder.
    """
    try:
        os.mkdir(path, 0o777)
    except FileExistsError:
        return False
    # a file system without modes (some FUSE and SMB mounts) still serves one identity
    with contextlib.suppress(PermissionError, NotImplementedError):
        os.chmod(path, mode)
    return True


def write_config(
    root: str,
    namespace: str,
    fields: Mapping[str, Any],
    *,
    dir_mode: int = DIR_MODE,
    file_mode: int = FILE_MODE,
) -> dict[str, Any]:
    """Publish config.json unless there is one, and return what is on disk. Raises OSError, ValueError."""
    final = config_path(root, namespace)
    with contextlib.suppress(FileNotFoundError):
        return read_config(root, namespace)
    make_dir(os.path.dirname(final), dir_mode)
    temp = temp_path(final, hostname=socket.gethostname(), pid=os.getpid(), token=secrets.token_hex(6))
    text = json.dumps({"layout": LAYOUT_NAME, **fields}, indent=2, sort_keys=True) + "\n"
    fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
            with contextlib.suppress(PermissionError):
                os.fchmod(file.fileno(), file_mode)
        _publish_config(temp, final)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temp)
    return read_config(root, namespace)


def _publish_config(temp: str, final: str) -> None:
    try:
        os.link(temp, final)
    except FileExistsError:
        return
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
            raise
        # No hard links here. A rename may replace another's file in a race, which does no harm: all
        # writers of one digest write the same fields.
        os.rename(temp, final)


def read_config(root: str, namespace: str) -> dict[str, Any]:
    """The fields of config.json. Raises OSError, or ValueError when it is not a JSON object of sane size."""
    path = config_path(root, namespace)
    # O_NONBLOCK and O_NOFOLLOW: a FIFO or a link put in its place must neither hang nor lead elsewhere
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ValueError(f"{path} is not a regular file")
        raw = file.read(MAX_CONFIG_BYTES + 1)
    fields = json.loads(raw) if len(raw) <= MAX_CONFIG_BYTES else None
    if not isinstance(fields, dict):
        raise ValueError(f"{path} does not hold a JSON object")
    return fields
