"""docs/tenants.md as it stands: its configuration is accepted, its commands run, its tables are those of the
code.
"""

import re
import shlex
from pathlib import Path

import pages
import pytest

from penstock.cli.main import main
from penstock.config.tenancy import TenantConfig, TierConfig
from penstock.config.tree import Config
from penstock.errors import ContextTooLong
from penstock.gateway.identity.tenants import Tenants
from penstock.policy.tenant import check_tokens

PAGE = pages.text_of("tenants")
TIERS, JWT = pages.configs("tenants")


def test_three_tiers_and_a_tenant_with_something_of_its_own() -> None:
    tenants = Tenants(TIERS.tenants, TIERS.tiers, secret=b"s")
    acme, umbrella = tenants.tenant("acme"), tenants.tenant("umbrella")
    assert (acme.tier, acme.weight, acme.budget_month_micros) == ("pro", 4, 1_000_000_000)
    assert (umbrella.tier, umbrella.requests_per_minute, umbrella.models) == ("free", 100, frozenset())
    assert umbrella.tokens_per_minute == TIERS.tiers[0].tokens_per_minute
    assert tenants.tenant("a", "enterprise").band == "priority"
    assert JWT.auth.jwt.default_tier == "free"


def test_every_setting_is_there() -> None:
    (section,) = re.findall(r"\| setting \|.*?\n\n", PAGE, re.DOTALL)
    reported = set(
        re.findall(r"`(\w+)`", "\n".join(line.split("|")[1] for line in section.splitlines() if line))
    )
    assert reported == set(TierConfig.__struct_fields__) - {"name"}
    assert reported <= set(TenantConfig.__struct_fields__)


def test_the_error_says_which_limit_it_was_and_whose() -> None:
    (shown,) = re.findall(r'\{"message": "(The maximum context.*?)", "code"', PAGE, re.DOTALL)
    tenant = Tenants(TIERS.tenants, TIERS.tiers, secret=b"s").tenant("umbrella")
    with pytest.raises(ContextTooLong) as refused:
        check_tokens(tenant, 33_012, None)
    assert str(refused.value) == " ".join(shown.split())


def test_the_default_tiers_are_as_the_table_says() -> None:
    rows = {row[0]: row[1:] for row in pages.table("tenants", "| free | pro")}
    tiers = Config().tiers
    assert "| | " + " | ".join(tier.name for tier in tiers) in PAGE
    for at, tier in enumerate(tiers):
        minute = [pages.number(each) for each in rows["requests, tokens per minute"][at].split(", ")]
        assert minute == [tier.requests_per_minute, tier.tokens_per_minute]
        assert pages.number(rows["concurrent requests"][at]) == tier.concurrent_max
        context = [pages.number(each) for each in rows["context, answer tokens"][at].split(", ")]
        assert context == [tier.context_tokens_max, tier.output_tokens_max]
        assert float(rows["weight"][at]) == tier.weight
        assert rows["band"][at] == tier.band
        assert rows["smaller model"][at] == ("never" if tier.degrade == "never" else "rather than fail")


def test_the_commands_for_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commands = [shlex.split(line)[2:] for line in re.findall(r"^\$ (penstock keys .*)", PAGE, re.MULTILINE)]
    assert [command[0] for command in commands] == ["create", "list", "rotate", "revoke"]
    (shown,) = re.findall(r"^(sk-\w+)\.\.\.", PAGE, re.MULTILINE)
    file, prefix = str(tmp_path / "keys.jsonl"), ""
    for command in commands:
        argv = [file if word.endswith(".jsonl") else word for word in command]
        assert (
            main(
                [
                    "keys",
                    *(prefix if shown.startswith(word) and word.startswith("sk-") else word for word in argv),
                ]
            )
            == 0
        )
        said = capsys.readouterr().out
        if command[0] == "create":
            key = said.strip()
            prefix = key[: len(shown.partition("_")[0])]
            assert re.fullmatch(r"sk-\w{12}_[\w-]+", key)
        elif command[0] == "list":
            assert prefix in said
            assert "acme" in said
            assert "batch jobs" in said
            assert key not in said
        elif command[0] == "rotate":
            assert said.strip().startswith("sk-")
            assert not said.startswith(prefix)
    assert Path(file).stat().st_mode & 0o777 == 0o600
