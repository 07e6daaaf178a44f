"""docs/first_run.ipynb: its cells, run one after the other as they stand."""

import json
from pathlib import Path

import pytest
from runs import run

FILE = Path(__file__).parents[2] / "docs/first_run.ipynb"
# A cell's value is that of its last line, if it is an expression; `_repr_html_` shows it.
CELLS = """
import ast, json, sys

space, values = {}, []
for cell in json.load(open(sys.argv[1]))["cells"]:
    if cell["cell_type"] == "code":
        *body, last = ast.parse("".join(cell["source"])).body
        if not isinstance(last, ast.Expr):
            body, last = [*body, last], None
        exec(compile(ast.Module(body, []), "cell", "exec"), space)
        value = last and eval(compile(ast.Expression(last.value), "cell", "eval"), space)
        shown = value._repr_html_() if hasattr(value, "_repr_html_") else repr(value)
        values.append(shown)
        print(f"--- {shown[:2000]}")
json.dump(values, open("values.json", "w"))
"""


@pytest.mark.slow
def test_all_cells_run_and_the_model_learns(tmp_path):
    (tmp_path / "cells.py").write_text(CELLS)
    said = run("cells.py", FILE, cwd=tmp_path).out
    assert "Verdict: learns" in said
    _, row, score, _, folder, answers, table, curves, page, _ = json.loads(
        (tmp_path / "values.json").read_text()
    )
    assert "'answer'" in row and score == "[1.0]" and folder.endswith("first_run/step_000012')")
    assert answers.count("<think>") == 3 and "completion" in table and "eval/accuracy" in curves
    assert page.startswith("<iframe srcdoc=") and "Significant: on 64 held-out problems" in page
    assert said.rpartition("--- <iframe")[2].count("<think>") == 1  # what the checkpoint says
