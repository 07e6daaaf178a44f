"""HumanEval: the function's head is the prompt, and the tests are where rewards find them."""

import gzip
import json
import os
from pathlib import Path

import pytest

from torchtune_grpo.data import humaneval_dataset
from torchtune_grpo.rewards import CodeReward

DEFAULT_DIR = Path(__file__).parents[2].parent / "shared" / "humaneval"
REAL_FILE = Path(os.environ.get("TORCHTUNE_GRPO_HUMANEVAL", DEFAULT_DIR)) / "HumanEval.jsonl.gz"
ROW = {
    "task_id": "Test/0",
    "prompt": 'def add(x: int) -> int:\n    """Adds one."""\n',
    "entry_point": "add",
    "canonical_solution": "    return x + 1\n",
    "test": "def check(candidate):\n    assert candidate(1) == 2\n",
}


@pytest.fixture
def humaneval_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROW) + "\n" + json.dumps({**ROW, "task_id": "Test/1"}) + "\n")
    return str(path)


def test_the_item_holds_the_test_and_not_the_solution(llama3_tokenizer, humaneval_file):
    data = humaneval_dataset(llama3_tokenizer, source="json", data_files=humaneval_file)
    assert len(data) == 2 and data[0]["prompt"] == ROW["prompt"]
    expected = {name: ROW[name] for name in ("task_id", "test", "entry_point")}
    assert data[0]["columns"] == {**expected, "setup": ROW["prompt"]}
    system = llama3_tokenizer.decode(data[0]["tokens"], skip_special_tokens=False)
    assert "```python" in system and "canonical" not in system


def test_slices_leave_problems_for_evaluation(llama3_tokenizer, humaneval_file):
    node = {"source": "json", "data_files": humaneval_file}
    first = humaneval_dataset(llama3_tokenizer, split="test[:1]", **node)
    second = humaneval_dataset(llama3_tokenizer, split="test[1:]", **node)
    ids = [data[0]["columns"]["task_id"] for data in (first, second)]
    assert ids == ["Test/0", "Test/1"] and len(first) == len(second) == 1
    assert len(humaneval_dataset(llama3_tokenizer, source=humaneval_file)) == 2


def test_other_data_is_refused(llama3_tokenizer, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "x", "answer": "y"}) + "\n")
    with pytest.raises(ValueError, match="it has no column 'task_id', but .'answer', 'prompt'."):
        humaneval_dataset(llama3_tokenizer, source="json", data_files=str(tmp_path / "rows.jsonl"))


@pytest.mark.skipif(not REAL_FILE.exists(), reason="no HumanEval file here")
def test_every_real_solution_passes_and_an_empty_one_does_not(llama3_tokenizer):
    """All 164: as a base model continues the prompt, and as a chat model repeats it."""
    with gzip.open(REAL_FILE, "rt") as file:
        rows = [json.loads(line) for line in file]
    data = humaneval_dataset(llama3_tokenizer, source="json", data_files=str(REAL_FILE))
    columns = [data[index]["columns"] for index in range(len(data))]
    assert len(data) == 164
    arguments = {key: [c[key] for c in columns] for key in ("test", "entry_point", "setup")}
    solutions = [row["canonical_solution"] for row in rows]
    blocks = [f"```python\n{row['prompt']}{s}```" for row, s in zip(rows, solutions)]
    reward = CodeReward(workers=2, timeout=10)
    for completions, passed in ((solutions, 1.0), (blocks, 1.0), (["    pass\n"] * 164, 0.0)):
        assert reward(rows, completions, **arguments) == [passed] * 164
    reward.close()
