"""The error tree. A type says who can mend the trouble and whether trying again is safe.

    PenstockError
    ├── ClientError            the caller must change something; a retry fails the same way
    │   ├── InvalidRequest         a field is missing, mistyped or out of range     (400)
    │   │   ├── Unsupported        understood, and nothing here can do it           (400)
    │   │   ├── ContextTooLong     prompt and answer do not fit the model           (400)
    │   │   └── KVQuotaExceeded    they do not fit what one tenant may hold         (400)
    │   ├── Unauthenticated        no key, or a wrong one                           (401)
    │   ├── Forbidden              the caller is known and may not use this         (403)
    │   ├── NotFound               no such path or model                            (404)
    │   ├── MethodNotAllowed       the path exists, this verb on it does not        (405)
    │   ├── TooLarge               the body or the header is over its bound         (413)
    │   └── CrashingRequest          workers have died of its like                    (422)
    ├── Overloaded             no one is at fault; safe to retry later              (429/503)
    │   ├── LimitReached           the tenant's own limit, for some seconds or more (429)
    │   │   └── BudgetExhausted        its money for this day or month is spent       (429)
    │   ├── Evicted                accepted, then dropped before it was finished    (503)
    │   ├── Draining               this server is going away                        (503)
    │   ├── WorkerBusy             a worker has no room, and may have said when     (429)
    │   ├── WorkerEjected          its worker is not trusted: it moves elsewhere    (503)
    │   └── IdentityUnavailable    the identity provider cannot be asked            (503)
    ├── WorkerError            a worker's trouble; the caller may retry
    │   ├── WorkerUnavailable      nothing was sent yet: another worker may be tried  (503)
    │   │   ├── KeyRejected            it does not accept this server's key for it    (503)
    │   │   └── AttemptTimeout         no first token in time                         (503)
    │   ├── StreamBroken           tokens were already sent: resume, never restart    (502)
    │   ├── EnsembleFailed         a step before or after the model failed            (500)
    │   ├── EngineFault            the engine failed this request alone (NaN logits)  (500)
    │   ├── WeightsDamaged         what it computes with is not what was loaded: it ends
    │   └── DeviceFault            its device or its machine's memory is lost: it ends
    └── OperatorError          the operator must mend it
        ├── ConfigError            a config key or value
        ├── CheckpointError        a model directory that cannot be served
        └── LedgerError            the usage ledger's directory or database

Bugs are asserts, not members of this tree. `gateway/http/errors.py` alone turns types into HTTP. One bug has
a type: `NamespaceBreach`, for what it would do is worse than ending, so it is looked for under `python -O`
too.
"""


class PenstockError(Exception):
    """Anything expected that can go wrong; `str(error)` is fit for the person who must act on it."""

    retry_safe = False
    """Whether sending the very same request again may succeed and cannot do harm."""


class ClientError(PenstockError):
    """The caller must change the request. `param` names the field, `code` is OpenAI's short word."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class InvalidRequest(ClientError):
    """A field is missing, has the wrong type or is out of range."""


class Unsupported(InvalidRequest):
    """The request is well formed and asks for what nothing here can do, which is not bad input. `code` is
    "unsupported_parameter", or "unsupported_by_model" where another model may have it.
    """

    def __init__(
        self, message: str, *, param: str | None = None, code: str = "unsupported_parameter"
    ) -> None:
        super().__init__(message, param=param, code=code)


class ContextTooLong(InvalidRequest):
    """Prompt (and answer) do not fit the model's context."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class KVQuotaExceeded(InvalidRequest):
    """Prompt and answer alone need more KV blocks than one tenant may hold."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param, code="kv_quota_exceeded")


class Unauthenticated(ClientError):
    """No API key was given, or it is not one of ours."""


class Forbidden(ClientError):
    """The caller is who it says, but its tenant may not use this."""


class NotFound(ClientError):
    """No such path, or no such model."""


class MethodNotAllowed(ClientError):
    """The path exists but not with this verb; `allowed` lists the verbs that do."""

    def __init__(self, message: str, *, allowed: tuple[str, ...]) -> None:
        super().__init__(message)
        self.allowed = allowed


class TooLarge(ClientError):
    """The body or the header block is over its configured bound."""


class ModelBusy(ClientError):
    """A model with work was to be put to sleep: no answer is cut for that."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="model_busy")


class CrashingRequest(ClientError):
    """Workers have died of requests like this one: it is refused for a while, for the sake of all others."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="poison_request")


class Overloaded(PenstockError):
    """Too much work for now. `retry_after_s` is when room is expected, if that can be said."""

    retry_safe = True

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class LimitReached(Overloaded):
    """A limit of the tenant itself: others may have room."""


class BudgetExhausted(LimitReached):
    """The tenant's budget is used up until the day or month is over, or a store that is away cannot say that
    it is not; `retry_after_s` is when to ask again.
    """


class Evicted(Overloaded):
    """The request was accepted and then dropped: it waited too long, or gave way to more urgent ones."""


class Draining(Overloaded):
    """The server finishes what it has and takes nothing new."""


class WorkerBusy(Overloaded):
    """A worker refused a request for want of room: that is load, and no failure of the worker."""


class WorkerEjected(Overloaded):
    """The worker computes wrongly or slowly, so its requests continue elsewhere. The code that ejected it
    has blamed it: as an end of an attempt this is no failure of the worker's.
    """


class IdentityUnavailable(Overloaded):
    """The caller cannot be checked now, because the identity provider is not there."""


class WorkerError(PenstockError):
    """A worker failed us; the client did nothing wrong. `died`: its process ended with this request on it."""

    def __init__(self, message: str, *, died: bool = False) -> None:
        super().__init__(message)
        self.died = died


class WorkerUnavailable(WorkerError):
    """The worker cannot be reached or went away before anything was generated."""

    retry_safe = True


class NoMemory(WorkerUnavailable):
    """The model is asleep, and there is no memory to wake it in: other models have work."""


class KeyRejected(WorkerUnavailable):
    """The worker does not accept the key that this server has for it: all requests there will fail."""


class AttemptTimeout(WorkerUnavailable):
    """The worker gave no first token in time; `waited_ns` is how long the attempt had, and `unseen_ns` how
    long any engine may take for such a prompt (0: not known), which is more if its client waits for less.
    """

    def __init__(self, message: str, *, waited_ns: int, unseen_ns: int = 0) -> None:
        super().__init__(message)
        self.waited_ns, self.unseen_ns = waited_ns, unseen_ns


class StreamBroken(WorkerError):
    """The worker went away in the middle of an answer: it may be resumed, never restarted."""


class EnsembleFailed(WorkerError):
    """A step of an ensemble failed, or took too much time or memory; the message names its entry point."""


class EngineFault(WorkerError):
    """The engine failed this one request (for example NaN logits); others continue."""


class WeightsDamaged(WorkerError):
    """The weights in an engine's memory have changed: its process ends, so that the next one loads them
    again.
    """


class DeviceFault(WorkerError):
    """A worker's device, or the memory of its machine, is lost: its process ends."""


class OperatorError(PenstockError):
    """The operator must mend something before it can start."""


class ConfigError(OperatorError):
    """A config file or flag is wrong; the message names the key."""


class CheckpointError(OperatorError):
    """A model directory cannot be served; the message names the file, the tensor and what was expected."""


class LedgerError(OperatorError):
    """The usage ledger cannot be kept or read; the message names the file."""


class NamespaceBreach(AssertionError):
    """One tenant's KV blocks were about to be read, or filled, for another: the engine must end instead."""
