"""What a request's streams used, as their workers counted it, over all choices and all workers that it ran
on.
"""

from penstock.types import Usage

_NOTHING = Usage()


class UsageSum:
    """One for each request. A choice is one stream; most requests have one."""

    __slots__ = ("_before", "_usages", "choices_per_prompt")

    def __init__(self, choices_per_prompt: int = 1) -> None:
        self.choices_per_prompt = choices_per_prompt
        self._usages: dict[int, Usage] = {}
        """By index of the choice."""
        self._before: dict[int, Usage] = {}
        """Of choices that continue on another worker: what was used until they left the last one."""

    def ended(self, index: int, usage: Usage) -> None:
        """A choice's stream on its worker is over."""
        before = self._before.get(index)
        self._usages[index] = usage if before is None else continued(before, usage)

    def break_off(self, *, has_begun: bool) -> None:
        """Every choice whose stream was cut continues elsewhere; if none has begun, each begins again."""
        if has_begun:
            self._before.update(self._usages)
        else:
            self._usages.clear()

    def of(self, index: int) -> Usage | None:
        """One choice's."""
        return self._usages.get(index)

    @property
    def longest(self) -> int:
        """Tokens of the longest answer."""
        return max((usage.completion_tokens for usage in self._usages.values()), default=0)

    def total(self) -> Usage:
        """All choices together: every prompt once, every choice's answer. Times are the first choice's."""
        if len(self._usages) == 1 and 0 in self._usages:
            return self._usages[0]
        usages = list(self._usages.values())
        firsts = [usage for i, usage in self._usages.items() if i % self.choices_per_prompt == 0]
        first = self._usages.get(0, _NOTHING)
        return Usage(
            prompt_tokens=sum(usage.prompt_tokens for usage in firsts),
            completion_tokens=sum(usage.completion_tokens for usage in usages),
            cached_tokens=sum(usage.cached_tokens for usage in firsts),
            host_cached_tokens=sum(usage.host_cached_tokens for usage in firsts),
            queue_ns=first.queue_ns,
            prefill_ns=first.prefill_ns,
            decode_ns=first.decode_ns,
            steps=sum(usage.steps for usage in usages),
            computed_tokens=sum(usage.computed_tokens for usage in usages),
            preemptions=sum(usage.preemptions for usage in usages),
            kv_block_ns=sum(usage.kv_block_ns for usage in usages),
            device_ns=sum(usage.device_ns for usage in usages),
        )


def continued(before: Usage, after: Usage) -> Usage:
    """What a stream used that went on on another worker, as if it had never been interrupted: its prompt was
    read once for it, its answer is one, and the time of the move is part of its decoding. The machines' work
    is the sum.
    """
    if not before.completion_tokens:
        before, after = after, before  # It gave nothing there: its prompt was read where it did.
        prefill_ns, decode_ns = before.prefill_ns, before.decode_ns
    else:
        prefill_ns = before.prefill_ns
        decode_ns = before.decode_ns + after.queue_ns + after.prefill_ns + after.decode_ns
    return Usage(
        prompt_tokens=before.prompt_tokens,
        completion_tokens=max(before.completion_tokens, after.completion_tokens),
        cached_tokens=before.cached_tokens,
        host_cached_tokens=before.host_cached_tokens,
        queue_ns=before.queue_ns,
        prefill_ns=prefill_ns,
        decode_ns=decode_ns,
        steps=before.steps + after.steps,
        computed_tokens=before.computed_tokens + after.computed_tokens,
        preemptions=before.preemptions + after.preemptions,
        kv_block_ns=before.kv_block_ns + after.kv_block_ns,
        device_ns=before.device_ns + after.device_ns,
    )
