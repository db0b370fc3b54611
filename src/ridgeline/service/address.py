"""The address of the API: TLS, and the path prefix under which a proxy serves it."""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from ridgeline.core.config import ServiceConfig
from ridgeline.core.errors import ConfigError

_PREFIX = re.compile(r"(/[\w.~-]+)+", re.ASCII)


@dataclass(frozen=True, slots=True)
class Address:
    """host: as in the option. prefix: path before every route, "" or "/name" without a trailing slash.

    tls: None for HTTP without TLS.
    """

    host: str
    prefix: str
    tls: ssl.SSLContext | None

    @classmethod
    def read(cls, config: ServiceConfig) -> Address:
        """Raises ConfigError for a path or a file that cannot be used."""
        prefix = config.root_path.rstrip("/")
        if prefix and not _PREFIX.fullmatch(prefix):
            raise ConfigError(
                f"root_path is {config.root_path!r}: give a path of letters, digits and ._~- that begins with a slash, as in /llm.",
                param="root_path",
            )
        return cls(config.host, prefix, _read_tls(config))

    def url(self, port: int) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'http' if self.tls is None else 'https'}://{host}:{port}{self.prefix}"


def _read_tls(config: ServiceConfig) -> ssl.SSLContext | None:
    certificate, key = config.ssl_certfile, config.ssl_keyfile
    if not certificate:
        if key or config.ssl_keyfile_password:
            option = "ssl_keyfile" if key else "ssl_keyfile_password"
            raise ConfigError(f"{option} is given without ssl_certfile: give both.", param="ssl_certfile")
        return None
    for name, file in (("ssl_certfile", certificate), ("ssl_keyfile", key)):
        if file:
            _check_readable(name, file)
    key_option = "ssl_keyfile" if key else "ssl_certfile"
    encrypted = False

    def password() -> str:
        """Called for an encrypted key only. Without it, OpenSSL would ask on the terminal."""
        nonlocal encrypted
        encrypted = True
        if not config.ssl_keyfile_password:
            _refuse(key_option, f"the key in {key or certificate} is encrypted: give ssl_keyfile_password")
        return config.ssl_keyfile_password

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key or None, password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            _refuse(
                key_option, f"{key or certificate} is not the key of {certificate}: give the key that belongs to it"
            )
        if encrypted:
            _refuse(
                "ssl_keyfile_password", f"it does not decrypt the key in {key or certificate}: give the key's password"
            )
        _refuse(
            "ssl_certfile",
            f"{certificate} and its key are not valid PEM files ({error}): give PEM files of both",
        )
    return context


def _check_readable(name: str, file: str) -> None:
    try:
        Path(file).read_bytes()
    except OSError as error:
        _refuse(name, f"{file} cannot be read ({error.strerror}): give a PEM file")


def _refuse(name: str, problem: str) -> NoReturn:
    raise ConfigError(f"{name}: {problem}.", param=name)
