"""A real file system of a few KiB, which only the process that asks for it sees: writing to it fails as on a full disk.

For a process with one thread that is about to end, such as a forked one: it enters a namespace and never leaves it.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_MS_REMOUNT, _MS_REC, _MS_PRIVATE = 32, 16384, 1 << 18

_libc = ctypes.CDLL(None, use_errno=True)


def enter() -> None:
    """Own mounts from here on, whoever the user is. Raises ``OSError`` where the system does not allow it."""
    user, group = os.getuid(), os.getgid()
    _checked(_libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNS))
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    _mount(Path("/"), "", _MS_REC | _MS_PRIVATE, "")


def mount(folder: Path, kib: int) -> None:
    """An empty file system of that size over a folder. Raises ``OSError``."""
    _mount(folder, "tmpfs", 0, f"size={kib}k")


def resize(folder: Path, kib: int) -> None:
    """Give a file system of ours more room. Raises ``OSError``."""
    _mount(folder, "tmpfs", _MS_REMOUNT, f"size={kib}k")


def unmount(folder: Path) -> None:
    """Forget what it holds. Raises ``OSError``."""
    _checked(_libc.umount2(os.fsencode(folder), 2))


def _mount(folder: Path, kind: str, flags: int, options: str) -> None:
    arguments = (b"none", os.fsencode(folder), kind.encode(), ctypes.c_ulong(flags), options.encode())
    _checked(_libc.mount(*arguments))


def _checked(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
