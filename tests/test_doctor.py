"""The doctor on one and two ranks, failing checks, and its checks of GPUs with stand-ins."""

import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from bubblespec.__main__ import main
from bubblespec.config.file import load_config
from bubblespec.distributed.ranks import Ranks
from bubblespec.rollout.sampler import Sampler
from bubblespec.tools import doctor, forwards
from bubblespec.tools.doctor import CHECKS
from bubblespec.tools.forwards import Case, Line
from tests.helpers import graphs as stand_ins
from tests.helpers.warm import ROOT, launch

CONFIG = "configs/tiny_cpu.yaml"
COMMAND = ["-m", "bubblespec", "doctor", "--config", CONFIG]
SHORT = ["data.size=100", "eval.num_prompts=8", "run.eval_steps=0", "model.cpu_linear=torch"]
LINE = re.compile(r"(\S.*?) +(ok|slower|failed): (.+)")


def parsed(stdout: str) -> list[tuple[str, str, str]]:
    return [LINE.fullmatch(line).groups() for line in stdout.splitlines() if ": " in line]


def failing(monkeypatch, capsys, *overrides: str) -> tuple[str, list[tuple[str, str, str]]]:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["", "doctor", "--config", CONFIG, *SHORT, *overrides])
    assert main() == 1
    out, err = capsys.readouterr()
    return err.splitlines()[-1].removeprefix("error: checks that failed: "), parsed(out)


@pytest.mark.parametrize("ranks", [0, 2])
def test_all_checks_of_the_default_run(ranks, tmp_path):
    done = launch(ranks, [*COMMAND, *SHORT, "run.output_dir=runs/my run"], TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "no check failed; this trains:\ntorchrun " in done.stdout
    lines, *command = done.stdout.rpartition("torchrun ")
    found = parsed(lines)
    assert list(dict.fromkeys(name for name, _, _ in found)) == list(CHECKS)
    assert {verdict for _, verdict, _ in found} <= {"ok", "slower"}
    overrides = " ".join(SHORT)
    wanted = f"--nproc_per_node={max(ranks, 1)} train.py --config {CONFIG} {overrides}"
    assert "".join(command) == f"torchrun {wanted} 'run.output_dir=runs/my run'\n"
    of = {name: text for name, _, text in found}
    together = "shared memory" if ranks else "not applicable: one rank"
    assert together in of["collectives"]
    both = r"\d+ us over shared memory and \d+ us over gloo; \S.* is faster \(rollout\.progress_b"
    assert bool(re.search(both, of["collectives"])) == bool(ranks)
    assert re.match(
        r"6 responses of up to 64 tokens are the same with .* s with [1-9]", of["rollouts"]
    )
    assert not any(tmp_path.iterdir())


def test_failed_checks_leave_other_checks(monkeypatch, capsys):
    rollout = Sampler.rollout

    def wrong(sampler, plan):
        result = rollout(sampler, plan)
        plan.rows[0].tokens[-1] += 1
        return result

    def broken(case):
        yield forwards.ok("so far")
        raise RuntimeError("CUDA error:\n  no such thing")

    monkeypatch.setitem(CHECKS, "attention", CHECKS["attention"]._replace(make=broken))
    monkeypatch.setattr(Sampler, "rollout", wrong)
    failed, lines = failing(monkeypatch, capsys)
    assert failed == "attention, rollouts" and {name for name, _, _ in lines} == CHECKS.keys()
    why = "RuntimeError: CUDA error: no such thing; model.attention=sdpa"
    own = [line[1:] for line in lines if line[0] == "attention"]
    assert own == [("ok", "so far"), ("failed", why)]
    assert sum(verdict == "failed" for _, verdict, _ in lines) == 2
    assert lines[-1][2].startswith("1 of 6 responses of up to 64 tokens differ with drafts")
    assert lines[-1][2].endswith("; speculative.method=none")


def test_wrong_rollouts_fail_in_bfloat16(monkeypatch, capsys):
    """A tenth of the rows may differ there for their rounding, but not by a wrong token."""
    rollout = Sampler.rollout

    def wrong(sampler, plan):
        result = rollout(sampler, plan)
        plan.rows[0].tokens[-1] += 1
        return result

    monkeypatch.setattr(Sampler, "rollout", wrong)
    failed, lines = failing(monkeypatch, capsys, "model.dtype=bfloat16")
    assert failed == "rollouts" and [line[1] for line in lines[-2:]] == ["ok", "failed"]
    assert lines[-1][2].startswith("rollouts differ from a forward of transformers' modules: ")
    assert lines[-1][2].endswith("; model.dtype=float32")


def test_failed_model_stops_dependent_checks(monkeypatch, capsys):
    failed, lines = failing(monkeypatch, capsys, "model.path=nowhere/at/all")
    assert failed == "model"
    verdicts = {name: (verdict, text) for name, verdict, text in lines}
    assert verdicts["model"] == ("failed", "model.path: there is no folder nowhere/at/all")
    assert verdicts["graphs"] == ("failed", "not made, as model failed")
    assert verdicts["rollouts"] == ("failed", "not made, as set-up failed")
    assert verdicts["devices"][0] == "ok"


def test_gpu_unusable_by_torch_is_slower(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    case = SimpleNamespace(ranks=Ranks(torch.device("cpu")))
    for driver in (None, (12, 2)):
        for module in ("distributed.ranks", "tools.doctor"):
            monkeypatch.setattr(f"bubblespec.{module}.cuda_of_driver", lambda driver=driver: driver)
        found = [text for verdict, text in doctor.devices(case) if verdict == "slower"]
        assert any("model.device=cpu" in text for text in found) == (driver is not None)


def test_rank_failing_alone_stops_collective_checks(tmp_path):
    script = tmp_path / "doctor_of_two.py"
    script.write_text(
        "import sys\n"
        "from bubblespec.__main__ import main\n"
        "from bubblespec.tools import doctor, forwards\n"
        "def broken(case):\n"
        "    if case.ranks.rank == 1:\n"
        "        raise RuntimeError('out of memory')\n"
        "    case.ranks.barrier()\n"
        "    yield forwards.ok('together')\n"
        "check = doctor.CHECKS['TP tail']\n"
        "doctor.CHECKS['TP tail'] = check._replace(make=broken)\n"
        "sys.exit(main())\n"
    )
    done = launch(2, [str(script), *COMMAND[2:], *SHORT, "run.timeout_s=8"])
    assert done.returncode == 1
    lines = parsed(done.stdout)
    waited, raised = [text for name, _, text in lines if name == "TP tail"]
    assert waited.startswith("rank 1 missing in the check of TP tail")
    assert raised == "rank 1: RuntimeError: out of memory; rollout.tp_tail_max_rows=0"
    apart = [name for name, _, text in lines if text == "not made, as ranks are out of step"]
    assert apart == ["set-up", "collectives", "rollouts"]


@pytest.fixture
def on_gpu(monkeypatch, make_model) -> Case:
    """A case on a pretended GPU: kernels and graphs are stand-ins on the CPU."""
    pytest.importorskip("triton")
    monkeypatch.setattr(forwards, "CHECKED", 4)
    monkeypatch.setattr(forwards, "median_s", lambda action, device: action() is None or 0.001)
    model = make_model("llama", torch.float32, max_length=64)
    stand_ins.stand_in(monkeypatch)
    config = load_config(f"{ROOT}/{CONFIG}", [])
    return Case(config, Ranks(torch.device("cuda")), model, "varlen")


def test_attention_names_layers_kernel_and_fallback(on_gpu, make_model):
    line = Line("ok", "layers are written out; attention in training is varlen")
    assert list(forwards.attention(on_gpu)) == [line]
    why = "attention in training is sdpa: varlen fails"
    fallen = replace(on_gpu, kernel="sdpa", slower=[f"warning: {why}"])
    assert next(forwards.attention(fallen)) == Line("slower", why)
    other = replace(on_gpu, model=make_model("gpt2", torch.float64, max_length=64))
    slower, line = forwards.attention(other)
    assert slower.verdict == "slower" and "without CUDA graphs: no bfloat16" in slower.text
    assert line.text.startswith("layers are transformers' modules")


def test_graphs_are_compared_timed_or_slower(on_gpu, monkeypatch, capsys):
    compared, timed = forwards.graphs(on_gpu)
    assert compared.verdict == timed.verdict == "ok"
    assert compared.text == "hidden states of graphs and eager forwards agree"
    rollout = replace(on_gpu.config.rollout, enforce_eager=True)
    eager = replace(on_gpu, config=replace(on_gpu.config, rollout=rollout))
    why = "there are none: rollout.enforce_eager=true, or no operations for them"
    assert list(forwards.graphs(eager)) == [Line("slower", why)]

    def rehearse(run):
        raise RuntimeError("no such\ncapture")

    monkeypatch.setattr("bubblespec.engine.graphs.rehearse", rehearse)
    (line,) = forwards.graphs(on_gpu)
    why = "forwards are eager, not CUDA graphs: RuntimeError: no such capture"
    assert line == Line("slower", f"{why} (rollout.enforce_eager=true tries nothing else)")
    assert capsys.readouterr().err == f"warning: {line.text}\n"


for test in (
    test_attention_names_layers_kernel_and_fallback,
    test_graphs_are_compared_timed_or_slower,
):
    test.pytestmark = stand_ins.needs_interpreter
