"""Pack vLLM for a GPU machine that reaches no package registry: one archive, small enough to carry.

    python bench/vllm/bundle.py vllm.tar.xz --have packages.txt

`packages.txt` says what the machine has already, as `pip freeze` prints it there: torch above all. The archive holds
vLLM and what else it needs, without the packages and kernels that a dense model's benchmark does without (`--whole`
keeps them), and with device code for one GPU architecture. On the machine:

    mkdir /tmp/site && tar xJf vllm.tar.xz -C /tmp/site && export PYTHONPATH=/tmp/site

Which vLLM goes with which torch stands in its wheel: 0.26 wants torch 2.11. The scripts here stand in for xgrammar.
Takes minutes and 2 GB of scratch. Needs pip, tar and xz, and a registry.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

from device_code import keep_architecture

GLIBC_MINORS = range(39, 4, -1)
"""pip takes only wheels whose manylinux version is named: all of them up to a recent glibc."""
KERNELS_LEFT_OUT = ("_vllm_fa2_C", "_qutlass_C", "_flashmla", "_moe_C", "vllm-rs", "third_party/fmha_sm100",
                    "third_party/deep_gemm/include", "swagger")  # fmt: skip
"""Parts of vLLM's wheel for other GPUs, for mixtures of experts and latent attention, for another front end."""
PACKAGES_LEFT_OUT = """
    agent-detector anthropic astor cffi cryptography cuda-python cuda-tile depyf detect-installer fastapi-cli
    fastapi-cloud-cli fastar fastsafetensors flashinfer-python googleapis-common-protos httptools humming-kernels
    interegular lm-format-enforcer mcp mcp-types mistral-common nvidia-cuda-cccl nvidia-cuda-crt nvidia-cuda-nvcc
    nvidia-cuda-nvdisasm nvidia-cudnn-frontend nvidia-cutlass-dsl nvidia-cutlass-dsl-libs-base
    nvidia-cutlass-dsl-libs-core nvidia-cutlass-dsl-libs-cu12 nvidia-cutlass-dsl-libs-cu13 nvidia-nvvm nvtx
    opentelemetry-api opentelemetry-exporter-http-transport opentelemetry-exporter-otlp
    opentelemetry-exporter-otlp-common opentelemetry-exporter-otlp-proto-common
    opentelemetry-exporter-otlp-proto-grpc opentelemetry-exporter-otlp-proto-http opentelemetry-proto
    opentelemetry-sdk opentelemetry-semantic-conventions opentelemetry-semantic-conventions-ai outlines-core
    pycountry pycparser pyelftools pyjwt pynvvideocodec quack-kernels rich-toolkit rignore sentry-sdk tilelang
    tokenspeed-mla tokenspeed-triton torch-c-dlpack-ext torchcodec websockets xgrammar z3-solver
"""
"""Packages that vLLM names and starts and serves a dense model without."""
TRIM_MIN_BYTES = 1 << 20


def main(arguments: list[str]) -> int:
    """Run the command line; returns the exit status."""
    args = _parser().parse_args(arguments)
    have = {name_of(line) for path in args.have for line in path.read_text().splitlines() if name_of(line)}
    with tempfile.TemporaryDirectory(prefix="moonpool-bundle-") as scratch:
        folder = Path(scratch)
        platform = platform_flags(args.python)
        needed = resolve([f"vllm=={args.vllm}", *args.extra], platform, folder / "report.json")
        left_out = (
            have if args.whole else have | set(PACKAGES_LEFT_OUT.split()) - {name_of(extra) for extra in args.extra}
        )
        wanted = [requirement for requirement in needed if name_of(requirement) not in left_out]
        print(f"packing {len(wanted)} of {len(needed)} packages: {' '.join(wanted)}")
        pip("download", "--no-deps", "--dest", str(folder / "wheels"), *platform, *wanted)
        site = folder / "site"
        for wheel in sorted((folder / "wheels").glob("*.whl")):
            unpack(wheel, site, () if args.whole else KERNELS_LEFT_OUT)
        trim(site, args.architecture)
        subprocess.run(["tar", "--create", "--file", str(folder / "site.tar"), "-C", str(site), "."], check=True)
        with args.archive.open("wb") as archive:
            subprocess.run(
                ["xz", "-9", "--threads=0", "--stdout", str(folder / "site.tar")], stdout=archive, check=True
            )
    print(f"{args.archive}: {args.archive.stat().st_size / 1e6:.1f} MB")
    return 0


def name_of(requirement: str) -> str:
    """A requirement's package, as registries compare names; empty for a comment, an option or an empty line."""
    found = re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", requirement.strip())
    return re.sub(r"[-_.]+", "-", found[0]).lower() if found else ""


def platform_flags(python: str) -> list[str]:
    """pip's flags for wheels of x86-64 Linux and that version of CPython."""
    tags = [f"manylinux_2_{minor}_x86_64" for minor in GLIBC_MINORS]
    tags += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]
    flags = ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    return flags + [flag for tag in tags for flag in ("--platform", tag)]


def resolve(requirements: list[str], platform: list[str], report: Path) -> list[str]:
    """All that the requirements need, as NAME==VERSION, the newest that go together. Installs nothing."""
    target = ["--target", str(report.with_name("nothing"))]  # pip resolves for another platform only with a target
    pip("install", "--dry-run", "--ignore-installed", "--report", str(report), *target, *platform, *requirements)
    installs = json.loads(report.read_text())["install"]
    return sorted(f"{item['metadata']['name']}=={item['metadata']['version']}" for item in installs)


def pip(command: str, *arguments: str) -> None:
    """Run one of pip's commands quietly. Raises `CalledProcessError`."""
    subprocess.run([sys.executable, "-m", "pip", command, "--quiet", "--no-cache-dir", *arguments], check=True)


def unpack(wheel: Path, site: Path, left_out: Iterable[str]) -> None:
    """Unpack a wheel as an import path wants it, without the files whose path contains one of `left_out`."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not any(part in name for part in left_out)]
        archive.extractall(site, names)
    for data in site.glob("*.data"):
        for library in (data / "purelib", data / "platlib"):
            for path in sorted(library.rglob("*")) if library.is_dir() else ():
                if path.is_file():
                    moved = site / path.relative_to(library)
                    moved.parent.mkdir(parents=True, exist_ok=True)
                    path.rename(moved)


def trim(site: Path, architecture: int) -> None:
    """Empty the device code for other GPUs in all libraries below `site`."""
    for path in site.rglob("*.so*"):
        if path.is_file() and path.stat().st_size >= TRIM_MIN_BYTES:
            library = bytearray(path.read_bytes())
            if keep_architecture(library, architecture):
                path.write_bytes(library)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("archive", type=Path, help="the archive to write, such as vllm.tar.xz")
    add("--vllm", default="0.26.0", help="vLLM's version (default: %(default)s, the newest for torch 2.11)")
    add("--python", default="3.12", help="Python there (default: %(default)s)")
    add("--architecture", type=int, default=90, help="GPU there (default: %(default)s: sm_90, H100 and H200)")
    add("--have", type=Path, action="append", default=[], metavar="FILE", help="packages there, as pip freeze writes")
    add("--whole", action="store_true", help="leave nothing out but what the machine has")
    add("--extra", nargs="*", default=[], metavar="NAME==VERSION", help="further packages, with what they need")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
