"""Configuration files: what loads, what is refused, and that every problem is one line with the key
in it."""

import ast
import inspect
import itertools
import re
from pathlib import Path

import pytest

from bubblespec import config as module
from bubblespec.config import Config, flatten, mechanisms
from bubblespec.config.file import TRL, VALUES, VERL, config_to_yaml, load_config
from bubblespec.errors import InputError
from scripts import write_configuration
from tests.helpers.checks import refusal

MINIMAL = "model: {path: some/model}\ndata: {path: train.jsonl}\nrun: {output_dir: out}\n"
TASKS = MINIMAL.replace(
    "path: train.jsonl", "tasks: [{name: chain_sum, weight: 2, config: {min_terms: 2}}]"
)


@pytest.fixture
def load(tmp_path):
    """load(text, *overrides) -> the Config of a file with that text."""

    def write_and_load(text: str = MINIMAL, *overrides: str) -> Config:
        path = tmp_path / "config.yaml"
        path.write_text(text, encoding="utf-8")
        return load_config(str(path), list(overrides))

    return write_and_load


def rows_of(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")] for line in table.strip().splitlines()]


def test_last_override_wins_over_file(load):
    text = MINIMAL + "optim: {learning_rate: 0.5, weight_decay: 0.25}\n"
    config = load(text, "optim.learning_rate=1e-6", "run.seed=3", "run.seed=4")
    found = (config.optim.learning_rate, config.optim.weight_decay, config.run.seed)
    assert found == (1e-6, 0.25, 4)


# override | what the key is then
OVERRIDES = """
optim.learning_rate=1e-6 | 1e-6
reward.functions=[a.b, c.d] | ["a.b", "c.d"]
rollout.stop_token_ids=[1,2] | [1, 2]
eval.temperature=0 | 0.0
data.system_prompt=a=b | "a=b"
run.output_dir=${model.path} | "some/model"
model.path=3 | "3"
data.name=12:30 | "12:30"
data.name=null | None
data.name="null" | "null"
data.columns={1: 007, prompt: yes} | {"1": "007", "prompt": "yes"}
data.columns.prompt=1e3 | "1e3"
reward.functions=[a.b, 1.10] | ["a.b", "1.10"]
data.system_prompt=Answer: one number | "Answer: one number"
data.system_prompt='It''s: this' | "It's: this"
data.system_prompt='a' or "b" # c | "'a' or \\"b\\" # c"
data.system_prompt=[INST] | "[INST]"
"""


@pytest.mark.parametrize("override, wanted", rows_of(OVERRIDES))
def test_overrides_of_every_kind(load, override, wanted):
    name, found = override.split("=")[0], flatten(load(MINIMAL, override))
    value = found[name] if name in found else found["data.columns"]["prompt"]
    assert value == ast.literal_eval(wanted) and type(value) is type(ast.literal_eval(wanted))


@pytest.mark.parametrize("text", ["2024_05_01", "007", "1e3", "12:30", "yes", "1_0.50"])
def test_text_is_kept_as_written(load, text):
    """On the command line and in a file, whatever YAML 1.1 takes it for."""
    text_file = MINIMAL.replace(
        "train.jsonl", f"train.jsonl, split: {text}, columns: {{a: {text}}}"
    )
    data = load(text_file).data
    assert data.split == data.columns["a"] == text
    assert load(MINIMAL, f"run.output_dir={text}").run.output_dir == text


def test_home_is_expanded_in_paths(load, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    config = load(MINIMAL.replace("some/model", "~/model"), "run.output_dir=~/x", "data.name=~/x")
    assert (config.model.path, config.run.output_dir) == ("/home/me/model", "/home/me/x")
    assert config.data.name == "~/x"
    message = refusal(load, MINIMAL, "run.output_dir=~nobody.here/x")
    assert message.startswith("run.output_dir: ~nobody.here/x: no such user")


def test_half_characters_are_refused(load):
    for text in ("a\ud83d", "\udcff"):
        message = refusal(load, MINIMAL, f"data.system_prompt={text}")
        assert message.startswith("data.system_prompt: ") and "half a character" in message


def test_override_replaces_a_list_of_tasks(load):
    tasks = load(TASKS, "data.tasks=[{name: countdown, config: {a: {b: [1]}}}]").data.tasks
    assert [(t.name, t.weight, t.config) for t in tasks] == [("countdown", 1.0, {"a": {"b": [1]}})]


# override | key | hint
UNKNOWN = """
modl.path=x | modl.path | did you mean model.path?
learning_rate=1 | learning_rate | here it is optim.learning_rate
optim.learnin_rate=1 | optim.learnin_rate | did you mean optim.learning_rate?
rollout.learning_rate=1 | rollout.learning_rate | did you mean optim.learning_rate?
zzzz=1 | zzzz | valid are data, drafter, environment, eval, loss, model
rollout.num_generation=8 | rollout.num_generation | did you mean rollout.num_generations?
loss.beta=0.1 | loss.beta | here it is loss.kl_coef
args.beta=0.1 | args.beta | here it is loss.kl_coef
reward.tools=1 | reward.tools | did you mean environment.tools?
model.something=1 | model.something | valid are model.attention, model.batch_invariant
actor_rollout_ref.rollout.n=8 | actor_rollout_ref.rollout.n | here it is rollout.num_generations
actor_rollout_ref.rollout.val_kwargs.n=8 | actor_rollout_ref.rollout.val_kwargs.n | is eval.num_g
+trainer.nnodes=1 | +trainer.nnodes | not needed here, because torchrun has --nnodes
steps_per_generation=4 | steps_per_generation | is loss.num_minibatches, steps_per_generation / grad
per_device_train_batch_size=8 | per_device_train_batch_size | is rollout.num_prompts_per_step, per_d
data.truncation=error | data.truncation | not needed here, because prompts longer than
data.trncation=error | data.trncation | valid are data.as_chat, data.chat_template_kwargs
rollout.max_new_token=8 | rollout.max_new_token | valid are rollout.dynamic_sampling_max_batches
loss.entropy_coef=0.1 | loss.entropy_coef | not supported: the entropy is a metric
critic.optim.lr=1e-5 | critic.optim.lr | not supported: there is no critic
actor_rollout_ref.actor.optim.lr=1 | actor_rollout_ref.actor.optim.lr | is optim.learning_rate
num_generatons=8 | num_generatons | did you mean eval.num_generations or rollout.num_generations?
actor.kl_loss_type=low_var_kl | actor.kl_loss_type | loss.kl_estimator, where low_var_kl is k3
"""


@pytest.mark.parametrize("override, key, hint", rows_of(UNKNOWN))
def test_unknown_key_is_answered_by_nearest_key(load, override, key, hint):
    message = refusal(load, MINIMAL, override)
    assert message.startswith(f"{key}: unknown key") and hint in message


# override | key, where it is not that of the override | what is said
WRONG_TYPES = """
data.as_chat=maybe | |
model.path.x=3 | model.path |
model.path= | |
model=3 | |
reward.functions=a.b | | is a list or a mapping; set all of it
data.columns=[a] | | is a list or a mapping; set all of it
reward.weights=[a] | reward.weights[0] |
run.timeline_steps=[3,1.5] | run.timeline_steps[1] |
data.tasks[0].weight=1 | data.tasks | is a list or a mapping; set all of it
data.tasks=[3] | data.tasks[0] |
data.tasks=[{name: a, wieght: 2}] | data.tasks |
run.output_dir=${nothing.here} | |
data.tasks=[{name: a, config: {x: '${nothing}'}}] | data.tasks[0].config.x |
optim=adamw_8bit | | is a section; set its keys (not supported: the optimizer is AdamW)
"""


@pytest.mark.parametrize("override, key, what", rows_of(WRONG_TYPES))
def test_wrong_type_names_the_key(load, override, key, what):
    message = refusal(load, MINIMAL, override)
    assert message.startswith(f"{key or override.split('=')[0]}: ") and what in message


# overrides | key, where it is not that of the first override | what is possible
IMPOSSIBLE = """
rollout.num_generations=1 | | 1, but grpo compares
rollout.num_generations=1 loss.advantage_estimator=rloo | | 1, but rloo compares
run.seed=-1 | | at least 0
run.seed=18446744073709551616 | | below 18446744073709551616 = 2**64: random numbers are keyed
rollout.top_p=0 | | above 0
rollout.temperature=0 | | at least 0.001
optim.learning_rate=nan | | finite
optim.adam_epsilon=0 | | above 0
optim.adam_betas=[1,0.9] | optim.adam_betas[0] | below 1
optim.adam_betas=[0.9] | | two numbers
rollout.stop_token_ids=[3,-1] | rollout.stop_token_ids[1] | at least 0
rollout.min_completion_length=513 | | at most rollout.max_completion_length = 512
rollout.max_num_seqs=many | | auto, or at least 1
rollout.max_num_seqs=4096 | rollout.max_num_batched_tokens | at least rollout.max_num_seqs = 4096
optim.max_tokens_per_microbatch=1023 | | at least 1024
rollout.max_completion_length=1048576 | | below 1048576
run.eval_steps=5 | eval.num_prompts | at least 1
reward.functions=[] | | at least one
reward.functions=[a.b,a.b] | | 'a.b' is listed twice
reward.weights=[1,2] | | 2 weights for 1 reward.functions
reward.weights=[nan] | reward.weights[0] | finite
reward.overlong_buffer_length=513 | | at most rollout.max_completion_length = 512
speculative.method=none+drafter | | none, or some of bubble, suffix, quantized, drafter
loss.num_minibatches=3 | | a divisor of rollout.num_prompts_per_step = 16
loss.delta=1.2 | | above 1 + loss.epsilon_high = 1.2
loss.loss_type=distillation | model.teacher_path | is required for distillation
loss.distillation_coef=1 | model.teacher_path | is required for distillation
loss.distillation_beta=2 | | at most 1
model.teacher_path=t | | set loss.loss_type=distillation, or a weight in loss.distillation_coef
loss.loss_type=distillation model.teacher_path=t loss.delta=3 | loss.delta | without rewards
loss.distillation_coef=1 loss.loss_type=distillation model.teacher_path=t | | without rewards
rollout.dynamic_sampling_max_batches=2 loss.loss_type=distillation model.teacher_path=t | | without
reward.overlong_buffer_length=2 loss.loss_type=distillation model.teacher_path=t | | without rewards
eval.functions=[bubblespec.rewards.exact_match] | | eval/rewards/exact_match/mean
eval.functions=[a.b,a.b] | | listed twice
eval.functions=[a.b] | | empty, as run.eval_steps is 0
eval.functions=[a.reward] | | has the name of another metric, eval/reward
run.save_best=eval/reward | | null, as run.eval_steps is 0
loss.loss_type=my.loss loss.delta=3 | loss.delta | is not passed to my.loss; leave it out
loss.loss_type=my.loss loss.epsilon_high=0.3 | loss.epsilon_high | is not passed to my.loss
loss.advantage_estimator=group | | grpo, rloo, reinforce_plus_plus, reinforce_plus_plus_baseline, or
loss.scale_rewards=none loss.advantage_estimator=my.function | | leave it out
optim.stream_gradients=true loss.advantage_estimator=my.function | | gets the whole batch
speculative.method=my.Source+my.Source | | quantized, drafter and dotted paths
loss.loss_type=cispo | loss.epsilon_high | at least 1 with cispo
loss.loss_type=cispo loss.epsilon_high=5 loss.delta=9 | loss.delta | leave it out
loss.scale_rewards=group loss.advantage_estimator=reinforce_plus_plus | | scaled by the batch
optim.stream_gradients=true loss.num_iterations=2 | | one update per step
model.batch_invariant=true rollout.tp_tail_max_rows=4 | rollout.tp_tail_max_rows | must be 0 with
optim.stream_gradients=true loss.scale_rewards=batch | | scale_rewards=batch uses the batch
data.path=null | data.path, data.tasks | exactly one
data.path=null data.tasks=[{name:a},{name:a,weight:0}] | data.tasks[1].weight | above 0
data.path=null data.tasks=[{name:a}] data.eval_path=b.jsonl | data.eval_path | leave it out
"""


def test_distillation_has_no_rewards_by_default(load):
    options = (MINIMAL, "loss.loss_type=distillation", "model.teacher_path=t")
    alone = (*options, "rollout.num_generations=1", "optim.stream_gradients=true")
    assert load(*alone).reward.functions == []
    assert load(*options, "reward.functions=[a.b]").reward.functions == ["a.b"]
    assert load(MINIMAL).reward.functions == ["bubblespec.rewards.exact_match"]


@pytest.mark.parametrize("overrides, key, what", rows_of(IMPOSSIBLE))
def test_impossible_values_name_key_and_valid_values(load, overrides, key, what):
    overrides = [
        o.replace("name:", "name: ").replace("weight:", "weight: ") for o in overrides.split()
    ]
    with pytest.raises(InputError) as caught:
        load(MINIMAL, *overrides)
    lines = str(caught.value).splitlines()
    start = f"{key or overrides[0].split('=')[0]}: "
    assert any(line.startswith(start) and what in line for line in lines), lines


def foreign_keys() -> list[str]:
    lines = Path(__file__).with_name("assets").joinpath("foreign_keys.txt").read_text().splitlines()
    return [name for line in lines if not line.startswith("#") for name in line.split()]


def test_every_foreign_key_has_an_answer(load):
    """All that TRL's GRPOConfig and verl's GRPO examples can set, in one message."""
    ours, names = flatten(Config()), foreign_keys()
    with pytest.raises(InputError) as caught:
        load(MINIMAL, *(f"{name}=1" for name in names))
    lines = dict(line.split(": ", 1) for line in str(caught.value).splitlines())
    assert len(names) > 400
    for name in set(names) - ours.keys():
        assert re.match(
            r"unknown key; (here it is \w+\.\w+|not needed here, because |not supported)|"
            r"is a section; set its keys \(",
            lines[name],
        ), lines[name]


def test_answers_name_existing_keys_and_values(load):
    ours = flatten(Config())
    for name, answer in (TRL | VERL).items():
        keys = re.findall(r"\w+\.\w+", answer.partition(",")[0])
        is_ours = bool(keys) and set(keys) <= ours.keys()
        assert is_ours or re.match("not needed here, because |not supported", answer), name
    for key, values in VALUES.items():
        for value, answer in values.items():
            assert refusal(load, MINIMAL, f"{key}={value}") == f"{key}: here {value} is {answer}"
            if " " not in answer:
                load(MINIMAL, f"{key}={answer}", "eval.num_prompts=1")


@pytest.mark.parametrize(
    "name", ["vllm_gpu_memory_utilization", "actor_rollout_ref.rollout.gpu_memory_utilization"]
)
def test_shares_of_an_engine_alone_are_left_out(load, name):
    """Ours is the share of a whole run: 0.3 of another trainer would leave few responses room."""
    answer = refusal(load, MINIMAL, f"{name}=0.3")
    assert answer.startswith(f"{name}: unknown key; not needed here, because ")
    assert "the share for weights, optimizer and training as well; leave it out" in answer


@pytest.mark.parametrize("longest, wanted", [(512, 256), (2048, 512), (1024, 512), (30, 15)])
def test_observation_length_auto_leaves_room_for_a_turn(load, longest, wanted):
    """Also with nothing but defaults, the first of them."""
    options = ["environment.factory=my.Class", f"rollout.max_completion_length={longest}"]
    config = load(
        MINIMAL, *options[: 1 if longest == 512 else 2], "optim.max_tokens_per_microbatch=9999"
    )
    assert config.environment.max_observation_length == wanted
    assert load(config_to_yaml(config)) == config


def test_all_problems_are_reported_at_once(load):
    """Keys that a line names are not complained of again: `data.path` and what it needs."""
    text = """
model_name_or_path: some/model
dataset_name: some/data
scale_rewards: false
rollout: {num_generations: 0, max_completion_length: 100000, top_k: -1}
loss: {loss_type: gprpo, num_minibatches: 0}
"""
    with pytest.raises(InputError) as caught:
        load(text, "run.seed=a", "run.seed", "eval.num_promts=3")
    assert str(caught.value).splitlines() == [
        "model_name_or_path: unknown key; here it is model.path",
        "dataset_name: unknown key; here it is data.path",
        "scale_rewards: unknown key; here it is loss.scale_rewards, where false is none",
        "rollout.top_k: here -1 is 0",
        "run.seed: Value 'a' of type 'str' could not be converted to Integer",
        "override 'run.seed' is not of the form section.key=value",
        "eval.num_promts: unknown key; did you mean eval.num_prompts?",
        "run.output_dir: is required",
        "rollout.num_generations: 0 must be at least 1",
        "loss.num_minibatches: 0 must be at least 1",
        "optim.max_tokens_per_microbatch: 8192 must be at least 100512, so that the longest prompt "
        "and response fit",
        "loss.loss_type: gprpo must be grpo, dr_grpo, dapo, cispo, distillation, or a dotted path",
    ]


@pytest.mark.parametrize("key, default", flatten(Config()).items())
def test_wrong_value_never_ends_in_traceback(load, key, default):
    """Loaded, or refused with a line that names the key."""
    value = "nan" if isinstance(default, float) else "{a: 1}"
    try:
        loaded = flatten(load(MINIMAL, f"{key}={value}"))[key]
    except InputError as error:
        assert key in str(error)
    else:
        assert not isinstance(loaded, float)


@pytest.mark.parametrize(
    "text, part",
    [
        ("", "model.path: is required"),
        (MINIMAL.partition("run:")[0], "run.output_dir: is required"),
        ("- a\n- b\n", "expected sections (model, data, ...), found list"),
        ("a: {b", "not valid YAML"),
        ("1: 2\n", "the key 1 is not text"),
        ("2024-05-02: {a: 1}\n", ""),
        ("data: {1: 2, on: 3}\n", "data.1: unknown key"),
        ("data: {columns: {1: {2: 3}}}\n", "data.columns.1: {'2': '3'} is not text"),
        ("reward: {functions: [[a]]}\n", "reward.functions[0]: ['a'] is not text"),
        ("model:\n\tpath: x\n", "line 2"),
        ("a: 1\n---\nb: 2\n", "not valid YAML"),
        ("a: !!python/object:os.system x", "not valid YAML"),
    ],
)
def test_broken_file_is_one_line(load, text, part):
    with pytest.raises(InputError) as caught:
        load(text)
    assert part in str(caught.value)


def test_missing_file_and_folder_are_named(tmp_path):
    for path in (str(tmp_path / "none.yaml"), str(tmp_path)):
        assert refusal(load_config, path) == f"--config: no file at {path}"


@pytest.mark.parametrize(
    "override", ["run.seed", "=3", ".=3", "run.seed={", "run.seed=[1", "run.output_dir=${a"]
)
def test_malformed_override_is_quoted(load, override):
    assert refusal(load, MINIMAL, override).startswith(f"override '{override}'")


TEXTS = ["plain", "\\${x} ${model.path}", "$\\boxed{${a${b}}}$", "null", "two\nlines: é\\", ""]


@pytest.mark.parametrize("text", TEXTS)
def test_resolved_configuration_round_trips(load, text):
    numbers = ("optim.adam_epsilon=1e-17", "rollout.stop_token_ids=[3]", "reward.weights=[0.1]")
    config = load(TASKS, "optim.learning_rate=1e-6", *numbers)
    config.data.system_prompt = text
    config.data.tasks[0].config = {"text": text, "nested": {"list": [1, 2.5, None, True, text]}}
    written = config_to_yaml(config)
    assert load(written) == config
    assert config_to_yaml(load(written)) == written


def test_every_field_has_a_docstring_line():
    sources = (inspect.getsource(module), inspect.getsource(mechanisms))
    for section in [node for source in sources for node in ast.parse(source).body]:
        if not isinstance(section, ast.ClassDef) or section.name == "Config":
            continue
        for statement, below in itertools.pairwise([*section.body, ast.Pass()]):
            if isinstance(statement, ast.AnnAssign):
                name = f"{section.name}.{statement.target.id}"
                assert isinstance(below, ast.Expr) and below.value.value.strip(), name
                assert below.lineno == statement.end_lineno + 1, name


def test_reference_page_equals_declarations():
    """docs/configuration.md, and that it has what the classes themselves say."""
    page = write_configuration.PAGE.read_text(encoding="utf-8")
    assert page == write_configuration.page(), "run python -m scripts.write_configuration"
    lines = {line.split("`")[1]: line for line in page.splitlines() if line.startswith("| `")}
    for key, default in flatten(Config()).items():
        is_set = default not in (None, "???", [], {}, True, False)
        assert key in lines and (not is_set or str(default).strip("[]'") in lines[key]), key
    assert lines["run.save_steps"].endswith("| may differ |")
    assert lines["loss.kl_coef"].endswith("|  |")
