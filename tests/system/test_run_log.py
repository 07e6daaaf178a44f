"""A run's record, when the run is killed anywhere, a line is torn, or anything is logged."""

import enum
import json
import math
import tracemalloc
from dataclasses import replace
from types import SimpleNamespace

import numpy
import pytest
import torch
from kill_points import kill_points
from processes import on_two_ranks
from steps import make_recorder, make_scores, make_trajectory

from torchtune_grpo.config.check import read_config
from torchtune_grpo.config.command_line import load_config
from torchtune_grpo.machine.parallel import on_first_rank
from torchtune_grpo.monitor.record import (
    COMPLETIONS_FILE,
    RUN_FILE,
    append,
    append_groups,
    keep_until,
    read_lines,
    read_metrics,
)
from torchtune_grpo.monitor.recorder import Recorder
from torchtune_grpo.rewards.call import MEASURED, Outcome
from torchtune_grpo.rewards.workers import ContractError

FILES = [COMPLETIONS_FILE, RUN_FILE]


def groups(scores, step=1):
    """Make the records of one group of two completions."""
    return make_recorder(make_trajectory(), scores, num_groups=1).take(step)[0]


def record(folder, *steps):
    """Record two completions and one event a step."""
    folder.mkdir(exist_ok=True)
    for step in steps:
        scores = replace(make_scores(), extra={"note": ["ü €"] * 4})
        append_groups(folder, groups(scores, step), done=1.0)
        append(folder, "step", step, {"reward": step / 3, "€": 1.0})


def history(folder):
    """Read the steps of the completions and of the events."""
    return [[each["step"] for each in read_lines(folder / name)] for name in FILES]


def check_history(folder, *steps):
    """Assert that exactly these steps are recorded, in whole lines and no other file."""
    assert sorted(path.name for path in folder.iterdir()) == FILES
    assert history(folder) == [[step for step in steps for _ in range(2)], [*steps]]
    for name in FILES:
        for line in (folder / name).read_text(encoding="utf-8").splitlines():
            json.loads(line, parse_constant=pytest.fail)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "out"


@pytest.mark.slow
@pytest.mark.parametrize("step", [0, 2, 3])
def test_a_resume_that_is_killed_anywhere_loses_nothing(tmp_path, folder, step):
    record(tmp_path, 1, 2, 3)
    sizes = range(1, (tmp_path / FILES[0]).stat().st_size, 97) if step == 3 else ()
    for where in kill_points(
        lambda: keep_until(folder, step),
        folder=folder,
        prepare=lambda: record(folder, 1, 2, 3),
        sizes=sizes,
    ):
        for kept in map(set, history(folder)):
            assert kept in ({1, 2, 3}, set(range(1, step + 1))), where
        keep_until(folder, step)
        check_history(folder, *range(1, step + 1))


@pytest.mark.slow
def test_a_step_that_is_killed_anywhere_leaves_the_others(tmp_path, folder):
    """Also in the middle of a character."""
    record(tmp_path, 1, 2)
    before = (tmp_path / FILES[0]).stat().st_size
    record(tmp_path, 3)
    written = (tmp_path / FILES[0]).read_bytes()
    inside = [n for n in range(before, len(written)) if 0x80 <= written[n] < 0xC0]
    assert inside
    for _ in kill_points(
        lambda: record(folder, 3),
        folder=folder,
        prepare=lambda: record(folder, 1, 2),
        sizes=sorted({*range(before, len(written), 97), *inside}),
    ):
        keep_until(folder, 2)
        check_history(folder, 1, 2)
        record(folder, 3)
        check_history(folder, 1, 2, 3)


def test_torn_lines_are_left_out_and_reported_once(folder, caplog):
    record(folder, 1, 2)
    path = folder / FILES[1]
    lines = path.read_bytes()
    torn = lines[: lines.rindex("€".encode()) + 1]
    with pytest.raises(UnicodeDecodeError):
        torn.decode()
    noise = b'{"reward": 1}\n[1]\n7\n\xff\x00\n{"step": "1"}\n' + b"[" * 100_000 + b"\n"
    path.write_bytes(noise + torn)
    assert [each["step"] for each in read_lines(path)] == [1]
    caplog.clear()
    keep_until(folder, 2)
    (message,) = caplog.messages
    assert f"{path}: left out 7 line(s)" in message
    assert [each["step"] for each in read_lines(path)] == [1]
    caplog.clear()
    keep_until(folder, 2)
    assert not caplog.messages  # they are gone


def test_a_last_line_without_its_end_is_whole(folder):
    record(folder, 1, 2)
    path = folder / FILES[1]
    path.write_bytes(path.read_bytes()[:-1])
    keep_until(folder, 2)
    record(folder, 3)
    check_history(folder, 1, 2, 3)


def test_a_large_record_is_not_read_whole(folder):
    folder.mkdir()
    line = json.dumps({"step": 1, "completion": "x" * 10_000}) + "\n"
    for name in FILES:
        (folder / name).write_text(line * 2000)  # 20 MB
    tracemalloc.start()
    keep_until(folder, 1)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2e6
    assert (folder / FILES[0]).read_text() == line * 2000


def test_completions_are_whole_groups_and_bounded(tmp_path):
    """Half of a run may fill half of 64 MiB and 1 MiB more; no group is cut."""
    path = tmp_path / COMPLETIONS_FILE
    for step in (1, 2, 80, 100):
        group = [{"step": step, "completion": "x" * 400_000}] * 2
        append_groups(tmp_path, [group] * 90, done=step / 100)
        size = len(path.read_bytes().splitlines(True)[-1])
        allowed = 2**20 + step / 100 * 64 * 2**20
        assert allowed - 2 * size < path.stat().st_size <= allowed
    lines = read_lines(path)
    assert all(sum(line["step"] == step for line in lines) % 2 == 0 for step in (1, 2, 80, 100))


class Color(enum.IntEnum):
    RED = 1


class Hostile:
    def __str__(self):
        raise ValueError

    __repr__ = __str__
    tolist = property(__str__)


itself = [1]
itself.append(itself)
deep = []
for _ in range(100_000):
    deep = [deep]

# What a reward may give to log_extra -> what the file says; None = any text.
VALUES = {
    "dict": ({"a": [1, None, True], 2: "b"}, {"a": [1, None, True], "2": "b"}),
    "tuple keys": ({(1, 2): {(3,): 4}}, {"(1, 2)": {"(3,)": 4}}),
    "set": ({7}, [7]),
    "not finite": ([math.nan, math.inf, -math.inf, 1.5], [None, None, None, 1.5]),
    "tensor": (torch.tensor([[1.0, math.nan]], dtype=torch.bfloat16), [[1.0, None]]),
    "no values": (torch.ones(2, device="meta"), None),
    "numpy scalars": ([numpy.float32(0.5), numpy.float64("nan"), numpy.int8(1)], [0.5, None, 1]),
    "huge": ([10**5000, -(2**64), 2**63 - 1], [hex(10**5000), hex(-(2**64)), 2**63 - 1]),
    "enum": (Color.RED, 1),
    "bytes": (b"\xff", "b'\\xff'"),
    "surrogate": ("\ud800 \udcff", "\ud800 \udcff"),
    "line ends": ("a\nb\u2028\x85", "a\nb\u2028\x85"),
    "no text": ({Hostile(): [Hostile(), 1]}, {"<Hostile>": ["<Hostile>", 1]}),
    "function": (lambda: None, None),
    "in itself": (itself, None),
    "deep": (deep, None),
}


@pytest.mark.parametrize("name", VALUES)
def test_whatever_a_reward_logs_is_valid_json(folder, name):
    value, expected = VALUES[name]
    notes = Outcome(4)
    notes.log_extra("note", [value] * 4)
    folder.mkdir()
    append_groups(folder, groups(replace(make_scores(), extra=notes.extra)), done=1.0)
    lines = (folder / FILES[0]).read_bytes().decode().removesuffix("\n").split("\n")
    assert len(lines) == 2
    for line in lines:
        got = json.loads(line, parse_constant=pytest.fail)["extra"]["note"]
        assert got == expected if expected is not None else got
    keep_until(folder, 1)
    assert len(read_lines(folder / FILES[0])) == 2


def test_totals_beyond_float32_and_a_metric_called_step(tmp_path):
    total = torch.full((4,), math.inf)
    append_groups(tmp_path, groups(replace(make_scores(), total=total)), done=1.0)
    append(tmp_path, "step", 1, {"step": 9.0, "kind": 1.0, "kl": math.nan})
    keep_until(tmp_path, 1)
    assert read_lines(tmp_path / COMPLETIONS_FILE)[0]["reward"] is None
    assert read_metrics(tmp_path) == [{"step": 1, "kl": None}]


def test_names_of_the_run_are_refused():
    notes = Outcome(1)
    for name in MEASURED:
        for said in (name, f"b/{name}"):  # of a reward "a/b"
            with pytest.raises(ContractError, match=rf"log_metric\('{said}', .*mean, .*another"):
                notes.log_metric(said, 1.0)
    assert not notes.metrics


@pytest.mark.parametrize("fails", ["logger", "completions"])
def test_what_fails_on_the_rank_that_records_ends_all(tmp_path, folder, fails):
    """The other would go on, and wait for the first one, which is gone."""
    cfg = load_config("llama3_2_1B_lora_grpo", [f"output_dir={folder}"])
    (tmp_path / "file").touch()
    cfg.metric_logger.log_dir = str(tmp_path / ("file" if fails == "logger" else "logs"))
    decider = SimpleNamespace(name="a", measure="accuracy", is_known=True)

    def error(rank: int) -> str:
        more = {"decider": decider, "device": torch.device("cpu")}
        ranges = dict.fromkeys("ab")
        try:
            recorder = Recorder(read_config(cfg.copy()), cfg, rewards=ranges, **more)
            on_first_rank((folder / COMPLETIONS_FILE).mkdir)
            recorder.groups.take = lambda step: ([[{"step": step}]], {})
            recorder._write_page = lambda: None
            recorder.step(1, {"num_tokens": 1.0})
        except Exception as error:
            return type(error).__name__
        return "goes on"

    assert on_two_ranks(error, folder=tmp_path)[1] == "FirstRankFailed"
