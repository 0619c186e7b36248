"""Moving beside computing, and the tokens an object should hold, follow from the sizes and the rates given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from moonpool.calc import Bandwidth, ModelConfigError, Report, calculate, parse_bandwidth, read_model
from moonpool.calc.command import EPILOG, calc

CONFIGS = Path(__file__).parent / "configs"
PCIE = Bandwidth("PCIe", 55.3e9, "measured")


def report(name: str = "llama-3.1-8b", **options: Any) -> Report:
    return calculate(read_model(CONFIGS / f"{name}.json"), **options)


def test_the_reference_workload_takes_what_the_wire_takes() -> None:
    """32 requests of 10,000 tokens: 0.76 s at 55.3 GB/s, against 8.69 s computed at 36,800 tokens a second."""
    size = report(bandwidths=[PCIE], prefill_tokens_per_s=36_800)
    (move,) = size.moves
    assert 32 * move.seconds == pytest.approx(0.76, abs=0.005)
    assert size.compute_s is not None
    assert 32 * size.compute_s == pytest.approx(8.69, abs=0.01)
    assert move.times_faster == pytest.approx(11.5, abs=0.1)


def test_at_the_break_even_rate_and_bandwidth_both_take_as_long() -> None:
    slow = Bandwidth("slow", 1e9, "given")
    rate = report(bandwidths=[slow]).moves[0].break_even_tokens_per_s
    even = report(bandwidths=[slow], prefill_tokens_per_s=rate)
    assert even.compute_s == pytest.approx(even.moves[0].seconds)
    assert even.break_even_bytes_per_s == pytest.approx(1e9)


def test_without_a_prefill_rate_no_computing_time_is_made_up() -> None:
    size = report()
    assert size.compute_s is None
    assert size.break_even_bytes_per_s is None
    assert all(move.times_faster is None for move in size.moves)
    assert all(choice.lost_s is None for choice in size.objects)


def test_each_rank_moves_its_own_share() -> None:
    whole, quarter = report(bandwidths=[PCIE]), report(bandwidths=[PCIE], tp_size=4)
    assert quarter.moves[0].seconds == pytest.approx(whole.moves[0].seconds / 4)


@pytest.mark.parametrize(
    ("name", "options", "tokens"),
    [
        ("llama-3.1-8b", {}, 16),
        ("llama-3.1-8b", {"kv_dtype": "fp8"}, 32),
        ("llama-3.1-8b", {"tp_size": 8}, 128),
        ("llama-3.1-70b", {"tp_size": 8}, 64),
        ("deepseek-v3", {"tp_size": 8}, 32),
        ("falcon-7b", {}, 256),
        ("falcon-7b", {"kv_dtype": "fp8"}, 256),
        ("llama-3.1-8b", {"tokens_per_block": 64}, 64),
        ("llama-3.1-8b", {"tokens_per_block": 512, "tp_size": 8, "kv_dtype": "fp8"}, 512),
    ],
)
def test_the_recommended_object_is_the_smallest_to_reach_2_mb_up_to_256_tokens(
    name: str, options: dict[str, Any], tokens: int
) -> None:
    size = report(name, **options)
    chosen = next(choice for choice in size.objects if choice.tokens == tokens)
    assert size.recommended_tokens_per_object == tokens
    assert chosen.bytes == tokens * size.rank_token_bytes
    smaller = [choice for choice in size.objects if choice.tokens < tokens]
    assert all(choice.bytes < 2_000_000 for choice in smaller)
    assert chosen.bytes >= 2_000_000 or tokens >= 256
    assert tokens % size.tokens_per_block == 0


def test_larger_objects_cost_less_each_and_lose_more_of_a_prefix() -> None:
    choices = report(prefill_tokens_per_s=40_000, object_overhead_s=5e-6, bandwidths=[PCIE]).objects
    assert [choice.tokens for choice in choices] == [16, 32, 64, 128, 256]
    assert [choice.objects for choice in choices] == [625, 312, 156, 78, 39]
    assert choices[0].overhead_s == pytest.approx(3.125e-3)
    assert choices[0].overhead_share == pytest.approx(5e-6 / (5e-6 + 2**21 / 55.3e9))
    assert [choice.lost_tokens for choice in choices] == [0, 8, 24, 56, 120]
    assert choices[-1].lost_s == pytest.approx(0.003)


def test_a_request_shorter_than_an_object_stores_none() -> None:
    choices = report(tokens=100).objects
    assert [choice.objects for choice in choices] == [6, 3, 1, 0, 0]
    assert choices[-1].overhead_share == 0


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"tokens": 0}, "tokens is 0"),
        ({"tp_size": -1}, "tp_size is -1"),
        ({"tp_size": 3}, "8 KV heads don't spread over 3"),
        ({"tokens_per_block": 0}, "tokens_per_block"),
        ({"kv_dtype": "fp7"}, "'fp7' isn't known"),
        ({"prefill_tokens_per_s": 0}, "prefill rate"),
        ({"bandwidths": []}, "bandwidth"),
        ({"object_overhead_s": -1}, "overhead"),
    ],
)
def test_impossible_requests_are_refused(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ModelConfigError, match=complaint):
        report(**options)


def test_an_unnamed_element_type_is_asked_for() -> None:
    with pytest.raises(ModelConfigError, match="--dtype"):
        report("gpt2")
    assert report("gpt2", kv_dtype="fp32").token_bytes == 12 * 2 * 768 * 4
    with pytest.raises(ModelConfigError, match="state heads"):
        report("nemotron-h-8b", tp_size=256)


@pytest.mark.parametrize(
    ("text", "name", "bytes_per_s"),
    [
        ("55GB/s", "55.0 GB/s", 55e9),
        ("12.5 GB/s", "12.5 GB/s", 12.5e9),
        ("100Gb/s", "12.5 GB/s", 12.5e9),
        ("100Gbps", "12.5 GB/s", 12.5e9),
        ("400Gbit/s", "50.0 GB/s", 50e9),
        ("NIC=25GB/s", "NIC", 25e9),
        ("a=b=2GiB/s", "a=b", 2**31),
    ],
)
def test_a_bandwidth_is_read_in_bytes_and_in_bits(text: str, name: str, bytes_per_s: float) -> None:
    assert parse_bandwidth(text) == Bandwidth(name, bytes_per_s, "given")


@pytest.mark.parametrize("text", ["", "fast", "NIC=", "0GB/s", "-1GB/s", "5XB/s", "1..2Gb/s"])
def test_what_is_not_a_bandwidth_is_refused_by_name(text: str) -> None:
    with pytest.raises(ModelConfigError, match="bandwidth") as caught:
        parse_bandwidth(text)
    assert repr(text) in str(caught.value)


app = typer.Typer()
app.command(epilog=EPILOG)(calc)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "160"})


def test_the_command_prints_tables_for_people() -> None:
    result = run(str(CONFIGS / "llama-3.1-8b.json"), "--prefill-rate", "36800", "--tp", "2")
    assert result.exit_code == 0
    for text in ("128 KiB", "64.0 KiB", "1.31 GB", "PCIe 5.0 x16", "Recommended: 32 tokens an object", "times faster"):
        assert text in result.output


def test_the_command_prints_the_same_as_json() -> None:
    result = run(str(CONFIGS / "gpt-oss-20b.json"), "--json", "--tokens", "2000", "--bandwidth", "NIC=25GB/s")
    assert result.exit_code == 0
    assert json.loads(result.output) == json.loads(
        json.dumps(report("gpt-oss-20b", tokens=2_000, bandwidths=[parse_bandwidth("NIC=25GB/s")]).as_dict())
    )


def test_the_command_tells_how_much_a_nodes_pool_holds() -> None:
    config = str(CONFIGS / "llama-3.1-8b.json")
    result = run(config, "--url", "embedded:256MiB")
    assert result.exit_code == 0
    assert "The node's pool, 256 MiB (268 MB), holds 2,048 tokens of requests that share nothing." in result.output
    told = json.loads(run(config, "--url", "embedded:256MiB", "--json").output)
    assert (told["pool_bytes"], told["pool_tokens"]) == (256 << 20, 2048)
    assert json.loads(run(config, "--json").output)["pool_tokens"] is None


def test_the_command_says_what_is_wrong_in_one_line() -> None:
    for arguments in (
        ("/nowhere",),
        (str(CONFIGS / "gpt2.json"),),
        (str(CONFIGS / "gpt-oss-20b.json"), "--object-overhead", "5x"),
    ):
        result = run(*arguments)
        assert result.exit_code == 1
        assert result.stdout == ""
        assert len(result.stderr.splitlines()) == 1
        assert result.stderr.startswith("moonpool calc: ")


def test_the_command_s_help_has_examples() -> None:
    assert "Examples:" in run("--help").output
