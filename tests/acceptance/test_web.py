"""``celery dislock web`` as an operator starts it, and as somebody hostile talks to it."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request

import pytest

from celery_dislock import Dislock
from tests.acceptance.fleet import LIMIT, ROOT, wait_for
from tests.programs import missing

# As the entry point does, which an environment with a checkout on its path may not have.
PROGRAM = """
import signal, sys
# A shell's background job ignores Ctrl-C, and so does all that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
from celery.bin.celery import celery, main
from celery_dislock.operating.cli import dislock
celery.add_command(dislock)
sys.argv[0] = "celery"
main()
"""
APP = """
import os
from celery import Celery
app = Celery("shop", broker=os.environ["SHOP_BROKER_URL"])
"""


class NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_args):
        return None


OPENER = urllib.request.build_opener(NoRedirect)


class Server:
    """The command, in a process of its own."""

    def __init__(self, folder, url, *args):
        (folder / "shop.py").write_text(APP, "utf-8")
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, "-A", "shop", "dislock", "web", "--port", "0", *args],
            cwd=folder,
            env={
                **os.environ,
                "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}",
                "PYTHONUNBUFFERED": "1",
                "SHOP_BROKER_URL": url,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.line = self.process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:(\d+)(\S*)/(\S*)", self.line)
        assert found, self.line + self.process.stdout.read()
        self.port = int(found[1])
        self.address = f"http://127.0.0.1:{self.port}{found[2]}"
        self.token = found[3]  # as a query string

    def ask(self, path, form=None, **headers):
        """Return status, JSON and headers of an answer; follows no redirect."""
        data = None if form is None else urllib.parse.urlencode(form).encode()
        request = urllib.request.Request(self.address + path, data, headers)  # noqa: S310 -- ours
        try:
            with OPENER.open(request, timeout=LIMIT) as answer:
                return answer.status, json.loads(answer.read()), answer.headers
        except urllib.error.HTTPError as answer:
            with answer:
                is_json = answer.headers["Content-Type"] == "application/json"
                return answer.code, json.loads(answer.read()) if is_json else None, answer.headers

    def cookie(self, **headers):
        """Open the address that was printed; return the header with the cookie that it gives."""
        status, _, answer = self.ask(f"/{self.token}", **headers)
        assert status == 302
        return {"Cookie": answer["Set-Cookie"].partition(";")[0]}

    def stop(self, how=signal.SIGTERM):
        """End it; return its exit code and what it has printed."""
        if self.process.poll() is None:
            self.process.send_signal(how)
        try:
            printed, _ = self.process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            self.process.kill()
            printed, _ = self.process.communicate()
        return self.process.returncode, printed


IDLE = 300  # connections
BEFORE_THEY_ARE_CLOSED = 20  # seconds; those that say nothing are closed after thirty


@pytest.fixture
def serve(tmp_path, redis_url):
    """Start the command with these options."""
    with contextlib.ExitStack() as stack:

        def start(*args, url=redis_url):
            server = Server(tmp_path, url, *args)
            stack.callback(server.stop)
            return server

        yield start


@pytest.mark.extra
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_the_page_of_an_app_without_a_dislock(serve, redis_url, how):
    """On the loopback, and it ends without a traceback, as ^C ends it, too."""
    with Dislock.from_url(redis_url) as dislock, dislock.lock("export:7"):
        server = serve()
        status, told, headers = server.ask("/api/locks")
        assert status == 200
        assert [one["key"] for one in told["locks"]] == ["export:7"]
        assert "Server" not in headers
    assert server.line == f"The page is at {server.address}/ (^C ends it)\n"
    assert server.stop(how) == (0, "")


def test_what_is_no_http_is_refused_and_others_are_served(serve):
    """Broken lines, lengths and hosts, over a socket: an error, or the end of the connection."""
    server = serve("--allow-actions")
    post = b"POST /api/limit HTTP/1.1\r\nHost: localhost\r\n"
    for sent in (
        b"\0\xff\x16\x03\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /api/locks HTTP/1.1\r\n\r\n",  # names no host
        b"GET /api/locks HTTP/1.1\r\nHost: localhost\r\nX : y\r\n\r\n",
        b"GET /api/locks HTTP/1.1\r\nHost: " + b"a" * 10**5 + b"\r\n\r\n",
        post + b"Content-Length: -1\r\n\r\n",
        post + b"Content-Length: 99999999\r\n\r\n",
        post + b"Transfer-Encoding: gzip\r\n\r\n",
        post + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    ):
        with socket.create_connection(("127.0.0.1", server.port), LIMIT) as connection:
            connection.sendall(sent)
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(12)[9:10] in {b"", b"4", b"5"}, sent[:60]
        assert server.ask("/api/locks")[0] == 200
    assert server.stop()[1] == ""


@pytest.fixture
def nginx(tmp_path):
    """Start nginx with the block of the page about the page, in front of a port; gives its own."""
    program = shutil.which("nginx") or missing("nginx")
    text = (ROOT / "docs" / "how-to" / "web-page.md").read_text("utf-8")
    (block,) = re.findall(r"^location /locks/ \{.*?^\}$", text, re.MULTILINE | re.DOTALL)
    with contextlib.ExitStack() as stack:

        def start(port):
            with socket.create_server(("127.0.0.1", 0)) as free:
                own = free.getsockname()[1]
            folder = tmp_path / "nginx"
            folder.mkdir()
            temporary = "".join(
                f"{kind}_temp_path {folder}/{kind};\n"
                for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
            )
            (folder / "conf").write_text(
                f"daemon off; pid {folder}/pid; error_log {folder}/error;\n"
                "events { worker_connections 64; }\n"
                f"http {{ access_log off; {temporary} server {{ listen 127.0.0.1:{own};\n"
                f"{block.replace('127.0.0.1:8765', f'127.0.0.1:{port}')} }} }}\n"
            )
            command = [program, "-p", str(folder), "-e", f"{folder}/error", "-c", f"{folder}/conf"]
            process = subprocess.Popen(command)
            stack.callback(process.wait, LIMIT)
            stack.callback(process.terminate)

            def answers():
                assert process.poll() is None, (folder / "error").read_text()
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", own)):
                    return True

            wait_for("nginx answers", answers)
            return own

        yield start


def test_the_block_for_nginx_does_what_the_page_says(serve, nginx):
    """A form of the page is taken, also on another port, and nobody chooses another Host."""
    name = "ops.example.com"
    args = ("--allow-actions", "--allow-host", name, "--url-prefix", "/locks")
    server = serve(*args, "--trusted-proxy", "127.0.0.1")
    port = nginx(server.port)
    server.address = f"http://127.0.0.1:{port}/locks"
    host = {"Host": f"{name}:{port}"}
    form = {"name": "dislock:{export:7}", "limit": "0"}
    given = {**host, **server.cookie(**host)}
    assert server.ask("/api/limit", form, **given, Origin=f"http://{name}:{port}")[0] == 200
    assert server.ask("/api/limit", form, **given, Origin=f"http://{name}:1")[0] == 403
    assert server.ask("/api/locks", Host="evil.example")[0] == 400
    for forged in ("X-Forwarded-Host", "Forwarded", "X-Forwarded-Server"):
        header = {forged: f"host={name}" if forged == "Forwarded" else name}
        assert server.ask("/api/locks", Host="evil.example", **header)[0] == 400
        header = {forged: "host=localhost" if forged == "Forwarded" else "localhost"}
        assert server.ask("/api/locks", **host, **header)[0] == 403


def test_who_opens_many_connections_closes_the_page_to_nobody(serve):
    """They send nothing; the one that is idle for longest makes room, and the newest stay."""
    server = serve()
    with contextlib.ExitStack() as stack:
        address = ("127.0.0.1", server.port)
        idle = [stack.enter_context(socket.create_connection(address)) for _ in range(IDLE)]
        page = urllib.request.urlopen(server.address, timeout=BEFORE_THEY_ARE_CLOSED)  # noqa: S310
        assert stack.enter_context(page).status == 200
        idle[0].settimeout(LIMIT)
        assert idle[0].recv(1) == b""
        idle[-1].setblocking(False)
        with pytest.raises(BlockingIOError):
            idle[-1].recv(1)
