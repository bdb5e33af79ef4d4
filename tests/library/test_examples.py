"""Every program in examples/ does what its first line says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import vitruvian
from tests import api_page

ROOT = Path(__file__).parents[2]
EXAMPLES = {
    "open_and_compare.py": (["HF", "RUN"], r"megatron \{'tp': 2, 'pp': 1\}\nequal\n"),
    "plan_before.py": (["RUN"], r"changes: \{'cast BF16 to F16': \d+\}"),
    "convert_with_progress.py": (
        ["HF", "NEW"],
        r"converting: \d+ bytes\nverifying: \d+ bytes\n\d+ tensors, digest \w{64}\n",
    ),
    "parts_on_nodes.py": (["HF", "NEW"], r"each part: \[\d+, \d+, \d+, \d+\]\n\w{64}\n"),
    "digest_of_names.py": (["HF", "RUN"], r"(\w{64}) .*\n\1 "),
    "without_a_copy.py": (["HF", "NEW"], r"llama, \d+ parameters\n\d+ tensors, digest \w{64}\n"),
    "norms_of_layers.py": (["RUN"], r" +\d+\.\d{4}  model\.embed_tokens\.weight\n"),
    "rank_of_megatron.py": (["HF"], r"rows of the embedding: \(4, 64\) bfloat16\n"),
    "stream_to_a_server.py": (["RUN"], r"\d{5,} bytes\n"),
    "into_a_model.py": (["RUN", "HF"], r"\d+ tensors; logits \(1, 3, \d+\)\n"),
    "export_in_a_trainer.py": (["HF", "NEW", "OUT"], r"train_loss"),
}
"""Program: its words, and what it prints."""


def test_every_example_is_run_and_listed():
    assert EXAMPLES.keys() == {path.name for path in (ROOT / "examples").glob("*.py")}
    assert EXAMPLES.keys() == set(
        re.findall(r"^\| \[(\w+\.py)\]", (ROOT / "examples/README.md").read_text(), re.MULTILINE)
    )


def test_the_page_of_the_library_is_that_of_its_docstrings():
    assert api_page.PAGE.read_text() == api_page.page(), "python -m tests.api_page"


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_prints_what_it_should(model, tmp_path, name):
    argv, printed = EXAMPLES[name]
    source = model("llama", "bfloat16")
    places = {"HF": source, "RUN": tmp_path / "run", "NEW": tmp_path / "new", "OUT": tmp_path / "out"}
    vitruvian.convert(source, places["RUN"], to="megatron", tp=2)
    ran = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *(str(places[word]) for word in argv)],
        capture_output=True, text=True, timeout=200, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert re.search(printed, ran.stdout), ran.stdout
