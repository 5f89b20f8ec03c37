"""The bound of one tenant's KV blocks, beside a pool that says what each holds."""

import pytest

from penstock.errors import KVQuotaExceeded
from penstock.kv.hashing import token_array
from penstock.schedule.request import Request
from penstock.schedule.shares import PARKED_MAX, KVQuota
from penstock.types import RequestId, SamplingParams


class Pool:
    """Of 20 blocks."""

    num_blocks = 20

    def __init__(self, **used: int) -> None:
        self._used = {salt.encode(): count for salt, count in used.items()}

    def num_used_by(self, salt: bytes) -> int:
        return self._used.get(salt, 0)


def request(salt: str = "a", *, number: int = 0, tokens: int = 4) -> Request:
    made = Request(
        request_id=RequestId(f"{salt}{number}"),
        tokens=token_array(range(tokens)),
        sampling=SamplingParams(),
        salt=salt.encode(),
    )
    made.order = (0, number, number)
    return made


def test_a_tenant_is_over_from_one_block_more_than_its_part_on() -> None:
    quota = KVQuota(Pool(a=10, b=11), 0.5)  # type: ignore[arg-type]
    assert quota.blocks_max == 10
    assert quota.is_over(request("b")) is True
    assert quota.is_over(request("a")) is False
    assert quota.is_over(request("c")) is False


def test_what_a_tenant_holds_and_asks_for_fits_its_part_or_it_holds_nothing() -> None:
    quota = KVQuota(Pool(a=6), 0.5)  # type: ignore[arg-type]
    assert quota.admits(request("a"), 4)
    assert not quota.admits(request("a"), 5)
    assert quota.admits(request("b"), 15), "alone it was checked when it was submitted"
    assert KVQuota(Pool(a=19), 1.0).admits(request("a"), 15), "all there is bounds nobody"  # type: ignore[arg-type]


@pytest.mark.parametrize(("prompt", "param"), [(4, "max_tokens"), (200, "prompt")])
def test_the_refusal_names_what_is_too_long(prompt: int, param: str) -> None:
    quota = KVQuota(Pool(), 0.5)  # type: ignore[arg-type]
    quota.check_fits(request(tokens=prompt), 160)
    with pytest.raises(KVQuotaExceeded) as caught:
        quota.check_fits(request(tokens=prompt), 161)
    assert caught.value.param == param


def test_parked_requests_come_back_first_come_first_by_tenant() -> None:
    quota = KVQuota(Pool(), 0.5)  # type: ignore[arg-type]
    late, early, other = request(number=2), request(number=1), request("b")
    for each in (late, early, other):
        assert quota.park(each)
    assert (len(quota), quota.tenants()) == (3, [b"a", b"b"])
    assert quota.is_behind(late)
    assert not quota.is_behind(request(number=0))
    assert not quota.is_behind(request("c"))
    assert quota.unpark(b"a") is early
    assert quota.remove(late)
    assert not quota.remove(late)
    assert quota.unpark(b"a") is None
    assert (len(quota), quota.tenants()) == (1, [b"b"])


def test_no_more_are_parked_than_the_bound() -> None:
    quota = KVQuota(Pool(), 0.5)  # type: ignore[arg-type]
    for number in range(PARKED_MAX):
        assert quota.park(request(number=number))
    assert not quota.park(request("b"))
    assert len(quota) == PARKED_MAX
