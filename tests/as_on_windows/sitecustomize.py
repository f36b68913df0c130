"""On the path of a Python process, this lets posttrain's modules see the standard library that Windows has.

They find no `resource`, `fcntl`, … and no POSIX names in `os`, `signal`, `select` and `socket`; libraries keep those of
the machine. A process that is started from here is no different, except in a module that it runs as its main one.
"""

import builtins
import importlib
import select
import socket
import sys
from importlib.machinery import PathFinder, SourceFileLoader
from types import ModuleType

MODULES = {"crypt", "curses", "fcntl", "grp", "posix", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty"}
SIGNALS = {"SIGABRT", "SIGFPE", "SIGILL", "SIGINT", "SIGSEGV", "SIGTERM", "SIG_DFL", "SIG_IGN"}
# Python's documentation says "Availability: Unix" of each.
NAMES = {
    "os": """chown chroot fchdir fchmod fchown fork forkpty geteuid getegid getgid getgroups getloadavg getpgid getpgrp
        getpriority getresuid getsid getuid killpg lchown major mkfifo mknod nice openpty pathconf posix_spawn pread
        pwrite register_at_fork sched_getaffinity sched_setaffinity sched_yield sendfile setegid seteuid setgid
        setgroups setpgid setpriority setsid setuid statvfs sync sysconf tcgetpgrp ttyname uname wait wait3 wait4 waitid
        O_CLOEXEC O_DIRECTORY O_DSYNC O_NOCTTY O_NOFOLLOW O_NONBLOCK O_SYNC
        WNOHANG WEXITSTATUS WIFEXITED WIFSIGNALED WTERMSIG""",
    "signal": """ITIMER_PROF ITIMER_REAL ITIMER_VIRTUAL SIG_BLOCK SIG_SETMASK SIG_UNBLOCK alarm getitimer pause
        pthread_kill pthread_sigmask setitimer siginterrupt sigpending sigtimedwait sigwait sigwaitinfo""",
    "select": "epoll poll EPOLLIN POLLIN POLLHUP POLLERR",
    "socket": "AF_UNIX CMSG_LEN CMSG_SPACE recv_fds send_fds",
    "sys": "getdlopenflags setdlopenflags",
    "time": "clock_settime pthread_getcpuclockid tzset",
}


def _select(read, write, wrong, timeout=None):
    if not all(isinstance(one, socket.socket) for one in (*read, *write, *wrong)):
        raise OSError(10038, "An operation was attempted on something that is not a socket")
    return select.select(read, write, wrong, timeout)


OTHERS = {"os": {"name": "nt"}, "sys": {"platform": "win32"}, "select": {"select": _select}}


class Seen(ModuleType):
    """A module without some of its names."""

    def __init__(self, name: str):
        module = importlib.import_module(name)
        gone = set(NAMES[name].split())
        if name == "signal":
            gone |= {one for one in dir(module) if one.startswith("SIG") and one not in SIGNALS}
        object.__setattr__(self, "_facts", (module, gone, OTHERS.get(name, {})))

    def __getattribute__(self, name):
        module, gone, others = object.__getattribute__(self, "_facts")
        if name in gone:
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r} on Windows")
        return others[name] if name in others else getattr(module, name)

    def __setattr__(self, name, value):
        setattr(object.__getattribute__(self, "_facts")[0], name, value)

    def __dir__(self):
        module, gone, _ = object.__getattribute__(self, "_facts")
        return [name for name in dir(module) if name not in gone]


SEEN = {name: Seen(name) for name in NAMES}


def _import(name, globals=None, locals=None, fromlist=(), level=0):
    if level == 0 and name.partition(".")[0] in MODULES:
        raise ModuleNotFoundError(f"No module named {name!r} on Windows", name=name)
    module = builtins.__import__(name, globals, locals, fromlist, level)
    return SEEN.get(name, module) if level == 0 and name in SEEN else module


class Loader(SourceFileLoader):
    def exec_module(self, module):
        module.__dict__["__builtins__"] = vars(builtins) | {"__import__": _import}
        super().exec_module(module)


class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] != "posttrain" or (spec := PathFinder.find_spec(name, path, target)) is None:
            return None
        if isinstance(spec.loader, SourceFileLoader):
            spec.loader = Loader(spec.loader.name, spec.loader.path)
        return spec


sys.meta_path.insert(0, Finder)
