"""docs/engines/vllm.md says what the connector's code says. Its commands are run by test_docs.py."""

from __future__ import annotations

import ast
import inspect
import json
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from moonpool.engines import vllm
from moonpool.engines.vllm import compat, identity
from moonpool.engines.vllm.layout import PIECE_BYTES_MIN
from moonpool.engines.vllm.lookups import LOOKUP_PATIENCE_S
from moonpool.engines.vllm.notes import decode_note, encode_note
from moonpool.engines.vllm.settings import Settings, parse_settings
from moonpool.engines.vllm.stats import METRICS, REASONS, UNSTORED
from tests.test_docs import PACKAGE, ROOT, blocks, check_same, table

DOCUMENT = "docs/engines/vllm.md"
TEXT = (ROOT / DOCUMENT).read_text()


def test_settings_are_listed_with_defaults_as_the_code_describes_them() -> None:
    check_same(DOCUMENT, "setting", [[f"`{name}`", shown(name), text] for name, text in described(Settings).items()])


def described(kind: type) -> dict[str, str]:
    """Per field of a class the first paragraph of the text below it."""
    (found,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(found, ast.ClassDef)
    texts = {}
    for field, below in zip(found.body, found.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            assert isinstance(below, ast.Expr), f"{field.target.id} isn't described"
            assert isinstance(below.value, ast.Constant)
            texts[field.target.id] = " ".join(str(below.value.value).split("\n\n")[0].split())
    assert list(texts) == list(Settings.__struct_fields__)
    return texts


def shown(name: str) -> str:
    """A default, as it would be written in the extra config."""
    value = getattr(Settings(), name)
    if name.endswith("_bytes"):
        value = f"{value >> 30}GiB" if value >= 1 << 30 else f"{value >> 20}MiB"
        assert getattr(parse_settings({name: value}), name) == getattr(Settings(), name)
    return "" if value is None else f"`{json.dumps(value)}`"


def test_metrics_are_listed_as_they_are_shown() -> None:
    expected = [[f"`vllm:moonpool_{metric.name}_total`", metric.label, metric.text] for metric in METRICS]
    check_same(DOCUMENT, "metric", expected)


def test_every_reason_for_computing_is_explained() -> None:
    assert [row[0] for row in table(DOCUMENT, "reason in `recomputed_tokens`")] == [f"`{name}`" for name in REASONS]


def test_reasons_for_not_storing_are_the_code_s() -> None:
    told = {row[0].strip("`") for row in table(DOCUMENT, "reason in `unstored_objects`")}
    assert told == set(UNSTORED)


def test_counters_that_the_text_names_exist() -> None:
    names = {metric.name for metric in METRICS} | set(Settings.__struct_fields__)
    for name in re.findall(r"`(\w+_tokens|\w+_objects)`", TEXT):
        assert name in names, name


# ---- what is typed ---------------------------------------------------------------------------------------------------


def transfer_configs() -> list[dict[str, Any]]:
    """Every configuration of a connector that is printed, those within a MultiConnector included."""
    found = []
    for block in blocks(DOCUMENT):
        if block.text.startswith("vllm serve"):
            words = shlex.split(block.text)
            found.append(json.loads(words[words.index("--kv-transfer-config") + 1]))
        elif block.language == "json" and "kv_connector" in block.text:
            found += json.loads(block.text)["kv_connector_extra_config"]["connectors"]
    return found


def test_the_connectors_that_are_configured_are_there() -> None:
    assert len(transfer_configs()) == 2
    for config in transfer_configs():
        assert config["kv_connector_module_path"] == vllm.__name__
        assert config["kv_connector"] in vllm.__all__
        assert config["kv_role"] == "kv_both"
        parse_settings(config.get("kv_connector_extra_config", {}))


def test_settings_that_are_printed_are_taken() -> None:
    printed = re.findall(r'`("\w+": [^`{]*)`', TEXT)
    assert printed
    for text in printed:
        parse_settings(json.loads(f"{{{text}}}"))


def test_the_logging_that_is_printed_shows_our_lines(tmp_path: Path) -> None:
    (block,) = (block for block in blocks(DOCUMENT) if block.language == "json" and "loggers" in block.text)
    path = tmp_path / "logging.json"
    path.write_text(block.text)
    script = (
        "import json, logging.config, pathlib, sys\n"
        "logging.config.dictConfig(json.loads(pathlib.Path(sys.argv[1]).read_text()))\n"
        "logging.getLogger('moonpool.vllm').info('seen')\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")
    assert re.fullmatch(r"INFO .* \[moonpool\.vllm\] seen\n", done.stderr)


def test_lines_of_the_log_that_are_quoted_are_written_so() -> None:
    written = "".join(path.read_text() for path in sorted(PACKAGE.glob("engines/vllm/*.py")))
    written += (PACKAGE / "gpu" / "registration.py").read_text()
    for quoted in (
        "moonpool is off, the engine goes on without it: ",
        "moonpool failed in ",
        "moonpool is left alone for ",
        " s after failures in a row; the last: ",
        " of the pool registered with CUDA in ",
    ):
        assert quoted in TEXT
        assert quoted in written


# ---- what is taken and what isn't ------------------------------------------------------------------------------------


def refused(start: str) -> set[str]:
    """The names in the row of what isn't supported that begins so."""
    (row,) = (row for row in table(DOCUMENT, "what") if row[0].startswith(start))
    return set(re.findall(r"`([\w]+)`", row[0].removeprefix(start)))


def test_what_is_not_supported_is_the_code_s() -> None:
    assert refused("KV cache dtypes other than") == {*compat.KV_DTYPES, *compat.INLINE_SCALES}
    assert refused("`load_format` other than") == {*identity._FROM_FILES, "dummy"}
    assert not refused("`prefix_caching_hash_algo`") & set(compat.HASHES)
    oldest = ".".join(map(str, compat.OLDEST))
    assert any(row[0] == f"vLLM before {oldest}" for row in table(DOCUMENT, "what"))
    for release in compat.TESTED:
        assert ".".join(map(str, release)) in TEXT.split("## ")[0]
    assert f"runs shorter than {PIECE_BYTES_MIN} bytes" in TEXT


@pytest.mark.parametrize("method", ["extract_hidden_states", "custom_class"])
def test_speculative_methods_that_are_refused_are_named(method: str) -> None:
    assert method in refused("speculative methods")


def test_numbers_that_the_text_gives_are_the_code_s() -> None:
    settings = Settings()
    assert f"for {settings.lookup_timeout_s * 1e3:g} ms at most, and its request for {LOOKUP_PATIENCE_S:g} s" in TEXT
    assert f"left alone for {settings.retry_s:g} s after" in TEXT
    assert settings.tokens_per_object == 256
    (most,) = map(int, re.findall(r"objects of up to (\d+) tokens\s+the token ids are told", TEXT))
    notes = [decode_note(encode_note(bytes(32), [7] * count, "x" * 64)) for count in (most, most + 1)]
    assert [bool(note and note.tokens) for note in notes] == [True, False]


def test_the_reference_workload_s_figures_are_those_measured() -> None:
    modes = json.loads((ROOT / "bench" / "results" / "vllm_reference.json").read_text())["modes"]
    measured = [[f"{run['until_last_answer_s']:.2f}" for run in mode["runs"][:2]] for mode in modes]
    assert [row[1:] for row in table("README.md", "seconds until the last answer")] == measured
    assert [mode["mode"] for mode in modes] == ["baseline", "native", "moonpool", "moonpool"]
    assert (modes[0]["requests"], modes[0]["tokens"], modes[0]["model"]) == (32, 10_000, "llama-8b")


# ---- the walk --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("walk", ["load", "store"])
def test_the_walk_names_what_is_in_the_files(walk: str) -> None:
    section = TEXT.split(f"## One {walk}\n")[1].split("\n## ")[0]
    steps = re.findall(r"^\| (\d+) \| `([\w/]+\.py)` \| (.*?) \|", section, re.MULTILINE)
    assert [int(number) for number, _, _ in steps] == list(range(1, len(steps) + 1))
    for _, file, names in steps:
        there = names_in(PACKAGE / file)  # read, not imported: some of the files need vLLM
        for name in re.findall(r"`([\w.]+)`", names):
            assert name in there, f"{file} has no {name}"


def names_in(path: Path) -> set[str]:
    """The functions and classes of a file, and the methods as `Class.method`."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return found
