"""Layers with a state: against their formulas token by token, and under any change of schedule."""

import copy
import itertools

import pytest
import torch

from bubblespec.engine import state_layers
from bubblespec.engine.batch import SamplingParams
from bubblespec.engine.decoder import is_like_llama, is_written_out
from bubblespec.engine.model import forward_hidden, pack_sequences
from bubblespec.engine.model_checks import prepare_model
from bubblespec.engine.ops import torch_states as ops
from bubblespec.engine.state_layers import CHUNK
from tests.helpers.generation import STOP, Drafter, as_dict, make_engine, make_prompts, make_rows
from tests.helpers.gradients import check_packed_gradients
from tests.test_architectures import HYBRIDS, build

PARAMS = SamplingParams(temperature=0.9, top_p=0.97, stop_token_ids=STOP, min_length=2)
ROWS, HEADS, KEY, VALUE = 3, 2, 5, 4


def token_by_token(state, q, k, v, log_decay, beta):
    """The recurrence as the papers write it: its outputs, and the state behind each token."""
    outs, states = [], []
    for t in range(v.shape[2]):
        state = state * log_decay[:, :, t, None, None].exp()
        added = v[:, :, t]
        if beta is not None:
            known = (state * k[:, :, t, :, None]).sum(-2)
            added = beta[:, :, t, None] * (added - known)
        state = state + k[:, :, t, :, None] * added[:, :, None]
        outs.append((state * q[:, :, t, :, None]).sum(-2))
        states.append(state)
    return torch.stack(outs, 2), states


def random_window(width: int, has_beta: bool):
    torch.manual_seed(width)
    q, k = (
        torch.nn.functional.normalize(torch.randn(ROWS, HEADS, width, KEY).double(), dim=-1)
        for _ in "qk"
    )
    v, state = torch.randn(ROWS, HEADS, width, VALUE).double(), torch.randn(ROWS, HEADS, KEY, VALUE)
    log_decay = -torch.rand(ROWS, HEADS, width).double() * 3
    beta = torch.rand(ROWS, HEADS, width).double() * 2 if has_beta else None
    return state.double(), q, k, v, log_decay, beta


@pytest.mark.parametrize("has_beta", [True, False])
@pytest.mark.parametrize("width", [1, 2, 7, CHUNK])
def test_window_equals_its_tokens_one_by_one(width, has_beta):
    state, *fed = random_window(width, has_beta)
    wanted, states = token_by_token(state, *fed)
    out, added, sums = ops.window(state, *fed)
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-12)
    torch.testing.assert_close(
        ops.behind(state, fed[1], added, sums), states[-1], rtol=0, atol=1e-12
    )
    kept = torch.tensor([0, width, width // 2])
    folded = state.clone()
    ops.fold(folded, fed[1], added, sums, kept)
    for row, count in enumerate(kept.tolist()):
        expected = states[count - 1][row] if count else state[row]
        torch.testing.assert_close(folded[row], expected, rtol=0, atol=1e-12)


@pytest.fixture(scope="module", params=["qwen3_5", "qwen3_next", "granite_hybrid"])
def baseline(request):
    """Sampled rows of one schedule, which every other schedule must reproduce."""
    model = build(*HYBRIDS[request.param])
    prepare_model(model, 200)
    prompts = [*make_prompts(4, 25), *make_prompts(1, 140)]
    prompts[1] = prompts[1][:1]
    rows = make_engine(model, 64, seed=5, max_length=200).run(make_rows(prompts, 3), PARAMS)
    assert {len(row.tokens) for row in rows} != {30}
    return model, prompts, as_dict(rows)


ALL = {"num_slots": 64}
FEW = {"num_slots": 5, "max_num_batched_tokens": 12}
ONE = {"num_slots": 1, "max_num_batched_tokens": 1}
PAGES = {"num_slots": 8, "page_size": 5, "num_pages": 45}


@pytest.mark.parametrize("corrupted, options", [(0.0, ALL), (0.3, FEW), (None, ONE), (0.3, PAGES)])
def test_tokens_with_any_schedule_and_drafts_are_equal(baseline, corrupted, options):
    model, prompts, wanted = baseline
    engine = make_engine(model, seed=5, max_length=200, **options)
    for _ in range(2):  # the second time with slots that had other rows
        drafter = None if corrupted is None else Drafter(wanted, corrupted)
        rows = make_rows(prompts, 3)
        assert as_dict(engine.run(rows, PARAMS, drafter)) == wanted
        engine.reset()


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next", "olmo_hybrid", "lfm2", "nemotron_h"])
def test_gradients_of_packed_sequences_equal_those_of_the_model(name, monkeypatch):
    """Lengths on both sides of a window; the reference computes each sequence alone."""
    model, lengths = build(*HYBRIDS[name]), [CHUNK + 9, 3, 1, CHUNK, 2 * CHUNK + 1]
    check_packed_gradients(model, lengths, 200, monkeypatch)


@pytest.mark.parametrize("name", ["qwen3_5", "granite_hybrid"])
def test_copied_model_has_weights_of_its_own(name):
    """The reference of a KL term is such a copy."""
    model = build(*HYBRIDS[name])
    prepare_model(model, 200)
    other = copy.deepcopy(model)
    prepare_model(other, 200)
    ids, packing = torch.arange(1, 9), pack_sequences([5, 3], model.device)
    before = forward_hidden(other, ids, packing)
    assert torch.equal(before, forward_hidden(model, ids, packing))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    assert torch.equal(before, forward_hidden(other, ids, packing))
    assert not torch.equal(before, forward_hidden(model, ids, packing))


def test_installed_kernel_of_whole_sequences_is_given_their_borders(monkeypatch):
    """A stand-in for flash-linear-attention, which computes each sequence alone."""
    lengths, calls = [CHUNK + 9, 1, 5], []
    _, *fed = random_window(sum(lengths), True)
    q, k, v, *rates = (of[0].transpose(0, 1) for of in fed)
    packed = torch.stack((q, k), 1), v, torch.stack(rates, 1)
    wanted = state_layers.recurrence(pack_sequences(lengths, v.device), 0, *packed)

    def kernel(q, k, v, g, beta, *, scale, cu_seqlens):
        calls.append((scale, q.dtype, k.dtype, v.dtype, g.dtype, beta.dtype))
        outs = []
        for begin, end in itertools.pairwise(cu_seqlens.tolist()):
            own = (of[:, begin:end].transpose(1, 2).double() for of in (q, k, v, g, beta))
            state = g.new_zeros(1, v.shape[2], q.shape[-1], v.shape[-1])
            outs.append(token_by_token(state, *own)[0].transpose(1, 2))
        return torch.cat(outs, 1), None

    monkeypatch.setattr(state_layers, "delta_kernel", lambda device: kernel)
    found = state_layers.recurrence(pack_sequences(lengths, v.device), 0, *packed)
    assert 0 < (found - wanted).abs().max() < 0.02 * wanted.abs().max()  # bfloat16
    assert calls == [(1.0, *[torch.bfloat16] * 3, *[torch.float64] * 2)]


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next_dense", "olmo_hybrid", "lfm2"])
def test_layers_are_written_out(name):
    """And so faster than transformers' modules, which serve all others."""
    model = build(*HYBRIDS[name])
    prepare_model(model, 200)
    assert is_written_out(model) and not is_like_llama(model)


def test_layer_that_differs_from_what_is_written_out_is_refused(monkeypatch):
    """Training computes it as well, so transformers' modules cannot take its place."""
    monkeypatch.setattr(ops, "unit", lambda x: x)
    with pytest.raises(ValueError, match="logits through packed sequences differ"):
        prepare_model(build(*HYBRIDS["qwen3_5"]), 200)
