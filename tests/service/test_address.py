"""The address clients use: behind a proxy under a path, and by TLS."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

import ridgeline.service.pages as pages
from ridgeline.core.config import ServiceConfig
from ridgeline.core.errors import ConfigError
from ridgeline.service.address import Address

from .live import MODEL, behaviour, counts, live

WEB = Path(pages.__file__).parent / "web"
ABSOLUTE = re.compile(r"""(?:src|href|action)="/|\b(?:fetch|import|open)\(\s*["'`]/|from\s+["'`]/""")


# --- a path before every route --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("root_path", ["/llm", "/a/b.c-d", "/llm/"])
def test_a_proxy_may_keep_or_strip_the_path(root_path: str) -> None:
    prefix = root_path.rstrip("/")
    with live(behaviour(counts), root_path=root_path, api_key="secret") as server:
        key = {"authorization": "Bearer secret"}
        assert server.server.url == f"http://127.0.0.1:{server.port}{prefix}"
        for start in (prefix, ""):
            assert server.send("GET", f"{start}/v1/models", headers=key).json["data"][0]["id"] == MODEL
            assert server.send("GET", f"{start}/requests?order=slowest&limit=3", headers=key).status == 200
            assert server.send("POST", f"{start}/tokenize", {"prompt": "hi"}, key).status == 200
            assert server.get(f"{start}/health").status == server.get(f"{start}/chat").status == 200
            assert server.get(f"{start}/dashboard/chat/main.js").status == 200
            for path in ("/v1/models", "/metrics", "/nowhere", "//health", "/../health", "/%2e/health"):
                assert server.get(start + path).status == 401, start + path
            assert server.get(start or "/").json["chat"] == f"{prefix}/chat"
            page = server.send("GET", start or "/", headers={"accept": "text/html"})
            assert f'<base href="{prefix}/">'.encode() in page.data, (
                "links are right with and without a slash at the end"
            )
            assert server.get(f"{start}/openapi.json").json["servers"] == [{"url": prefix}]
        for path in (f"{prefix}{prefix}/health", f"{prefix}x/health", f"/x{prefix}/health"):
            assert server.send("GET", path, headers=key).status == 404


@pytest.mark.parametrize("root_path", ["llm", "//", "/a//b", "http://a.example/llm", "/a b", "/a?b", "/ü"])
def test_a_path_that_no_proxy_has_is_refused(root_path: str) -> None:
    if root_path == "//":
        assert Address.read(ServiceConfig(root_path=root_path)).prefix == ""
        return
    with pytest.raises(ConfigError, match="root_path is"):
        Address.read(ServiceConfig(root_path=root_path))


@pytest.mark.parametrize("file", sorted(WEB.glob("*.[hj]*[ls]")), ids=lambda file: file.name)
def test_addresses_in_the_pages_are_relative(file: Path) -> None:
    """So that they work under any path, and whether a proxy strips it or not."""
    assert not ABSOLUTE.search(file.read_text())


@pytest.mark.parametrize(("host", "url"), [("::1", "http://[::1]:80/llm"), ("localhost", "http://localhost:80/llm")])
def test_the_announced_address(host: str, url: str) -> None:
    assert Address.read(ServiceConfig(host=host, root_path="/llm")).url(80) == url


# --- TLS ------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with certificates for localhost that they sign themselves, and their keys."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs the program openssl")
    folder = tmp_path_factory.mktemp("tls")

    def run(*words: str) -> None:
        subprocess.run([openssl, *words], cwd=folder, check=True, capture_output=True)

    subject = ("-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1")
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")
    for name in ("good", "other"):
        run("req", "-x509", *curve, "-nodes", "-keyout", f"{name}.key", "-out", f"{name}.pem", *subject)
    run("req", "-x509", *curve, "-passout", "pass:sesame", "-keyout", "locked.key", "-out", "locked.pem", *subject)
    (folder / "both.pem").write_text((folder / "good.key").read_text() + (folder / "good.pem").read_text())
    (folder / "text.pem").write_text("no certificate")
    return folder


@pytest.mark.parametrize(
    ("certificate", "key", "password"),
    [("good.pem", "good.key", None), ("both.pem", None, None), ("locked.pem", "locked.key", "sesame")],
)
def test_https(files: Path, certificate: str, key: str | None, password: str | None) -> None:
    options = {"ssl_keyfile": str(files / key) if key else None, "ssl_keyfile_password": password}
    with live(behaviour(counts), ssl_certfile=str(files / certificate), **options) as server:
        assert server.server.url == f"https://127.0.0.1:{server.port}"
        trust = ssl.create_default_context(cafile=str(files / certificate))
        connection = http.client.HTTPSConnection("localhost", server.port, timeout=10, context=trust)
        body = json.dumps({"prompt": "hi", "max_tokens": 2})
        headers = {"content-type": "application/json", "origin": f"https://localhost:{server.port}"}
        connection.request("POST", "/v1/completions", body, headers)
        response = connection.getresponse()
        assert response.status == 200 and json.loads(response.read())["usage"]["completion_tokens"] == 2
        connection.close()
        with pytest.raises((OSError, http.client.HTTPException)):
            server.get("/health")  # plain HTTP


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ssl_certfile": "missing.pem"}, r"ssl_certfile: .*missing\.pem cannot be read \(No such file"),
        ({"ssl_certfile": "good.pem", "ssl_keyfile": "missing.key"}, r"ssl_keyfile: .*missing\.key cannot be read"),
        ({"ssl_certfile": "good.pem", "ssl_keyfile": "other.key"}, r"ssl_keyfile: .*other\.key is not the key of .*good\.pem"),
        ({"ssl_certfile": "good.pem"}, "ssl_certfile: .*good.pem and its key are not valid PEM files .*give PEM files of both"),
        ({"ssl_certfile": "text.pem", "ssl_keyfile": "good.key"}, "ssl_certfile: .*text.pem and its key are not valid PEM files"),
        ({"ssl_certfile": "."}, "ssl_certfile: .* cannot be read"),
        ({"ssl_keyfile": "good.key"}, "ssl_keyfile is given without ssl_certfile"),
        ({"ssl_keyfile_password": "x"}, "ssl_keyfile_password is given without ssl_certfile"),
        ({"ssl_certfile": "locked.pem", "ssl_keyfile": "locked.key"},
         "ssl_keyfile: .*the key in .*locked.key is encrypted: give ssl_keyfile_password"),
        ({"ssl_certfile": "locked.pem", "ssl_keyfile": "locked.key", "ssl_keyfile_password": "wrong"},
         "ssl_keyfile_password: it does not decrypt the key in .*locked.key"),
    ],
)  # fmt: skip
def test_files_that_cannot_be_used_are_refused(files: Path, options: dict[str, str], message: str) -> None:
    full = {name: value if name.endswith("password") else str(files / value) for name, value in options.items()}
    with pytest.raises(ConfigError, match=message):
        Address.read(ServiceConfig(**full))
