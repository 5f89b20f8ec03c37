import pytest

from penstock.config.checks import check
from penstock.config.load import parse_config
from penstock.errors import ConfigError

MODELS = "models: [{path: ./l, name: large}, {path: ./m, name: medium}, {path: ./s, name: small}]\n"


def problems(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check(parse_config(MODELS + text))
    return str(caught.value)


def test_a_chain_and_auto_that_are_fine() -> None:
    check(
        parse_config(
            MODELS
            + """
routing:
  models: [{model: large, fallback: medium, data: [eu]}, {model: medium, fallback: small}]
  auto: [{model: small, up_to: 0.3}, {model: medium, up_to: 0.6, tiers: [enterprise]}, {model: large}]
admission:
  ttft_target_ms: 2000
  targets: [{tier: free, ttft_ms: 5000}, {band: bulk, ttft_ms: 0}]
"""
        )
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "routing: {models: [{model: large, fallback: small}, {model: small, fallback: large}]}",
            "routing.models[0].fallback: goes in a circle: large -> small -> large",
        ),
        ("routing: {models: [{model: small, fallback: small}]}", "goes in a circle: small -> small"),
        (
            "routing: {models: [{model: large, fallback: smal}]}",
            "routing.models[0].fallback: no model 'smal' here; did you mean 'small'?",
        ),
        ("routing: {models: [{model: huge}]}", "routing.models[0].model: no model 'huge' here"),
        ("routing: {models: [{model: large}, {model: large}]}", "'large' is there twice"),
        ("routing: {auto: [{model: x}]}", "routing.auto[0].model: no model 'x' here"),
        (
            ("routing: {auto: [{model: small, up_to: 0.5}, {model: medium, up_to: 0.5}, {model: large}]}"),
            "`up_to` must rise",
        ),
        (
            "routing: {auto: {name: smart, models: [{model: small}]}}",
            "`routing.auto.name` is no longer a setting",
        ),
        (
            "routing: {auto: [{model: small, tiers: [pro]}, {model: large, tiers: [pro]}]}",
            "routing.auto: the tier 'pro' stands at two models",
        ),
        ("admission: {targets: [{ttft_ms: 5}]}", "admission.targets[0]: names neither"),
        ("admission: {targets: [{band: a, ttft_ms: 5}, {band: a, ttft_ms: 6}]}", "is there twice"),
    ],
)
def test_what_is_wrong_is_said(text: str, said: str) -> None:
    assert said in problems(text)


def test_no_model_may_be_called_as_the_choice_between_models() -> None:
    text = "models: [{path: ./a, name: auto}]\nrouting: {auto: [{model: auto}]}"
    with pytest.raises(ConfigError, match="'auto' is the name of a model"):
        check(parse_config(text))
