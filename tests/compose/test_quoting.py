"""Words that Hydra's grammar cannot read: the remedy, typed in a shell, sets the values that were meant."""

import re
import shlex

import pytest

from gpt2_fp8.compose import preflight
from gpt2_fp8.config import typed
from gpt2_fp8.config.errors import UserError

WORDS = ["trainer=cpu", "data.val_sequences=0"]
ODD = [
    "~/a.txt", "größe.txt", "日本.txt", "a#b.txt", "a:b.txt", "a=b.txt", "my file.txt", "a&b.txt", "a;b.txt", "50%.txt",
    "a^b.txt", "it's.txt", 'a"b.txt', "a(1).txt", "<a>.txt", "a!b.txt", "`a`.txt", "$a.txt", "a\\b#.txt",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in [*ODD, "plain.txt"]:
        (tmp_path / name.removeprefix("~/")).write_text("text\n")


def read(word):
    """The configuration of a word, or of the remedy that is named for it, typed in a shell."""
    for _ in range(2):
        try:
            (config,) = preflight([*WORDS, *(["data=text_files"] if "data." in word[0] else []), *word])
        except UserError as refused:
            remedy = refused.problems[0].remedy
            (found,) = re.findall(r"(?:^|: )((?:'|data\.|notes=).*)", remedy)
            word = shlex.split(found)
            continue
        return config
    raise AssertionError(f"{word} is refused too")


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("form", ["[{}]", "[plain.txt,{}]", "[{}, plain.txt]", '["plain.txt",{}]'])
def test_each_item_of_a_list_gets_its_own_quotes(name, form):
    if "'" in name or '"' in name:
        pytest.skip("a quote in a list opens a text")
    word = f"data.train_files={form.format(name)}"
    others = ["plain.txt"] if "plain" in form else []
    assert sorted(read([word]).data.train_files) == sorted([name, *others])


@pytest.mark.parametrize("name", ODD)
def test_a_list_that_is_a_text_is_taken_for_the_list(name):
    if '"' in name:
        pytest.skip("it ends the text")
    assert read([f'data.train_files="[{name}]"']).data.train_files == [name]


@pytest.mark.parametrize("name", ODD)
def test_a_text_that_stands_for_a_list_becomes_one(name):
    assert read(shlex.split(typed.word("data.train_files", name))).data.train_files == [name]


@pytest.mark.parametrize("name", ODD)
def test_a_text_is_quoted_as_a_whole(name):
    assert read([f"notes={name} and so on"]).notes == f"{name} and so on"


def test_each_value_of_a_sweep_gets_its_own_quotes():
    with pytest.raises(UserError) as refused:
        preflight(["-m", *WORDS, "notes=größe,~b,c"])
    assert refused.value.problems[0].remedy.endswith("""'notes="größe","~b",c'""")
    assert [config.notes for config in preflight(["-m", *WORDS, 'notes="größe","~b",c'])] == ["größe", "~b", "c"]


def test_several_values_that_are_quoted_become_one_list():
    with pytest.raises(UserError) as refused:
        preflight([*WORDS, "data=text_files", "data.train_files='a b',plain.txt"])
    (found,) = re.findall("as one list (.*)", refused.value.problems[0].remedy)
    assert shlex.split(found) == ["data.train_files=['a b',plain.txt]"]


@pytest.mark.parametrize("text", ["{a}", "{~: 1}", "{a: ~, é}", "(a", "a]", "]["])
def test_what_looks_like_keys_and_is_none_becomes_a_text(text):
    assert read([f"notes={text}"]).notes == text


def test_a_list_that_is_not_closed_is_closed_and_quoted_at_once():
    assert read(["data.train_files=[~/a.txt"]).data.train_files == ["~/a.txt"]


def test_a_key_with_other_letters_is_not_repeated():
    with pytest.raises(UserError, match="keys have only letters") as refused:
        preflight([*WORDS, "größe=1"])
    assert "größe" not in refused.value.problems[0].remedy


def test_items_that_a_shell_has_split_are_quoted_at_once():
    assert read(["data.train_files=[~/a.txt,", "my", "file.txt]"]).data.train_files == ["~/a.txt", "my file.txt"]


def test_the_values_of_keys_in_braces_have_quotes_of_their_own():
    assert typed.word("k", "{a: 1, b: [~/x, 2]}") == """'k={a: 1,b: ["~/x",2]}'"""
