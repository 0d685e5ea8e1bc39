"""The process that `sandbox.run` starts: it fences off a solution and a checker, and tells how the check went.

It is run as a script and imports little, so that a sample starts fast. Four processes take part. The launcher keeps
the time. Its child builds the fence and starts the other two. The solution runs the model's program, the checker runs
the tests. They share nothing but two pipes, so a program cannot reach what judges it: the tests see values only.
"""

import ctypes
import marshal
import os
import resource
import select
import signal
import sys
from collections.abc import Callable

MAX_MESSAGE = 8 * 2**20  # bytes
MAX_VERDICT = 4096  # bytes, which a pipe takes without a reader
MAX_FILES = 32  # that a process has open
FIRST_UID = 2_100_000_000  # above those that systemd, containers and directory services hand out

# <sched.h>, <sys/mount.h>, <linux/mount.h>, <sys/prctl.h>, <linux/capability.h>
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 0x1000, 0x4000, 0x40000
AT_FDCWD, AT_RECURSIVE, SYS_MOUNT_SETATTR, MOUNT_ATTR_RDONLY = -100, 0x8000, 442, 1
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
CAPABILITY_VERSION_3 = 0x20080522

LIBC = ctypes.CDLL(None, use_errno=True)


class Ended(Exception):
    """The process at the other end of a pipe is gone."""


class Refused(Exception):
    """What fences a program off does not work here; the message says what."""


class Failed(Exception):
    """The solution raised an error; the message is its text."""


def send(pipe: int, content: object) -> None:
    """Write a message. marshal has tuples, sets and infinities, and reading it runs no code, unlike pickle."""
    content = marshal.dumps(content)
    with open(pipe, "wb", closefd=False) as file:
        file.write(len(content).to_bytes(8, "big") + content)


def receive(pipe: int) -> object:
    """Read a message and not a byte more. Raises Ended if there is none, ValueError if it exceeds MAX_MESSAGE."""
    size = int.from_bytes(_read(pipe, 8), "big")
    if size > MAX_MESSAGE:
        raise ValueError(f"a message of {size} bytes")
    return marshal.loads(_read(pipe, size))


def _read(pipe: int, size: int) -> bytes:
    content = bytearray()
    while len(content) < size:
        part = os.read(pipe, min(size - len(content), 2**16))
        if not part:
            raise Ended
        content += part
    return bytes(content)


def call(name: str, *arguments) -> None:
    """Call a function of the C library. Raises OSError that names it."""
    if getattr(LIBC, name)(*(ctypes.c_ulong(each) if isinstance(each, int) else each for each in arguments)) == -1:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")


def fork(function: Callable, *arguments) -> int:
    """Call a function in a new process, which ends when the function or this process does; the new process's id."""
    pid = os.fork()
    if pid == 0:
        try:
            call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL)
            function(*arguments)
        finally:
            os._exit(1)
    return pid


def launch(
    program: str, entry_point: str, limits: tuple, isolate: bool, parent: int, folder: str, visible: list[str]
) -> str:
    """Have a program checked within its time, and leave no process behind.

    Args:
        program: defines the entry point.
        entry_point: name of the function to be checked.
        limits: the fields of `sandbox.Limits`.
        isolate: whether to use namespaces, a file system and a user of its own.
        parent: id of the process that waits.
        folder: to work in.
        visible: folders that an isolated program can read.

    The checker reads prompt, test and entry point from the standard input: a process that never has them cannot tell.

    Returns:
        ``passed``, ``failed`` and why, or ``refused`` and why it was not run.
    """
    uids = None
    if isolate and may_be_anyone():
        # Of all programs that run at once, none has the user of another: the number of processes is counted by user.
        uids = [FIRST_UID + 2 * os.getpid(), FIRST_UID + 2 * os.getpid() + 1]
    if isolate:
        enter_namespaces(new_user=uids is None)
    call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL)  # not earlier: it is forgotten when capabilities change
    if os.getppid() != parent:
        return "refused its parent has ended"
    call("prctl", PR_SET_DUMPABLE, 0)  # all inherit it: not even the same user can trace them or write to their memory
    call("prctl", PR_SET_CHILD_SUBREAPER, 1)
    reading, writing = os.pipe()
    child = fork(supervise, program, entry_point, limits, isolate, folder, visible, uids, writing)
    os.close(writing)
    ready, _, _ = select.select([reading], [], [], limits[0])
    verdict = os.read(reading, MAX_VERDICT).decode(errors="replace") if ready else "failed timed out"
    os.kill(child, signal.SIGKILL)  # all processes of its namespace end with it
    os.waitpid(child, 0)
    if not isolate:
        end_orphans()
    return verdict or "failed ended before its verdict"


def may_be_anyone() -> bool:
    """Whether this is root, and not that of a container with few users."""
    with open("/proc/self/uid_map") as file:
        ranges = [list(map(int, line.split())) for line in file]
    return os.geteuid() == 0 and any(first <= FIRST_UID < first + size for first, _, size in ranges)


def enter_namespaces(new_user: bool) -> None:
    flags = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
    if not new_user:
        call("unshare", flags)
        return
    uid, gid = os.geteuid(), os.getegid()
    call("unshare", flags | CLONE_NEWUSER)
    # As its root, since no one else may set what `forbid_shared_memory` sets.
    for name, content in ("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1"):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(content)


def end_orphans() -> None:
    """End what left the tree of processes: the kernel made it this process's child."""
    found = True
    while found:
        found = False
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{pid}/stat") as file:
                    parent = file.read().rpartition(")")[2].split()[1]
            except OSError:
                continue  # it ended meanwhile
            if int(parent) == os.getpid():
                found = True
                os.kill(int(pid), signal.SIGKILL)
                os.waitpid(int(pid), 0)


def supervise(
    program: str,
    entry_point: str,
    limits: tuple,
    isolate: bool,
    folder: str,
    visible: list[str],
    uids: list[int] | None,
    report: int,
) -> None:
    """Start checker and solution, wait for the checker, and write its verdict to report."""
    try:
        if isolate:
            forbid_shared_memory()
            build_file_system(folder, visible, limits[3], uids[0] if uids else 0)
        questions, ask = os.pipe()
        answers, answer = os.pipe()
        reading, writing = os.pipe()
        # The solution comes last and waits to be asked: the checker is ready before foreign code runs.
        checker = fork(check, ask, answers, writing, limits, uids and uids[1])
        solution = fork(solve, program, entry_point, questions, answer, limits, uids and uids[0])
    except Exception as error:
        os.write(report, f"refused {error}".encode()[:MAX_VERDICT])
        return
    for pipe in questions, ask, answers, answer, writing:
        os.close(pipe)
    statuses = {}
    while checker not in statuses:
        pid, statuses[pid] = os.wait()
    verdict = os.read(reading, MAX_VERDICT)
    if verdict == b"ended":
        while solution not in statuses:
            pid, statuses[pid] = os.wait()
        verdict = f"failed ended before it answered ({_how(statuses[solution])})".encode()
    os.write(report, verdict or f"failed the checker ended ({_how(statuses[checker])})".encode())


def _how(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"exit status {code}" if code >= 0 else (signal.strsignal(-code) or f"signal {-code}").lower()


def forbid_shared_memory() -> None:
    """Forbid System V shared memory and queues, which outlive the process that filled them, so no limit holds them."""
    for name in "shmall", "msgmni":
        try:
            with open(f"/proc/sys/kernel/{name}", "w") as file:
                file.write("0")
        except OSError:  # some containers have it read-only
            pass


def build_file_system(folder: str, visible: list[str], size: int, owner: int) -> None:
    """Make folder all that is writable, visible and a few devices all that can be read, and everything else absent.

    The new root is made by chroot, and it matters that it is: from there the kernel makes no user namespace, which
    would give capabilities back.
    """
    call("mount", None, b"/", None, MS_REC | MS_PRIVATE, None)  # nothing of what follows is seen outside
    root = folder
    call("mount", b"tmpfs", root.encode(), b"tmpfs", MS_NOSUID | MS_NODEV, b"size=64k,nr_inodes=1k,mode=755")
    trees = []
    for path in sorted(set(visible), key=len):
        if os.path.isdir(path) and not any(path.startswith(tree + "/") for tree in trees):
            os.makedirs(root + path)
            call("mount", path.encode(), (root + path).encode(), None, MS_BIND | MS_REC, None)
            trees.append(path)
    os.makedirs(root + folder)
    os.makedirs(root + "/dev")
    devices = ["/dev/null", "/dev/zero", "/dev/urandom"]
    for device in devices:
        os.close(os.open(root + device, os.O_CREAT))
    attributes = (ctypes.c_uint64 * 4)(MOUNT_ATTR_RDONLY | MS_NOSUID | MS_NODEV)
    call("syscall", SYS_MOUNT_SETATTR, AT_FDCWD, root.encode(), AT_RECURSIVE, attributes, ctypes.sizeof(attributes))
    for device in devices:
        call("mount", device.encode(), (root + device).encode(), None, MS_BIND, None)
    options = f"size={size},nr_inodes=1k,mode=700,uid={owner},gid={owner}"
    call("mount", b"tmpfs", (root + folder).encode(), b"tmpfs", MS_NOSUID | MS_NODEV, options.encode())
    os.chroot(root)
    os.chdir(folder)


def confine(keep: list[int], limits: tuple, uid: int | None) -> None:
    """Give up all files but keep, all rights, and what exceeds the limits."""
    null = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(null, standard)
    before = 2
    for file in [*sorted(keep), resource.getrlimit(resource.RLIMIT_NOFILE)[0]]:
        os.closerange(before + 1, file)
        before = file
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    _, cpu, memory, size, processes = limits
    for kind, limit in (
        (resource.RLIMIT_CPU, cpu),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, size),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_NOFILE, MAX_FILES),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        most = resource.getrlimit(kind)[1]
        limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
        resource.setrlimit(kind, (limit, limit))
    call("capset", (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3), (ctypes.c_uint32 * 6)())
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)  # so that no program gives any of them back
    call("prctl", PR_SET_DUMPABLE, 0)


def check(ask: int, answers: int, report: int, limits: tuple, uid: int | None) -> None:
    """Run the tests on what the solution answers, and write the verdict to report."""
    try:
        prompt, test, entry_point = receive(0)
        try:
            confine([ask, answers, report], limits, uid)
        except Exception as error:
            raise Refused(str(error)) from error
        verdict = judge(prompt, test, entry_point, ask, answers)
    except Refused as error:
        verdict = f"refused {error}"
    except Ended:
        verdict = "ended"
    except Failed as error:
        verdict = f"failed {error}"
    except MemoryError:
        verdict = "failed out of memory"
    except BaseException as error:
        verdict = "failed " + ": ".join(filter(None, [type(error).__name__, str(error)]))
    os.write(report, verdict.encode(errors="replace")[:MAX_VERDICT])


def judge(prompt: str, test: str, entry_point: str, ask: int, answers: int) -> str:
    def question(*arguments, **named):
        try:
            send(ask, (arguments, named))
        except BrokenPipeError:
            raise Ended from None
        match receive(answers):
            case ["value", value]:
                return value
            case ["raised", "MemoryError", _]:
                raise Failed("out of memory")
            case ["raised", str(name), str(text)]:  # with a colon, so that no error reads as "passed"
                raise Failed(f"{name}: {text}")
            case _:
                raise Failed("answered what is no answer")

    why = receive(answers)
    if why is not None:
        raise Refused(why)
    names = {}
    exec(prompt, names)  # for the helpers in it that some tests call
    exec(test, names)
    names[entry_point] = question  # some tests call it by name
    question()  # whether the program runs
    names["check"](question)
    return "passed"


def solve(program: str, entry_point: str, questions: int, answers: int, limits: tuple, uid: int | None) -> None:
    """Run the program when first asked, and its function with the arguments of every further question."""
    try:
        confine([questions, answers], limits, uid)
    except Exception as error:
        send(answers, str(error))
        return
    send(answers, None)
    names = {}

    def define():
        exec(program, names)
        if entry_point not in names:
            raise NameError(f"name {entry_point!r} is not defined")

    function = define
    while True:
        arguments, named = receive(questions)
        try:
            answer = ("value", plain(function(*arguments, **named)))
        except BaseException as error:
            answer = ("raised", type(error).__name__, str(error))
        send(answers, answer)
        function = names.get(entry_point)


def plain(value: object) -> object:
    """A value without its classes: what marshal can hold. Raises TypeError for anything else."""
    if value is None or isinstance(value, bool):
        return value
    for kind in int, float, complex, str, bytes:
        if isinstance(value, kind):
            return kind(*kind.__getnewargs__(value))  # what lies beneath, whatever a subclass makes of str() or int()
    for kind in list, tuple, set, frozenset:
        if isinstance(value, kind):
            return kind(map(plain, value))
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    if getattr(value, "shape", None) == ():  # a number of numpy
        return plain(value.item())
    raise TypeError(f"returned a {type(value).__name__}")


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # with Python's handler it would reach even the first of a namespace
    os.umask(0o022)
    try:
        *job, packages = receive(0)
        sys.path += packages
        verdict = launch(*job)
    except Exception as error:
        verdict = f"refused {error or type(error).__name__}"
    os.write(1, verdict.encode(errors="replace")[:MAX_VERDICT])


if __name__ == "__main__":
    main()
