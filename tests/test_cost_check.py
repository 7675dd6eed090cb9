"""The scripts that compare GPU costs with measured ones, and that fit them."""

import itertools
from argparse import Namespace

import numpy as np
import pytest

from benchmarks import fit_roofline, measured_costs
from benchmarks.measured_costs import SHAPE, predict, read_cases
from bubblespec.errors import InputError
from bubblespec.tools.simulate.roofline import FITTED, MODELS

COLUMNS = "model,batch,seq,gamma,mode,mean_ms,median_ms"
LINES = ["Qwen2.5-7B,0,0,0,target_decode,9.5,9.5", "Qwen2.5-7B,1,256,0,target_decode,9.5,9.53"]
LINES += ["Qwen/Qwen2.5-7B-Instruct,64,4096,7,target_verify,40.5,40.44"]
LINES += ["Qwen2.5-7B,16,256,3,target_decode_sd,9.5,9.53"]
LINES += ["Qwen2.5-7B,16,256,3,drafter_decode,5.3,5.31"]


@pytest.fixture
def check(tmp_path, capsys):
    def run(text: str | None) -> tuple[int, str, str]:
        path = tmp_path / "measured.csv"
        if text is not None:
            path.write_text(text)
        try:
            measured_costs.run(Namespace(file=str(path)), "")
        except InputError as error:
            return 2, "", f"{error}"
        return 0, *capsys.readouterr()

    return run


def test_check_prints_errors_by_model_and_mode(check):
    code, out, _ = check("\n".join([COLUMNS, *LINES]))
    lines = out.splitlines()
    assert code == 0 and len(lines) == 6
    assert lines[2].startswith("| Qwen2.5-7B | target_decode | 1 | ")
    assert "Qwen/Qwen2.5-7B-Instruct" in lines[3] or "Qwen/Qwen2.5-7B-Instruct" in lines[4]
    assert "1 of 1" in lines[2] and "(1 rows x 1 at 256)" in lines[2]
    assert lines[5].startswith("left out: 2 lines")


def test_shape_by_columns_equals_known_model(tmp_path):
    path = tmp_path / "measured.csv"
    columns = f"{COLUMNS},{','.join(SHAPE)},gpu,ranks,engine,shared"
    shape = ",".join(map(str, MODELS["7b"][: len(SHAPE)]))
    path.write_text(f"{columns}\nMine,4,512,0,target_decode,,5.0,{shape},h100,2,bubblespec,0\n")
    (case,), _ = read_cases(str(path))
    assert case.shape == MODELS["7b"]
    assert (case.gpu, case.num_ranks, case.engine, case.shared) == ("h100", 2, "bubblespec", 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file"),
        ("model,batch\na,1\n", "has no seq, mode, median_ms"),
        (f"{COLUMNS}\nMine,1,256,0,target_decode,1,1\n", "line 2: unknown model 'Mine'; give the"),
        (f"{COLUMNS}\n7b,1,256,0,decode,1,1\n", "line 2: mode: 'decode'; valid are target_decode"),
        (f"{COLUMNS}\n7b,1.5,256,0,target_decode,1,1\n", "line 2: batch: 1.5 must be an integer"),
        (f"{COLUMNS}\n7b,1,256\n", "line 2: no mode"),
        (f"{COLUMNS},gpu\n7b,1,256,0,target_decode,1,1,v100\n", "line 2: gpu: 'v100'; valid are"),
        (f"{COLUMNS}\n7b,0,0,0,target_decode,1,1\n", "has no line of target_decode"),
    ],
)
def test_bad_file_ends_in_one_line(check, text, message):
    code, _, error = check(text)
    assert code == 2 and "\n" not in error and message in error


def test_fit_recovers_constants_despite_noise(tmp_path):
    truth = FITTED._replace(peak_share=0.6, knee=2.0, layer_s=70e-6, copy_memory_share=0.45)
    kinds = ("0,target_decode", "3,target_verify", "15,target_verify", "3,drafter_decode")
    shapes = itertools.product((1, 4, 16, 64), (256, 4096), kinds)
    lines = [f"7b,{rows},{context},{kind},,1" for rows, context, kind in shapes]
    path = tmp_path / "measured.csv"
    path.write_text("\n".join([COLUMNS, *lines]))
    noise = np.random.default_rng(0).normal(1.0, 0.02, len(lines))
    cases = [
        case._replace(seconds=predict(case, truth) * factor)
        for case, factor in zip(read_cases(str(path))[0], noise, strict=True)
    ]
    found = fit_roofline.fit_cases(cases)
    for name in ("peak_share", "layer_s", "block_s", "copy_memory_share"):
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=0.1), name
    assert found.knee == pytest.approx(2.0, rel=0.2)
