"""Which path and verb go where, and who may go there."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from penstock.errors import MethodNotAllowed, NotFound
from penstock.gateway.admin import Admin
from penstock.gateway.auth import Caller
from penstock.gateway.entrance import Access
from penstock.gateway.exchange import Exchange
from penstock.gateway.generate import Generate
from penstock.gateway.inspect import Inspect

Handler = Callable[[Exchange, Caller], Awaitable[None]]


@dataclass(slots=True, frozen=True)
class Route:
    """What one path does."""

    access: Access
    handlers: Mapping[str, Handler]

    @property
    def allowed(self) -> tuple[str, ...]:
        """The verbs, as an `Allow` header lists them."""
        return (*self.handlers, *(("HEAD",) if "GET" in self.handlers else ()), "OPTIONS")

    def handler(self, method: str) -> Handler:
        """What answers this verb; HEAD is a GET whose body is not sent.

        Raises:
            MethodNotAllowed: nothing does.
        """
        handler = self.handlers.get("GET" if method == "HEAD" else method)
        if handler is None:
            allowed = self.allowed
            raise MethodNotAllowed(
                f"Method {method} is not allowed here. Allowed: {', '.join(allowed)}.", allowed=allowed
            )
        return handler


class Routes:
    """The table."""

    def __init__(self, generate: Generate, inspect: Inspect, admin: Admin) -> None:
        self._table = {
            "/": Route(Access.OPEN, {"GET": inspect.landing}),
            "/health": Route(Access.OPEN, {"GET": inspect.health}),
            "/ready": Route(Access.OPEN, {"GET": inspect.ready}),
            "/metrics": Route(Access.LOOK, {"GET": inspect.metrics}),
            "/status.json": Route(Access.LOOK, {"GET": inspect.status}),
            "/v1/chat/completions": Route(Access.KEY, {"POST": generate.chat}),
            "/v1/completions": Route(Access.KEY, {"POST": generate.completions}),
            "/v1/models": Route(Access.KEY, {"GET": inspect.list_models}),
            "/v1/tokenize": Route(Access.KEY, {"POST": inspect.tokenize}),
            "/v1/detokenize": Route(Access.KEY, {"POST": inspect.detokenize}),
            # vLLM has these two outside /v1, and its clients look for them there.
            "/tokenize": Route(Access.KEY, {"POST": inspect.tokenize}),
            "/detokenize": Route(Access.KEY, {"POST": inspect.detokenize}),
            "/admin/workers": Route(Access.ADMIN, {"GET": admin.workers}),
        }
        self._below = {
            "/v1/models/": Route(Access.KEY, {"GET": inspect.show_model}),
            "/admin/explain/": Route(Access.ADMIN, {"GET": admin.explain}),
            "/admin/workers/": Route(Access.ADMIN, {"POST": admin.order}),
        }
        """Paths that end in the name of something, which may hold slashes."""

    def find(self, path: str) -> Route:
        """The route of a path; a slash at its end does not matter.

        Raises:
            NotFound: there is none.
        """
        route = self._table.get(path) or self._table.get(path.rstrip("/"))
        if route is None:
            route = next((found for start, found in self._below.items() if path.startswith(start)), None)
        if route is None:
            raise NotFound(f"Unknown path: {path[:128]}. The API is under /v1.", code="unknown_path")
        return route
