"""A small Hugging Face Hub on loopback: what the tests publish to and load from.

It speaks the part of the Hub's HTTP interface that the `huggingface_hub` client uses to create a repository, to upload
and to download, keeps everything in memory, and fails on demand:

    with HubServer() as hub:
        hub.fail("commit", status=500, times=2)         # the next two commits
        hub.fail("put", cut_after=10_000)               # the connection breaks in the middle of a large file
        HfApi(endpoint=hub.url, token=hub.WRITE).create_repo("org/draft")

Large files travel by LFS (basic and multipart). Xet is not offered: run the client with `HF_HUB_DISABLE_XET=1`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

LARGE_SUFFIXES = (".safetensors", ".png", ".gguf", ".bin")
LARGE_SIZE = 10_000_000
NAME = r"[\w.\-]+/[\w.\-]+"


@dataclass
class Failure:
    """An answer that replaces the server's own for the next `times` requests of one step."""

    step: str
    status: int
    times: int
    message: str
    headers: dict[str, str]
    cut_after: int | None
    after: int
    lose_answer: bool


@dataclass
class User:
    name: str
    role: str = "write"
    organisations: tuple[str, ...] = ("org",)


@dataclass
class Repository:
    """Branches and commits of one model repository; a commit is a complete listing of path -> content."""

    name: str
    private: bool = False
    refs: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    log: list[dict[str, Any]] = field(default_factory=list)

    def commit(self, ref: str, files: dict[str, bytes], message: str) -> str:
        digest = hashlib.sha1(f"{self.name}{ref}{message}{len(self.log)}".encode())
        for path in sorted(files):
            digest.update(path.encode() + hashlib.sha1(files[path]).digest())
        oid = digest.hexdigest()
        self.commits[oid] = dict(files)
        self.refs[ref] = oid
        self.log.append({"oid": oid, "ref": ref, "message": message, "files": sorted(files)})
        return oid

    def resolve(self, revision: str) -> str | None:
        return self.refs.get(revision) or (revision if revision in self.commits else None)

    def files(self, revision: str = "main") -> dict[str, bytes]:
        oid = self.resolve(revision)
        assert oid is not None, revision
        return self.commits[oid]


class Reply(Exception):
    """Ends the handling of a request with this answer."""

    def __init__(self, status: int, body: Any = None, headers: dict[str, str] | None = None):
        super().__init__(status)
        self.status, self.body, self.headers = status, body, headers or {}


def error(status: int, message: str, code: str | None = None, **headers: str) -> Reply:
    named = {"X-Error-Message": message, **({"X-Error-Code": code} if code else {}), **headers}
    return Reply(status, {"error": message}, named)


def git_oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class HubServer:
    """The server and its state. `url` is what `HF_ENDPOINT` takes; tests read `repositories` and `requests`."""

    WRITE, READ, STRANGER, BAD = "hf_write", "hf_read", "hf_stranger", "hf_bad"

    def __init__(self, chunk_size: int | None = None):
        self.chunk_size = chunk_size  # bytes of one part; None: large files travel in one piece
        self.users = {self.WRITE: User("writer"), self.READ: User("reader", role="read")}
        self.users[self.STRANGER] = User("stranger", organisations=())
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.parts: dict[str, dict[int, bytes]] = {}
        self.requests: list[tuple[str, str, str]] = []  # (step, method, path)
        self.failures: list[Failure] = []
        self.lock = threading.RLock()
        handler = type("Handler", (HubHandler,), {"hub": self})
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        self.storage_url = f"http://localhost:{self.http.server_port}"  # another host, as the Hub's storage is

    def __enter__(self) -> HubServer:
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()

    def fail(
        self,
        step: str,
        status: int = 500,
        times: int = 1,
        message: str = "told to fail",
        cut_after: int | None = None,
        after: int = 0,
        lose_answer: bool = False,
        **headers: str,
    ) -> None:
        """Make the next `times` requests of `step` fail, once `after` of them have gone through.

        With `cut_after` the connection breaks after that many bytes of the request's body, and no answer is sent. With
        `lose_answer` the request is carried out and the connection breaks instead of the answer.
        """
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        with self.lock:
            self.failures.append(Failure(step, status, times, message, named, cut_after, after, lose_answer))

    def next_failure(self, step: str) -> Failure | None:
        with self.lock:
            for failure in self.failures:
                if failure.step != step or failure.times < 1:
                    continue
                if failure.after > 0:
                    failure.after -= 1
                    return None
                failure.times -= 1
                return failure
        return None

    def count(self, step: str) -> int:
        return sum(1 for seen, _, _ in self.requests if seen == step)

    def add_repository(self, name: str, files: dict[str, bytes] | None = None, private: bool = False) -> Repository:
        repository = Repository(name, private=private)
        repository.commit("main", {".gitattributes": b"*.safetensors filter=lfs\n", **(files or {})}, "initial commit")
        self.repositories[name] = repository
        return repository


class HubHandler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    # -- plumbing ------------------------------------------------------------------------------------------------

    def log_message(self, format: str, *args: Any) -> None:
        """Silent: a test reads `HubServer.requests`."""

    def read_body(self, limit: int | None = None) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            return self.read_chunks(limit)
        length = int(self.headers.get("Content-Length") or 0)
        return self.rfile.read(length if limit is None else min(length, limit))

    def read_chunks(self, limit: int | None) -> bytes:
        body = bytearray()
        while size := int(self.rfile.readline().split(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
            if limit is not None and len(body) >= limit:
                return bytes(body)
        self.rfile.readline()
        return bytes(body)

    def send(self, status: int, body: Any = None, headers: dict[str, str] | None = None) -> None:
        payload = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "X-Request-Id": "test", **(headers or {})}
        headers.setdefault("Content-Length", str(len(payload)))
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(payload)

    def hang_up(self) -> None:
        self.close_connection = True
        self.connection.close()

    def handle_request(self) -> None:
        parts = urlsplit(self.path)
        self.query = parse_qs(parts.query)
        path = parts.path
        step, function, arguments = self.route(path)
        with self.hub.lock:
            self.hub.requests.append((step, self.command, path))
        failure = self.hub.next_failure(step)
        if failure and failure.cut_after is not None:
            self.read_body(limit=failure.cut_after)
            return self.hang_up()
        self.body = self.read_body()
        try:
            if failure and not failure.lose_answer:
                raise error(failure.status, failure.message, **failure.headers)
            with self.hub.lock:
                function(*arguments)
            raise AssertionError(f"{step} gave no answer")
        except Reply as reply:
            if failure and failure.lose_answer:
                return self.hang_up()
            self.send(reply.status, reply.body, reply.headers)

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    def route(self, path: str) -> tuple[str, Callable[..., None], tuple[str, ...]]:
        for method, pattern, step in ROUTES:
            if self.command in method.split("|") and (match := re.fullmatch(pattern, path)):
                return step, getattr(self, step), tuple(unquote(group) for group in match.groups())
        return "unknown", self.unknown, ()

    def unknown(self) -> None:
        raise error(404, f"no such endpoint: {self.command} {self.path}")

    # -- who may do what -----------------------------------------------------------------------------------------

    def user(self) -> User | None:
        header = self.headers.get("Authorization")
        if header is None:
            return None
        user = self.hub.users.get(header.removeprefix("Bearer "))
        if user is None:
            raise error(401, "Invalid credentials in Authorization header")
        return user

    def writer(self, name: str) -> User:
        user = self.user()
        if user is None:
            raise error(401, "Invalid username or password.")
        namespace = name.split("/")[0]
        if user.role != "write" or namespace not in (user.name, *user.organisations):
            raise error(403, f'You don\'t have the rights to write to the namespace "{namespace}"')
        return user

    def repository(self, name: str) -> Repository:
        found = self.hub.repositories.get(name)
        user = self.user()
        readable = found and (not found.private or (user and name.split("/")[0] in (user.name, *user.organisations)))
        if found is None or not readable:
            # The real Hub does not tell a missing repository from a private one.
            raise error(404 if user else 401, "Repository not found", "RepoNotFound")
        return found

    def commit_of(self, name: str, revision: str) -> tuple[Repository, str]:
        repository = self.repository(name)
        oid = repository.resolve(revision)
        if oid is None:
            raise error(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return repository, oid

    # -- repositories --------------------------------------------------------------------------------------------

    def whoami(self) -> None:
        user = self.user()
        if user is None:
            raise error(401, "Invalid username or password.")
        orgs = [{"name": name, "roleInOrg": user.role} for name in user.organisations]
        token = {"displayName": "test", "role": user.role}
        raise Reply(200, {"type": "user", "name": user.name, "orgs": orgs, "auth": {"accessToken": token}})

    def create(self) -> None:
        asked = json.loads(self.body)
        user = self.user()
        name = f"{asked.get('organization') or (user.name if user else '')}/{asked['name']}"
        self.writer(name)
        if name in self.hub.repositories:
            raise Reply(409, {"error": "You already created this model repo", "url": f"{self.hub.url}/{name}"})
        private = asked.get("private") or asked.get("visibility") == "private"
        self.hub.add_repository(name, private=bool(private))
        raise Reply(200, {"url": f"{self.hub.url}/{name}", "name": name})

    def branch(self, name: str, branch: str) -> None:
        self.writer(name)
        repository = self.repository(name)
        if branch in repository.refs:
            raise error(409, f"Reference already exists: {branch}")
        start = (json.loads(self.body) if self.body else {}).get("startingPoint", "main")
        repository.refs[branch] = self.commit_of(name, start)[1]
        raise Reply(200, {})

    def tag(self, name: str, revision: str) -> None:
        self.writer(name)
        repository, oid = self.commit_of(name, revision)
        wanted = json.loads(self.body)["tag"]
        if wanted in repository.refs:
            raise error(409, f"Tag already exists: {wanted}")
        repository.refs[wanted] = oid
        raise Reply(200, {})

    def info(self, name: str, revision: str = "main") -> None:
        repository, oid = self.commit_of(name, revision)
        siblings = [{"rfilename": path} for path in sorted(repository.commits[oid])]
        answer = {"id": name, "modelId": name, "sha": oid, "private": repository.private, "siblings": siblings}
        raise Reply(200, {**answer, "tags": [], "downloads": 0})

    def tree(self, name: str, revision: str, folder: str = "") -> None:
        repository, oid = self.commit_of(name, revision)
        prefix = f"{folder}/" if folder else ""
        found = {path: content for path, content in repository.commits[oid].items() if path.startswith(prefix)}
        if not found:
            raise error(404, f"{folder} does not exist", "EntryNotFound")
        raise Reply(200, [self.entry(repository, *item) for item in sorted(found.items())])

    def paths_info(self, name: str, revision: str) -> None:
        repository, oid = self.commit_of(name, revision)
        text = self.body.decode()
        asked = json.loads(text)["paths"] if text.startswith("{") else parse_qs(text).get("paths", [])
        files = repository.commits[oid]
        raise Reply(200, [self.entry(repository, path, files[path]) for path in asked if path in files])

    def entry(self, repository: Repository, path: str, content: bytes) -> dict[str, Any]:
        entry: dict[str, Any] = {"type": "file", "path": path, "size": len(content), "oid": git_oid(content)}
        if self.is_large(path, len(content)):
            entry["lfs"] = {"oid": sha256(content), "size": len(content), "pointerSize": 130}
        return entry

    @staticmethod
    def is_large(path: str, size: int) -> bool:
        return path.endswith(LARGE_SUFFIXES) or size > LARGE_SIZE

    # -- uploading -----------------------------------------------------------------------------------------------

    def yaml(self) -> None:
        if not json.loads(self.body)["content"].startswith("---\n"):
            raise Reply(400, {"errors": [{"message": "no metadata"}], "warnings": []})
        raise Reply(200, {"errors": [], "warnings": []})

    def may_write(self, name: str) -> None:
        # Anyone who may read may open a pull request.
        if self.query.get("create_pr") != ["1"]:
            self.writer(name)
        elif self.user() is None:
            raise error(401, "Invalid username or password.")

    def preupload(self, name: str, revision: str) -> None:
        self.may_write(name)
        repository, oid = self.commit_of(name, revision)
        answer = []
        for file in json.loads(self.body)["files"]:
            large = self.is_large(file["path"], file["size"])
            known = repository.commits[oid].get(file["path"])
            oid_now = None if known is None else sha256(known) if large else git_oid(known)
            mode = "lfs" if large else "regular"
            answer.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid_now})
        raise Reply(200, {"files": answer})

    def batch(self, name: str) -> None:
        if self.user() is None:
            raise error(401, "Invalid username or password.")
        answer = []
        for wanted in json.loads(self.body)["objects"]:
            entry = {"oid": wanted["oid"], "size": wanted["size"]}
            if wanted["oid"] not in self.hub.objects:
                entry["actions"] = self.upload_actions(wanted["oid"], wanted["size"])
            answer.append(entry)
        transfer = "multipart" if self.hub.chunk_size else "basic"
        raise Reply(200, {"transfer": transfer, "objects": answer})

    def upload_actions(self, oid: str, size: int) -> dict[str, Any]:
        verify = {"href": f"{self.hub.url}/lfs-verify"}
        chunk = self.hub.chunk_size
        if chunk is None or size <= chunk:
            return {"upload": {"href": f"{self.hub.url}/lfs-put/{oid}"}, "verify": verify}
        count = -(-size // chunk)
        header = {str(part): f"{self.hub.url}/lfs-put/{oid}/{part}" for part in range(1, count + 1)}
        complete = f"{self.hub.url}/lfs-complete/{oid}"
        return {"upload": {"href": complete, "header": {"chunk_size": str(chunk), **header}}, "verify": verify}

    def put(self, oid: str, part: str | None = None) -> None:
        if part is None:
            self.store(oid, self.body)
        else:
            self.hub.parts.setdefault(oid, {})[int(part)] = self.body
        raise Reply(200, None, {"ETag": f'"{hashlib.md5(self.body).hexdigest()}"'})

    def complete(self, oid: str) -> None:
        parts = self.hub.parts[oid]
        listed = [part["partNumber"] for part in json.loads(self.body)["parts"]]
        if listed != sorted(parts):
            raise error(400, f"parts {sorted(parts)} arrived, {listed} are listed")
        self.store(oid, b"".join(parts[number] for number in listed))
        raise Reply(200, {})

    def store(self, oid: str, content: bytes) -> None:
        if sha256(content) != oid:
            raise error(400, f"the content's SHA-256 is {sha256(content)}, not {oid}")
        self.hub.objects[oid] = content

    def verify(self) -> None:
        asked = json.loads(self.body)
        if len(self.hub.objects.get(asked["oid"], b"")) != asked["size"]:
            raise error(404, "object not found")
        raise Reply(200, {})

    def commit(self, name: str, revision: str) -> None:
        self.may_write(name)
        repository, oid = self.commit_of(name, revision)
        lines = [json.loads(line) for line in self.body.splitlines() if line]
        header = next(line["value"] for line in lines if line["key"] == "header")
        if header.get("parentCommit") not in (None, oid):
            raise error(412, "A commit has happened since. Please refresh and try again.")
        files = dict(repository.commits[oid])
        for line in lines:
            self.apply(files, line["key"], line["value"])
        pull = self.query.get("create_pr") == ["1"]
        number = 1 + sum(ref.startswith("refs/pr/") for ref in repository.refs)
        new = repository.commit(f"refs/pr/{number}" if pull else revision, files, header["summary"])
        answer = {"commitUrl": f"{self.hub.url}/{name}/commit/{new}", "commitOid": new}
        if pull:
            answer["pullRequestUrl"] = f"{self.hub.url}/{name}/discussions/{number}"
        raise Reply(200, answer)

    def apply(self, files: dict[str, bytes], key: str, value: dict[str, Any]) -> None:
        if key == "file":
            files[value["path"]] = base64.b64decode(value["content"])
        elif key == "lfsFile":
            if value["oid"] not in self.hub.objects:
                raise error(400, f"{value['path']} was never uploaded")
            files[value["path"]] = self.hub.objects[value["oid"]]
        elif key == "deletedFile" and files.pop(value["path"], None) is None:
            raise error(404, "A file with this name doesn't exist", "EntryNotFound")

    # -- downloading ---------------------------------------------------------------------------------------------

    def resolve(self, name: str, revision: str, path: str) -> None:
        repository, oid = self.commit_of(name, revision)
        commit = {"X-Repo-Commit": oid}
        content = repository.commits[oid].get(path)
        if content is None:
            raise error(404, f"Entry not found: {path}", "EntryNotFound", **commit)
        if self.is_large(path, len(content)):
            self.hub.objects[sha256(content)] = content
            linked = {"X-Linked-Etag": f'"{sha256(content)}"', "X-Linked-Size": str(len(content))}
            raise Reply(
                302, None, {**commit, **linked, "Location": f"{self.hub.storage_url}/lfs-get/{sha256(content)}"}
            )
        self.serve(content, {**commit, "ETag": f'"{git_oid(content)}"'})

    def get(self, oid: str) -> None:
        if oid not in self.hub.objects:
            raise error(404, "no such object")
        self.serve(self.hub.objects[oid], {"ETag": f'"{oid}"'})

    def serve(self, content: bytes, headers: dict[str, str]) -> None:
        headers = {"Content-Type": "application/octet-stream", "Accept-Ranges": "bytes", **headers}
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if match is None:
            raise Reply(200, content, {**headers, "Content-Length": str(len(content))})
        first, last = int(match[1]), int(match[2] or len(content) - 1)
        headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
        raise Reply(206, content[first : last + 1], headers)


ROUTES = [
    ("GET", r"/api/whoami-v2", "whoami"),
    ("POST", r"/api/repos/create", "create"),
    ("POST", r"/api/validate-yaml", "yaml"),
    ("GET", rf"/api/models/({NAME})", "info"),
    ("GET", rf"/api/models/({NAME})/revision/([^/]+)", "info"),
    ("GET", rf"/api/models/({NAME})/tree/([^/]+)", "tree"),
    ("GET", rf"/api/models/({NAME})/tree/([^/]+)/(.+)", "tree"),
    ("POST", rf"/api/models/({NAME})/paths-info/([^/]+)", "paths_info"),
    ("POST", rf"/api/models/({NAME})/branch/([^/]+)", "branch"),
    ("POST", rf"/api/models/({NAME})/tag/([^/]+)", "tag"),
    ("POST", rf"/api/models/({NAME})/preupload/([^/]+)", "preupload"),
    ("POST", rf"/api/models/({NAME})/commit/([^/]+)", "commit"),
    ("POST", rf"/({NAME})\.git/info/lfs/objects/batch", "batch"),
    ("PUT", r"/lfs-put/(\w+)", "put"),
    ("PUT", r"/lfs-put/(\w+)/(\d+)", "put"),
    ("POST", r"/lfs-complete/(\w+)", "complete"),
    ("POST", r"/lfs-verify", "verify"),
    ("GET|HEAD", rf"/({NAME})/resolve/([^/]+)/(.+)", "resolve"),
    ("GET|HEAD", r"/lfs-get/(\w+)", "get"),
]
