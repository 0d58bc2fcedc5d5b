"""Where compute threads run, on machines that are described as Linux describes them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.live import cli, serving

from slotwise.compose.launch import AUTO, CORES, NONE, Processor, environment, numbers, read_processors


def machine(folder: Path) -> list[Processor]:
    """Two nodes of two cores with two hardware threads each, numbered as Linux numbers them."""
    for node, listed in ((0, "0-1,4-5"), (1, "2-3,6-7"), (2, "")):
        place = folder / f"node/node{node}"
        place.mkdir(parents=True)
        (place / "cpulist").write_text(listed + "\n")
    for number in range(8):
        place = folder / f"cpu/cpu{number}/topology"
        place.mkdir(parents=True)
        (place / "thread_siblings_list").write_text(f"{number % 4},{number % 4 + 4}\n")
    return read_processors(range(8), folder)


def test_a_place_of_cores_is_a_core_with_its_hardware_threads_node_by_node(tmp_path: Path) -> None:
    processors = machine(tmp_path)
    assert environment(None, CORES, processors) == {
        "OMP_NUM_THREADS": "4", "OMP_PLACES": "{0,4},{1,5},{2,6},{3,7}", "OMP_PROC_BIND": "true"}
    assert environment(2, CORES, processors)["OMP_PLACES"] == "{0,4},{1,5}", "both on the first node"
    usable = [one for one in processors if one.number in (1, 3, 6, 7)]
    assert environment(None, CORES, usable)["OMP_PLACES"] == "{1},{3,7},{6}", "processors of others are left out"


def test_a_list_keeps_its_order(tmp_path: Path) -> None:
    assert environment(None, "6,0-1", machine(tmp_path)) == {
        "OMP_NUM_THREADS": "3", "OMP_PLACES": "{6},{0},{1}", "OMP_PROC_BIND": "true"}
    assert numbers("3,0-2,7") == [3, 0, 1, 2, 7]


def test_the_default_leaves_the_environment_as_it_is() -> None:
    assert environment(None, AUTO, []) == {}
    assert environment(1, AUTO, []) == {"OMP_NUM_THREADS": "1"}
    assert environment(None, NONE, []) == {"OMP_PROC_BIND": "false"}


@pytest.mark.parametrize(("threads", "bind", "error"), [
    (5, CORES, "--cpu-threads 5: --cpu-bind cores has 4 places"), (3, "0,1", "--cpu-bind 0,1 has 2 places"),
    (None, "8", "this process may not use processor 8; it may use 0, 1, 2, 3, 4, 5, 6, 7"),
    (1 << 15, AUTO, "this process may use")])
def test_places_that_are_not_there_are_refused(tmp_path: Path, threads: int | None, bind: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        environment(threads, bind, machine(tmp_path))


@pytest.mark.parametrize("bind", [CORES, "0"])
def test_an_unknown_machine_is_not_guessed_at(bind: str) -> None:
    with pytest.raises(ValueError, match="not known"):
        environment(None, bind, [])


@pytest.mark.parametrize(
    "text", ["", "a", "1-", "-1", "3-1", "1,1", "0-3,2", "0-999999", "1 2", "٣", "1,,2", "9999999"])
def test_a_list_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must"):
        numbers(text)


def test_a_machine_without_descriptions_has_processors_of_one_node(tmp_path: Path) -> None:
    assert read_processors([2, 0], tmp_path) == [Processor(0, frozenset({0}), 0), Processor(2, frozenset({2}), 0)]


@pytest.mark.parametrize(("arguments", "error"), [
    (("--cpu-threads", "0"), "argument --cpu-threads: must be"),
    (("--cpu-bind", "3-1"), "argument --cpu-bind: must be"),
    (("--cpu-threads", "65536"), "--cpu-threads 65536: this process may use"),
    (("--cpu-bind", "65000"), "may not use processor 65000")])
def test_the_command_line_refuses_them_in_one_line(arguments: tuple[str, ...], error: str) -> None:
    done = cli("serve", *arguments)
    assert done.returncode != 0 and done.stderr.count("\n") == 1 and error in done.stderr


def test_the_engine_runs_where_it_is_told(tmp_path: Path) -> None:
    last = max(os.sched_getaffinity(0))
    with serving("--cpu-bind", str(last), log=tmp_path / "log") as live:
        answer = live.client.post("/v1/completions", json={"prompt": "def f", "max_tokens": 2})
        assert answer.status_code == 200
        (engine,) = [int(child) for child in children(live.process.pid) if b"compose.engine_process" in command(child)]
        assert os.sched_getaffinity(engine) == {last}
        names = [Path(f"/proc/{engine}/task/{task}/comm").read_text() for task in os.listdir(f"/proc/{engine}/task")]
        assert not [name for name in names if name.startswith("compute-")], "one place is one thread, the leader"


def children(process: int) -> list[str]:
    return [child for task in os.listdir(f"/proc/{process}/task")
            for child in Path(f"/proc/{process}/task/{task}/children").read_text().split()]


def command(process: str) -> bytes:
    return Path(f"/proc/{process}/cmdline").read_bytes()
