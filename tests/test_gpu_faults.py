"""What goes wrong on a GPU behind the trial of kernels: comparisons that find differences, memory
that runs out, a GPU that is lost. The run goes on, or ends in one line with what is whole saved."""

import contextlib
import io
import sys
from types import SimpleNamespace

import pytest
import torch

import train
from bubblespec import setup
from bubblespec.distributed.ranks import Ranks
from bubblespec.engine import ops
from bubblespec.engine.engine import Engine
from bubblespec.errors import InputError
from bubblespec.learn.learner import Learner
from bubblespec.mechanisms import Run
from bubblespec.rollout.evaluate import Evaluator
from bubblespec.rollout.sampler import Sampler
from tests.helpers.documented import rows, says
from tests.helpers.runs import digests, same_weights, weights

ALONE = Ranks(torch.device("cpu"))
ON_GPU = SimpleNamespace(device=torch.device("cuda"), gather_text=ALONE.gather_text, is_main=True)
NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
LOST = RuntimeError("CUDA error: an illegal memory access was encountered")
OPTIONS = ["model.dtype=float64", "rollout.num_prompts_per_step=4", "rollout.num_generations=4"]
OPTIONS += ["rollout.max_completion_length=24", "data.size=40", "run.max_steps=3"]
OPTIONS += ["run.eval_steps=2", "eval.num_prompts=4", "run.save_steps=0", "reward.num_workers=0"]


def make_config(**model):
    model = SimpleNamespace(kernels="auto", **model)
    rollout = SimpleNamespace(enforce_eager=False, max_prompt_length=8, max_completion_length=8)
    return SimpleNamespace(model=model, rollout=rollout)


def with_problems(problems: list):
    """A comparison whose results are these, one after the other; errors are raised."""

    def find(*_):
        problem = problems.pop(0)
        if isinstance(problem, Exception):
            raise problem
        return problem

    return find


@pytest.fixture
def engines(monkeypatch):
    """The engines that `build_engine` makes from now on: whether each is eager, and by torch."""
    made = []
    monkeypatch.setattr(setup, "has_kernels", lambda *_: ops.ATTEND not in ops.replaced)

    def build_engine(run):
        is_eager = run.config.rollout.enforce_eager or ops.ATTEND in ops.replaced
        made.append("torch" if ops.ATTEND in ops.replaced else "eager" if is_eager else "graphs")
        forward = SimpleNamespace(type=(), is_eager=is_eager)
        engine = SimpleNamespace(runner=SimpleNamespace(forward=forward), release=lambda: None)
        return engine

    monkeypatch.setattr(setup, "build_engine", build_engine)
    return made


def build(monkeypatch, problems: list, config=None):
    monkeypatch.setattr(setup, "generation_problem", with_problems(problems))
    learner = SimpleNamespace(params=None)
    run = Run(config or make_config(), ON_GPU)
    run.learner = learner
    setup.build_agreeing_engine(run)
    return ops.LAYERS not in ops.replaced


def test_engine_falls_back_until_its_texts_agree(monkeypatch, engines, capsys):
    assert build(monkeypatch, [None]) and engines == ["graphs"]
    assert capsys.readouterr().err == ""
    engines.clear()
    config = make_config()
    assert build(monkeypatch, ["rollouts differ", None], config) and config.rollout.enforce_eager
    assert engines == ["graphs", "eager"] and not ops.replaced
    assert says("texts of the engine differ", capsys.readouterr().err.strip())
    engines.clear()
    assert not build(monkeypatch, ["rollouts differ", RuntimeError("a launch"), None])
    assert engines == ["graphs", "eager", "torch"] and set(ops.replaced) == set(ops.OPERATIONS)
    first, second = capsys.readouterr().err.splitlines()
    assert says("texts of the engine differ", first) and "RuntimeError: a launch" in second
    assert (
        says("one kernel: it raises, or its numbers differ", second) and "all operations" in second
    )


def test_rollouts_that_torch_cannot_mend_are_told(monkeypatch, engines, capsys):
    build(monkeypatch, ["they differ", "they differ", "they still differ"])
    *_, last = capsys.readouterr().err.splitlines()
    assert engines == ["graphs", "eager", "torch"]
    assert last.startswith("warning: they still differ, also by torch's operations")


def test_engine_of_triton_alone_ends_with_a_line(monkeypatch, engines):
    config = make_config()
    config.model.kernels = "triton"
    with pytest.raises(InputError, match=r"^model\.kernels: triton, but rollouts differ; set auto"):
        build(monkeypatch, ["rollouts differ"], config)


def test_lost_gpu_is_not_compared_again(monkeypatch, engines):
    with pytest.raises(InputError, match=r"^model\.kernels: .*illegal memory access.*; set torch"):
        build(monkeypatch, [LOST])
    assert engines == ["graphs"] and not ops.replaced


def test_no_memory_to_compare_is_no_fault_of_kernels(monkeypatch, engines, capsys):
    assert build(monkeypatch, [NO_MEMORY]) and engines == ["graphs"] and not ops.replaced
    line = "warning: not compared with transformers' modules: OutOfMemoryError: CUDA out of"
    assert capsys.readouterr().err.startswith(line)


def test_gradients_fall_back_to_modules(monkeypatch, capsys):
    monkeypatch.setattr(setup, "has_kernels", lambda *_: True)
    model, config = SimpleNamespace(device=None, dtype=None), make_config()

    def check(*problems) -> bool:
        ops.replaced.clear()
        monkeypatch.setattr(setup, "gradient_problem", with_problems(list(problems)))
        setup.check_gradient(Run(config, ON_GPU, model), "varlen", None)
        return ops.LAYERS not in ops.replaced

    assert check(None) and capsys.readouterr().err == ""
    assert not check("gradients differ", None) and list(ops.replaced) == [ops.LAYERS, ops.HEAD]
    assert says("gradients differ", capsys.readouterr().err.strip())
    assert not check("gradients differ", "they differ")
    assert "attention by varlen they differ" in capsys.readouterr().err.splitlines()[1]
    config.model.kernels = "triton"
    with pytest.raises(InputError, match="triton, but gradients differ"):
        check("gradients differ")


def run(folder, *overrides: str) -> tuple[int, list[str]]:
    """What `python train.py` does, in this process: its exit code, and what it says."""
    said, given = io.StringIO(), [f"run.output_dir={folder}", *OPTIONS, *overrides]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(said):
        patch.setattr(sys, "argv", ["train.py", "--config", "configs/tiny_cpu.yaml", *given])
        code = train.main()
    return code, said.getvalue().splitlines()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    assert run(folder)[0] == 0
    return folder


def fail_at(monkeypatch, owner, name: str, error: Exception, is_due) -> None:
    original = getattr(owner, name)

    def failing(self, *arguments, **options):
        if is_due(self, *arguments):
            raise error
        return original(self, *arguments, **options)

    monkeypatch.setattr(owner, name, failing)


def is_in_rollout(engine, *_) -> bool:
    return PLACE[-1] == 1


PLACE = [0]  # the step that is sampled


PHASES = {
    "rollout": (Engine, "step", is_in_rollout, "rollout of step 2", 1),
    "update": (Learner, "update", lambda *of: of[-1] == 1, "training of step 2", None),
    "evaluation": (Evaluator, "evaluate", lambda *of: of[-1] == 2, "evaluation after 2", 2),
}  # fmt: skip


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("error", [NO_MEMORY, LOST], ids=["memory", "lost"])
def test_run_ends_in_one_line_and_goes_on_later(monkeypatch, tmp_path, undisturbed, phase, error):
    owner, name, is_due, activity, saved = PHASES[phase]
    sample = Sampler.sample

    def noted(sampler, step):
        PLACE.append(step)
        return sample(sampler, step)

    with monkeypatch.context() as patch:
        patch.setattr(Sampler, "sample", noted)
        fail_at(patch, owner, name, error, is_due)
        code, said = run(tmp_path)
    PLACE.append(0)
    assert code == 1 and not any("Traceback" in line for line in said), said
    assert said[-1].startswith(f"error: {activity}") and str(error)[:30] in said[-1]
    where = "an update" if phase == "update" else "a rollout or an evaluation"
    if error is NO_MEMORY:
        assert says(f"memory in {where}", said[-1])
    elif phase != "evaluation":
        assert says("a kernel or the GPU in a step", said[-1])
    found = sorted(path.name for path in tmp_path.glob("checkpoint-*"))
    assert found == ([] if saved is None else [f"checkpoint-{saved}"])
    code, said = run(tmp_path)
    assert code == 0 and digests(tmp_path) == digests(undisturbed)
    assert same_weights(weights(tmp_path, 3), weights(undisturbed, 3))


@pytest.mark.parametrize("place", ["loading.load_model", "prepare_model", "make_sampler"])
def test_memory_of_set_up_is_not_the_models_fault(monkeypatch, tmp_path, place):
    def failing(*_, **__):
        raise NO_MEMORY

    monkeypatch.setattr(f"bubblespec.setup.{place}", failing)
    code, said = run(tmp_path)
    assert code == 1 and says("memory in set-up", said[-1])
    assert not any("Traceback" in line for line in said)


def test_other_errors_keep_their_traceback(monkeypatch, tmp_path):
    monkeypatch.setattr("bubblespec.setup.make_sampler", lambda *_, **__: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        run(tmp_path)


def test_page_has_no_other_faults():
    """Each row but those of the trial and of captures, whose tests are elsewhere, is seen here."""
    elsewhere = {"no C compiler, or no Python.h", "a capture, at any size"}
    elsewhere |= {
        "any of these, with `model.kernels=triton`",
        "the GPU itself, in a trial at the start",
    }
    here = {"one kernel: it raises, or its numbers differ", "texts of the engine differ"}
    here |= {"gradients differ", "memory in set-up", "memory in a rollout or an evaluation"}
    here |= {"memory in an update", "a kernel or the GPU in a step"}
    silent = {what for what, line in rows().items() if line == "nothing"}
    assert set(rows()) == here | elsewhere | silent and len(silent) == 1
