"""The fixed-block norm, the flat layout, and the version gate."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import LayoutError, UserError
from holdfast.layout import Layout, place_layout
from holdfast.parallel.axes.process_groups import connect
from holdfast.parallel.axes.replica_groups import ConnectSettings
from holdfast.parallel.gradients.buckets import FlatLayout, GradientBucket, cut_into_runs
from holdfast.parallel.gradients.grad_norm import (
    clip_factor,
    combine_norms,
    sum_of_squares,
    total_of_squares,
)
from holdfast.parallel.torch_compat import check_version, is_peer_loss


def test_norm_is_one_value_for_any_cut_of_the_buffer_into_whole_blocks() -> None:
    flat = torch.randn(4096 * 12, generator=torch.Generator().manual_seed(1))
    whole = float(sum_of_squares(flat))
    exact = float(flat.double().square().sum())
    assert math.isclose(whole, exact, rel_tol=1e-6)
    for threads in (1, 2):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        assert float(sum_of_squares(flat)) == whole
        torch.set_num_threads(before)
    blocks = [float(sum_of_squares(flat[i : i + 4096])) for i in range(0, flat.numel(), 4096)]
    assert combine_norms(blocks) == math.sqrt(whole)


def test_norm_of_a_non_finite_buffer_is_not_finite() -> None:
    for bad in (math.nan, math.inf):
        flat = torch.zeros(8192)
        flat[5000] = bad
        assert not math.isfinite(float(sum_of_squares(flat)))
    assert float(sum_of_squares(torch.zeros(0))) == 0.0
    with pytest.raises(ValueError, match="whole blocks"):
        sum_of_squares(torch.zeros(100))


def test_clip_factor_is_torchs() -> None:
    p = torch.nn.Parameter(torch.zeros(3))
    p.grad = torch.tensor([3.0, 4.0, 12.0])
    torch.nn.utils.clip_grad_norm_([p], 2.0)
    assert torch.allclose(p.grad, torch.tensor([3.0, 4.0, 12.0]) * clip_factor(13.0, 2.0))
    assert clip_factor(0.5, 2.0) == 1.0
    assert clip_factor(13.0, 0.0) == 1.0


@given(st.integers(0, 5000), st.integers(0, 100), st.integers(1, 9))
def test_chunks_tile_a_bucket_on_aligned_cuts(size: int, offset: int, parts: int) -> None:
    bucket = GradientBucket(offset * 16, offset * 16 + size, 0, 0)
    at = bucket.start
    for index in range(parts):
        start, stop = bucket.chunk(index, parts)
        assert start == at
        assert start % 16 == 0 or start == bucket.stop
        at = stop
    assert at == bucket.stop


@given(st.lists(st.integers(1, 300), min_size=1, max_size=20), st.integers(1, 2000))
def test_layout_holds_every_slice_once_and_ignores_bucket_size(sizes: list[int], cap: int) -> None:
    shapes = [(n,) for n in sizes]
    groups = cut_into_runs(shapes, cap, 4)
    assert [i for g in groups for i in g] == list(range(len(sizes)))
    layout = FlatLayout.build([[shapes[i] for i in group] for group in groups])
    other = FlatLayout.build([shapes])
    assert layout.slices == other.slices
    assert layout.size == other.size
    assert layout.size % 4096 == 0
    at = 0
    for piece in layout.slices:
        assert piece.start >= at
        assert piece.start % 16 == 0
        at = piece.start + piece.size


def test_an_unknown_torch_is_refused_with_a_sentence() -> None:
    for good in ("2.11.0", "2.12.1+cpu", "2.13.0"):
        check_version(good)
    for bad in ("2.10.1", "2.14.0.dev20270101", "3.0"):
        with pytest.raises(UserError, match="install torch 2"):
            check_version(bad)


def test_only_connection_errors_count_as_the_loss_of_a_peer() -> None:
    assert is_peer_loss(RuntimeError("[.../gloo/transport/tcp/pair.cc:553] Connection closed"))
    assert not is_peer_loss(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_peer_loss(ValueError("gloo"))


def test_layouts_that_cannot_run_are_refused() -> None:
    store = torch.distributed.HashStore()
    with pytest.raises(LayoutError, match="need the backend nccl"):
        connect(
            ConnectSettings(store, torch.device("cuda")),
            place_layout(Layout(dp_replicate=2), 1, ("a", "a")),
            0,
        )


def test_what_no_norm_counts_must_be_finite_too() -> None:
    flat, device = torch.ones(8192), torch.device("cpu")
    assert total_of_squares([flat, flat], [], device) == 16384.0
    assert total_of_squares([flat], [2 * flat], device) == 8192.0
    broken = torch.zeros(4096)
    broken[7] = math.inf
    assert math.isnan(total_of_squares([flat], [flat, broken], device))
