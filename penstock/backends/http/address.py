"""Where a worker listens, and whom TLS trusts."""

import ssl
from dataclasses import dataclass
from urllib.parse import urlsplit

from penstock.backends.http.limits import HttpLimits
from penstock.errors import ConfigError


@dataclass(slots=True, frozen=True)
class HttpAddress:
    """Where a worker listens: `http://host:port/base`."""

    scheme: str
    host: str
    port: int
    base: str
    """Path before every other path; empty or "/v1", never with a slash at its end."""

    @classmethod
    def parse(cls, url: str) -> "HttpAddress":
        """Read an address.

        Raises:
            ConfigError: it is no http or https URL with a host and without user, query or fragment.
        """
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"{url!r} is no address: {error}") from error
        plain = url.isascii() and url.isprintable() and " " not in url
        if parts.scheme not in {"http", "https"} or not parts.hostname or not plain:
            raise ConfigError(f"expected an address such as http://10.0.0.7:8000, got {url!r}")
        if "@" in parts.netloc or parts.query or parts.fragment:
            raise ConfigError("an address has no user, query or fragment; keys belong into the environment")
        return cls(
            parts.scheme,
            parts.hostname,
            port or (443 if parts.scheme == "https" else 80),
            parts.path.rstrip("/"),
        )

    @property
    def authority(self) -> str:
        """The `Host` header; IPv6 addresses are bracketed (RFC 9110, section 7.2)."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        is_default = self.port == (443 if self.scheme == "https" else 80)
        return host if is_default else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.base}"


def tls_context(config: HttpLimits) -> ssl.SSLContext:
    """Certificates and host names are verified, always; `ca_file` adds to whom the system trusts."""
    context = ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if config.ca_file:
        try:
            context.load_verify_locations(cafile=config.ca_file)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"backends.ca_file: {config.ca_file}: {reason_of(error)}") from error
    return context


def reason_of(error: OSError) -> str:
    """The system's own word for the trouble, without asyncio's wrapping."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted ({error.verify_message})"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed ({error.reason or error})"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    return error.strerror or str(error)
