"""Scaling that contradicts itself is refused by the name of its key."""

import pytest

from penstock.config.checks import check
from penstock.config.load import parse_config
from penstock.errors import ConfigError


def config(scale: str, replicas: int = 1, fleet: str = "") -> bytes:
    return (
        f"models: [{{path: penstock-demo, replicas: {replicas}, scale: {{{scale}}}}}]\nfleet: {{{fleet}}}\n"
        "auth: {disabled: true}\n"
    ).encode()


@pytest.mark.parametrize(
    ("scale", "words"),
    [
        ("min: 4", "models[0].scale.max: 0, so nothing scales"),
        ("max: 3, min: 4", "models[0].scale.min: 4 is above models[0].scale.max (3)"),
        ("max: 3, standby: 4", "models[0].scale.standby: 4 is above models[0].scale.max (3)"),
        ("max: 3, schedule: ['mon 07:00-08:00 4']", "models[0].scale.schedule[0]: 4 workers are above"),
        ("max: 3, schedule: ['monday 7-8']", "scale.schedule[0]: expected DAY-DAY HH:MM-HH:MM WORKERS"),
        ("max: 3, frozen: ['07:00-08:00 2']", "models[0].scale.frozen[0]: expected DAY-DAY HH:MM-HH:MM, got"),
        ("max: 3, mode: hope", "models[0].scale.mode"),
        ("max: 3, pools: [{name: A}]", "models[0].scale.pools[0].name: expected 1 to 32 of a-z"),
        ("max: 3, pools: [{name: a}, {name: a}]", "scale.pools[1].name: 'a' is another pool's already"),
        ("max: 9, min: 3, pools: [{name: a, max: 2}]", "scale.min: 3 is above what the pools may have"),
        ("max: 9, min: 2, pools: [{name: a, spot: true}]", "scale.min: 2 is above what the pools that are"),
        ("max: 3, metric: cpu", "scale.metric"),
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_refused_by_name(scale: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check(parse_config(config(scale), source="test"))
    assert words in str(refused.value)


def test_replicas_are_within_the_bounds_and_may_be_none() -> None:
    with pytest.raises(ConfigError, match=r"scale.max: 2 is below the model's replicas \(3\)"):
        check(parse_config(config("max: 2", replicas=3), source="test"))
    found = parse_config(
        config(
            "max: 4, min: 0, standby: 1, in_after_s: 60, mode: advise, frozen: ['sat 02:00-04:00'], "
            "schedule: ['mon-fri 07:00-19:00 3'], pools: [{name: firm, max: 3, price: 4}, "
            "{name: spot, spot: true, price: 1.5, ray_resources: {spot: 1}}]",
            replicas=0,
            fleet="accelerators_max: 8, per_hour_max: 40",
        ),
        source="test",
    )
    scale = found.models[0].scale
    assert (scale.max, scale.min, scale.standby, scale.in_after_s, scale.mode) == (4, 0, 1, 60.0, "advise")
    assert (scale.pools[1].spot, scale.pools[1].price, scale.pools[1].max) == (True, 1.5, 256)
    assert scale.pools[1].ray_resources == {"spot": 1}
    assert (found.fleet.accelerators_max, found.fleet.per_hour_max) == (8, 40.0)


PODS = "discover: [{engine: vllm, kubernetes: {namespace: a, service: vllm, api_server: 'https://10.0.0.1'}}]"
WORKLOADS = {
    "max: 2, pools: [{name: a, workload: pod/vllm}]": "expected deployment/NAME or statefulset/NAME",
    "max: 2, pools: [{name: a, workload: deployment/vllm}, {name: b}]": "all have a workload, or none",
    "max: 2, pools: [{name: a, workload: deployment/v}, {name: b, workload: deployment/v}]": "one workload",
    "max: 2, pools: [{name: a, workload: deployment/v, ray_resources: {GPU: 1}}]": "whose pods say what",
}


@pytest.mark.parametrize("scale", WORKLOADS)
def test_workloads_that_contradict_something_are_refused(scale: str) -> None:
    text = f"models:\n- {{path: m, replicas: 0, {PODS}, scale: {{{scale}}}}}\n"
    with pytest.raises(ConfigError) as refused:
        check(parse_config(text, source="test"))
    assert WORKLOADS[scale] in str(refused.value)


@pytest.mark.parametrize(
    ("rest", "server", "words"),
    [
        (f"replicas: 0, {PODS}", "", ""),
        ("replicas: 0", "", "pools with a workload need a kubernetes entry"),
        (f"replicas: 2, {PODS}", "", "2 would run here"),
        (f"replicas: 0, {PODS}", "server: {processes: 2}\n", "run several servers with one shared.url"),
        (
            f"replicas: 0, {PODS[:-1]}, {PODS[11:].replace('namespace: a', 'namespace: b')}",
            "",
            "one namespace",
        ),
    ],
)
def test_a_workload_goes_with_discovery_and_without_replicas(rest: str, server: str, words: str) -> None:
    pools = "pools: [{name: gpu, workload: deployment/vllm}]"
    text = f"{server}models:\n- {{path: m, {rest}, scale: {{max: 4, {pools}}}}}\n"
    if not words:
        check(found := parse_config(text, source="test"))
        assert found.models[0].scale.pools[0].workload == "deployment/vllm"
        assert not found.models[0].scale.launches
        return
    with pytest.raises(ConfigError) as refused:
        check(parse_config(text, source="test"))
    assert words in str(refused.value)
