"""The version that each conversation gets while a rollout runs: by a hash, so that a conversation stays where
it is.

    0        share                                    BUCKETS - share      BUCKETS
    | canary | ............ the rest, old ............ | control, old      |

A conversation's bucket never changes, and the canary only grows, to the right: so a conversation changes its
version once at most, and once more if the rollout is taken back. The control cohort is of the same size and
drawn in the same way, so the two have the same traffic at the same time; the rest is not compared.

Before anybody has the new version some conversations may be in the shadow: the old version answers them, and
their requests are copied to the new one.
"""

import enum
from hashlib import blake2b

BUCKETS = 10_000
GROUPS = 20
"""Of conversations, in each cohort: how far these differ says how sure a difference of cohorts is."""


class Cohort(enum.StrEnum):
    """The part of a model's traffic that a conversation is in."""

    CANARY = "canary"
    CONTROL = "control"
    REST = "rest"
    SHADOW = "shadow"
    """It has the old version, and its requests are copied to the new one."""


def bucket_of(salt: str, conversation: str) -> int:
    """A number below `BUCKETS`; another `salt` deals again, so that it is not always the same conversations
    that go first.
    """
    digest = blake2b(f"{salt}\0{conversation}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % BUCKETS


def cohort_of(bucket: int, share: int, shadow: int = 0) -> Cohort:
    """Where `share` buckets have the new version; while none has, `shadow` buckets are copied to it."""
    assert 0 <= bucket < BUCKETS, bucket
    assert 0 <= share <= BUCKETS, share
    assert not (share and shadow), "what is copied comes before what is dealt"
    if bucket < shadow:
        return Cohort.SHADOW
    if bucket < share:
        return Cohort.CANARY
    return Cohort.CONTROL if bucket >= BUCKETS - min(share, BUCKETS - share) else Cohort.REST
