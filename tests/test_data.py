"""Rows into prompts with stable uids, prompts into the batch of any step."""

import collections
import json
import random

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from bubblespec.config import Config
from bubblespec.data.prompts import (
    DATE,
    build_prompt_set,
    data_state,
    make_tokenize,
    reasoning_gym_rows,
    render_text,
)
from bubblespec.data.schedule import PromptSet
from bubblespec.errors import InputError
from bubblespec.loading import load_tokenizer
from tests.helpers.checks import refusal
from tests.helpers.rows import numbered_prompts


def words(text) -> list[int]:
    """One token a word; chat messages count the words of their contents."""
    text = text if isinstance(text, str) else " ".join(message["content"] for message in text)
    return [len(word) for word in text.split()]


def build(prompts: list, longest: int = 100, **options) -> PromptSet:
    return build_prompt_set([{"prompt": prompt} for prompt in prompts], words, longest, **options)


# Rows into prompts


USER, SYSTEM = {"role": "user", "content": "hi"}, {"role": "system", "content": "own"}


@pytest.mark.parametrize(
    "prompt, as_chat, system_prompt, wanted",
    [
        ("hi", False, None, "hi"),
        ("hi", True, "be brief", [{"role": "system", "content": "be brief"}, USER]),
        ([USER], False, "be brief", [{"role": "system", "content": "be brief"}, USER]),
        ([SYSTEM, USER], True, "be brief", [SYSTEM, USER]),
    ],
)
def test_chat_and_system_prompt(prompt, as_chat, system_prompt, wanted):
    assert build([prompt], as_chat=as_chat, system_prompt=system_prompt).prompts[0].text == wanted


@pytest.mark.parametrize(
    "prompt, part",
    [
        (None, "row 1 is None"),
        ({"role": "user", "content": "x"}, "neither a string nor a list"),
        ("", "the prompt of row 1 is empty"),
        (["x"], "row 1 has 'x', not a message"),
        ([{"role": "user"}], "not a message with 'role' and 'content'"),
        ([{"role": "user", "content": None}], "whose role or content is not text"),
        ([{"role": "user", "content": [{"type": "image"}]}], "parts that are not text"),
        ([{"role": "user", "content": ["hi"]}], "parts that are not text"),
        ([{"role": "user", "content": [{"type": "text", "text": 3}]}], "parts that are not text"),
    ],
)
def test_invalid_prompt_error_names_row(prompt, part):
    assert part in refusal(lambda: build(["fine", prompt], as_chat=True))


def test_system_prompt_with_string_prompt_is_refused():
    message = refusal(lambda: build([[USER], "hi"], system_prompt="be brief"))
    assert message.startswith("data.system_prompt: the prompt of row 1 is a string")
    assert "data.as_chat=true" in message


def test_text_parts_become_one_text():
    parts = [{"type": "text", "text": "add 1 "}, {"type": "text", "text": "and 1", "image": None}]
    (prompt,) = build([[SYSTEM, {"role": "user", "content": parts}]]).prompts
    assert prompt.text == [SYSTEM, {"role": "user", "content": "add 1 and 1"}]
    assert prompt.prompt_id == build([prompt.text]).prompts[0].prompt_id


def test_uids_are_distinct_63_bit_hashes():
    texts = ["a"] * 50 + [f"word {i}" for i in range(500)] + [[USER], [SYSTEM], [USER]]
    prompt_ids = [prompt.prompt_id for prompt in build(texts).prompts]
    assert (
        len(set(prompt_ids)) == len(texts)
        and 1 << 60 < max(prompt_ids) < 1 << 63
        and min(prompt_ids) >= 0
    )
    # sha256sum of 0:"a" begins with 093395b438bcc297; read little-endian and shifted right by one.
    assert prompt_ids[0] == int("97c2bc38b4953309", 16) >> 1


def test_uids_follow_prompts_when_rows_are_reordered():
    texts = [f"problem number {i}" for i in range(40)] + ["twice", "twice"]
    shuffled = random.Random(0).sample(texts, len(texts))
    of = lambda prompts: sorted((p.text, p.prompt_id) for p in prompts.prompts)  # noqa: E731
    assert shuffled != texts and of(build(shuffled)) == of(build(texts))
    short = build(["a b c", *texts], longest=3)
    assert short.num_dropped == 0 and build(["a b c d"], longest=3).num_dropped == 1
    assert of(build(texts[5:])) == [pair for pair in of(build(texts)) if pair[0] not in texts[:5]]


def make_tokenizer(vocabulary: str, processor=None, **options) -> PreTrainedTokenizerFast:
    ids = {word: number for number, word in enumerate(vocabulary.split())}
    core = Tokenizer(models.WordLevel(ids, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.post_processor = processor or processors.Sequence([])
    return PreTrainedTokenizerFast(tokenizer_object=core, **options)


VOCABULARY = "<s> user assistant hi there ?"
BOS = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
BOTH = processors.TemplateProcessing(
    "<s> user $A assistant", special_tokens=[("<s>", 0), ("user", 1), ("assistant", 2)]
)


def test_chats_get_special_tokens_of_template_only():
    tokenizer = make_tokenizer(VOCABULARY, BOS, bos_token="<s>")
    with pytest.raises(InputError, match=r"model\.path: its tokenizer has no chat template"):
        make_tokenize(tokenizer)([USER])
    tokenizer.chat_template = (
        "<s> {% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
        "{% if add_generation_prompt %}assistant{% endif %}"
    )
    assert make_tokenize(tokenizer)([USER]) == [0, 1, 3, 2]


@pytest.mark.parametrize("options, wanted", [({}, [1, 4, 2]), ({"thinks": False}, [1, 2])])
def test_template_gets_configured_options(tmp_path, options, wanted):
    template = "user {% if thinks is not defined %}there {% endif %}assistant"
    make_tokenizer(VOCABULARY, chat_template=template).save_pretrained(tmp_path)
    config = Config()
    config.model.path, config.data.chat_template_kwargs = str(tmp_path), options
    assert make_tokenize(load_tokenizer(config))([USER]) == wanted


@pytest.mark.parametrize("processor, before", [(BOTH, [0, 1]), (BOS, [0]), (None, [])])
def test_strings_get_bos_once_and_no_eos(processor, before):
    """Ids by hand: BOS is 0; "<s>" may be in the text as well."""
    made = make_tokenizer(VOCABULARY, processor, bos_token="<s>")
    tokenize = make_tokenize(made)
    assert tokenize("hi there") == [*before, 3, 4]
    assert tokenize("hi") == [*before, 3]
    assert tokenize(made.decode([*before, 3])) == [*before, 3], "not twice"


@pytest.mark.parametrize("model", ["drops", "as bos"])
@pytest.mark.parametrize("processor, before", [(BOS, [0]), (BOTH, [0, 1]), (None, [])])
def test_bos_of_tokenizer_without_common_letters(model, processor, before):
    """Unknown letters have no token at all, or that of BOS."""
    ids = dict(zip(VOCABULARY.split(), range(6), strict=True))
    core = Tokenizer(models.WordLevel(ids, unk_token="<s>"))
    if model == "drops":
        core.model = models.BPE(ids | {"h": 6, "i": 7}, [])
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.post_processor = processor or processors.Sequence([])
    tokenize = make_tokenize(PreTrainedTokenizerFast(tokenizer_object=core))
    assert tokenize("hi") == [*before, *([6, 7] if model == "drops" else [3])]


def loaded(folder, template: str | None, **options) -> PreTrainedTokenizerFast:
    make_tokenizer(VOCABULARY, chat_template=template).save_pretrained(folder)
    config = Config()
    config.model.path, config.data.chat_template_kwargs = str(folder), options
    return load_tokenizer(config)


@pytest.mark.parametrize("is_own", [True, False])
def test_byte_order_mark_is_no_part_of_template(tmp_path, is_own):
    tokenizer = loaded(tmp_path, "\ufeffuser there" if is_own else "hi")
    if not is_own:
        (tmp_path / "template").write_text("user there", encoding="utf-8-sig")
        config = Config()
        config.model.path, config.model.chat_template_path = (
            str(tmp_path),
            str(tmp_path / "template"),
        )
        tokenizer = load_tokenizer(config)
    assert tokenizer.chat_template == "user there" and make_tokenize(tokenizer)([USER]) == [1, 4]


READS = "{% generation %}{% set thinks = thinks | default(true) %}{{ messages[0].role }}"
READS += "{% if thinks == true and day is defined %}{{ message.thinking }}{% endif %}"
READS += "{% endgeneration %}{# budget #} level"


@pytest.mark.parametrize("template", [READS, None])
@pytest.mark.parametrize(
    "options, says",
    [
        ({"thinks": False, "day": "off"}, None),
        ({"think": False}, "think: the chat template of model.path does not read it"),
        ({"day": 1, "thinking": False}, "thinking: the"),
        ({"budget": 1}, "budget: the"),
        ({"level": 1}, "level: the"),
        ({"messages": []}, "messages: the"),
        ({"tools": []}, "tools: the"),
        ({"thinks": "false"}, "thinks: 'false' is text, which is always true; leave out its"),
        ({"thinks": "True"}, "thinks: 'True' is text"),
    ],
)
def test_options_that_no_template_reads_are_refused(tmp_path, template, options, says):
    if says is None and template is not None:
        loaded(tmp_path, template, **options)
        return
    message = refusal(lambda: loaded(tmp_path, template, **options))
    says = says if template is not None else f"{next(iter(options))}: the chat template"
    assert message.startswith("data.chat_template_kwargs." + says)


def test_template_gets_one_date_for_good(tmp_path):
    """Local time in seconds since 1970: by hand, a day has 86400."""
    make_tokenizer(
        VOCABULARY + " 01 02", chat_template="hi {{ strftime_now('%d') }}"
    ).save_pretrained(tmp_path)
    config = Config()
    config.model.path = str(tmp_path)
    for seconds, wanted in [(0, [3, 6]), (86399, [3, 6]), (86400, [3, 7])]:
        assert make_tokenize(load_tokenizer(config, seconds))([USER]) == wanted
    state = data_state("{{ strftime_now('%d') }}", [], [], 86400)
    assert state[DATE].tolist() == [86400] and DATE not in data_state("plain", [], [], 86400)


@pytest.mark.parametrize(
    "name, chat, says",
    [
        ("json", [SYSTEM, USER], None),
        ("json", [USER, {"role": "assistant", "content": None, "tool_calls": [{}]}], None),
        ("python", [USER], "a chat as text that is not JSON"),
        ("json", [USER, {"role": "user"}], "not a message with 'role' and 'content'"),
    ],
)
def test_chats_as_text_are_chats_or_refused(name, chat, says):
    text = " " + json.dumps(chat, indent=1) + "\n" if name == "json" else str(chat)
    if says is not None:
        assert says in refusal(lambda: build(["hi", text]))
        return
    as_text, as_list = (
        build_prompt_set([{"prompt": prompt}], lambda _: [1], 9, as_chat=True).prompts[0]
        for prompt in (text, chat)
    )
    assert as_text == as_list and as_text.text == chat


@pytest.mark.parametrize(
    "text", ['[{"role": 1}]', '[{"role": "a", "content": "b"}] is JSON', "[hi]"]
)
def test_other_text_in_brackets_is_text(text):
    assert build([text]).prompts[0].text == text


CALLS = "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments FILTER }}"
CALLS += "{% endfor %}{% endfor %}"


@pytest.mark.parametrize("filtered", ["| tojson", "", "+ ''"])
@pytest.mark.parametrize("arguments", [{"city": 'Bjørn "x"'}, {}])
def test_arguments_as_json_text_are_quoted_once(filtered, arguments):
    """Templates that write arguments as JSON, and templates that need text."""
    written = json.dumps(arguments, ensure_ascii=False)
    call = {"type": "function", "function": {"name": "f", "arguments": written}}
    chat = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}, USER]
    tokenizer = make_tokenizer(VOCABULARY, chat_template=CALLS.replace("FILTER", filtered))
    assert render_text(tokenizer, chat) == written
    assert call["function"]["arguments"] == written, "the prompt itself is unchanged"


def test_tool_calls_as_text_are_refused():
    chat = [USER, {"role": "assistant", "content": "", "tool_calls": "[]"}]
    assert "whose tool_calls are no list" in refusal(lambda: build([chat]))


CHATML = (
    "{% for m in messages %}<|{{ m.role }}|> {{ m.content }} <|end|> {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TRIMMED = CHATML.replace("{{ m.content }}", "{{ m.content | trim }}")


@pytest.mark.parametrize("template", [CHATML, TRIMMED])
def test_last_assistant_message_is_continued(template):
    vocabulary = "? <|user|> <|assistant|> <|end|> hi there"
    tokenize = make_tokenize(make_tokenizer(vocabulary, chat_template=template))
    begun = {"role": "assistant", "content": "hi there "}
    assert tokenize([USER]) == [1, 4, 3, 2]
    assert tokenize([USER, begun]) == [1, 4, 3, 2, 4, 5]
    assert tokenize([USER, {**begun, "content": ""}]) == [1, 4, 3, 2]
    assert tokenize([USER, begun, USER]) == [1, 4, 3, 2, 4, 5, 3, 1, 4, 3, 2]


# Batches


def prompt_ids(prompts: PromptSet, seed: int, step: int, size: int) -> list[int]:
    return [p.prompt_id for p in prompts.batch(seed, step, size)]


@pytest.mark.parametrize("count, size", [(23, 5), (20, 5), (5, 5), (9, 1)])
def test_every_epoch_covers_distinct_prompts(count, size):
    prompts, per_epoch, orders = numbered_prompts(count), count // size, set()
    for epoch in range(4):
        steps = range(epoch * per_epoch, (epoch + 1) * per_epoch)
        seen = [prompt_id for step in steps for prompt_id in prompt_ids(prompts, 3, step, size)]
        assert len(seen) == per_epoch * size == len(set(seen)), "only the remainder is left out"
        orders.add(tuple(seen))
    assert len(orders) == 4


def test_all_64_bits_of_seed_count():
    prompts = numbered_prompts(40)
    seeds = (2**63 - 1, 2**63, 2**63 + 1, 2**64 - 1, 0)
    batches = [tuple(prompt_ids(prompts, seed, 5, 40)) for seed in seeds]
    extra = [tuple(p.prompt_id for p in prompts.extra(seed, 5, 40, set())) for seed in seeds]
    assert len({*batches, *extra}) == 10


# Procedural problems

SUMS = {"name": "chain_sum", "weight": 3.0, "config": {"min_terms": 2, "max_terms": 2}}
LONG = {"name": "chain_sum", "weight": 1.0, "config": {"min_terms": 6, "max_terms": 6}}
GCD = {"name": "gcd", "weight": 1.0, "config": {}}


def test_task_row_depends_on_tasks_seed_and_number_only():
    tasks = [SUMS, LONG, GCD]
    rows = reasoning_gym_rows(tasks, 40, 1)
    for row in rows:
        assert row["prompt"] == row["entry"]["question"] and row["answer"] == row["entry"]["answer"]
        assert row["entry"]["metadata"]["source_dataset"] == row["task"] in ("chain_sum", "gcd")
    assert reasoning_gym_rows(tasks, 40, 1) == rows
    assert reasoning_gym_rows(tasks, 15, 1) == rows[:15]
    first, second = ({r["prompt"] for r in reasoning_gym_rows([LONG], 300, s)} for s in (1, 501))
    assert len(first) == 300 and not first & second, "training and held-out seeds"


def test_task_mixture_follows_weights():
    count = 1200
    found = collections.Counter(
        r["entry"]["metadata"]["difficulty"]["num_terms"][0]
        for r in reasoning_gym_rows([SUMS, LONG], count, 1)
    )
    # Binomial(1200, 3/4): standard deviation 15, so 60 is four of them; equal weights would be 300
    # away.
    assert abs(found[2] - 900) < 60 and found[2] + found[6] == count


@pytest.mark.filterwarnings("ignore:non-integer arg", "ignore:randrange")
@pytest.mark.parametrize(
    "task, part",
    [
        ({"name": "chain_sums", "config": {}}, "Dataset 'chain_sums' not registered"),
        ({"name": "chain_sum", "config": {"terms": 1}}, "'terms'"),
        ({"name": "chain_sum", "config": {"min_terms": 0}}, "min_terms must be positive"),
        ({"name": "chain_sum", "config": {"min_terms": 2.5}}, ""),
    ],
)
def test_wrong_task_or_parameter_error_names_task(task, part):
    message = refusal(reasoning_gym_rows, [SUMS, {"weight": 1} | task], 5, 1)
    assert message.startswith(f"data.tasks[1] ({task['name']}): ") and part in message


def test_extra_prompts_are_unused_and_a_function_of_step():
    prompts = numbered_prompts(30)
    used = {p.prompt_id for p in prompts.batch(0, 5, 8)}
    first = [p.prompt_id for p in prompts.extra(0, 5, 6, used)]
    assert len(set(first)) == 6 and not used & set(first)
    assert first == [p.prompt_id for p in prompts.extra(0, 5, 6, used)]
    assert [p.prompt_id for p in prompts.extra(0, 5, 3, used)] == first[:3]
    assert first != [p.prompt_id for p in prompts.extra(0, 6, 6, used)]
    assert first != [p.prompt_id for p in prompts.extra(1, 5, 6, used)]
    following = [p.prompt_id for p in prompts.extra(0, 5, 30, used | set(first))]
    assert sorted([*used, *first, *following]) == list(range(30)), "what is left, and no more"
