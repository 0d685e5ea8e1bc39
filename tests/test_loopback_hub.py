"""The Hub for tests, judged by the clients of the real one: huggingface_hub, datasets and transformers."""

import contextlib
import hashlib
import json
import re
import socket
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import httpx2
import pytest
from datasets import Dataset
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants
from huggingface_hub.errors import (
    HfHubHTTPError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils.sha import git_hash

SERVER = Path(__file__).with_name("loopback_hub.py")
REPO = "tester/repo"


@contextlib.contextmanager
def serving(root, *options, command=(SERVER,)):
    """A server of its own: its address, the environment of its clients, what it logged, and `api(token)`."""
    command = [sys.executable, *command, root, "0", *options]
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    try:
        ready, port = server.stdout.readline().split()
        assert ready == "ready"
        url = f"http://127.0.0.1:{port}"
        env = {"HF_ENDPOINT": url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": "hf_x"}
        yield SimpleNamespace(
            url=url,
            env=env,
            root=root,
            port=int(port),
            process=server,
            api=lambda token="hf_x": HfApi(endpoint=url, token=token),
            log=lambda: (root / "access.log").read_text().splitlines(),
        )
    finally:
        server.kill()
        server.wait()


@pytest.fixture(scope="module")
def seed(tmp_path_factory):
    """A folder with one dataset, tester/seeded: two configurations, the first with two splits, one of two shards."""
    root = tmp_path_factory.mktemp("seed")
    folder = root / "datasets/tester/seeded"
    for path, rows in {
        "first/train-00000-of-00002": range(5),
        "first/train-00001-of-00002": range(5, 8),
        "first/test-00000-of-00001": range(2),
        "second/train-00000-of-00001": range(3),
    }.items():
        Dataset.from_dict({"x": list(rows)}).to_parquet(folder / f"{path}.parquet")
    files = {name: f"data_files: [{{split: train, path: {name}/train-*}}" for name in ("first", "second")}
    files["first"] += ", {split: test, path: first/test-*}"
    configs = "".join(f"- {{config_name: {name}, {data}]}}\n" for name, data in files.items())
    (folder / "README.md").write_text(f"---\nconfigs:\n{configs}---\n# Seeded\n")
    return root


@pytest.fixture(scope="module")
def served(tmp_path_factory, seed):
    with serving(tmp_path_factory.mktemp("hub"), "--seed", seed) as hub:
        yield hub


@pytest.fixture(autouse=True)
def online(monkeypatch):
    """Here the client in this process reaches the server; conftest.py has it offline."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)


@pytest.fixture
def repo(served, request):
    """The name of a new model repository with a small file and an LFS file."""
    name = "tester/" + re.sub(r"[^\w]", "-", request.node.name).strip("-")
    served.api().create_repo(name)
    served.api().create_commit(name, [add("a.txt", b"a"), add("w.bin", b"weights")], commit_message="first")
    return name


def add(path, data):
    return CommitOperationAdd(path, data)


def contents(api, repo, revision=None, **kwargs):
    """{path: bytes} of every file of a revision, downloaded and compared with the hashes that the tree tells."""
    found = {}
    for entry in api.list_repo_tree(repo, revision=revision, recursive=True, **kwargs):
        if hasattr(entry, "tree_id"):
            continue
        url = f"{api.endpoint}/{repo}/resolve/{revision or 'main'}/{entry.path}"
        data = urllib.request.urlopen(url).read()
        assert len(data) == entry.size
        if entry.lfs:
            assert hashlib.sha256(data).hexdigest() == entry.lfs.sha256
        else:
            assert git_hash(data) == entry.blob_id
        found[entry.path] = data
    del found[".gitattributes"]
    return found


@contextlib.contextmanager
def refused(status, error=HfHubHTTPError, match=None):
    with pytest.raises(error, match=match) as caught:
        yield
    assert type(caught.value) is error
    assert caught.value.response.status_code == status


# Repositories


@pytest.mark.parametrize("kind", ["model", "dataset"])
def test_repository_is_made_and_deleted(served, kind):
    api, name = served.api(), "tester/made"
    url = api.create_repo(name, repo_type=kind)
    assert (url.repo_id, url.repo_type) == (name, kind)
    assert api.create_repo(name, repo_type=kind, exist_ok=True) == url
    with refused(409):
        api.create_repo(name, repo_type=kind)
    info = api.repo_info(name, repo_type=kind)
    assert (info.id, info.author, info.private) == (name, "tester", False)
    assert [sibling.rfilename for sibling in info.siblings] == [".gitattributes"]
    assert [commit.title for commit in api.list_repo_commits(name, repo_type=kind)] == ["initial commit"]
    api.delete_repo(name, repo_type=kind)
    assert not api.repo_exists(name, repo_type=kind)
    with refused(404, RepositoryNotFoundError):
        api.delete_repo(name, repo_type=kind)
    api.delete_repo(name, repo_type=kind, missing_ok=True)


def test_accounts(served):
    assert served.api().whoami()["name"] == "tester"
    assert served.api("hf_read").whoami()["auth"]["accessToken"]["role"] == "read"
    with refused(401, match="Invalid user token"):
        served.api("hf_other").whoami()


def test_what_is_missing_is_named(served, repo, tmp_path):
    api = served.api()
    for missing, error in [
        ({"repo_id": "tester/none", "filename": "a.txt"}, RepositoryNotFoundError),
        ({"repo_id": repo, "filename": "a.txt", "revision": "none"}, RevisionNotFoundError),
        ({"repo_id": repo, "filename": "a.txt", "revision": "0" * 40}, RevisionNotFoundError),
        ({"repo_id": repo, "filename": "none.txt"}, RemoteEntryNotFoundError),
    ]:
        with refused(404, error):
            api.hf_hub_download(**missing, cache_dir=tmp_path)
    assert list(tmp_path.rglob(".no_exist/*/none.txt")), "the client was told of which commit the file is missing"
    with refused(404, RevisionNotFoundError):
        api.model_info(repo, revision="none/\n日本")
    with refused(404, RemoteEntryNotFoundError):
        list(api.list_repo_tree(repo, "none"))
    with refused(404, RevisionNotFoundError):
        api.create_commit(repo, [add("b.txt", b"b")], commit_message="b", revision="none")
    with refused(404, RemoteEntryNotFoundError):
        api.delete_file("none.txt", repo)
    assert api.get_paths_info(repo, ["none.txt"]) == []


def test_private_repository_is_hidden_without_a_token(served, tmp_path):
    name = "tester/private"
    served.api().create_repo(name, private=True)
    served.api().create_commit(name, [add("w.bin", b"weights")], commit_message="first")
    for token in ("hf_x", "hf_read"):
        assert served.api(token).model_info(name).private
        path = served.api(token).hf_hub_download(name, "w.bin", cache_dir=tmp_path / token)
        assert Path(path).read_bytes() == b"weights"
    for absent in (name, "tester/none"):
        with refused(401, RepositoryNotFoundError):
            served.api(False).model_info(absent)
        with refused(401, RepositoryNotFoundError):
            served.api(False).hf_hub_download(absent, "w.bin", cache_dir=tmp_path / "none")


@pytest.mark.parametrize(("token", "status"), [("hf_read", 403), (False, 401), ("hf_other", 401)])
def test_who_may_not_write_changes_nothing(served, repo, token, status):
    api, before = served.api(token), served.api().list_repo_refs(repo)
    for write in (
        lambda: api.create_repo("tester/not_made"),
        lambda: api.delete_repo(repo),
        lambda: api.create_commit(repo, [add("a.txt", b"b")], commit_message="b"),
        lambda: api.create_commit(repo, [add("a.txt", b"b")], commit_message="b", create_pr=True),
        lambda: api.create_commit(repo, [CommitOperationDelete("a.txt")], commit_message="b"),
        lambda: api.create_branch(repo, branch="v2"),
        lambda: api.create_tag(repo, tag="v1"),
        lambda: api.delete_branch(repo, branch="main"),
    ):
        with refused(status):
            write()
    assert served.api().list_repo_refs(repo) == before
    assert not served.api().repo_exists("tester/not_made")
    if token != "hf_other":
        assert contents(api, repo) == {"a.txt": b"a", "w.bin": b"weights"}


# Commits


def test_folder_is_uploaded(served, repo, tmp_path):
    """LFS and small files, in folders; what was there and is not sent again stays, unless a pattern names it."""
    api = served.api()
    odd = "é and ü#?%.md"
    files = {"w.bin": b"new", "large.txt": b"x" * (10 * 2**20 + 1), "sub/b.json": b"{}", f"sub/{odd}": b"\0", "0": b""}
    for path, data in files.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(data)
    first = api.model_info(repo).sha
    commit = api.upload_folder(repo_id=repo, folder_path=tmp_path, commit_message="up", commit_description="all")
    assert commit.repo_url.repo_id == repo
    assert api.model_info(repo).sha == commit.oid
    entries = {entry.path: entry for entry in api.list_repo_tree(repo, recursive=True)}
    assert {path for path, entry in entries.items() if getattr(entry, "lfs", None)} == {"w.bin", "large.txt"}
    assert {path for path, entry in entries.items() if hasattr(entry, "tree_id")} == {"sub"}
    assert [entry.path for entry in api.list_repo_tree(repo, "sub")] == ["sub/b.json", f"sub/{odd}"]
    top = {entry.path for entry in api.list_repo_tree(repo)}
    assert top == {".gitattributes", "a.txt", "w.bin", "large.txt", "0", "sub"}
    assert {entry.path for entry in api.get_paths_info(repo, ["sub", "0"])} == {"sub", "0"}
    folder = served.root / "models" / repo / "commits" / commit.oid
    on_disk = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert on_disk == {".gitattributes", "a.txt", *files}
    snapshot = Path(api.snapshot_download(repo, cache_dir=tmp_path / "cache"))
    assert {path: (snapshot / path).read_bytes() for path in files} == files

    # the first commit is what it was, and an upload that changes nothing makes none
    assert contents(api, repo, first) == {"a.txt": b"a", "w.bin": b"weights"}
    assert api.upload_folder(repo_id=repo, folder_path=tmp_path, ignore_patterns="cache/*").oid == commit.oid
    second = api.upload_folder(repo_id=repo, folder_path=tmp_path / "sub", delete_patterns=["*.txt", "sub/b*"])
    assert set(api.list_repo_files(repo)) == {".gitattributes", "w.bin", "0", f"sub/{odd}", "b.json", odd}
    api.delete_folder("sub", repo)
    assert set(api.list_repo_files(repo)) == {".gitattributes", "w.bin", "0", "b.json", odd}

    history = api.list_repo_commits(repo)
    assert [commit.title for commit in history[2:]] == ["up", "first", "initial commit"]
    assert (history[1].commit_id, history[2].message) == (second.oid, "all")
    assert history == sorted(history, key=lambda commit: commit.created_at, reverse=True)
    assert len(api.model_info(repo, files_metadata=True).siblings) == 5


def test_ranges(served, repo):
    def get(value):
        request = urllib.request.Request(f"{served.url}/{repo}/resolve/main/w.bin", headers={"Range": value})
        with urllib.request.urlopen(request) as answer:
            return answer.status, answer.headers["Content-Range"], answer.read()

    assert get("bytes=0-2") == (206, "bytes 0-2/7", b"wei")
    assert get("bytes=5-99") == (206, "bytes 5-6/7", b"ts")
    assert get("bytes=3-") == (206, "bytes 3-6/7", b"ghts")
    assert get("bytes=-2") == (206, "bytes 5-6/7", b"ts")
    with pytest.raises(urllib.error.HTTPError, match="416"):
        get("bytes=7-")


def test_branches_and_tags(served, repo):
    api = served.api()
    first = api.model_info(repo).sha
    api.create_tag(repo, tag="v1")
    api.create_branch(repo, branch="next/2")
    with refused(409):
        api.create_branch(repo, branch="next/2")
    with refused(409):
        api.create_tag(repo, tag="v1")
    api.create_branch(repo, branch="next/2", exist_ok=True)
    second = api.create_commit(repo, [add("a.txt", b"b")], commit_message="b", revision="next/2").oid
    api.create_branch(repo, branch="old", revision=first)
    refs = api.list_repo_refs(repo, include_pull_requests=True)
    assert {ref.name: ref.target_commit for ref in refs.branches} == {"main": first, "next/2": second, "old": first}
    assert [(ref.name, ref.ref, ref.target_commit) for ref in refs.tags] == [("v1", "refs/tags/v1", first)]
    assert refs.pull_requests == []
    for revision, data in {"main": b"a", "v1": b"a", "old": b"a", second: b"b"}.items():
        assert contents(api, repo, revision)["a.txt"] == data
    assert api.model_info(repo, revision="next/2").sha == second
    assert Path(api.hf_hub_download(repo, "a.txt", revision="next/2", cache_dir=served.root / "c")).read_bytes() == b"b"
    with refused(404, RevisionNotFoundError):
        api.create_commit(repo, [add("a.txt", b"c")], commit_message="c", revision="v1")
    api.delete_branch(repo, branch="next/2")
    api.delete_tag(repo, tag="v1")
    assert api.model_info(repo, revision=second).sha == second
    for revision in ("next/2", "v1"):
        with refused(404, RevisionNotFoundError):
            api.model_info(repo, revision=revision)


def test_pull_requests(served, repo):
    api = served.api()
    first = api.model_info(repo).sha
    pull = api.create_commit(repo, [add("a.txt", b"b")], commit_message="b", create_pr=True)
    assert (pull.pr_num, pull.pr_revision) == (1, "refs/pr/1")
    api.create_commit(repo, [add("c.txt", b"c")], commit_message="c", revision="refs/pr/1")
    assert {"a.txt", "c.txt"} < set(api.list_repo_files(repo, revision="refs/pr/1"))
    assert api.model_info(repo).sha == first
    api.create_commit(repo, [add("a.txt", b"d")], commit_message="d")
    # from a commit that is no longer the newest one
    commit = api.create_commit(repo, [add("e.bin", b"e")], commit_message="e", create_pr=True, parent_commit=first)
    assert contents(api, repo, commit.oid) == {"a.txt": b"a", "w.bin": b"weights", "e.bin": b"e"}
    refs = api.list_repo_refs(repo, include_pull_requests=True)
    assert [ref.ref for ref in refs.pull_requests] == ["refs/pr/1", "refs/pr/2"]


def test_commit_upon_another_parent_is_refused(served, repo):
    api = served.api()
    first = api.model_info(repo).sha
    second = api.create_commit(repo, [add("a.txt", b"b")], commit_message="b", parent_commit=first).oid
    with refused(412, match="A commit has happened since. Please refresh and try again."):
        api.create_commit(repo, [add("a.txt", b"c")], commit_message="c", parent_commit=first)
    assert api.model_info(repo).sha == second


def test_one_of_the_commits_upon_a_parent_wins(served, repo):
    api, outcomes = served.api(), []
    first = api.model_info(repo).sha

    def commit(number):
        try:
            files = [add(f"{number}/{name}", b"%d" % number) for name in range(20)]
            outcomes.append(api.create_commit(repo, files, commit_message="race", parent_commit=first).oid)
        except HfHubHTTPError as error:
            outcomes.append(error.response.status_code)

    threads = [threading.Thread(target=commit, args=[number]) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes.count(412) == 7
    assert api.model_info(repo).sha in outcomes
    assert len(contents(api, repo)) == 22


@pytest.mark.parametrize(
    "operation",
    [
        {"key": "file", "value": {"path": "../../escaped", "content": "x"}},
        {"key": "file", "value": {"path": "/escaped", "content": "x"}},
        {"key": "file", "value": {"path": "a.txt/b", "content": "x"}},
        {"key": "lfsFile", "value": {"path": "x.bin", "oid": "0" * 64}},
        {"key": "lfsFile", "value": {"path": "x.bin", "oid": "../visibility"}},
        {"key": "renamed", "value": {"path": "a.txt"}},
    ],
)
def test_bad_commit_is_refused_as_a_whole(served, operation):
    name, api = "tester/bad", served.api()
    api.create_repo(name, exist_ok=True)
    api.create_commit(name, [add("a.txt", b"a"), add("w.bin", b"weights")], commit_message="a")
    before = api.model_info(name).sha
    lines = [{"key": "header", "value": {"summary": "bad"}}, {"key": "file", "value": {"path": "b", "content": "b"}}]
    body = "\n".join(map(json.dumps, [*lines, operation])).encode()
    url, token = f"{served.url}/api/models/{name}/commit/main", {"Authorization": "Bearer hf_x"}
    with pytest.raises(urllib.error.HTTPError, match="400"):
        urllib.request.urlopen(urllib.request.Request(url, body, token, method="POST"))
    assert api.model_info(name).sha == before
    assert not list(served.root.rglob("escaped"))


# Interruptions


def test_upload_of_a_killed_client_goes_on(served, repo, tmp_path, fresh_process):
    """The old commit stays, and what had arrived is not sent again."""
    api, before = served.api(), served.api().model_info(repo).sha
    folder, log = tmp_path / "folder", served.root / "access.log"
    folder.mkdir()
    for name in "xyz":
        (folder / f"{name}.bin").write_bytes(name.encode() * 3_000_000)
    (folder / "b.txt").write_text("b")
    code = """
    import contextlib, os, signal, sys, time
    from pathlib import Path
    from huggingface_hub import CommitOperationAdd, HfApi
    repo, folder, log = sys.argv[1:]
    whole = CommitOperationAdd.as_file

    def others_arrived():
        return sum(line.startswith(f"PUT /lfs/models/{repo}/") for line in Path(log).read_text().splitlines()) == 3

    @contextlib.contextmanager
    def as_file(self, with_tqdm=False):
        with whole(self) as file:
            yield Dying(file) if self.path_in_repo == "z.bin" and with_tqdm else file

    class Dying:
        def __init__(self, file):
            self.file = file
        def __getattr__(self, name):
            return getattr(self.file, name)
        def read(self, size):
            if self.file.tell() > 1_000_000:
                until = time.monotonic() + 30
                while not others_arrived() and time.monotonic() < until:
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)
            return self.file.read(size)

    CommitOperationAdd.as_file = as_file
    HfApi().upload_folder(repo_id=repo, folder_path=folder)
    """
    with pytest.raises(AssertionError):
        fresh_process(code, repo, folder, log, env=served.env)

    def sent():
        return sum(line.startswith(f"PUT /lfs/models/{repo}/") for line in served.log())

    assert sent() == 3  # w.bin, x.bin and y.bin
    assert api.model_info(repo).sha == before
    objects = served.root / "models" / repo / "lfs"
    assert len(list(objects.iterdir())) == 3
    assert {hashlib.sha256(path.read_bytes()).hexdigest() for path in objects.iterdir()} == {
        path.name for path in objects.iterdir()
    }
    api.upload_folder(repo_id=repo, folder_path=folder)
    assert sent() == 4
    assert set(contents(api, repo)) == {"a.txt", "b.txt", "w.bin", "x.bin", "y.bin", "z.bin"}


def test_half_a_commit_is_none(served, repo):
    """The client dies while it sends a commit, behind a line that is whole."""
    before = served.api().model_info(repo).sha
    lines = [{"key": "header", "value": {"summary": "half"}}, {"key": "file", "value": {"path": "b", "content": "b"}}]
    body = "".join(json.dumps(line) + "\n" for line in lines)
    head = f"POST /api/models/{repo}/commit/main HTTP/1.1\r\nAuthorization: Bearer hf_x\r\nContent-Length: 1000\r\n\r\n"
    with socket.create_connection(("127.0.0.1", served.port)) as client:
        client.sendall((head + body).encode())
        client.shutdown(socket.SHUT_WR)
        assert client.recv(1) == b""  # the server has given up
    assert served.api().model_info(repo).sha == before
    assert not list((served.root / "scratch").iterdir())


# A server that dies, as if killed, before the n-th thing it does to the disk (but for its log) once `armed` is there.
DIES = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv.pop(1))
dies_at, armed, done = int(sys.argv.pop(1)), Path(sys.argv[1]) / "armed", 0

def count(event, arguments):
    global done
    changes = event in ("os.mkdir", "os.rename", "os.link", "os.remove", "os.rmdir")
    changes = changes or (event == "open" and isinstance(arguments[1], str) and set("wa") & set(arguments[1]))
    if changes and not str(arguments[0]).endswith("access.log") and armed.exists():
        done += 1
        if done == dies_at:
            os._exit(9)

sys.addaudithook(count)
import loopback_hub
loopback_hub.main()
"""


def test_commit_of_a_killed_server_is_there_or_not(tmp_path):
    """Wherever it dies: main is the old commit or the new one, whole, and the next server takes the commit again."""
    old, new = {"a.txt": b"a", "w.bin": b"weights"}, {"a.txt": b"b", "sub/c.txt": b"c", "w.bin": b"weights"}
    with serving(tmp_path) as hub:
        hub.api().create_repo(REPO)
        first = hub.api().create_commit(REPO, [add(*item) for item in old.items()], commit_message="first").oid
    histories = []
    while "second" not in histories[-1:]:
        with serving(tmp_path, command=("-S", "-c", DIES, SERVER.parent, str(len(histories) + 1))) as hub:
            history = [commit.title for commit in hub.api().list_repo_commits(REPO)]
            assert history in (["first", "initial commit"], ["second", "first", "initial commit"])
            assert contents(hub.api(), REPO) == (new if history[0] == "second" else old)
            assert not list((tmp_path / "scratch").iterdir())
            histories.append(history[0])
            (tmp_path / "armed").touch()
            with contextlib.suppress(httpx2.TransportError, HfHubHTTPError):  # the server died; the last one has it
                files = [add("a.txt", b"b"), add("sub/c.txt", b"c")]
                hub.api().create_commit(REPO, files, commit_message="second", parent_commit=first)
            (tmp_path / "armed").unlink()
    assert 10 < len(histories) < 100
    assert histories.count("second") == 1


# datasets and transformers


def test_datasets(served, module_process):
    code = """
    import json
    from datasets import Dataset, DatasetDict, get_dataset_config_names, load_dataset
    from huggingface_hub import HfApi
    found = {"configs": get_dataset_config_names("tester/seeded")}
    for config in found["configs"]:
        for split, rows in load_dataset("tester/seeded", config).items():
            streamed = load_dataset("tester/seeded", config, split=split, streaming=True)
            assert [row["x"] for row in streamed] == rows["x"][:]
            found[f"{config} {split}"] = rows["x"][:]
    DatasetDict(train=Dataset.from_dict({"y": [1, 2]})).push_to_hub("tester/pushed_rows", "one")
    first = HfApi().dataset_info("tester/pushed_rows").sha
    Dataset.from_dict({"y": [3]}).push_to_hub("tester/pushed_rows", "one")
    found["newer"] = load_dataset("tester/pushed_rows", "one")["train"]["y"][:]
    found["older"] = load_dataset("tester/pushed_rows", "one", revision=first)["train"]["y"][:]
    print(json.dumps(found))
    """
    found = json.loads(module_process(code, env=served.env).splitlines()[-1])
    assert found.pop("configs") == ["first", "second"]
    assert found.pop("newer") == [3]
    assert found.pop("older") == [1, 2]
    assert found == {"first train": [*range(8)], "first test": [0, 1], "second train": [0, 1, 2]}


def test_seeds_are_not_written_to(served, seed):
    files = {path: path.read_bytes() for path in seed.rglob("*") if path.is_file()}
    api, kind = served.api(), {"repo_type": "dataset"}
    commits = api.list_repo_commits("tester/seeded", **kind)
    assert len(commits) == 1
    api.upload_file(path_or_fileobj=b"changed", path_in_repo="README.md", repo_id="tester/seeded", **kind)
    api.upload_file(path_or_fileobj=b"# Seeded", path_in_repo="README.md", repo_id="tester/seeded", **kind)
    assert {path: path.read_bytes() for path in seed.rglob("*") if path.is_file()} == files


@pytest.mark.slow
def test_transformers(served, tiny, tokenizer, input_ids, tmp_path, module_process):
    """A model with its code, of a revision, in a process that has only what the Hub gives."""
    import torch

    for seed in (0, 1):
        tiny(seed=seed).save_pretrained(tmp_path / str(seed))
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    code = """
    import sys
    from transformers import AutoTokenizer
    from laplacian_heads import LaplaceGPTForCausalLM
    for seed in "01":
        model = LaplaceGPTForCausalLM.from_pretrained(f"{sys.argv[1]}/{seed}")
        print(model.push_to_hub("tester/tiny").oid)
    AutoTokenizer.from_pretrained(f"{sys.argv[1]}/tokenizer").push_to_hub("tester/tiny")
    """
    first, second = module_process(code, tmp_path, can_import=True, env=served.env).split()
    code = """
    import json, sys
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    ids, *revisions = sys.argv[1:]
    for revision in revisions:
        model = AutoModelForCausalLM.from_pretrained("tester/tiny", revision=revision, trust_remote_code=True)
        with torch.no_grad():
            print(model.eval()(torch.tensor(json.loads(ids))).logits.double().sum().item(), type(model).__module__)
    print(len(AutoTokenizer.from_pretrained("tester/tiny", trust_remote_code=True)))
    """
    *lines, length = module_process(code, input_ids.tolist(), first, "main", env=served.env).splitlines()
    assert length == "300"
    for seed, line in enumerate(lines):
        with torch.no_grad():
            assert float(line.split()[0]) == tiny(seed=seed)(input_ids).logits.double().sum().item()
    assert first in lines[0]
