"""Which path and verb go where, and who may go there."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from penstock.errors import MethodNotAllowed, NotFound
from penstock.gateway.api.admin import REQUESTS, WORKERS, Admin
from penstock.gateway.api.console import PATH as CONSOLE
from penstock.gateway.api.console import Console
from penstock.gateway.api.costs import CostsAdmin
from penstock.gateway.api.generate import Generate
from penstock.gateway.api.inspect import Inspect
from penstock.gateway.api.orders import ROLLOUTS, AdaptersAdmin, RolloutsAdmin, ScaleAdmin, SleepAdmin
from penstock.gateway.api.responses import PATH, Responses
from penstock.gateway.api.tenants import KEYS, TenantsAdmin
from penstock.gateway.api.vectors import VectorEndpoints
from penstock.gateway.http.errors import HttpFault
from penstock.gateway.http.exchange import JSON, Exchange, RequestHead
from penstock.gateway.identity.tenancy import Access
from penstock.gateway.identity.tenants import Caller

_POLLED = frozenset(
    (
        *("/health", "/ready", "/metrics", "/status.json"),
        *("/admin/workers", "/admin/history", "/admin/alerts", "/admin/audit", "/admin/costs"),
        *("/admin/scale", "/scale"),
    )
)
Handler = Callable[[Exchange, Caller], Awaitable[None]]


def is_poll(method: str, path: str, status: int) -> bool:
    """Whether a request is one of the many by which something watches us, and was answered; "not ready" is an
    answer.
    """
    looked = method in ("GET", "HEAD") and path.rstrip("/") in _POLLED
    return looked and (status < 400 or status == 503)


@dataclass(slots=True, frozen=True)
class Route:
    """The behaviour of one path."""

    access: Access
    handlers: Mapping[str, Handler]

    @property
    def allowed(self) -> tuple[str, ...]:
        """The verbs, as an `Allow` header lists them."""
        return (*self.handlers, *(("HEAD",) if "GET" in self.handlers else ()), "OPTIONS")

    def check_body(self, head: RequestHead) -> None:
        """Refuse a body that is not said to be JSON: one that says nothing is taken for it.

        Raises:
            HttpFault: it is something else.
        """
        kind = head.headers.get(b"content-type")
        if kind is None or self.access is not Access.KEY:
            return
        media = kind.partition(b";")[0].strip().lower()
        if media != JSON and not (media.startswith(b"application/") and media.endswith(b"+json")):
            raise HttpFault(
                415,
                f"The body must be JSON and say so with the header 'Content-Type: application/json', not "
                f"'{media[:64].decode('latin-1')}'.",
                code="unsupported_media_type",
            )

    def handler(self, method: str) -> Handler:
        """The handler of this verb; HEAD is a GET whose body is not sent.

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


class Answers(NamedTuple):
    """The endpoints whose answers a model gives."""

    generate: Generate
    responses: Responses
    vectors: VectorEndpoints
    around: Callable[[Handler], Handler]
    """Lets ensembles be asked for where models are."""


class Orders(NamedTuple):
    """Endpoints of operators, each a part of its own."""

    adapters: AdaptersAdmin
    nights: SleepAdmin
    costs: CostsAdmin
    rollouts: RolloutsAdmin
    scaling: ScaleAdmin


class Routes:
    """The table."""

    def __init__(
        self,
        answers: Answers,
        inspect: Inspect,
        admin: Admin,
        tenants: TenantsAdmin,
        console: Console,
        orders: Orders,
    ) -> None:
        generate, responses, vectors, around = answers
        self.at_once = frozenset((generate.chat, generate.completions))  # See `http/begun.py`.
        adapters, nights, costs, rollouts, scaling = orders
        self._table = {
            "/": Route(Access.OPEN, {"GET": console.landing}),
            "/console": Route(Access.OPEN, {"GET": console.page}),
            "/console/feed": Route(Access.LOOK, {"GET": console.feed}),
            "/health": Route(Access.OPEN, {"GET": inspect.health}),
            "/ready": Route(Access.OPEN, {"GET": inspect.ready}),
            "/metrics": Route(Access.LOOK, {"GET": inspect.metrics}),
            "/status.json": Route(Access.LOOK, {"GET": inspect.status}),
            "/v1/chat/completions": Route(Access.KEY, {"POST": around(generate.chat)}),
            "/v1/completions": Route(Access.KEY, {"POST": around(generate.completions)}),
            "/v1/responses": Route(Access.KEY, {"POST": responses.create}),
            "/v1/embeddings": Route(Access.KEY, {"POST": vectors.embeddings}),
            "/v1/rerank": Route(Access.KEY, {"POST": vectors.rerank}),
            "/v1/score": Route(Access.KEY, {"POST": vectors.score}),
            "/v1/models": Route(Access.KEY, {"GET": inspect.list_models}),
            "/v1/tokenize": Route(Access.KEY, {"POST": inspect.tokenize}),
            "/v1/detokenize": Route(Access.KEY, {"POST": inspect.detokenize}),
            "/v1/load_lora_adapter": Route(Access.ADMIN, {"POST": adapters.load}),
            "/v1/unload_lora_adapter": Route(Access.ADMIN, {"POST": adapters.unload}),
            # vLLM has these outside /v1, and its clients look for them there.
            "/rerank": Route(Access.KEY, {"POST": vectors.rerank}),
            "/score": Route(Access.KEY, {"POST": vectors.score}),
            "/tokenize": Route(Access.KEY, {"POST": inspect.tokenize}),
            "/detokenize": Route(Access.KEY, {"POST": inspect.detokenize}),
            "/admin/workers": Route(Access.ADMIN, {"GET": admin.workers}),
            "/admin/sleep": Route(Access.ADMIN, {"POST": nights.sleep}),
            "/admin/wake_up": Route(Access.ADMIN, {"POST": nights.wake_up}),
            "/admin/is_sleeping": Route(Access.ADMIN, {"GET": nights.is_sleeping}),
            "/admin/history": Route(Access.ADMIN, {"GET": admin.history}),
            "/admin/alerts": Route(Access.ADMIN, {"GET": admin.alerts}),
            "/admin/audit": Route(Access.ADMIN, {"GET": admin.audit}),
            "/admin/costs": Route(Access.ADMIN, {"GET": costs.costs}),
            "/scale": Route(Access.LOOK, {"GET": scaling.wanted}),
            "/admin/scale": Route(Access.ADMIN, {"GET": scaling.show, "POST": scaling.order}),
            "/admin/rollouts": Route(Access.ADMIN, {"GET": rollouts.show, "POST": rollouts.start}),
            "/admin/tenants": Route(Access.ADMIN, {"GET": tenants.tenants}),
            "/admin/keys": Route(Access.ADMIN, {"GET": tenants.keys, "POST": tenants.create}),
            "/admin/requests": Route(Access.ADMIN, {"GET": admin.requests}),
        }
        self._below = {
            PATH: Route(
                Access.KEY,
                {"GET": responses.show, "DELETE": responses.delete, "POST": responses.cancel},
            ),
            "/v1/models/": Route(Access.KEY, {"GET": inspect.show_model}),
            "/admin/explain/": Route(Access.ADMIN, {"GET": admin.explain}),
            WORKERS: Route(Access.ADMIN, {"GET": admin.worker, "POST": admin.order}),
            REQUESTS: Route(Access.ADMIN, {"GET": admin.request}),
            KEYS: Route(Access.ADMIN, {"POST": tenants.order}),
            ROLLOUTS: Route(Access.ADMIN, {"POST": rollouts.order}),
            CONSOLE: Route(Access.OPEN, {"GET": console.file}),
        }
        """Paths that end in the name of something, which may hold slashes."""

        known = [
            each for each, route in self._table.items() if each.startswith("/v1/") or "GET" in route.handlers
        ]
        self._known = f"{', '.join(known[:-1])} and {known[-1]}"

    def all(self) -> Mapping[str, Route]:
        """Every path; one that ends in a slash has a name behind it."""
        return {**self._table, **self._below}

    def find(self, path: str) -> Route:
        """The route of a path; a slash at its end does not matter.

        Raises:
            NotFound: there is none.
        """
        route = self._table.get(path) or self._table.get(path.rstrip("/"))
        if route is None:
            route = next((found for start, found in self._below.items() if path.startswith(start)), None)
        if route is None:
            raise NotFound(
                f"This server has no {path[:128]}. It has {self._known}.",
                code="unknown_path",
            )
        return route
