"""Files into rows: what a file says is what rewards get."""

import bz2
import csv
import datetime
import gzip
import json
import lzma
import os

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from bubblespec.data.prompts import build_prompt_set
from bubblespec.data.rows import load_rows
from bubblespec.rewards import exact_match
from tests.helpers.checks import refusal

ROWS = [
    {"prompt": "one plus one", "answer": "2", "level": 1},
    {"prompt": "two, doubled", "answer": "4", "level": 3},
]
CHATS = [
    {"prompt": [{"role": "user", "content": "hi"}], "answer": "a"},
    {
        "prompt": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}],
        "answer": "b",
    },
]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Everything that `datasets` keeps goes here instead of the user's cache."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "cache"


def as_jsonl(rows: list) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def write(path, rows: list) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        path.write_text(as_jsonl(rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1))
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


def load(path: str) -> list[dict]:
    return list(load_rows(str(path), None, "train"))


# Loading files


@pytest.mark.parametrize("suffix", ["json", "jsonl", "parquet"])
def test_rows_of_file_have_all_columns(tmp_path, suffix):
    typed = [{"prompt": "p", "number": 2**53 + 1, "text": "2024-05-02"}] * 2
    if suffix == "parquet":
        typed = [row | {"day": datetime.date(2024, 5, 2)} for row in typed]
    for rows in (ROWS, CHATS, typed):
        assert load(write(tmp_path / f"rows[1].{suffix}", rows)) == rows


def test_folder_and_glob_take_files_in_name_order(tmp_path):
    write(tmp_path / "folder" / "b.jsonl", ROWS[1:])
    write(tmp_path / "folder" / "a.jsonl", ROWS[:1])
    (tmp_path / "folder" / "README.md").write_text("not data")
    assert load(tmp_path / "folder") == ROWS
    assert load(tmp_path / "folder" / "*.jsonl") == ROWS
    assert load(tmp_path / "folder" / "[b].jsonl") == ROWS[1:]
    write(tmp_path / "folder" / "c.csv", ROWS)
    assert "mixes file formats ['csv', 'json']" in refusal(load, tmp_path / "folder")


@pytest.mark.parametrize(
    "name, content, says",
    [
        ("torn.jsonl", '{"prompt": "x"}\n\n{"prompt": "y"\n', "torn.jsonl, line 3 is not JSON"),
        ("number.jsonl", '{"prompt": "x"}\n3\n', "number.jsonl, line 2 has 3, not an object"),
        ("array.json", '[{"prompt": "x"},\n {"prompt" "y"}]', "array.json, line 2 is not JSON"),
        ("nested.json", '{"rows": [{"prompt": "x"}]}', "column; it has rows; set "),
        ("qa.jsonl", '{"id": "1", "question": "x"}', 'set "data.columns={prompt: question}"'),
        (
            "own.jsonl",
            '{"id": 1, "task": "x"}',
            'it has id, task; set "data.columns={prompt: task}"',
        ),
        ("open.csv", 'prompt,answer\n"x,1\ny,2\n', "open.csv, line 3 is not CSV: "),
        ("long.csv", "prompt,answer\nx,1\ny,2,3\n", "line 3 has 3 cells, but the header has 2"),
        ("twice.csv", "prompt,prompt\nx,1\n", "has two columns with the same name"),
        ("twice.jsonl", '{"prompt": "x"}\n{"a": 1, "a": 2}\n', "twice.jsonl, line 2: "),
        ("not.parquet", "hello", "not.parquet, split train: "),
        ("header.csv", "prompt,answer\n", "header.csv, split train, has no rows"),
        ("empty.csv", "", "empty.csv, split train, has no rows"),
        ("blank.jsonl", "\n \n\n", "blank.jsonl, split train, has no rows"),
        ("none.json", "[]", "none.json, split train, has no rows"),
        ("hole.csv", "prompt,answer\nx,1\n,2\n", "the prompt of row 1 is empty"),
    ],
)
def test_broken_file_is_one_error_line_with_name(tmp_path, name, content, says):
    path = tmp_path / name
    path.write_text(content)
    message = refusal(lambda: build_prompt_set(load(path), list, 100, key="data.path"))
    assert message.startswith("data.path: ") and says in message
    assert str(tmp_path) in message or name == "hole.csv", "its row is at fault"


# What becomes of values


@pytest.mark.parametrize("suffix", ["json", "jsonl"])
def test_json_values_are_unchanged(tmp_path, suffix):
    """Each alone and all in one column, nested and in lists; and as text they match themselves.
    An empty one is no reference."""
    texts = ["2024-05-02", "2024-05-02T10:00:00Z", "10:30", "007", "NA", "None", "nan", "", "é"]
    numbers = [7, 2.5, -3, 2**53 + 1, 2**64 + 1, 1e300, 7.0]
    values = [*texts, *numbers, True, False, None, [], {}]
    values += [[value] for value in values[:6]] + [{"date": value} for value in values[:6]]
    rows = [{"prompt": "p", "answer": value, "other": [value, {"in": value}]} for value in values]
    for part in ([row] for row in rows):
        assert repr(load(write(tmp_path / f"one.{suffix}", part))) == repr(part)
    loaded = load(write(tmp_path / f"all.{suffix}", rows))
    assert repr(loaded) == repr(rows), "types as well"
    answers = [row["answer"] for row in loaded[: len(texts) + len(numbers)]]
    written = texts + [json.dumps(number) for number in numbers]
    assert exact_match(None, written, None, answers) == [1.0 if text else None for text in written]


def test_csv_cells_are_unchanged_texts(tmp_path):
    texts = ["NA", "DE", "007", "010", "", "None", "nan", "2.5", "7", "2024-05-02", str(2**64 + 1)]
    texts += ["true", "1e5", 'say "x",\nthen y', "a" * (1 << 18)]
    rows = [{"prompt": "p", "answer": text} for text in texts]
    loaded = load(write(tmp_path / "rows.csv", rows))
    assert loaded == rows
    scores = exact_match(None, texts, None, [row["answer"] for row in loaded])
    assert scores == [1.0 if text else None for text in texts]


# Forms of files


def zstd(content: bytes) -> bytes:
    return pyarrow.compress(content, "zstd", asbytes=True)


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress, zstd])
def test_compressed_files_are_recognised_by_first_bytes(tmp_path, compress):
    content = compress(as_jsonl(ROWS).encode())
    for name in ("plain.jsonl", "rows.jsonl.gz", "ROWS.JSON.XZ", "rows.ndjson.zst"):
        (tmp_path / name).write_bytes(content)
        assert load(tmp_path / name) == ROWS
    (tmp_path / "rows.csv.gz").write_bytes(compress(b"prompt,answer\nx,007\n"))
    assert load(tmp_path / "rows.csv.gz") == [{"prompt": "x", "answer": "007"}]
    (tmp_path / "torn.jsonl.gz").write_bytes(content[: len(content) // 2])
    assert "cannot load" in refusal(load, tmp_path / "torn.jsonl.gz")


LAYOUTS = {
    "mark": "\ufeff" + as_jsonl(ROWS),
    "crlf": as_jsonl(ROWS).replace("\n", "\r\n"),
    "one line": as_jsonl(ROWS).replace("\n", " "),
    "mixed": as_jsonl(ROWS[:1]) + json.dumps(ROWS[1:], indent=2),
    "indented": "\n".join(json.dumps(row, indent=1) for row in ROWS),
    "list": json.dumps(ROWS),
}
MISSING = [{"prompt": "x", "a": 1, "b": None}, {"prompt": "y", "a": None, "b": "z"}]
# A mark of byte order, blank lines, a column without a name, and a row that ends early.
SPREADSHEET = "\ufeff,prompt,answer\r\n0,x,1\r\n\r\n1,y\r\n"
CELLS = [
    {"Unnamed: 0": "0", "prompt": "x", "answer": "1"},
    {"Unnamed: 0": "1", "prompt": "y", "answer": None},
]


@pytest.mark.parametrize(
    "suffix, text, rows",
    [
        *(("json", text, ROWS) for text in LAYOUTS.values()),
        ("jsonl", '{"prompt": "x", "a": 1}\n{"prompt": "y", "b": "z"}', MISSING),
        ("csv", SPREADSHEET, CELLS),
        ("tsv", SPREADSHEET.replace(",", "\t"), CELLS),
    ],
    ids=[*LAYOUTS, "missing columns", "spreadsheet", "tabs"],
)
def test_rows_are_read_in_any_layout(tmp_path, suffix, text, rows):
    (tmp_path / f"rows.{suffix}").write_text(text, encoding="utf-8", newline="")
    assert load(tmp_path / f"rows.{suffix}") == rows


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_slices_of_split_are_taken(tmp_path, suffix):
    path = write(tmp_path / f"rows.{suffix}", [{"prompt": f"p{n}"} for n in range(10)])
    for split, wanted in [
        ("train[:3]", range(3)),
        ("train[-2:]", [8, 9]),
        ("train[50%:]", range(5, 10)),
        ("train[8:]+train[:1]", [8, 9, 0]),
        ("all", range(10)),
    ]:
        rows = load_rows(path, None, split)
        assert [row["prompt"] for row in rows] == [f"p{n}" for n in wanted], split
    assert "has no rows" in refusal(load_rows, path, None, "train[:0]") or suffix == "parquet"
    message = refusal(load_rows, path, None, "test")
    assert message.endswith("""ValueError: Unknown split "test". Should be one of ['train'].""")


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
@pytest.mark.parametrize(
    "train, test",
    [
        ("train", "test"),
        ("a", "eval_1"),
        ("x-train-0", "dev"),
        ("sums.train", "sums.test"),
        ("train/part", "test/part"),
        ("set/part", "set/test_2/b/train"),  # folders come first
    ],
)
def test_files_of_other_splits_are_not_trained_on(tmp_path, suffix, train, test):
    """Neither from a folder nor by a glob; a line says so, and the split is to be had."""
    own, other = [{"prompt": "own"}], [{"prompt": "other"}]
    write(tmp_path / "data" / f"{train}.{suffix}", own)
    write(tmp_path / "data" / f"{test}.{suffix}", other)
    for path in ("data", f"data/**/*.{suffix}"):
        lines = []
        assert load_rows(str(tmp_path / path), None, "train", warn=lines.append) == own
        assert len(lines) == 1 and f"{test}.{suffix}" in lines[0]
        split = "validation" if test == "dev" else "test"
        assert load_rows(str(tmp_path / path), None, split, warn=lines.append) == other
    for name, rows in ((train, own), (test, other)):
        path = str(tmp_path / "data" / f"{name}.{suffix}")
        assert load_rows(path, None, "train", warn=pytest.fail) == rows, "named by itself"


def test_shards_in_data_are_splits_of_their_names(tmp_path):
    for name in ("train", "hard"):
        write(tmp_path / "data" / f"{name}-00000-of-00001.jsonl", [{"prompt": name}])
    assert load(tmp_path) == [{"prompt": "train"}]
    assert load_rows(str(tmp_path), None, "hard") == [{"prompt": "hard"}]


def test_name_of_two_splits_is_refused_beside_others(tmp_path):
    write(tmp_path / "dev_train.jsonl", ROWS)
    assert load(tmp_path) == ROWS
    write(tmp_path / "dev_test.jsonl", ROWS)
    message = refusal(load, tmp_path)
    assert message.startswith("data.path: ")
    assert "dev_test.jsonl may be validation or test;" in message


def test_test_set_alone_is_no_train_set_beside_unread_files(tmp_path):
    write(tmp_path / "test.jsonl", ROWS)
    assert load(tmp_path) == ROWS
    (tmp_path / "train.jsonl.lz4").write_bytes(b"")
    assert "Unknown split" in refusal(load, tmp_path)
    assert load_rows(str(tmp_path), None, "test") == ROWS


def test_any_depth_is_read_and_unread_files_are_named(tmp_path):
    names = ["a/b/three.jsonl", "a/two.ndjson", "four.xlsx", "one.jsonl", "one.jsonl.lz4"]
    for number, name in enumerate(names):
        write((tmp_path / name).with_suffix(".jsonl"), [{"prompt": str(number)}])
        (tmp_path / name).with_suffix(".jsonl").rename(tmp_path / name)
    (tmp_path / "config.json").write_text("{}")
    for path, read, unread in [
        (".", [0, 1, 3], "config.json, four.xlsx, one.jsonl.lz4"),
        ("*", [3], "a, config.json, four.xlsx, one.jsonl.lz4"),
        ("**/*.jsonl", [0, 3], None),
        ("**/*.xlsx", [], "four.xlsx"),
    ]:
        lines = []
        path = str(tmp_path if path == "." else tmp_path / path)
        if not read:
            assert f"not read: {unread}" in refusal(load, path)
            continue
        rows = load_rows(path, None, "train", warn=lines.append)
        assert [int(row["prompt"]) for row in rows] == read
        (line,) = lines
        assert f"{len(read)} rows of {len(read)} file" in line
        assert line.endswith(f"; not read ({unread})" if unread else ".jsonl)")


def test_folders_of_save_to_disk_are_read(tmp_path):
    saved = datasets.Dataset.from_list(ROWS)
    saved.save_to_disk(tmp_path / "one")
    assert load(tmp_path / "one") == ROWS
    both = datasets.DatasetDict(train=saved.select([1]), test=saved.select([0]))
    both.save_to_disk(tmp_path / "two", num_shards={"train": 1, "test": 1})
    assert load(tmp_path / "two") == ROWS[1:] == load(tmp_path / "two" / "train")
    assert load_rows(str(tmp_path / "two"), None, "test") == ROWS[:1]
    assert "Unknown split" in refusal(load_rows, str(tmp_path / "two"), None, "dev")
    datasets.Dataset.from_list(ROWS * 9).save_to_disk(tmp_path / "shards", num_shards=3)
    assert load(tmp_path / "shards") == ROWS * 9


# Columns by other names


@pytest.mark.parametrize(
    "columns, wanted",
    [
        ({"prompt": "question", "answer": "model.truth"}, {"prompt": "q", "answer": 7}),
        ({"prompt": "question", "question": "prompt"}, {"prompt": "q", "question": "old"}),
        ({"answer": "in.name"}, {"prompt": "old", "answer": "2"}),
    ],
)
def test_columns_are_renamed_from_top_level_or_nested(tmp_path, columns, wanted):
    rows = [{"question": "q", "prompt": "old", "model": {"truth": 7}, "in.name": "2"}]
    path = write(tmp_path / "rows.jsonl", rows)
    assert load_rows(path, None, "train", columns=columns) == [rows[0] | wanted]


@pytest.mark.parametrize("name, source", [("prompt", "problem"), ("answer", "level.deep")])
def test_missing_column_error_names_column(tmp_path, name, source):
    path = write(tmp_path / "rows.jsonl", ROWS)
    message = refusal(lambda: load_rows(path, None, "train", columns={name: source}))
    assert message.startswith(f"data.columns.{name}: some row has no column '{source}'; the")


# What is read and what is not


def test_replaced_columnar_file_is_read_anew(tmp_path, monkeypatch):
    """With the former time stamp, and where the cache of `datasets` cannot be written."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", "/proc/none/cache")
    others = [row | {"answer": "other"} for row in ROWS]
    for rows in (ROWS, others):
        path = write(tmp_path / "rows.parquet", rows)
        datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
        table = pyarrow.Table.from_pylist(rows)
        with pyarrow.ipc.new_file(tmp_path / "rows.arrow", table.schema) as file:
            file.write_table(table)
        for folder, _, files in os.walk(tmp_path):
            for name in files:
                os.utime(os.path.join(folder, name), (1e9, 1e9))
        for name in (path, tmp_path / "saved", tmp_path / "rows.arrow"):
            assert load(name) == rows


@pytest.mark.parametrize("name", ["data", "data/**/*.jsonl", "data/*/*.jsonl"])
def test_linked_folders_are_read_once(tmp_path, monkeypatch, name):
    """Folders that link to themselves and to each other, each twice, and files that are links."""
    monkeypatch.chdir(tmp_path)
    for folder in ("train", "test"):
        write(tmp_path / "data" / folder / "rows.jsonl", [{"prompt": folder}])
        for link in ("a", "b"):
            (tmp_path / "data" / folder / link).symlink_to("..")
    (tmp_path / "data" / "latest").symlink_to("test")
    (tmp_path / "data" / "train" / "same.jsonl").symlink_to("rows.jsonl")
    for path in (name, str(tmp_path / name)):
        assert load(path) == [{"prompt": "train"}] * 2
        assert load_rows(path, None, "test") == [{"prompt": "test"}]


def test_unreadable_folder_is_named(tmp_path, monkeypatch):
    for name in ("open", "shut"):
        write(tmp_path / name / "rows.jsonl", [{"prompt": name}])
    scandir = os.scandir

    def refuse_one(folder):
        if os.path.basename(folder) == "shut":
            raise PermissionError
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", refuse_one)
    lines = []
    assert load_rows(str(tmp_path), None, "train", warn=lines.append) == [{"prompt": "open"}]
    assert lines[0].endswith("; not read (shut)")


@pytest.mark.parametrize("path", ["data", "data/**", "data/**/*.jsonl"])
@pytest.mark.parametrize("output", ["", "runs/own"])
def test_what_runs_have_written_is_no_data(tmp_path, path, output):
    rows = [{"prompt": "own"}]
    write(tmp_path / "data" / "rows.jsonl", rows)
    out = tmp_path / "data" / output
    written = ["metrics.jsonl", "samples.jsonl", "checkpoint-5/state.json", "rollouts/1.jsonl"]
    for name in written:
        write(out / name, [{"prompt": "of the run"}])
    assert output or len(load(tmp_path / path)) > 1, "names alone say nothing"
    write(out / "trace" / "responses.parquet", rows)
    (out / "config.yaml").write_text("run: {}\n")
    assert load(tmp_path / path) == rows
    assert load(out / "rollouts") == [{"prompt": "of the run"}], "named by itself"


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 12345\n"


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet", "all/train/a.jsonl.gz"])
def test_pointer_to_file_is_named(tmp_path, name):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(POINTER)
    message = refusal(load, tmp_path / name.partition("/")[0])
    assert message.startswith("data.path: ") and message.count(str(tmp_path / name)) == 1
    assert message.endswith("is a pointer of git-lfs, not the file: run `git lfs pull`")


@pytest.mark.parametrize("name", ["dataset_dict.json", "state.json"])
@pytest.mark.parametrize("content", ["", "[]", '{"splits": ["train"]}', POINTER])
def test_damaged_saved_folder_is_one_line(tmp_path, name, content):
    (tmp_path / "dataset_info.json").write_text("{}")
    (tmp_path / name).write_text(content)
    message = refusal(load, tmp_path)
    assert message.startswith(f"data.path: {tmp_path} is a damaged folder of save_to_disk: ")
