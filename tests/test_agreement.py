"""What a run computes against transformers' modules: no alarm for models of several families, by
torch's operations and by kernels, in graphs and without; and faults, each of which is found."""

import re

import numpy as np
import pytest
import torch

from bubblespec.engine import engine as engine_module
from bubblespec.engine import kv_cache, sampling
from bubblespec.engine.batch import SamplingParams
from bubblespec.engine.model import OWN_HIDDEN, OutputHead
from bubblespec.engine.model_checks import prepare_model
from bubblespec.learn import agreement
from bubblespec.learn.agreement import generation_problem, gradient_problem, rows_problem
from tests.helpers import graphs as stand_ins
from tests.helpers.generation import make_rows, make_runner
from tests.helpers.graphs import needs_interpreter
from tests.helpers.models import GQA, config_of, random_model

MAX_LENGTH, SHORT = 48, 20
PLAIN, WARM, GREEDY = SamplingParams(), SamplingParams(0.7, 0.9, 20), SamplingParams(0.0)
STOPS = SamplingParams(stop_token_ids=(5, 11, 20), min_length=4)
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7}
KINDS = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "gemma": ("Gemma3Text", {"head_dim": 16, "query_pre_attn_scalar": 16, **WINDOWS}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "sliding_window": None}),
}
TINY = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
TINY |= {"num_attention_heads": 2, "num_key_value_heads": 1}
MESSAGE = re.compile(
    r"rollouts differ from a forward of transformers' modules: (log-probability of )?token \d+ of "
    r"row \d+ (by|loses by) \S+( against another)?, rounding explains [^\n]+"
)


def make(name: str = "llama", dtype=torch.bfloat16, std: float = 0.2, **options):
    """std: of weights; 0.02 hides attention, which is uniform then, and 0.2 does not."""
    kind, own = KINDS[name]
    model = random_model(config_of(kind, GQA | own, initializer_range=std, **options), dtype)
    prepare_model(model, MAX_LENGTH)
    return model


def runner_of(model, num_slots: int = 4, length: int = MAX_LENGTH, **options):
    return make_runner(model, num_slots, length, 3, **{"max_num_batched_tokens": 16} | options)


@pytest.fixture
def on_gpu(monkeypatch):
    """on_gpu(model options) -> a model whose operations are triton's. Pages and splits have few
    positions, and there is one short text, over a border of pages and splits."""
    from bubblespec.engine.ops import triton_ops

    stand_ins.stand_in(monkeypatch)
    monkeypatch.setattr(triton_ops, "KEYS", 2048)
    monkeypatch.setattr(triton_ops, "tiling", triton_ops.tiling.__wrapped__)  # no cache
    monkeypatch.setattr(kv_cache, "SPLIT", 16)
    monkeypatch.setattr(agreement, "NEW_TOKENS", 6)
    monkeypatch.setattr(agreement, "DRAFT", 3)
    monkeypatch.setattr(agreement, "WRONG", 4)
    monkeypatch.setattr(stand_ins.graphs, "SIZES", (8,))
    make_rows = agreement._make_rows
    monkeypatch.setattr(agreement, "_make_rows", lambda runner: make_rows(runner)[-1:])
    return lambda **options: make(**TINY, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", KINDS)
def test_no_problem_with_operations_of_torch(name, dtype):
    model = make(name, dtype)
    turn = (list(KINDS).index(name) + (dtype == torch.float32)) % 3
    for params in (PLAIN, (WARM, GREEDY, STOPS)[turn]):
        assert generation_problem(runner_of(model), params) is None
    params = (PLAIN, WARM, PLAIN)[turn]
    assert gradient_problem(model, "sdpa", params, MAX_LENGTH, 1 << 12) is None


def test_no_problem_in_float64():
    model = make(dtype=torch.float64)
    assert generation_problem(runner_of(model), PLAIN) is None
    assert gradient_problem(model, "sdpa", PLAIN, MAX_LENGTH, 1 << 20) is None


def test_texts_cross_borders_and_drafts_are_partly_wrong(monkeypatch):
    seen, runner = [], runner_of(make(dtype=torch.float32), 8, page_size=16)
    observe = agreement._Drafts.observe
    monkeypatch.setattr(kv_cache, "SPLIT", 32)
    monkeypatch.setattr(
        agreement._Drafts, "observe", lambda *of: seen.append(of[4:]) or observe(*of)
    )
    assert generation_problem(runner, PLAIN) is None
    num_draft, num_accepted = (np.concatenate(of) for of in zip(*seen, strict=True))
    assert 0.3 < num_accepted.sum() / num_draft.sum() < 0.95 and num_draft.sum() > 100
    rows = agreement._make_rows(runner)
    spans = [(len(row.prompt), len(row.prompt) + row.max_new_tokens) for row in rows]
    assert all(any(begin < border < end for begin, end in spans) for border in (16, 32))
    assert min(begin for begin, _ in spans) == 1 and max(end for _, end in spans) <= MAX_LENGTH


@pytest.mark.parametrize("is_drafted", [False, True])
def test_wrong_acceptance_is_found(monkeypatch, is_drafted):
    runner = runner_of(make())
    if is_drafted:
        monkeypatch.setattr(engine_module, "num_accepted", lambda token, draft, counts: counts)
    problem = generation_problem(runner, PLAIN)
    assert bool(problem) == is_drafted and (problem is None or MESSAGE.fullmatch(problem))


@pytest.mark.parametrize("params", [SamplingParams(0.5), SamplingParams(top_k=3), GREEDY])
def test_sampling_with_other_parameters_is_found(params):
    model = make()
    rows, engine = make_rows([(3, 4, 5), (7, 8)], 2, 24), engine_module.Engine(runner_of(model))
    engine.run(rows, PLAIN)
    assert rows_problem(model, rows, PLAIN, 3) is None
    assert MESSAGE.fullmatch(rows_problem(model, rows, params, 3))


def test_other_noise_is_found():
    model = make()
    rows, engine = make_rows([(3, 4, 5)], 2, 24), engine_module.Engine(runner_of(model))
    engine.run(rows, PLAIN)
    problem = rows_problem(model, rows, PLAIN, 4)
    assert MESSAGE.fullmatch(problem) and "loses by" in problem


def test_one_wrong_number_is_found_and_named():
    model = make()
    rows, engine = make_rows([(3, 4, 5)], 3, 24), engine_module.Engine(runner_of(model))
    engine.run(rows, PLAIN)
    rows[2].logprob[7] += 4.0
    problem = rows_problem(model, rows, PLAIN, 3)
    assert MESSAGE.fullmatch(problem) and "log-probability of token 7 of row 2 by 4" in problem
    rows[2].logprob[7] = np.nan
    assert "token 7 of row 2 by inf" in rows_problem(model, rows, PLAIN, 3)


@pytest.mark.parametrize(
    "params, wanted",
    [
        (SamplingParams(top_k=2), [0.7, 0.4]),  # log(0.4 / 0.2), log(0.3 / 0.2)
        (SamplingParams(top_p=0.5), [np.inf, 0.4]),  # logit(0.5) - logit(0.4)
        (SamplingParams(top_k=2, top_p=0.6), [0.7, 0.1]),  # 0.4 / 0.7 of the two that are kept
    ],
)
def test_token_near_a_bar_may_lose(params, wanted):
    """Tokens 0 and 1 are kept, and would not be for slightly other logits; 2 has been drawn."""
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]], dtype=torch.float64).log()
    identity = torch.nn.Linear(4, 4, bias=False, dtype=torch.float64)
    torch.nn.init.eye_(identity.weight)
    found = np.zeros(2)
    for position in range(200):
        keys = torch.from_numpy(sampling.stream_keys(0, *np.zeros((3, 1), int), [position]))
        given = logits, torch.tensor([2]), torch.tensor([0]), keys
        lost = agreement._values(*given, head=OutputHead(identity, 4), params=params)[1].item()
        kept = sampling.add_gumbel(logits, keys, 4)[0, :2]
        found[kept.argmax()] = max(found[kept.argmax()], lost)
    assert found[1] == pytest.approx(wanted[1], abs=0.03)
    assert found[0] == pytest.approx(wanted[0], abs=0.03) or (found[0] > 3 and wanted[0] == np.inf)


def test_small_difference_of_all_tokens_is_found():
    """It is within what a single token may differ by."""
    model = make(std=0.02)
    rows, engine = make_rows([(3, 4, 5)], 2, 24), engine_module.Engine(runner_of(model))
    engine.run(rows, PLAIN)
    rows[1].logprob += 0.012
    problem = rows_problem(model, rows, PLAIN, 3)
    assert MESSAGE.fullmatch(problem) and " of 24 tokens by more than 0.0" in problem
    assert " of row 1 by 0.01" in problem


def test_logits_are_computed_in_pieces(monkeypatch):
    model, sizes = make(), []
    rows, engine = make_rows([(3, 4, 5)], 2, 24), engine_module.Engine(runner_of(model))
    engine.run(rows, WARM)
    values = agreement._values
    monkeypatch.setattr(agreement, "MAX_LOGITS", 5 * 97)
    monkeypatch.setattr(
        agreement, "_values", lambda *of, **how: sizes.append(len(of[0])) or values(*of, **how)
    )
    assert rows_problem(model, rows, WARM, 3) is None
    assert set(sizes) == {5, 4} and sum(sizes) == 2 * 48


@pytest.mark.parametrize("factor", [1.0, 1.1])
def test_gradient_of_a_layer_off_by_a_tenth_is_found(monkeypatch, factor):
    """Only that of training is: the hook is gone when the model's modules come."""
    model, handles = make(std=0.02), []
    weight = model.model.layers[1].self_attn.k_proj.weight
    forward, own_modules = agreement.forward_hidden, agreement.own_modules

    def spoilt(*of):
        handles.append(weight.register_hook(lambda gradient: gradient * factor))
        return forward(*of)

    monkeypatch.setattr(agreement, "forward_hidden", spoilt)
    monkeypatch.setattr(
        agreement, "own_modules", lambda model: handles[0].remove() or own_modules(model)
    )
    problem = gradient_problem(model, "sdpa", PLAIN, MAX_LENGTH, 1 << 20)
    assert (problem is not None) == (factor != 1.0)
    assert problem is None or re.fullmatch(
        "gradients differ from those of transformers' modules: model.layers.1.self_attn.k_proj by "
        r"0\.\d+ of its size, rounding explains 0\.0\d+",
        problem,
    )


def test_model_is_left_as_it_was(monkeypatch):
    model = make()
    before = model.config._attn_implementation, {n: p.clone() for n, p in model.named_parameters()}
    assert generation_problem(runner_of(model), PLAIN) is None
    assert gradient_problem(model, "sdpa", PLAIN, MAX_LENGTH, 1 << 20) is None
    assert model.config._attn_implementation == before[0]
    assert all(torch.equal(p, before[1][n]) and p.grad is None for n, p in model.named_parameters())
    assert not any(module._forward_hooks for module in model.modules())


class Changed:
    """A kernel whose arguments or results are changed."""

    def __init__(self, kernel, before=None, after=None):
        self.kernel, self.before, self.after = kernel, before, after

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            arguments = list(arguments)
            if self.before:
                self.before(arguments)
            self.kernel[grid](*arguments, **options)
            if self.after:
                self.after(arguments)

        return launch


def repeat_first_page(arguments: list) -> None:
    arguments[7] = arguments[7][:, :1].expand_as(arguments[7]).contiguous()


FAULTS = {
    None: None,
    "_merge": {"after": lambda arguments: arguments[0].neg_()},
    "_attend": {"before": repeat_first_page},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_kernels_are_found(monkeypatch, on_gpu, fault):
    """In float16: triton's interpreter has no products of bfloat16."""
    from bubblespec.engine.ops import triton_ops

    runner = runner_of(on_gpu(dtype=torch.float16), 1, SHORT, page_size=16, enforce_eager=True)
    if fault is not None:
        changed = Changed(getattr(triton_ops, fault), **FAULTS[fault])
        monkeypatch.setattr(triton_ops, fault, changed)
    problem = generation_problem(runner, PLAIN)
    assert (problem is None) == (fault is None), problem
    assert problem is None or MESSAGE.fullmatch(problem)


def test_graphs_with_draws_agree(on_gpu):
    model = on_gpu(dtype=torch.float32)
    runner = runner_of(model, 1, SHORT, max_num_batched_tokens=8, page_size=16)
    assert generation_problem(runner, SamplingParams(0.6)) is None
    pool = runner.graphs.pool
    assert pool.problem is None and pool.num_replays > 8 and len(pool.graphs) > len(pool.shapes)


def test_gradients_of_kernels_agree(on_gpu):
    model = on_gpu(name="qwen3", dtype=torch.float32)
    assert OWN_HIDDEN in vars(model)
    assert gradient_problem(model, "sdpa", PLAIN, 8, 1 << 20) is None


for each in (
    test_faults_of_kernels_are_found,
    test_graphs_with_draws_agree,
    test_gradients_of_kernels_agree,
):
    each.pytestmark = getattr(each, "pytestmark", []) + needs_interpreter
