"""A sandbox for programs that a model wrote: HumanEval runs them, and they may do anything."""

import dataclasses
import functools
import marshal
import os
import site
import subprocess
import sys
import tempfile
from multiprocessing.connection import wait
from pathlib import Path

CHILD = Path(__file__).with_name("sandbox_child.py")
UNSANDBOXED = "LAPLACIAN_HEADS_UNSANDBOXED"
MAX_REASON = 200  # characters


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a program may use.

    Args:
        wall: seconds from start to verdict; 5 as in nanochat (karpathy/nanochat at 01f5f10, `execute_code`).
        cpu: seconds of processor time, per process.
        memory: bytes of address space, per process.
        folder: bytes of all files together; they are held in memory.
        processes: how many at once, threads included.
    """

    wall: float = 5.0
    cpu: int = 5
    memory: int = 512 * 2**20
    folder: int = 16 * 2**20
    processes: int = 16


def run(prompt: str, solution: str, test: str, entry_point: str, limits: Limits = Limits()) -> str:
    """Run a program and HumanEval's tests of it, each in a process of its own.

    The tests get plain values: numbers, texts, lists, tuples, sets, dicts. Classes derived from them are reduced to
    them, and all else is an error. The program gets copies of the arguments, in a process that does not have the tests.

    Args:
        prompt: HumanEval's, which defines the helpers that some tests call.
        solution: a whole program that defines the function.
        test: HumanEval's, which defines ``check(candidate)``.
        entry_point: name of the function.
        limits: what the program may use.

    Returns:
        ``passed``, or why it did not in one line of at most MAX_REASON characters.

    Raises:
        ValueError: the program was not run, as this machine does not permit it to be isolated.
    """
    outcome, reason = _run(prompt, solution, test, entry_point, limits, isolated())
    if outcome == "refused":
        raise ValueError(f"A program could not be run: {reason}.")
    return "passed" if outcome == "passed" else reason


def isolated() -> bool:
    """Whether `run` isolates programs; only LAPLACIAN_HEADS_UNSANDBOXED=1 lets it run any that it cannot isolate.

    Those have processes, an environment and limits of their own as well, but the files, network and rights of the user.

    Raises:
        ValueError: it cannot isolate them, and the variable is not set.
    """
    why = why_not_isolated()
    if why is not None and os.environ.get(UNSANDBOXED) != "1":
        raise ValueError(
            "HumanEval runs programs that a model wrote, and this machine does not permit them to be isolated "
            f"({why}); {UNSANDBOXED}=1 runs them with your rights instead."
        )
    return why is None


@functools.cache
def why_not_isolated() -> str | None:
    """None if this machine permits isolation, tried with a program; else what failed."""
    # Statistics needs much of Python's library, compiled parts included, so what is not visible shows.
    program = "def f():\n    import statistics\n    return statistics.mean([1, 3])"
    outcome, reason = _run("", program, "def check(f): assert f() == 2", "f", Limits(), isolate=True)
    return None if outcome == "passed" else reason


def _run(prompt: str, solution: str, test: str, entry_point: str, limits: Limits, isolate: bool) -> tuple[str, str]:
    """The outcome (passed, failed or refused) and the reason for it."""
    if sys.platform != "linux":
        return "refused", "only Linux can isolate them"
    # The prefixes hold Python's library and the packages.
    visible = ["/bin", "/lib", "/lib64", "/usr", sys.base_prefix, sys.prefix]
    with (
        tempfile.TemporaryDirectory(prefix="laplacian-heads-", ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile() as job,
    ):
        packages = site.getsitepackages()
        for part in (
            (solution, entry_point, dataclasses.astuple(limits), isolate, os.getpid(), folder, visible, packages),
            (prompt, test, entry_point),
        ):
            content = marshal.dumps(part)
            job.write(len(content).to_bytes(8, "big") + content)
        job.seek(0)
        environment = {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": folder,
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "PYTHONHASHSEED": "0",
        }
        with subprocess.Popen(
            # Not -I, which ignores the hash seed. -S, since what packages run at the start takes long.
            [sys.executable, "-sPSB", CHILD],
            stdin=job,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env=environment,
            start_new_session=True,
        ) as launcher:
            try:
                # The launcher keeps the time; should it be hindered, this ends it, and its processes end with it.
                ready = wait([launcher.stdout], limits.wall + 1)
                verdict = (
                    os.read(launcher.stdout.fileno(), 4096).decode(errors="replace") if ready else "failed timed out"
                )
            finally:
                launcher.kill()
    outcome, _, reason = (verdict or "failed ended before its verdict").partition(" ")
    reason = "".join(each if each.isprintable() else " " for each in reason)
    return outcome, " ".join(reason.split())[:MAX_REASON]
