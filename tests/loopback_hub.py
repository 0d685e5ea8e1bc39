"""A Hub on 127.0.0.1 for tests: what huggingface_hub, datasets and transformers ask of it, answered as the Hub does.

    python tests/loopback_hub.py ROOT PORT [--seed FOLDER]

prints `ready PORT` when it serves; PORT 0 takes a free one. Everything lies in ROOT, and a server that was killed
goes on from there: what becomes visible does so by one rename, a branch after the commit that it points to. FOLDER
has datasets/OWNER/NAME/ and models/OWNER/NAME/, the files of repositories to begin with; nothing is written there.
ROOT/access.log has a line for every request: method, path, status.
"""

import argparse
import base64
import contextlib
import hashlib
import json
import re
import shutil
import tempfile
import threading
import traceback
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from urllib.parse import parse_qs, quote, unquote, urlsplit

USER = "tester"
TOKENS = {"hf_x": "write", "hf_read": "read"}  # whoever brings no token reads what is public
LFS = "7z arrow bin bz2 ckpt gguf gz h5 jpg model npy npz onnx parquet pickle pkl png pt pth safetensors tar xz zip zst"
LFS_SUFFIXES = tuple(f".{suffix}" for suffix in LFS.split())
LARGEST_REGULAR_FILE = 10 * 2**20
PIECE = 2**20  # bytes in memory of a file that comes


class Refused(Exception):
    """An answer that is not a success: its status, message, X-Error-Code, other headers, and more of its body."""

    def __init__(self, status, message, code=None, headers=(), **body):
        super().__init__(message)
        self.status, self.body = status, {"error": message, **body}
        line = re.sub(r"[^ -~]", "?", message)  # a header has no other letters
        self.headers = {"X-Error-Message": line, **({"X-Error-Code": code} if code else {}), **dict(headers)}


def git_oid(data):
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def lfs_entry(sha256, size):
    """What a tree says of an LFS file. Its blob is a pointer."""
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()
    lfs = {"oid": sha256, "size": size, "pointerSize": len(pointer)}
    return {"oid": git_oid(pointer), "size": size, "lfs": lfs}


def is_lfs(path, size):
    return path.endswith(LFS_SUFFIXES) or size > LARGEST_REGULAR_FILE


def publish(source, target):
    """Make what was written elsewhere on the disk visible, as a whole."""
    target.parent.mkdir(parents=True, exist_ok=True)
    source.replace(target)


def listing(tree):
    """{path: what the Hub tells} for every file and folder of a tree."""
    files = {path: {"type": "file", "path": path, **entry} for path, entry in tree.items()}
    inside = {}
    for path in tree:
        for parent in PurePosixPath(path).parents[:-1]:  # the last is the root
            inside.setdefault(str(parent), []).append((path, tree[path]["oid"]))
    for folder, entries in inside.items():
        oid = hashlib.sha1(json.dumps(sorted(entries)).encode()).hexdigest()
        files[folder] = {"type": "directory", "path": folder, "oid": oid, "size": 0}
    return dict(sorted(files.items()))


class Repository:
    """The folder of one repository.

    commits/OID       the files of a commit, hard links where commits share them
    records/OID.json  its parent, title, message, date and tree, {path: oid, size, lfs}; OID is the record's hash
    refs/NAME         the OID of a branch, tag or pull request; NAME is like refs/heads/main, quoted
    lfs/SHA256        the LFS objects that were uploaded
    visibility        public or private; without it there is no repository
    """

    def __init__(self, folder, scratch):
        self.folder = folder
        self.scratch = scratch  # scratch(): a temporary folder on the same disk
        self.kind, self.name = folder.parts[-3], "/".join(folder.parts[-2:])

    @property
    def visibility(self):
        file = self.folder / "visibility"
        return file.read_text() if file.exists() else None

    @property
    def refs(self):
        """{refs/...: OID}"""
        return {unquote(file.name): file.read_text() for file in sorted((self.folder / "refs").iterdir())}

    def resolve(self, revision):
        """(OID, record) of a branch, a tag, refs/... or an OID."""
        refs = self.refs
        names = (f"refs/heads/{revision}", f"refs/tags/{revision}", revision)
        oid = next((refs[name] for name in names if name in refs), revision)
        record = self.folder / "records" / f"{oid}.json"
        if not re.fullmatch("[0-9a-f]{40}", oid) or not record.exists():
            raise Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return oid, json.loads(record.read_text())

    def set_ref(self, name, oid):
        self._write(self.folder / "refs" / quote(name, safe=""), oid)

    def delete_ref(self, name):
        (self.folder / "refs" / quote(name, safe="")).unlink()

    def store(self, content):
        """Keep an LFS object, given piece by piece, and return its sha256."""
        digest = hashlib.sha256()
        with self.scratch() as scratch:
            with (scratch / "object").open("wb") as file:
                for piece in content:
                    digest.update(piece)
                    file.write(piece)
            publish(scratch / "object", self.folder / "lfs" / digest.hexdigest())
        return digest.hexdigest()

    def commit(self, ref, parent, operations, title, message=""):
        """Point `ref` to a new commit: `parent` and the operations of a payload upon it. Returns its OID."""
        files = {}  # {path: (its entry in the tree, the bytes or where they lie)}
        if parent:
            parent, before = self.resolve(parent)
            files = {path: (entry, self.folder / "commits" / parent / path) for path, entry in before["tree"].items()}
        for operation in operations:
            self._apply(files, operation["key"], **operation["value"])
        date = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        tree = {path: entry for path, (entry, _) in files.items()}
        record = json.dumps({"parent": parent, "title": title, "message": message, "date": date, "tree": tree})
        oid = hashlib.sha1(record.encode()).hexdigest()
        with self.scratch() as scratch:
            (scratch / "files").mkdir()
            for path, (_, source) in files.items():
                file = scratch / "files" / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.hardlink_to(source) if isinstance(source, Path) else file.write_bytes(source)
            publish(scratch / "files", self.folder / "commits" / oid)
        self._write(self.folder / "records" / f"{oid}.json", record)
        self.set_ref(ref, oid)
        return oid

    def _apply(self, files, key, path, content="", encoding="", oid="", **_):
        """Carry out one operation of a payload upon `files`."""
        path = path.rstrip("/")
        inside = [name for name in files if name.startswith(f"{path}/")]
        if key in ("deletedFile", "deletedFolder"):
            gone = inside if key == "deletedFolder" else [path] if path in files else []
            if not gone:
                raise Refused(404, f"A file with this name doesn't exist: {path}", "EntryNotFound")
            for name in gone:
                del files[name]
            return
        if {"", ".", "..", ".git"} & set(path.split("/")):
            raise Refused(400, f"Invalid path: {path}")
        if inside or any(str(parent) in files for parent in PurePosixPath(path).parents):
            raise Refused(400, f"{path} would be a file and a folder")
        if key == "file":
            data = base64.b64decode(content) if encoding == "base64" else content.encode()
            files[path] = {"oid": git_oid(data), "size": len(data)}, data
        elif key == "lfsFile":
            stored = self.folder / "lfs" / oid
            if not re.fullmatch("[0-9a-f]{64}", oid) or not stored.exists():
                reason = "an LFS pointer pointed to a file that does not exist"
                raise Refused(400, f"Your push was rejected because {reason}. Offending file: - {path}")
            files[path] = lfs_entry(oid, stored.stat().st_size), stored
        else:
            raise Refused(400, f"Unknown operation {key}")

    def _write(self, path, text):
        with self.scratch() as scratch:
            (scratch / "text").write_text(text)
            publish(scratch / "text", path)


class Hub(ThreadingHTTPServer):
    """The repositories below a folder, ROOT/{models,datasets}/OWNER/NAME, served on 127.0.0.1."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, root, port):
        super().__init__(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.root = root
        self.locks = {}
        shutil.rmtree(root / "scratch", ignore_errors=True)  # what a killed server was at
        (root / "scratch").mkdir(parents=True)

    @contextlib.contextmanager
    def scratch(self):
        with tempfile.TemporaryDirectory(dir=self.root / "scratch") as folder:
            yield Path(folder)

    def repository(self, kind, name):
        return Repository(self.root / kind / name, self.scratch)

    def lock(self, repository):
        """Held by whoever moves a ref, or makes or removes the repository."""
        return self.locks.setdefault(repository.folder, threading.Lock())

    def create(self, repository, visibility="public", source=None):
        """Make a repository with one commit: the files of the folder `source`, and .gitattributes."""
        attributes = "".join(f"*{suffix} filter=lfs diff=lfs merge=lfs -text\n" for suffix in LFS_SUFFIXES)
        operations = [{"key": "file", "value": {"path": ".gitattributes", "content": attributes}}]
        with self.scratch() as scratch:
            new = Repository(scratch / "owner" / "name", self.scratch)
            for path in sorted(source.rglob("*")) if source else ():
                if not path.is_file():
                    continue
                value = {"path": path.relative_to(source).as_posix()}
                if is_lfs(path.name, path.stat().st_size):
                    with path.open("rb") as file:
                        oid = new.store(iter(lambda file=file: file.read(PIECE), b""))
                    operations.append({"key": "lfsFile", "value": {**value, "oid": oid}})
                else:
                    content = base64.b64encode(path.read_bytes()).decode()
                    operations.append({"key": "file", "value": {**value, "content": content, "encoding": "base64"}})
            new.commit("refs/heads/main", None, operations, "initial commit")
            (new.folder / "visibility").write_text(visibility)
            publish(new.folder, repository.folder)

    def delete(self, repository):
        with self.scratch() as scratch:
            publish(repository.folder, scratch / "deleted")

    def seed(self, folder):
        """Make the repositories whose files lie in a folder, but for those that are here already."""
        for source in sorted([*folder.glob("models/*/*"), *folder.glob("datasets/*/*")]):
            repository = self.repository(source.parts[-3], "/".join(source.parts[-2:]))
            if not repository.visibility:
                self.create(repository, source=source)


NAME = r"(?P<name>\w[\w.-]*/\w[\w.-]*)"
API = rf"/api/(?P<kind>models|datasets)/{NAME}"
GIT = rf"/(?:(?P<kind>datasets)/)?{NAME}"
REVISION = r"(?P<revision>[^/]+)"
OBJECT = rf"/lfs/(?P<kind>models|datasets)/{NAME}/(?P<oid>[0-9a-f]{{64}})"
ROUTES = []


def route(methods, pattern, role=None):
    """The method below answers such requests. `role` is what the token must allow; None: no token is needed.

    The method gets a Repository in place of the kind and name in the path, and the other groups of the pattern.
    """

    def register(method):
        ROUTES.append((methods.split(), re.compile(pattern), role, method))
        return method

    return register


class Handler(BaseHTTPRequestHandler):
    """One connection: finds the route of each request and sends its answer, or why it is refused."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are two packets; the second would wait for an acknowledgement

    def answer(self):
        url = urlsplit(self.path)
        self.query = {key: values[-1] for key, values in parse_qs(url.query).items()}
        self.left = int(self.headers.get("Content-Length", 0))  # bytes of the body that were not read
        try:
            try:
                if "Transfer-Encoding" in self.headers:
                    self.close_connection = True  # where this body ends is not known
                    raise Refused(411, "The Hub for tests wants Content-Length")
                self._find(url.path)
            except Refused as refused:
                self.send(refused.body, refused.status, refused.headers)
            except ConnectionError:
                raise
            except Exception as error:
                traceback.print_exc()
                self.send({"error": repr(error)}, 500)
        except ConnectionError:  # the client is gone
            self.close_connection = True

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = answer

    def _find(self, path):
        for methods, pattern, role, method in ROUTES:
            if self.command in methods and (match := pattern.fullmatch(path)):
                parts = {key: value and unquote(value) for key, value in match.groupdict().items()}
                if "name" in parts:
                    kind = parts.pop("kind") or "models"
                    parts["repository"] = self.server.repository(kind, parts.pop("name"))
                self._admit(role, parts.get("repository"))
                method(self, **parts)
                return
        raise Refused(404, f"The Hub for tests has no {self.command} {path}")

    def _admit(self, needed, repository):
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        self.role = TOKENS.get(token)
        if token and not self.role:
            raise Refused(401, "Invalid credentials in Authorization header")
        if repository:
            visibility = repository.visibility
            if not visibility or (visibility == "private" and needed and not self.role):
                # Alike, for whether a private one exists is private too; without a token, the Hub says 401 for both.
                raise Refused(404 if self.role else 401, "Repository not found", "RepoNotFound")
        if needed == "write" and self.role != "write":
            message = f"The token may only {self.role}" if self.role else "Invalid username or password."
            raise Refused(403 if self.role else 401, message)

    def body(self):
        """The body of the request, piece by piece. ConnectionError if the client goes away before its end."""
        while self.left:
            piece = self.rfile.read(min(self.left, PIECE))
            if not piece:
                raise ConnectionError("the body ends too early")
            self.left -= len(piece)
            yield piece

    def json(self):
        return json.loads(b"".join(self.body()) or b"{}")

    def send_headers(self, status, headers):
        for _ in self.body():  # what is left of it is not the next request
            pass
        with (self.server.root / "access.log").open("a") as log:  # before the answer: who has it finds the line
            log.write(f"{self.command} {self.path} {status}\n")
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, str(value))
        self.end_headers()

    def send(self, value, status=200, headers=()):
        data = json.dumps(value).encode()
        self.send_headers(status, {"Content-Type": "application/json", "Content-Length": len(data), **dict(headers)})
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *arguments):
        pass

    # Accounts and repositories

    @route("GET", "/api/whoami-v2", "read")
    def whoami(self):
        if not self.role:
            raise Refused(401, "Invalid username or password.")
        token = {"type": "access_token", "accessToken": {"displayName": self.role, "role": self.role}}
        self.send({"type": "user", "id": USER, "name": USER, "fullname": USER, "orgs": [], "auth": token})

    @route("POST", "/api/validate-yaml")
    def validate_yaml(self):
        self.send({"errors": [], "warnings": []})

    @route("POST", "/api/repos/create", "write")
    def create(self):
        asked, repository = self._named()
        visibility = asked.get("visibility") or ("private" if asked.get("private") else "public")
        answer = {"url": self._url(repository), "name": repository.name}
        with self.server.lock(repository):
            if repository.visibility:
                raise Refused(409, f"You already created this repo: {repository.name}", **answer)
            self.server.create(repository, visibility)
        self.send(answer)

    @route("DELETE", "/api/repos/delete", "write")
    def delete(self):
        _, repository = self._named()
        with self.server.lock(repository):
            if not repository.visibility:
                raise Refused(404, "Repository not found", "RepoNotFound")
            self.server.delete(repository)
        self.send({})

    def _named(self):
        asked = self.json()
        kind, name = asked.get("type") or "model", f"{asked.get('organization') or USER}/{asked['name']}"
        if kind not in ("model", "dataset") or not re.fullmatch(NAME, name):
            raise Refused(400, f"The Hub for tests has no {kind} named {name}")
        return asked, self.server.repository(f"{kind}s", name)

    def _url(self, repository):
        return f"{self.server.url}/{'datasets/' if repository.kind == 'datasets' else ''}{repository.name}"

    @route("GET", rf"{API}(?:/revision/{REVISION})?", "read")
    def info(self, repository, revision):
        oid, record = repository.resolve(revision or "main")
        siblings = [{"rfilename": path} for path in record["tree"]]
        if "blobs" in self.query:
            for sibling, entry in zip(siblings, record["tree"].values(), strict=True):
                lfs = {"lfs": {**entry["lfs"], "sha256": entry["lfs"]["oid"]}} if "lfs" in entry else {}
                sibling.update(blobId=entry["oid"], size=entry["size"], **lfs)
        name = {"_id": repository.name, "id": repository.name, "author": repository.name.split("/")[0], "sha": oid}
        state = {"private": repository.visibility == "private", "gated": False, "disabled": False, "tags": []}
        self.send({**name, **state, "lastModified": record["date"], "siblings": siblings})

    # Revisions

    @route("GET", rf"{API}/refs", "read")
    def refs(self, repository):
        found = {"branches": [], "tags": [], "converts": [], "pullRequests": []}
        lists = {"refs/heads/": "branches", "refs/tags/": "tags", "refs/pr/": "pullRequests"}
        for ref, oid in repository.refs.items():
            start = ref[: ref.index("/", len("refs/")) + 1]
            name = ref if start == "refs/pr/" else ref.removeprefix(start)
            found[lists[start]].append({"name": name, "ref": ref, "targetCommit": oid})
        self.send(found)

    @route("POST", rf"{API}/branch/{REVISION}", "write")
    def create_branch(self, repository, revision):
        self._create_ref(repository, f"refs/heads/{revision}", self.json().get("startingPoint", "main"))

    @route("POST", rf"{API}/tag/{REVISION}", "write")
    def create_tag(self, repository, revision):
        self._create_ref(repository, f"refs/tags/{self.json()['tag']}", revision)

    def _create_ref(self, repository, ref, start):
        with self.server.lock(repository):
            if ref in repository.refs:
                raise Refused(409, f"Reference already exists: {ref}")
            repository.set_ref(ref, repository.resolve(start)[0])
        self.send({})

    @route("DELETE", rf"{API}/(?P<group>branch|tag)/{REVISION}", "write")
    def delete_ref(self, repository, group, revision):
        ref = f"refs/{'heads' if group == 'branch' else 'tags'}/{revision}"
        if ref == "refs/heads/main":
            raise Refused(403, "main cannot be deleted")
        with self.server.lock(repository):
            if ref not in repository.refs:
                raise Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")
            repository.delete_ref(ref)
        self.send({})

    @route("GET", rf"{API}/commits/{REVISION}", "read")
    def commits(self, repository, revision):
        found = []
        while revision:
            oid, record = repository.resolve(revision)
            told = {key: record[key] for key in ("title", "message", "date")}
            found.append({"id": oid, "authors": [{"user": USER}], **told})
            revision = record["parent"]
        self.send(found)

    # Files

    @route("GET", rf"{API}/tree/{REVISION}(?:/(?P<folder>.+))?", "read")
    def tree(self, repository, revision, folder):
        entries = listing(repository.resolve(revision)[1]["tree"])
        prefix = f"{folder.strip('/')}/" if folder else ""
        if prefix and prefix[:-1] not in entries:
            raise Refused(404, f"{folder} does not exist on {revision}", "EntryNotFound")
        deep = self.query.get("recursive", "").lower() in ("true", "1")
        below = [path for path in entries if path.startswith(prefix) and (deep or "/" not in path[len(prefix) :])]
        self.send([entries[path] for path in below])

    @route("POST", rf"{API}/paths-info/{REVISION}", "read")
    def paths_info(self, repository, revision):
        paths = parse_qs(b"".join(self.body()).decode()).get("paths", [])
        entries = listing(repository.resolve(revision)[1]["tree"])
        self.send([entries[path] for path in dict.fromkeys(path.strip("/") for path in paths) if path in entries])

    @route("GET HEAD", rf"{GIT}/resolve/{REVISION}/(?P<path>.+)", "read")
    def resolve(self, repository, revision, path):
        commit, record = repository.resolve(revision)
        if path not in record["tree"]:
            raise Refused(404, "Entry not found", "EntryNotFound", {"X-Repo-Commit": commit})
        entry = record["tree"][path]
        size, etag = entry["size"], f'"{entry.get("lfs", entry)["oid"]}"'
        headers = {"ETag": etag, "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        headers["Content-Type"] = "application/octet-stream"
        if "lfs" in entry:
            headers |= {"X-Linked-Etag": etag, "X-Linked-Size": size}
        start, end, status = 0, size, 200
        if wanted := re.fullmatch(r"bytes=(?:(\d+)-(\d*)|-(\d+))", self.headers.get("Range", "")):
            first, last, tail = wanted.groups()
            start = int(first) if first else max(0, size - int(tail))
            end, status = min(size, int(last) + 1 if last else size), 206
            if start >= end:
                raise Refused(416, "Range not satisfiable", headers={"Content-Range": f"bytes */{size}"})
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
        with (repository.folder / "commits" / commit / path).open("rb") as file:
            self.send_headers(status, {**headers, "Content-Length": end - start})
            if self.command == "GET" and size:
                self.connection.sendfile(file, start, end - start)

    # Uploads: which files are LFS, their objects, the commit

    @route("POST", rf"{API}/preupload/{REVISION}", "write")
    def preupload(self, repository, revision):
        tree, told = repository.resolve(revision)[1]["tree"], []
        for file in self.json()["files"]:
            mode = "lfs" if is_lfs(file["path"], file["size"]) else "regular"
            entry = tree.get(file["path"], {"oid": None})
            oid = entry.get("lfs", entry)["oid"]  # a file that has this hash already is not committed
            told.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self.send({"files": told})

    @route("POST", rf"{GIT}\.git/info/lfs/objects/batch", "write")
    def lfs_batch(self, repository):
        objects = [{"oid": each["oid"], "size": each["size"]} for each in self.json()["objects"]]
        for each in objects:
            if not (repository.folder / "lfs" / each["oid"]).exists():
                href = {"href": f"{self.server.url}/lfs/{repository.kind}/{repository.name}/{each['oid']}"}
                each["actions"] = {"upload": href, "verify": href}
        self.send({"transfer": "basic", "objects": objects})

    @route("PUT", OBJECT)  # as with the Hub's signed addresses, whoever was told one needs no token
    def lfs_upload(self, repository, oid):
        if repository.store(self.body()) != oid:
            raise Refused(400, f"What was sent is not {oid}")
        self.send({})

    @route("POST", OBJECT, "write")
    def lfs_verify(self, repository, oid):
        stored = repository.folder / "lfs" / oid
        if not stored.exists() or stored.stat().st_size != self.json()["size"]:
            raise Refused(404, f"{oid} was not uploaded")
        self.send({})

    @route("POST", rf"{API}/commit/{REVISION}", "write")
    def commit(self, repository, revision):
        header, *operations = (json.loads(line) for line in b"".join(self.body()).splitlines())
        header, answer = header["value"], {"success": True, "hookOutput": ""}
        ref = revision if revision.startswith("refs/pr/") else f"refs/heads/{revision}"
        with self.server.lock(repository):
            refs = repository.refs
            if ref not in refs:
                raise Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")
            parent = header.get("parentCommit", refs[ref])
            if self.query.get("create_pr") == "1":
                number = 1 + sum(name.startswith("refs/pr/") for name in refs)
                ref, answer["pullRequestUrl"] = f"refs/pr/{number}", f"{self._url(repository)}/discussions/{number}"
            elif parent != refs[ref]:
                raise Refused(412, "A commit has happened since. Please refresh and try again.")
            oid = repository.commit(ref, parent, operations, header["summary"], header.get("description", ""))
        self.send({**answer, "commitOid": oid, "commitUrl": f"{self._url(repository)}/commit/{oid}"})


def main():
    parser = argparse.ArgumentParser(description="A Hub on 127.0.0.1 for tests.")
    parser.add_argument("root", type=Path)
    parser.add_argument("port", type=int)
    parser.add_argument("--seed", type=Path, metavar="FOLDER", help="the files of repositories to begin with")
    arguments = parser.parse_args()
    with Hub(arguments.root.resolve(), arguments.port) as hub:
        if arguments.seed:
            hub.seed(arguments.seed)
        print("ready", hub.server_port, flush=True)
        hub.serve_forever()


if __name__ == "__main__":
    main()
