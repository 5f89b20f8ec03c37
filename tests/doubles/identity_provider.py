"""An identity provider with keys made here: signs any token, and serves what a provider serves, or breaks."""

import base64
import http.server
import json
import threading
import time
from typing import Any

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

AUDIENCE = "penstock"


class Key:
    """A signing key with a name."""

    def __init__(self, kid: str, algorithm: str = "RS256", *, bits: int = 2048, **jwk: Any) -> None:
        self.kid, self.algorithm = kid, algorithm
        if algorithm[:2] in ("RS", "PS"):
            self.private: Any = rsa.generate_private_key(public_exponent=65537, key_size=bits)
            public = RSAAlgorithm.to_jwk(self.private.public_key(), as_dict=True)
        elif algorithm == "ES256":
            self.private = ec.generate_private_key(ec.SECP256R1())
            public = ECAlgorithm.to_jwk(self.private.public_key(), as_dict=True)
        else:
            self.private = ed25519.Ed25519PrivateKey.generate()
            public = OKPAlgorithm.to_jwk(self.private.public_key(), as_dict=True)
        self.jwk = {
            k: v for k, v in {**public, "kid": kid, "use": "sig", "alg": algorithm, **jwk}.items() if v
        }
        self.jwk.pop("key_ops", None)

    @property
    def public_pem(self) -> bytes:
        return self.private.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )

    def sign(self, claims: dict[str, Any], *, algorithm: str | None = None, **header: Any) -> str:
        named = {"kid": self.kid, **header}
        headers = {name: value for name, value in named.items() if value is not None}
        return jwt.encode(claims, self.private, algorithm or self.algorithm, headers=headers)


def raw_token(header: object, claims: object, signature: bytes = b"") -> str:
    """A token as no library would make it."""

    def part(value: object) -> str:
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        return base64.urlsafe_b64encode(data).rstrip(b"=").decode()

    return ".".join([part(header), part(claims), part(signature)])


class IdentityProvider:
    """Serves its description and its keys over HTTP. `answer` replaces what the keys' address says."""

    def __init__(self, *keys: Key) -> None:
        self.keys = list(keys)
        self.fetches = 0
        self.answer: tuple[int, bytes] | None = None
        provider = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, body = provider._page(self.path)
                if status == 0:
                    self.wfile.write(body)  # Not HTTP at all.
                    return
                self.send_response(status)
                if status == 302:
                    self.send_header("Location", f"{provider.issuer}/jwks")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.issuer = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def _page(self, path: str) -> tuple[int, bytes]:
        if path == "/.well-known/openid-configuration":
            return 200, json.dumps({"issuer": self.issuer, "jwks_uri": f"{self.issuer}/jwks"}).encode()
        self.fetches += 1
        return self.answer or (200, self.jwks())

    def jwks(self) -> bytes:
        return json.dumps({"keys": [key.jwk for key in self.keys]}).encode()

    def claims(self, **changed: Any) -> dict[str, Any]:
        """Claims that are accepted, changed; a claim of None is left out."""
        now = int(time.time())
        claims = {"iss": self.issuer, "aud": AUDIENCE, "sub": "acme", "iat": now, "exp": now + 600, **changed}
        return {name: value for name, value in claims.items() if value is not None}

    def token(self, key: Key | None = None, **changed: Any) -> str:
        return (key or self.keys[0]).sign(self.claims(**changed))

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
