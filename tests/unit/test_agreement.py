"""Agreement before the first byte: cheap when ranks agree, the same words everywhere when not. Ranks are threads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from syncline import CollectiveMismatch, ContractMismatch, Statistics, SynclineError
from syncline.liveness import StepPhase
from syncline.transport import Transport, run_ranks
from syncline.transport.agreement import agree, describe_tensors, exchange


def error_of(transport: Transport, title: str, lines: list[str], **options: Any) -> str:
    with pytest.raises(ContractMismatch) as caught:
        agree(transport, title, lines, **options)
    return str(caught.value)


def test_agreeing_costs_one_small_collective_and_nothing_for_a_rank_that_is_alone() -> None:
    def program(transport: Transport) -> Statistics:
        agree(transport, "Net", [f"parameter p{i}  (1000, 1000)" for i in range(1000)])
        return transport.statistics()

    for statistics in run_ranks(3, program):
        assert statistics.num_calls == {"all_gather": 1}
        assert statistics.payload_bytes == {"all_gather": 3 * 105}
    assert run_ranks(1, program)[0].total_calls == 0


def test_a_difference_is_told_in_the_same_words_on_every_rank() -> None:
    def program(transport: Transport) -> str:
        lines = ["a  1", "b  2" if transport.rank != 1 else "b  3"]
        return error_of(transport, "Net", lines, remedy=f"Ask rank {transport.rank}.")

    texts = run_ranks(3, program)
    assert len(set(texts)) == 1
    assert texts[0] == (
        "Net: the ranks do not agree. The expected values are those of most ranks.\n"
        "rank 1 against ranks 0, 2:\n"
        "  b\n"
        "    expected 2 (ranks 0, 2)\n"
        "    got      3 (rank 1)\n"
        "Ask rank 0."
    )


def test_order_and_number_of_entries_count_and_afterwards_the_transport_still_works() -> None:
    def program(transport: Transport) -> list[str]:
        texts = []
        for mine, theirs in ((["a", "b"], ["b", "a"]), (["a"], ["a", "a"]), ([], ["a"])):
            texts.append(error_of(transport, "Net", theirs if transport.rank else mine))
        x = torch.ones(1)
        transport.all_reduce(x).wait()
        assert x.item() == 2.0
        return texts

    one, other = run_ranks(2, program)
    assert one == other


def test_ranks_at_different_places_of_the_program_are_told_who_is_where() -> None:
    def program(transport: Transport) -> str:
        transport.board.step, transport.board.phase = 3 + transport.rank, StepPhase.AFTER_BACKWARD
        with pytest.raises(CollectiveMismatch) as caught:
            exchange(transport, "sl.barrier" if transport.rank else "sl.mean", [])
        return str(caught.value)

    texts = run_ranks(2, program)
    assert texts[0] == texts[1]
    first, second = texts[0].splitlines()[1:3]
    assert first.startswith("  rank 0: sl.mean, step 3, after backward, at test_agreement.py:")
    assert second.startswith("  rank 1: sl.barrier, step 4, after backward, at test_agreement.py:")


def test_a_payload_travels_in_the_same_collective() -> None:
    def program(transport: Transport) -> tuple[list[bytes], int]:
        payloads = exchange(transport, "Net", [], payload=bytes([7 + transport.rank]) * (3 + transport.rank))
        return payloads, transport.statistics().total_calls

    expected = [b"\7" * 3 + b"\0" * 69, b"\x08" * 4 + b"\0" * 68]
    assert run_ranks(2, program) == [(expected, 1), (expected, 1)]


@pytest.mark.parametrize(
    ("faults", "error_class", "text"),
    [
        ({1: TypeError("no")}, TypeError, "rank 1: no"),
        (
            {0: ValueError("no"), 1: TypeError("never"), 2: ValueError("no")},
            ValueError,
            "ranks 0, 2: no\nrank 1: never",
        ),
        ({2: KeyError("k")}, SynclineError, "rank 2: KeyError: 'k'"),
        ({0: RuntimeError("no"), 1: RuntimeError("no")}, RuntimeError, "ranks 0, 1: no"),
        ({0: RuntimeError("no"), 1: ValueError("k")}, SynclineError, "rank 0: RuntimeError: no\nrank 1: k"),
    ],
)
def test_what_some_ranks_refuse_every_rank_raises(
    faults: dict[int, Exception], error_class: type[Exception], text: str
) -> None:
    def program(transport: Transport) -> None:
        fault = faults.get(transport.rank)
        for is_described in (False, True):  # the fault may come before or after the call is described
            title = "Net" if is_described or transport.rank == min(faults) else f"rank {transport.rank}'s"
            with pytest.raises(error_class) as caught:  # the lowest rank that refuses says what
                exchange(transport, title, ["a"] if is_described or not fault else [], fault=fault)
            assert type(caught.value) is error_class
            assert str(caught.value) == f"Net: refused, nothing was sent\n{text}"
            assert caught.value.__cause__ is None  # it would repeat the text
            assert caught.value.__suppress_context__

    run_ranks(3, program)


def test_a_tensor_is_described_by_everything_that_must_be_equal() -> None:
    module = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    module.bias.requires_grad_(False)
    assert describe_tensors(module.named_parameters()) == [
        "parameter weight  torch.float32 (8, 3, 3, 3) on cpu strides (27, 1, 9, 3) requires_grad=True",
        "parameter bias  torch.float32 (8,) on cpu strides (1,) requires_grad=False",
    ]
    sent = describe_tensors([("x", torch.zeros(2, 3).t())], kind="tensor", layout=False)
    assert sent == ["tensor x  torch.float32 (3, 2) on cpu"]
    assert "torch.sparse_coo" in describe_tensors([("x", torch.zeros(2).to_sparse())])[0]


def test_devices_are_counted_not_numbered_so_that_ranks_can_compare_them() -> None:
    def on(device: str) -> Any:
        tensor = torch.zeros(1)
        return SimpleNamespace(
            dtype=tensor.dtype, shape=tensor.shape, device=torch.device(device), layout=tensor.layout
        )

    def devices(*names: str) -> list[str]:
        lines = describe_tensors([("x", on(name)) for name in names], layout=False)
        return [line.partition(" on ")[2] for line in lines]

    assert devices("cuda:3", "cpu", "cuda:3") == devices("cuda:0", "cpu", "cuda:0") == ["cuda", "cpu", "cuda"]
    assert (
        devices("cuda:3", "cuda:2") == devices("cuda:0", "cuda:1") == ["cuda", "cuda (device 2 of this rank)"]
    )
