"""The sandbox of HumanEval: right programs pass, wrong ones do not, and hostile ones neither pass nor do harm.

That an attack would work is shown beside that it does not: on tests that run in the program's own process, as they do
elsewhere, or without isolation where the harm is small.
"""

import os
import shutil
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from laplacian_heads.eval import sandbox
from laplacian_heads.eval.sandbox import Limits

HUMANEVAL = Path(__file__).resolve().parents[2] / "shared" / "hub" / "datasets" / "openai" / "openai_humaneval"
BRIEF = Limits(wall=1)
SLACK = 3  # seconds above the limit: one of the sandbox's, two of a busy machine's

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux can run these programs")
needs_isolation = pytest.mark.skipif(
    sandbox.why_not_isolated() is not None, reason=f"this machine cannot isolate: {sandbox.why_not_isolated()}"
)

# No answer that is known beforehand passes.
DOUBLE = """
import random

def check(candidate):
    for _ in range(3):
        number = random.randrange(10**9)
        assert candidate(number) == 2 * number
"""


def run(solution, test=DOUBLE, limits=BRIEF, prompt=""):
    start = time.monotonic()
    result = sandbox.run(prompt, solution, test, "f", limits)
    assert time.monotonic() - start < limits.wall + SLACK
    assert len(result) <= sandbox.MAX_REASON
    assert "\n" not in result
    return result


def reported(solution, expected, **options):
    """Run a program whose function f tells what it found, and compare."""
    return run(solution, f"def check(f):\n    found = f()\n    assert found == {expected!r}, found", **options)


@pytest.fixture
def unisolated(monkeypatch):
    monkeypatch.setattr(sandbox, "why_not_isolated", lambda: "for a test")
    monkeypatch.setenv(sandbox.UNSANDBOXED, "1")
    assert not sandbox.isolated()


@pytest.fixture(params=[pytest.param(True, marks=needs_isolation), False], ids=["isolated", "unisolated"])
def either(request):
    """A test with and without isolation."""
    if not request.param:
        request.getfixturevalue("unisolated")
    return request.param


@pytest.fixture
def left(monkeypatch, tmp_path):
    """left(): ids of the processes that a test's sandboxes have left, or have at the time."""
    child = tmp_path / "child.py"
    shutil.copy(sandbox.CHILD, child)
    monkeypatch.setattr(sandbox, "CHILD", child)

    def find():
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                command = (process / "cmdline").read_bytes()
            except OSError:
                continue
            if str(child).encode() in command:
                found.append(int(process.name))
        return found

    return find


def eventually(condition, seconds=2.0):
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


# Verdicts


@pytest.mark.parametrize(
    ("solution", "expected"),
    [
        ("def f(x): return 2 * x", "passed"),
        ("def f(x):\n    print(x)\n    return x + x", "passed"),
        ("f = lambda x: 2 * x", "passed"),
        ("def f(x): return x", "AssertionError"),
        ("def f(x) return x", "SyntaxError: "),
        ("def f(x): return '\0'", ("SyntaxError: ", "ValueError: ")),  # it depends on Python's version
        ("def f(x): return '\ud800'", "UnicodeEncodeError: "),
        ("def f(x): return 1 // 0", "ZeroDivisionError: integer division or modulo by zero"),
        ("1 // 0\ndef f(x): return 2 * x", "ZeroDivisionError: "),
        ("def f(x): return f(x)", "RecursionError: "),
        ("def f(): return 0", "TypeError: f() takes 0 positional arguments but 1 was given"),
        ("def f(x): yield 2 * x", "TypeError: returned a generator"),
        ("def f(x): return object()", "TypeError: returned a object"),
        ("def f(x): return f", "TypeError: returned a function"),
        ("def f(x): return 'x' * 10**7", "ValueError: a message of 10000"),
        ("def f(x): return input()", "EOFError: "),
        ("def f(x): raise ValueError('a\\nb' + '\\x1b[2J' + 'c' * 10**6)", "ValueError: a b [2Jccc"),
        ("def g(x): return 2 * x", "NameError: name 'f' is not defined"),
        ("", "NameError: name 'f' is not defined"),
        ("class passed(Exception): pass\ndef f(x): raise passed", "passed:"),
        ("import time\ndef f(x): time.sleep(60)", "timed out"),
        ("if __name__ == '__main__': 1 // 0\ndef f(x): return 2 * x", "passed"),  # as HumanEval's own `exec`
    ],
)
def test_verdicts(either, solution, expected):
    result = run(solution)
    assert result.startswith(expected)
    assert (result == "passed") == (expected == "passed")


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("None", "None"),
        ("[True, 1, 1.5, 'a', b'b', 2j, 10**400]", "[True, 1, 1.5, 'a', b'b', 2j, 10**400]"),
        ("collections.Counter('aab')", "{'a': 2, 'b': 1}"),
        ("collections.defaultdict(list, a=[1])", "{'a': [1]}"),
        ("collections.OrderedDict(a=(1, 2))", "{'a': (1, 2)}"),
        ("collections.namedtuple('Point', 'x y')(1, [2])", "(1, [2])"),
        ("({1, 2}, frozenset({(3,)}), {1: {2: set()}})", "({1, 2}, frozenset({(3,)}), {1: {2: set()}})"),
        ("float('inf'), -float('inf'), 0.1 + 0.2, -0.0", "(float('inf'), -float('inf'), 0.1 + 0.2, -0.0)"),
        ("float('nan')", "float('nan')"),
        ("enum.IntEnum('Number', 'one two').two", "2"),
        ("Text('a')", "'a'"),
        ("'\\ud800\\0'", "'\\ud800\\0'"),
    ],
)
@needs_isolation
def test_values_arrive_plain(expression, expected):
    solution = f"""
import collections, enum

class Text(str):
    def __str__(self): return "b"

def f():
    return {expression}
"""
    # repr tells what == does not: kinds of numbers, the sign of zero, nan.
    assert run(solution, f"def check(f):\n    assert repr(f()) == repr({expected})") == "passed"


@needs_isolation
def test_numbers_of_numpy_arrive_plain():
    pytest.importorskip("numpy")
    solution = """
import numpy

def f():
    return [numpy.float32(0.5), numpy.int64(3), numpy.bool_(True), numpy.float64(0.25)]
"""
    limits = Limits(memory=4 * 2**30)  # of address space
    assert run(solution, "def check(f):\n    assert repr(f()) == '[0.5, 3, True, 0.25]'", limits) == "passed"


@needs_isolation
def test_arguments_are_copies():
    test = """
def check(f):
    numbers = [3, 1, 2]
    assert f(numbers, reverse=True) == [3, 2, 1]
    assert numbers == [3, 1, 2]
    assert f((1, 2), {3}) == [(1, 2), {3}]
"""
    solution = """
def f(numbers, other=None, reverse=False):
    if other:
        return [numbers, other]
    numbers.sort(reverse=reverse)
    return numbers
"""
    assert run(solution, test) == "passed"


@needs_isolation
def test_tests_call_helpers_of_the_prompt_and_the_function_by_name():
    prompt = 'def encode(x):\n    return x + 1\n\n\ndef f(x):\n    """Undo encode."""\n'
    test = "def check(candidate):\n    assert candidate(encode(1)) == f(encode(1)) == 1"
    assert run(prompt + "    return x - 1", test, prompt=prompt) == "passed"
    assert run(prompt + "    return x", test, prompt=prompt) == "AssertionError"
    # A program cannot replace the helper.
    assert run("def encode(x): return x\ndef f(x): return x", test, prompt=prompt) == "AssertionError"


def test_humaneval(either):
    files = list(HUMANEVAL.rglob("test-*.parquet"))
    if not files:
        pytest.skip(f"HumanEval is not in {HUMANEVAL}")
    parquet = pytest.importorskip("pyarrow.parquet")
    problems = parquet.read_table(files[0]).to_pylist()
    assert len(problems) == 164
    if not either:
        problems = problems[::20]

    def check(problem):
        prompt, entry_point = problem["prompt"], problem["entry_point"]
        return [
            sandbox.run(prompt, prompt + body, problem["test"], entry_point)
            for body in (problem["canonical_solution"], "    raise NotImplementedError\n")
        ]

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for problem, (right, wrong) in zip(problems, pool.map(check, problems), strict=True):
            assert right == "passed", problem["task_id"]
            assert wrong.startswith("NotImplementedError"), problem["task_id"]


# Forged verdicts. Each of the first kind works on tests in its own process.

FORGERIES = {
    "exits at import": "import sys; sys.exit(0)",
    "raises SystemExit": "raise SystemExit",
    "leaves at import": "import os; os._exit(0)",
    "exits": "import sys\ndef f(x): sys.exit(0)",
    "leaves": "import os\ndef f(x): os._exit(0)",
    "equals all": "class All:\n    __eq__ = lambda *_: True\ndef f(x): return All()",
    "number that equals all": "class All(int):\n    __eq__ = lambda *_: True\ndef f(x): return All()",
    "text that equals all": "class All(str):\n    __eq__ = lambda *_: True\ndef f(x): return All()",
    "spares all assertions": """
import builtins, sys

class Spared(BaseException):
    def __init__(self, *_): sys.exit(0)

builtins.AssertionError = Spared
sys.excepthook = lambda *_: __import__("os")._exit(0)
def f(x): return 0
""",
    "replaces random": "import random\nrandom.randrange = lambda *_: 0\ndef f(x): return 0",
    "changes its caller's names": """
import sys

class Known:
    randrange = lambda *_: 0

def f(x):
    names = sys._getframe(1).f_globals
    if names.get("random") is Known: return 0
    names["random"] = Known
    return 2 * x
""",
}


@pytest.mark.parametrize("solution", FORGERIES.values(), ids=FORGERIES)
def test_no_forgery_passes(either, solution):
    naive = subprocess.run([sys.executable, "-c", f"{solution}\n{DOUBLE}\ncheck(f)"], capture_output=True)
    assert naive.returncode == 0
    assert run(solution) != "passed"


BLIND_FORGERIES = {
    "patches modules": """
import builtins, io, marshal, os, sys
for module in (marshal, os, sys, io, builtins):
    for name in dir(module):
        if callable(getattr(module, name)) and not name.startswith("__"):
            try: setattr(module, name, lambda *_, **__: b"passed")
            except Exception: pass
def f(x): return 0
""",
    "patches the functions that called it": """
import sys
def f(x):
    frame = sys._getframe()
    while frame:
        frame.f_globals.update({name: lambda *_: None for name in ("check", "judge", "confine", "plain")})
        frame.f_globals["__builtins__"] = {}
        frame = frame.f_back
    return 0
""",
    "goes on as its parent": """
import os
def stay(*_): raise RuntimeError
os._exit = stay
raise SystemExit
""",
    "writes to all files": """
import os
def f(x): return 0
for fd in range(256):
    for _ in range(3):
        try: os.write(fd, b"passed")
        except OSError: pass
""",
    "answers ahead": """
import marshal, os
def f(x): return 0
for answer in [None, "passed", ("passed",), ("value", "passed"), ("value", None), ("value", 0), ("refused", "x")]:
    content = marshal.dumps(answer)
    for fd in range(256):
        try: os.write(fd, len(content).to_bytes(8, "big") + content)
        except OSError: pass
""",
    "answers endlessly": """
import marshal, os, threading
def f(x): return 0
content = marshal.dumps(("value", 0))
def flood(fd):
    while True: os.write(fd, len(content).to_bytes(8, "big") + content)
for fd in range(3, 8):
    threading.Thread(target=flood, args=(fd,), daemon=True).start()
""",
    "answers more than there is memory": """
import os
def f(x): return 0
for fd in range(256):
    try: os.write(fd, b"\\x00" + b"\\xff" * 7)
    except OSError: pass
""",
    "answers code": """
import marshal, os
def f(x): return 0
content = marshal.dumps(("value", compile("import os; os._exit(0)", "", "exec")))
for fd in range(3, 256):
    try: os.write(fd, len(content).to_bytes(8, "big") + content)
    except OSError: pass
""",
    "closes all files": "import os\nos.closerange(0, 256)\ndef f(x): return 2 * x",
}


@pytest.mark.parametrize("solution", BLIND_FORGERIES.values(), ids=BLIND_FORGERIES)
def test_no_blind_forgery_passes(either, solution):
    assert run(solution) != "passed"


def test_forged_answer_is_an_answer(either):
    """What is written ahead takes the place of an answer, so that the checks above are of what they say."""
    solution = """
import marshal, os
for answer in [("value", None), ("value", 4)]:
    content = marshal.dumps(answer)
    for fd in range(3, 256):
        try: os.write(fd, len(content).to_bytes(8, "big") + content)
        except OSError: pass
def f(x): return 0
"""
    assert run(solution, "def check(f):\n    assert f(2) == 4") == "passed"
    assert run(solution) == "AssertionError"


def test_tests_are_not_in_the_programs_memory(either):
    # What it looks for does not match itself.
    solution = """
import ctypes, os, re  # in the program: 7

libc = ctypes.CDLL(None, use_errno=True)
PAGE = 4096

class Range(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]

def pages():
    buffer = ctypes.create_string_buffer(PAGE)
    here = Range(ctypes.addressof(buffer), PAGE)
    for address in id(object()), id(os), id("x" * 10**6), ctypes.addressof(buffer):
        for offset in range(-4000, 4000):
            there = Range(address - address % PAGE + offset * PAGE, PAGE)
            if libc.process_vm_readv(os.getpid(), ctypes.byref(here), 1, ctypes.byref(there), 1, 0) == PAGE:
                yield buffer.raw

def f():
    return {place for page in pages() for place in re.findall(b"in the ([a-z]+): [0-9]", page)}
"""
    test = "def check(f):  # in the test: 7\n    found = f()\n    assert found == {b'program'}, found"
    assert run(solution, test, Limits()) == "passed"


# Limits

BOMBS = {
    "processes": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "sessions": "import os\nwhile True:\n    try:\n        if os.fork() == 0: os.setsid()\n    except OSError: pass",
    "threads": """
import threading
def loop():
    while True: pass
while True:
    try: threading.Thread(target=loop).start()
    except RuntimeError: pass
""",
    "programs": """
import subprocess, sys
command = 'import subprocess, sys\\nwhile True: subprocess.Popen([sys.executable, "-c", "while True: pass"])'
while True:
    try: subprocess.Popen([sys.executable, "-c", command])
    except OSError: pass
""",
    "loop": "while True: pass",
    "deaf loop": """
import signal
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True:
    try:
        while True: pass
    except BaseException: pass
""",
    "loop when called": "def f(x):\n    while True: pass",
    "loop in C": "def f(x): return 10**10**10",
    "output": "while True: print('x' * 10**6)",
    "output to files": "import os\nwhile True:\n    for fd in (1, 2): os.write(fd, b'x' * 10**6)",
    "stopped": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
}


@pytest.mark.parametrize("solution", BOMBS.values(), ids=BOMBS)
@needs_isolation
def test_bombs_end_in_time(left, solution):
    assert run(solution, limits=Limits(wall=0.5)) in ("timed out", "out of memory")
    assert eventually(lambda: left() == [])


@pytest.mark.parametrize("kind", ["fork", "thread"])
@needs_isolation
def test_number_of_processes(kind):
    start = {
        "fork": "if os.fork() == 0: time.sleep(60)",
        "thread": "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
    }[kind]
    solution = f"""
import os, threading, time
def f():
    for count in range(50):
        try: {start if kind == "thread" else "start()"}
        except (OSError, RuntimeError): return count
    return count

def start():
    {start}
"""
    few = "def check(f):\n    count = f()\n    assert 5 < count < 16, count"
    assert run(solution, few) == "passed"
    assert run(solution, few, Limits(wall=2, processes=200, memory=2**40)) == "AssertionError: 49"


@needs_isolation
def test_programs_at_the_same_time_do_not_share_the_number_of_processes():
    solution = "import os, time\ndef f(x):\n    for _ in range(8):\n        if os.fork() == 0: time.sleep(60)\n"
    solution += "    time.sleep(0.5)\n    return 2 * x"
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: run(solution, "def check(f): assert f(1) == 2"), range(4))) == ["passed"] * 4


@pytest.mark.parametrize(
    ("solution", "expected"),
    [
        ("def f(x): return len(bytes(10**10))", "out of memory"),
        ("x = bytes(10**10)", "out of memory"),
        ("x = []\nwhile True: x.append(bytes(10**6))", "out of memory"),
        ("import mmap\nx = mmap.mmap(-1, 10**10)", "OSError: [Errno 12]"),
        ("import ctypes\ndef f(x): return ctypes.string_at(0)", "ended before it answered (segmentation fault)"),
    ],
)
def test_memory(either, solution, expected):
    assert run(solution, limits=Limits()).startswith(expected)


@needs_isolation
def test_processor_time():
    result = run("while True: pass", limits=Limits(wall=8, cpu=1))
    assert result == "ended before it answered (killed)"


@needs_isolation
def test_size_of_files():
    solution = """
import os, itertools

def f():
    size = 0
    names = ("file%d" % number for number in itertools.count())
    try:
        for name in names:
            with open(name, "wb", buffering=0) as file:
                for _ in range(4): size += file.write(bytes(2**20))
    except OSError as error:
        return size // 2**20, error.strerror
"""
    assert reported(solution, (8, "No space left on device"), limits=Limits(wall=2, folder=8 * 2**20)) == "passed"
    one = "def f():\n    with open('file', 'wb') as file: file.truncate(2**24 + 1)"
    assert run(one, "def check(f): f()").startswith("OSError: [Errno 27] File too large")


@needs_isolation
def test_memory_that_no_process_holds():
    solution = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def f(): return [libc.shmget(0, 2**28, 0o1600), libc.msgget(0, 0o1600)]
"""
    assert reported(solution, [-1, -1]) == "passed"


# Harm


@needs_isolation
def test_files_are_out_of_reach(tmp_path, monkeypatch):
    canary = tmp_path / "folder" / "canary"
    canary.parent.mkdir()
    canary.write_text("sings")
    for folder in (tmp_path, canary.parent):
        folder.chmod(0o777)
    read = f"def f(): return open({str(canary)!r}).read()"
    write = f"def f(): return open({str(canary)!r}, 'a').write('!')"
    delete = f"import shutil\ndef f(): return shutil.rmtree({str(canary.parent)!r})"
    for attack in read, write, delete:
        assert reported(attack, "sings").startswith("FileNotFoundError")
    assert canary.read_text() == "sings"

    def everything():
        """What others are not likely to change at the same time."""
        found = {path for path in Path(sys.prefix).rglob("*") if "__pycache__" not in path.parts}
        return found | {Path("/") / name for name in os.listdir("/")} | {canary, Path.home()}

    # Only now that a small attack has failed.
    before = everything()
    roots = [str(canary.parent), str(Path.home()), sys.prefix, sys.base_prefix, "/usr", "/"]
    solution = (
        f"import shutil\ndef f(x):\n    for root in {roots}: shutil.rmtree(root, ignore_errors=True)\n    return 0"
    )
    assert run(solution, limits=Limits(wall=2)) in ("AssertionError", "timed out")
    assert before <= everything()

    with monkeypatch.context() as without:
        without.setattr(sandbox, "why_not_isolated", lambda: "for a test")
        without.setenv(sandbox.UNSANDBOXED, "1")
        assert reported(read, "sings") == "passed"
        assert reported(write, 1) == "passed"
        assert reported(delete, None) == "passed"
    assert not canary.exists()


@needs_isolation
def test_only_the_working_folder_is_writable():
    solution = """
import os

def f():
    writable = []
    for folder, folders, _ in os.walk("/"):
        if os.access(folder, os.W_OK): writable.append(folder)
        try:
            os.mkdir(folder + "/x")
            os.rmdir(folder + "/x")
            writable.append(folder)
        except OSError: pass
        if folder.count("/") > 2: folders.clear()
    open("file", "w").close()
    return set(writable) <= {os.getcwd()} == {os.environ["HOME"]}, sorted(os.listdir("/"))
"""
    outside = {"bin", "dev", "lib", "lib64", "usr", "tmp"}
    test = f"""
def check(f):
    alone, names = f()
    assert alone
    for name in ("proc", "etc", "sys", "run", "var"): assert name not in names
    assert set(names) >= {outside & set(os.listdir("/"))}
"""
    assert run(solution, test, Limits()) == "passed"


def test_environment(either, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    solution = "import os\ndef f(): return sorted(os.environ), os.environ['HOME'] == os.getcwd()"
    names = ["HOME", "LANG", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PATH", "PYTHONHASHSEED"]
    assert reported(solution, (names, True)) == "passed"
    order = "def f(): return [*{'a', 'b', 'c', 'd', 'e', 'f', 'g'}]"
    assert reported(order, None) == reported(order, None)  # hashes are the same in each process


@needs_isolation
def test_network_is_out_of_reach(tmp_path, monkeypatch):
    name = f"\0laplacian-heads-{os.getpid()}"
    tmp_path.chmod(0o777)
    targets = []
    listeners = []
    for family, address in (
        (socket.AF_INET, ("127.0.0.1", 0)),
        (socket.AF_UNIX, name),
        (socket.AF_UNIX, str(tmp_path / "s")),
    ):
        listener = socket.socket(family)
        listener.bind(address)
        listener.listen()
        listener.settimeout(0.2)
        listeners.append(listener)
        targets.append((int(family), listener.getsockname() if family == socket.AF_INET else address))
    solution = f"""
import socket

def f():
    reached = []
    for family, address in {targets!r}:
        try:
            with socket.socket(family) as caller:
                caller.connect(address)
                caller.sendall(b"x")
            reached.append(True)
        except OSError:
            reached.append(False)
    return reached
"""
    try:
        assert reported(solution, [False] * 3) == "passed"
        for listener in listeners:
            with pytest.raises(TimeoutError):
                listener.accept()
        monkeypatch.setattr(sandbox, "why_not_isolated", lambda: "for a test")
        monkeypatch.setenv(sandbox.UNSANDBOXED, "1")
        assert reported(solution, [True] * 3) == "passed"
    finally:
        for listener in listeners:
            listener.close()


@needs_isolation
def test_no_process_can_be_killed(monkeypatch):
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True) as canary:
        try:
            small = f"import os\ndef f(): os.kill({canary.pid}, 9); return 1"
            assert reported(small, 1).startswith(("ProcessLookupError", "PermissionError"))
            # Only now that a small attack has failed.
            kills = [
                *(f"os.kill({pid}, number)" for pid in (canary.pid, os.getpid(), "os.getppid()", 1, -1)),
                *(f"os.killpg({group}, number)" for group in (canary.pid, os.getpgrp(), "os.getpgid(os.getppid())")),
                *(f"os.kill({pid}, number)" for pid in range(2, 10)),
            ]
            lines = "\n".join(f"        try: {kill}\n        except OSError: pass" for kill in kills)
            # Itself it may kill as well, so a verdict is not expected.
            solution = f"import os\ndef f(x):\n    for number in range(1, 65):\n{lines}\n    return 0"
            assert run(solution) != "passed"
            for kill in kills[:8]:
                for number in (2, 9):
                    assert run(f"import os\ndef f(x):\n    number = {number}\n    {kill}\n    return 0") != "passed"
            assert canary.poll() is None
            monkeypatch.setattr(sandbox, "why_not_isolated", lambda: "for a test")
            monkeypatch.setenv(sandbox.UNSANDBOXED, "1")
            assert reported(small, 1) == "passed"
            assert canary.wait(5) == -9
        finally:
            canary.kill()


RIGHTS = """
import ctypes, os, subprocess, sys

libc = ctypes.CDLL(None, use_errno=True)

def gained():
    found = []
    for name, flag in {"user": 0x10000000, "mount": 0x20000, "process": 0x20000000, "network": 0x40000000}.items():
        if libc.unshare(flag) == 0: found.append(name)
    if libc.unshare(0x10000000 | 0x20000) == 0: found.append("both")
    if libc.mount(b"tmpfs", os.getcwd().encode(), b"tmpfs", 0, None) == 0: found.append("tmpfs")
    if libc.mount(b"proc", os.getcwd().encode(), b"proc", 0, None) == 0: found.append("proc")
    if libc.mount(None, b"/", None, 32 | 4096, None) == 0: found.append("writable")
    if libc.chroot(os.getcwd().encode()) == 0: found.append("chroot")
    if libc.sethostname(b"x", 1) == 0: found.append("hostname")
    if libc.setuid(1) == 0: found.append("user")
    for resource in range(16):
        if libc.setrlimit(resource, (ctypes.c_ulong * 2)(2**62, 2**62)) == 0: found.append("limit %d" % resource)
    sets = (ctypes.c_uint32 * 6)()
    libc.capget((ctypes.c_uint32 * 2)(0x20080522), sets)
    if any((sets[0], sets[1], sets[3], sets[4])): found.append("capabilities")
    return found
"""


@needs_isolation
def test_no_rights_are_gained():
    # The limits that the sandbox does not set are left out: what it was started with may have none.
    unlimited = {f"limit {number}" for number in (2, 3, 5, 8, 10, 11, 12, 13, 14, 15)}
    test = f"def check(f):\n    found = set(f()) - {unlimited}\n    assert not found, found"
    assert run(RIGHTS + "def f(): return gained()", test) == "passed"
    # and not by starting a program
    started = RIGHTS + (
        "def f(): return eval(subprocess.run([sys.executable, '-c', "
        "open('program.py', 'w').write(SOURCE) and SOURCE + 'print(gained())'], capture_output=True).stdout)\n"
        f"SOURCE = {RIGHTS!r}\n"
    )
    assert run(started, test) == "passed"


def test_no_process_can_be_traced(either):
    solution = """
import ctypes, os

libc = ctypes.CDLL(None, use_errno=True)
libc.process_vm_writev.argtypes = libc.process_vm_readv.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 5

def f():
    buffer = ctypes.create_string_buffer(8)
    part = (ctypes.c_size_t * 2)(ctypes.addressof(buffer), 8)
    at = ctypes.addressof(part)
    reached = []
    # Without isolation the numbers are the machine's, and those around its own are the sandbox's.
    for pid in [*range(2, 100), *range(max(100, os.getpid() - 20), os.getpid() + 20), os.getppid(), 1]:
        if libc.process_vm_writev(pid, at, 1, at, 1, 0) > 0 or libc.process_vm_readv(pid, at, 1, at, 1, 0) > 0:
            reached.append(pid)
        elif pid != os.getpid() and libc.ptrace(0x4206, pid, 0, 0) == 0: reached.append(pid)  # PTRACE_SEIZE
        elif pid != os.getpid() and takes_file(pid): reached.append(pid)
    return {pid for pid in reached if pid in (os.getppid(), os.getpid()) or ISOLATED or near(pid)} == {os.getpid()}

def takes_file(pid):
    try: process = os.pidfd_open(pid)
    except OSError: return False
    taken = [libc.syscall(438, process, fd, 0) for fd in range(8)]  # pidfd_getfd
    for fd in [process, *taken]:
        if fd >= 0: os.close(fd)
    return max(taken) >= 0

def near(pid):
    try:
        with open("/proc/%d/cmdline" % pid) as file: return "sandbox_child" in file.read()
    except OSError: return False
"""
    assert reported(solution.replace("ISOLATED", str(either)), True) == "passed"


# What is left


def test_nothing_is_left(either, left, monkeypatch, tmp_path):
    folders = tmp_path / "folders"
    folders.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folders))
    leaves = """
import os
os.makedirs("a/b")
open("a/b/c", "w").close()
os.chmod("a/b", 0)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while True: pass
    os._exit(0)
def f(x): return 2 * x
"""
    many = Limits(processes=10000)  # without isolation, those of the user count
    for _ in range(9):
        assert run("def f(x): return 2 * x") == "passed"
        assert run(leaves, limits=many) == "passed"
    for _ in range(2):
        assert run("while True: pass", limits=Limits(wall=0.3)) == "timed out"
    assert left() == []
    if either or os.geteuid() == 0:
        assert os.listdir(folders) == []
    zombies = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = status.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(parent) == os.getpid() and state == "Z":
            zombies.append(status)
    assert zombies == []


def test_all_ends_with_the_parent(either, left, tmp_path):
    code = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import sandbox
if sys.argv[2] == "False":
    sandbox.why_not_isolated = lambda: "for a test"
sandbox.isolated()
sandbox.CHILD = Path(os.environ["CHILD"])
print("ready", flush=True)
sandbox.run("", "while True: pass", "def check(f): pass", "f", sandbox.Limits(wall=60, cpu=60))
"""
    with subprocess.Popen(
        [sys.executable, "-c", code, Path(sandbox.__file__).parent, str(either)],
        env={**os.environ, "CHILD": str(sandbox.CHILD), "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        try:
            assert parent.stdout.readline() == "ready\n"
            assert eventually(lambda: len(left()) == 4, 10)  # launcher, supervisor, solution, checker
        finally:
            parent.kill()
    assert eventually(lambda: left() == [])


def test_threads_run_at_the_same_time(either):
    solution = "import time\ndef f(x):\n    time.sleep(0.5)\n    return 2 * x"
    with ThreadPoolExecutor(4) as pool:
        start = time.monotonic()
        results = list(pool.map(lambda _: run(solution, "def check(f): assert f(1) == 2", Limits()), range(8)))
    assert results == ["passed"] * 8
    assert time.monotonic() - start < 8 * 0.5


# Machines that do not permit it


def test_refuses_without_isolation(monkeypatch):
    monkeypatch.setattr(sandbox, "why_not_isolated", lambda: "unshare: Operation not permitted")
    for value in None, "0", "yes":
        if value is None:
            monkeypatch.delenv(sandbox.UNSANDBOXED, raising=False)
        else:
            monkeypatch.setenv(sandbox.UNSANDBOXED, value)
        for attempt in sandbox.isolated, lambda: run("def f(x): return 2 * x"):
            with pytest.raises(ValueError, match=r"unshare: Operation not permitted.*LAPLACIAN_HEADS_UNSANDBOXED=1"):
                attempt()
    monkeypatch.setenv(sandbox.UNSANDBOXED, "1")
    assert not sandbox.isolated()
    assert run("def f(x): return 2 * x") == "passed"


@needs_isolation
def test_isolates_where_it_can(monkeypatch):
    monkeypatch.setenv(sandbox.UNSANDBOXED, "1")
    assert sandbox.isolated()
    assert reported("import os\ndef f(): return os.path.exists('/proc')", False) == "passed"


@pytest.fixture
def fresh_probe():
    yield sandbox.why_not_isolated.cache_clear
    sandbox.why_not_isolated.cache_clear()


@needs_isolation
def test_what_cannot_be_fenced_off_is_not_run(monkeypatch, tmp_path, fresh_probe):
    """Each call of the kernel that fails in turn ends in a refusal, in whichever process."""
    original = sandbox.CHILD.read_text()
    for call in "unshare", "mount", "syscall", "capset", "prctl":
        child = tmp_path / "child.py"
        failing = f"if name == {call!r}: raise OSError(1, f'{{name}}: not today')\n    if getattr(LIBC, name)("
        assert original.count("if getattr(LIBC, name)(") == 1
        child.write_text(original.replace("if getattr(LIBC, name)(", failing))
        monkeypatch.setattr(sandbox, "CHILD", child)
        fresh_probe()
        assert f"{call}: not today" in sandbox.why_not_isolated()
        monkeypatch.setattr(sandbox, "isolated", lambda: True)
        with pytest.raises(ValueError, match=f"{call}: not today"):
            run("def f(x): return 2 * x")


def test_other_systems(monkeypatch, fresh_probe):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.delenv(sandbox.UNSANDBOXED, raising=False)
    fresh_probe()
    assert "Linux" in sandbox.why_not_isolated()
    with pytest.raises(ValueError, match="Linux"):
        sandbox.isolated()
    monkeypatch.setenv(sandbox.UNSANDBOXED, "1")
    with pytest.raises(ValueError, match="Linux"):
        run("def f(x): return 2 * x")
