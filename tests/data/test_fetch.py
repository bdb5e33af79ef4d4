"""`train fetch` of files: what is written, what is dropped and under which name, and every error with its exit code."""

from __future__ import annotations

import gzip
import json
import random

import pytest

from tests.data.fetching import lines_of, parquet, recipe, write_lines

PAIR = "source: {}\nuser: q\nassistant: a\n"


@pytest.fixture
def fetch(train, monkeypatch, tmp_path):
    """`fetch(...)`: run the command in the test's own folder."""
    monkeypatch.chdir(tmp_path)
    return lambda *argv: train("fetch", *argv)


def pairs(count: int, start: int = 0):
    return [{"q": f"question {number}", "a": f"answer {number}"} for number in range(start, start + count)]


def asked(path):
    return [record["conversations"][0]["content"] for record in lines_of(path)]


# --- what is written -------------------------------------------------------------------------------------------------


def test_lines_are_those_of_the_users_script(fetch, tmp_path):
    """json.dumps with ensure_ascii=False, as in their code: the files are equal byte by byte."""
    odd = 'é 🦜 \u2028 \u0085 \x00 \x7f 𠮷 \u202e \ufeff "quoted" \\ \t \r\n </s> <|user|>'
    write_lines(tmp_path / "in.jsonl", [{"q": odd, "a": "bai"}, {"q": "nola?", "a": odd}])
    recipe(tmp_path / "r.yml", PAIR.format("in.jsonl"))
    ran = fetch("r.yml", "out.jsonl")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out == "2 read, 2 kept, 0 dropped\nSaved 2 examples to out.jsonl\n"
    turns = [[("user", odd), ("assistant", "bai")], [("user", "nola?"), ("assistant", odd)]]
    records = [{"conversations": [{"role": role, "content": content} for role, content in record]} for record in turns]
    expected = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    assert (tmp_path / "out.jsonl").read_bytes() == expected.encode()


def test_pairs_of_tables_are_text_and_nothing_else(fetch, tmp_path):
    """A table's cell is what stands there: `datasets` would make null of NA and 7 of 007."""
    table = (
        '\ufeffEnglish,Latvian,n\r\n"Hello, how are you?","Sveiki, kā jums klājas?",1\r\n'
        'NA,007,2\r\n"a ""b""\nc",null,3\r\n\r\n1e5,2024-01-01,4\r\nTrue, x ,5\r\n'
    )
    (tmp_path / "pairs.csv").write_bytes(table.encode())
    assert fetch("english-latvian", "out.jsonl").code == 0
    before = "<<<|user|>>>Translate the following sentence from English to Latvian: "
    between, after = "<<<|user|>>><<<|assistant|>>>", "<<<|assistant|>>>"
    cells = [
        ("Hello, how are you?", "Sveiki, kā jums klājas?"), ("NA", "007"), ('a "b"\nc', "null"), ("1e5", "2024-01-01"),
        ("True", " x "),
    ]  # fmt: skip
    assert lines_of(tmp_path / "out.jsonl") == [
        {"text": before + first + between + second + after} for first, second in cells
    ]


def test_the_readers_of_training_take_what_is_written(fetch, tmp_path):
    from train.data.tokens.records import reader

    write_lines(tmp_path / "in.jsonl", [{"q": "a", "a": "b", "s": "be brief"}, {"q": "a", "a": "b", "s": ""}])
    for form in ("conversations", "control-text"):
        recipe(tmp_path / "r.yml", PAIR.format("in.jsonl") + f"system: s\nas: {form}\n")
        assert fetch("r.yml", f"{form}.jsonl").code == 0
        read = reader(form, ("system", "user", "assistant"))
        records = [read(record) for record in lines_of(tmp_path / f"{form}.jsonl")]
        assert [list(record.roles) for record in records] == [["system", "user", "assistant"], ["user", "assistant"]]


@pytest.mark.parametrize("suffix", [".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".jsonl.gz", ".csv.gz"])
def test_every_format_gives_the_same(fetch, tmp_path, suffix):
    records = pairs(300)
    text = {
        "json": json.dumps(records),
        "csv": "q,a\n" + "".join(f"{record['q']},{record['a']}\n" for record in records),
        "tsv": "q\ta\n" + "".join(f"{record['q']}\t{record['a']}\n" for record in records),
    }.get(suffix.removesuffix(".gz")[1:], "\n".join(map(json.dumps, records)))
    content = parquet(records) if suffix == ".parquet" else text.encode()
    (tmp_path / f"in{suffix}").write_bytes(gzip.compress(content) if suffix.endswith(".gz") else content)
    recipe(tmp_path / "r.yml", PAIR.format(f"in{suffix}"))
    assert fetch("r.yml", "out.jsonl").code == 0
    assert asked(tmp_path / "out.jsonl") == [record["q"] for record in records]


def test_several_files_are_read_in_order(fetch, tmp_path):
    for name, start in (("b", 0), ("a", 10), ("c", 20)):
        write_lines(tmp_path / f"{name}.jsonl", pairs(3, start))
    recipe(tmp_path / "r.yml", PAIR.format("[c.jsonl, '[ab].jsonl']"))
    assert fetch("r.yml", "out/x.jsonl").code == 0
    assert asked(tmp_path / "out/x.jsonl") == [f"question {n}" for n in (20, 21, 22, 10, 11, 12, 0, 1, 2)]


def test_home_and_variables_are_put_in(fetch, tmp_path, monkeypatch):
    """The users' os.makedirs("~/…") made a folder named ~."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WORK", str(tmp_path))
    write_lines(tmp_path / "in.jsonl", pairs(1))
    recipe(tmp_path / "r.yml", PAIR.format("$WORK/in.jsonl"))
    assert fetch("r.yml", "~/sets/AYA.jsonl").code == 0
    assert (tmp_path / "home/sets/AYA.jsonl").is_file()
    assert not (tmp_path / "~").exists()


def test_out_has_the_name_of_the_recipe(fetch, tmp_path):
    write_lines(tmp_path / "in.jsonl", pairs(1))
    recipe(tmp_path / "mine.yml", PAIR.format("in.jsonl"))
    assert fetch("mine.yml").out.endswith("Saved 1 examples to mine.jsonl\n")


def test_sharegpt_with_many_turns(fetch, tmp_path):
    dialogue = [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}] * 2
    columns = {"from": [turn["from"] for turn in dialogue], "value": [turn["value"] for turn in dialogue]}
    write_lines(
        tmp_path / "in.jsonl", [{"c": dialogue, "id": 7}, {"c": columns, "id": None}, {"c": [*dialogue, {"from": "x"}]}]
    )
    shape = "turns: {role: from, content: value}\nroles: {human: user, gpt: assistant, system: system}\n"
    recipe(tmp_path / "r.yml", "source: in.jsonl\nconversations: c\nkeep: id\n" + shape)
    ran = fetch("r.yml", "out.jsonl")
    assert "3 read, 2 kept, 1 dropped (field 1)" in ran.out
    turns = [
        {"role": role, "content": content} for role, content in (("system", "s"), ("user", "q"), ("assistant", "a"))
    ]
    assert lines_of(tmp_path / "out.jsonl") == [{"conversations": turns * 2, "id": 7}, {"conversations": turns * 2}]


def test_text(fetch, tmp_path):
    write_lines(tmp_path / "in.jsonl", [{"t": "Kaixo\nmundua"}, {"t": " "}, {"t": "a <<<|user|>>> b"}, {"t": None}])
    recipe(tmp_path / "r.yml", "source: in.jsonl\ntext: t\n")
    assert "1 kept, 3 dropped (empty turn 1, marker 1, field 1)" in fetch("r.yml", "out.jsonl").out
    assert lines_of(tmp_path / "out.jsonl") == [{"text": "Kaixo\nmundua"}]


def test_kept_fields(fetch, tmp_path):
    """They are copied as JSON; what JSON has no word for drops the record, as a reader of lines would stop at it."""
    import datetime

    moment = datetime.datetime(2024, 1, 2, 3, 4, 5)
    rows = [{"q": "x", "a": "y", "t": moment, "n": number, "l": [1.5, None]} for number in (1.5, float("nan"), None)]
    (tmp_path / "in.parquet").write_bytes(parquet(rows))
    recipe(tmp_path / "r.yml", PAIR.format("in.parquet") + "keep: [t, n, l]\n")
    assert "2 kept, 1 dropped (type 1)" in fetch("r.yml", "out.jsonl").out
    fields = [{name: record.get(name) for name in "tnl"} for record in lines_of(tmp_path / "out.jsonl")]
    assert fields == [{"t": "2024-01-02T03:04:05", "n": number, "l": [1.5, None]} for number in (1.5, None)]
    deep = '{"q": "x", "a": "y", "t": ' + "[" * 100_000 + "]" * 100_000 + "}"
    (tmp_path / "deep.jsonl").write_text(deep + "\n" + json.dumps({**pairs(1)[0], "t": 1}))
    recipe(tmp_path / "d.yml", PAIR.format("deep.jsonl") + "keep: t\n")
    assert "2 read, 1 kept" in fetch("d.yml", "deep-out.jsonl").out


# --- what is dropped -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["jsonl", "json"])
def test_a_key_that_is_given_twice(fetch, tmp_path, end):
    """Readers of JSON take the last of the two."""
    twice = '{"q": "x", "a": "first", "a": "second"}'
    good = json.dumps(pairs(1)[0])
    (tmp_path / f"in.{end}").write_text(f"{twice}\n{good}\n" if end == "jsonl" else f"[{twice}, {good}]")
    recipe(tmp_path / "r.yml", PAIR.format(f"in.{end}"))
    ran = fetch("r.yml", "out.jsonl")
    if end == "json":
        assert ran.code == 3
        assert "in.json has an object with the key 'a' twice" in ran.err
    else:
        assert "2 read, 1 kept, 1 dropped (key 1)" in ran.out
        assert "dropped as key: a key is given twice in the record" in ran.err
        assert len(lines_of(tmp_path / "out.jsonl")) == 1


def test_every_dropped_record_is_counted(fetch, tmp_path):
    bad = [
        '{"q": "x"}', '{"q": "x", "a": null}', '{"q": "x", "a": 5}', '{"q": "x", "a": ["y"]}', '{"q": "", "a": "y"}',
        '{"q": "x", "a": " \\n"}', "[]", "{", '"x"', '{"q": "\\ud83d", "a": "y"}', '{"q": NaN, "a": "y"}',
    ]  # fmt: skip
    good = [json.dumps(record) for record in [*pairs(2), *pairs(1)]]
    (tmp_path / "in.jsonl").write_text("\n".join([*bad, "", "  ", *good]) + "\n")
    recipe(tmp_path / "r.yml", PAIR.format("in.jsonl") + "where: {q: {not: question 1}}\ndedup: prompt\n")
    ran = fetch("r.yml", "out.jsonl", "--json")
    report = json.loads(ran.out)
    assert report["dropped"] == {
        "json": 3,
        "type": 2,
        "object": 2,
        "field": 2,
        "empty turn": 2,
        "duplicate": 1,
        "filter": 1,
    }
    assert (report["read"], report["kept"], report["examples"]) == (14, 1, 1)
    assert report["read"] == report["kept"] + sum(report["dropped"].values())
    strict = fetch("r.yml", "strict.jsonl", "--strict")
    assert strict.code == 3
    assert "record 1 of in.jsonl: the field is missing" in strict.err
    assert not (tmp_path / "strict.jsonl").exists()


@pytest.mark.parametrize("cell", ["<<<|user|>>>", "a <<<|x|>>> b", "<<<<|assistant|>>>>", "<<<||>>>"])
def test_text_that_holds_a_marker_is_dropped_and_never_changed(fetch, tmp_path, cell):
    write_lines(tmp_path / "in.jsonl", [{"q": cell, "a": "y"}, {"q": "x", "a": cell}, {"q": "ok <<<", "a": ">>> |ok|"}])
    recipe(tmp_path / "r.yml", PAIR.format("in.jsonl") + "as: control-text\n")
    assert "1 kept, 2 dropped (marker 2)" in fetch("r.yml", "out.jsonl").out
    expected = "<<<|user|>>>ok <<<<<<|user|>>><<<|assistant|>>>>>> |ok|<<<|assistant|>>>"
    assert lines_of(tmp_path / "out.jsonl") == [{"text": expected}]


def test_no_text_can_pose_as_a_turn(tmp_path):
    """Whatever pieces of markers stand beside each other: what is read back is what was meant, or it is dropped."""
    from train.data.fetch.fetch import maker
    from train.data.fetch.recipe_yaml import parse
    from train.data.tokens.records import Malformed, reader

    make = maker(parse(b"source: x.jsonl\nuser: q\nassistant: a\nas: control-text\n", "r", "r"))
    read, pieces = (
        reader("control-text", ("user", "assistant")),
        ["<", "<<<|", "|>>>", ">", "|", "user", "x", "<<<", ">>>"],
    )
    draw, kept, reasons = random.Random(1), 0, set()
    for _ in range(20000):
        cells = ["".join(draw.choices(pieces, k=draw.randint(1, 6))) for _ in range(2)]
        try:
            line = make({"q": cells[0], "a": cells[1]}).line
        except Malformed as error:
            reasons.add(error.reason)
            continue
        kept += 1
        assert list(read(json.loads(line)).contents) == cells
    assert 1000 < kept < 20000
    assert reasons == {"marker"}


def test_the_first_of_equal_prompts_stays(fetch, tmp_path):
    records = [{"q": f"p{number % 7}", "a": str(number), "s": "system"} for number in range(50)]
    write_lines(tmp_path / "in.jsonl", [*records, {"q": "p1 ", "a": "other"}])
    recipe(tmp_path / "r.yml", PAIR.format("in.jsonl") + "system: s\n")
    assert "8 kept, 43 dropped (duplicate 43)" in fetch("r.yml", "out.jsonl", "--dedup", "prompt").out
    assert [row["conversations"][-1]["content"] for row in lines_of(tmp_path / "out.jsonl")] == [*"0123456", "other"]


# --- samples ---------------------------------------------------------------------------------------------------------


def test_samples(fetch, tmp_path):
    write_lines(tmp_path / "in.jsonl", pairs(2000))
    recipe(tmp_path / "r.yml", PAIR.format("in.jsonl"))
    for name, draw in {"a": (100, 33), "b": (100, 33), "c": (100, 34), "d": (300, 33), "e": (5000, 33)}.items():
        assert fetch("r.yml", f"{name}.jsonl", "--sample", draw[0], "--seed", draw[1]).code == 0
    prompts = {name: asked(tmp_path / f"{name}.jsonl") for name in "abcde"}
    assert prompts["a"] == prompts["b"] != prompts["c"]
    assert len(set(prompts["a"])) == 100
    assert set(prompts["a"]) < set(prompts["d"])
    for sample in prompts.values():  # the order of the source
        assert sample == sorted(sample, key=lambda text: int(text.split()[1]))
    assert len(prompts["e"]) == 2000


def test_a_sample_is_what_its_definition_says(fetch, tmp_path):
    """Written again in a few lines, as any other program could."""
    from hashlib import blake2b

    write_lines(tmp_path / "in.jsonl", pairs(500))
    recipe(tmp_path / "r.yml", PAIR.format("in.jsonl") + "sample: 50\nseed: 33\n")
    assert fetch("r.yml", "out.jsonl").code == 0
    priority = {number: blake2b(f"33:{number}".encode(), digest_size=8).digest() for number in range(500)}
    best = sorted(sorted(priority, key=priority.__getitem__)[:50])
    assert asked(tmp_path / "out.jsonl") == [f"question {number}" for number in best]


def test_samples_are_uniform(tmp_path):
    """Every record is drawn equally often: chi-square over 4000 samples of 5 of 20, far under its 0.1 % bound."""
    import io

    from train.data.fetch.reservoir import Sample

    hits = [0] * 20
    for seed in range(4000):
        sample = Sample(5, seed, io.BytesIO())
        for number in range(20):
            sample.offer(b"%d" % number)
        for line in sample.lines():
            hits[int(line)] += 1
    assert sum(hits) == 20000
    assert sum((count - 1000) ** 2 / 1000 for count in hits) < 43.8 * 0.75


def test_candidates_are_forgotten(tmp_path):
    import io

    from train.data.fetch import reservoir as module

    sample = module.Sample(100, 1, io.BytesIO())
    for number in range(60000):
        sample.offer(b"%d\n" % number)
        assert len(sample.priorities) < 200 + module.SPARE
    assert sample.end < 60000 * 6 / 4  # most lines never came to the disk
    exact = module.Sample(100, 1, io.BytesIO())
    exact.count = 60000
    for number in range(60000):
        exact.offer(b"%d\n" % number)
    exact.count = 100
    assert list(sample.lines()) == list(exact.lines())


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "content", "code", "message"),
    [
        (PAIR.format("none.jsonl"), None, 2, "there is no file none.jsonl"),
        (PAIR.format("'*.csv'"), None, 2, "there is no file *.csv"),
        (PAIR.format("in.csv"), b"q,b\n1,2\n", 2, "in.csv has no field 'a'"),
        (PAIR.format("in.csv"), b"q,q,a\n1,2,3\n", 3, "two columns named 'q'"),
        (PAIR.format("in.csv"), b"", 3, "in.csv has no header"),
        (PAIR.format("in.csv"), b'q,a\n"x,y\n', 3, "in.csv, line 2: unexpected end of data"),
        (PAIR.format("in.csv"), b'q,a\n"x"z,y\n', 3, "in.csv, line 2"),
        (PAIR.format("in.csv"), b"q,a\n\xe4,y\n", 3, "in.csv is not UTF-8: it has the byte 0xe4"),
        (PAIR.format("in.csv"), b"q,a\nx\nx,y,z\n", 3, "nothing is left of in.csv: 2 read, 0 kept, 2 dropped (col"),
        (PAIR.format("in.csv.gz"), b"q,a\nx,y\n", 3, "in.csv.gz is damaged"),
        (PAIR.format("in.csv.gz"), gzip.compress(b"q,a\n" + b"x,y\n" * 9, mtime=0)[:-12], 3, "in.csv.gz is damaged"),
        (PAIR.format("in.json"), b'[{"q": 1},', 3, "in.json is not JSON"),
        (PAIR.format("in.json"), b"[]", 3, "nothing is left of in.json"),
        (PAIR.format("in.parquet"), b"PAR1 not", 3, "in.parquet is damaged or not a Parquet file"),
        (PAIR.format("in.parquet"), parquet([{"q": "x", "A": "y"}]), 2, "in.parquet has no field 'a'"),
        (PAIR.format("in.jsonl"), b'{"q": "x", "b": "y"}\n', 2, "no record of in.jsonl has the field 'a'"),
        (PAIR.format("in.jsonl") + "where: {lang: {not: x}}\n", b'{"q": "x", "a": "y"}\n', 2, "has the field 'lang'"),
        (PAIR.format("in.jsonl") + "where: {q: 5}\n", b'{"q": true, "a": "y"}\n', 2, "where q: it holds True"),
        (PAIR.format("in.jsonl"), b"", 3, "nothing is left of in.jsonl: 0 read"),
    ],
)  # fmt: skip
def test_errors(fetch, tmp_path, text, content, code, message):
    path = recipe(tmp_path / "r.yml", text)
    if content is not None:
        (tmp_path / text.split("\n")[0].removeprefix("source: ")).write_bytes(content)
    before = sorted(tmp_path.iterdir())
    ran = fetch(path, "out.jsonl")
    assert ran.code == code, ran.err
    assert message in ran.err
    assert ran.out == ""
    assert len([line for line in ran.err.splitlines() if line.startswith("error: ")]) == 1
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        ((), 2, "no recipe is named"),
        (("r.yml", "--seed", "3"), 2, "--seed has no effect without --sample"),
        (("r.yml", "--sample", "0"), 2, "0 is not in the range"),
        (("r.yml", "--split", "train"), 2, "splits has no meaning for in.jsonl"),
        (("r.yml", "--cache", "c"), 2, "--cache copies a set of the Hub"),
        (("r.yml", "folder"), 2, "folder is not a file"),
        (("r.yml", "in.jsonl/out.jsonl"), 2, "is in something that is not a folder"),
        (("r.yml", "old.jsonl"), 7, "old.jsonl exists"),
        (("r.yml", "old.jsonl", "-n"), 0, ""),
        (("r.yml", "/dev/null", "--force"), 2, "/dev/null is not a file"),
        (("r.yml", "in.jsonl", "--force"), 2, "in.jsonl is also the input"),
        (("nothing.yml",), 2, "neither a recipe nor a file"),
        (("r.yml", "--source", "a b"), 2, "not a valid name on the Hub"),
        (("r.yml", "--source", "in.txt.bz2"), 2, "HF_HUB_OFFLINE"),
    ],
)
def test_usage(fetch, tmp_path, argv, code, message, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    write_lines(tmp_path / "in.jsonl", pairs(2))
    recipe(tmp_path / "r.yml", PAIR.format("in.jsonl"))
    (tmp_path / "folder").mkdir()
    (tmp_path / "old.jsonl").write_text("old")
    ran = fetch(*argv)
    assert ran.code == code
    assert message in ran.err
    assert (tmp_path / "old.jsonl").read_text() == "old"
    assert not list(tmp_path.glob("*.tmp"))


def test_force_replaces_and_follows_a_link(fetch, tmp_path):
    write_lines(tmp_path / "in.jsonl", pairs(2))
    recipe(tmp_path / "r.yml", PAIR.format("in.jsonl"))
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch/x.jsonl").write_text("old")
    (tmp_path / "x.jsonl").symlink_to("scratch/x.jsonl")
    assert fetch("r.yml", "x.jsonl").code == 7
    assert fetch("r.yml", "x.jsonl", "--force").code == 0
    assert (tmp_path / "x.jsonl").is_symlink()
    assert len(lines_of(tmp_path / "scratch/x.jsonl")) == 2


def test_dry_run_shows_what_would_be_written(fetch, tmp_path):
    write_lines(tmp_path / "in.jsonl", pairs(5000))
    recipe(tmp_path / "r.yml", PAIR.format("in.jsonl") + "where: {q: {not_like: '*3'}}\nsample: 5\n")
    ran = fetch("r.yml", "-n")
    assert ran.code == 0
    assert 'where: q not_like "*3"' in ran.out
    assert "write: r.jsonl as conversations, a sample of 5 with seed 0" in ran.out
    assert "first records: 1,000 read, 900 kept, 100 dropped (filter 100)" in ran.out
    assert json.loads(ran.out.splitlines()[-1])["conversations"][0]["content"] == "question 0"
    assert not (tmp_path / "r.jsonl").exists()
    assert json.loads(fetch("r.yml", "-n", "--json").out)["kept"] == 900


def test_the_list(fetch):
    ran = fetch("--list")
    assert len(ran.out.splitlines()) == 10
    assert "aya-basque" in ran.out
    assert {entry["name"] for entry in json.loads(fetch("--list", "--json").out)} >= {"codeact", "general"}


def test_quotes_of_tables(fetch, tmp_path):
    (tmp_path / "in.tsv").write_text('q\ta\n"x" y\t"z"\n')
    recipe(tmp_path / "r.yml", PAIR.format("in.tsv"))
    fetch("r.yml", "plain.jsonl")
    assert asked(tmp_path / "plain.jsonl") == ['"x" y']
    (tmp_path / "in.tsv").write_text('q\ta\n"x\ty"\t"z"\n')
    recipe(tmp_path / "r.yml", PAIR.format("in.tsv") + "quotes: true\n")
    fetch("r.yml", "quoted.jsonl")
    assert asked(tmp_path / "quoted.jsonl") == ["x\ty"]


def test_lines_without_an_end_are_not_held(fetch, tmp_path, monkeypatch):
    from train.data.fetch import tables

    monkeypatch.setattr(tables, "LONGEST", 1000)
    long = json.dumps({"q": "x" * 5000, "a": "y"})
    (tmp_path / "in.jsonl").write_text("\n".join([long, json.dumps(pairs(1)[0]), long, json.dumps(pairs(1)[0]), long]))
    recipe(tmp_path / "r.yml", PAIR.format("in.jsonl"))
    assert "5 read, 2 kept, 3 dropped (long 3)" in fetch("r.yml", "out.jsonl").out
