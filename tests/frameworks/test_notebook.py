"""`sl.launch` in a notebook: the example, the output of all ranks in the cell, errors in the cell, the stop button."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.states import wait_until

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

EXAMPLE = Path(__file__).parents[2] / "examples" / "notebook.ipynb"


def executed(*sources: str, allow_errors: bool = False) -> list[Any]:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    client = nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3", allow_errors=allow_errors)
    return list(client.execute().cells)


def printed(cell: Any) -> str:
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


def test_the_example_runs_on_two_ranks() -> None:
    notebook = nbformat.read(EXAMPLE, as_version=4)
    nbformat.validate(notebook)
    client = nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3")
    cells = [cell for cell in client.execute().cells if cell.cell_type == "code"]
    lines = printed(cells[1]).splitlines()
    assert sorted(line.partition(", loss")[0] for line in lines[:2]) == [
        "[rank 0] 2 ranks",
        "[rank 1] 2 ranks",
    ]
    assert lines[2].endswith("128 predictions")
    assert abs(float(cells[2].outputs[0].data["text/plain"]) - 0.25) < 0.2
    assert cells[3].outputs[-1].data["text/plain"] == "128"


FAILS = """
import torch, syncline as sl

class MyError(Exception):
    pass

def inner():
    raise MyError("rank 1 has no data")

def program():
    world = sl.init()
    if world.rank == 1:
        inner()
    sl.barrier()

x = torch.randn(600, 600, requires_grad=True)
(x @ x).sum().backward()
"""


def test_the_error_of_a_rank_is_shown_in_the_cell_and_the_next_cell_works() -> None:
    cells = executed(
        FAILS, "sl.launch(program)", "print(sl.launch(lambda: sl.init().size, ranks=2))", allow_errors=True
    )
    (error,) = [output for output in cells[1].outputs if output.output_type == "error"]
    assert error.ename == "PeerFailed"
    assert error.evalue.startswith("sl.launch: rank 1 (pid ")
    assert "in inner" in error.evalue
    assert "MyError: rank 1 has no data" in error.evalue
    assert printed(cells[2]) == "2\n"


def test_the_stop_button_ends_all_ranks(tmp_path: Path) -> None:
    jupyter_client = pytest.importorskip("jupyter_client")
    code = f"""
import os, pathlib, time, syncline as sl
def program():
    world = sl.init()
    (pathlib.Path({str(tmp_path)!r}) / str(os.getpid())).touch()
    time.sleep(300)
sl.launch(program)
"""
    manager, client = jupyter_client.manager.start_new_kernel(kernel_name="python3")
    try:
        request = client.execute(code)
        wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
        pids = [int(path.name) for path in tmp_path.iterdir()]
        manager.interrupt_kernel()
        reply = client.get_shell_msg(timeout=60)
        while reply["parent_header"].get("msg_id") != request:
            reply = client.get_shell_msg(timeout=60)
        assert reply["content"]["ename"] == "KeyboardInterrupt"
        assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
