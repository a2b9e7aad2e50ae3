"""Words that Hydra's grammar cannot read: the remedy, typed in a shell, sets the values that were meant."""

import re
import shlex
import shutil

import pytest

from gpt2_fp8.compose import preflight
from gpt2_fp8.config import typed
from gpt2_fp8.config.errors import UserError
from tests import forkserver
from tests.runs import SMALL, forked, summary

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


TYPED = ["2024_01_15", "1e5", "12e4567", "1.50", ".5", "+5", "nan", "-inf", "true", "1_000", "42", "007", "2024-01-15"]


@pytest.mark.parametrize("text", TYPED)
def test_a_text_key_has_what_was_typed(text):
    """Also where Hydra's grammar has a number or a truth value for it."""
    assert preflight([*WORDS, f"run_name={text}"])[0].run_name == text
    assert preflight([*WORDS, f"run_name='{text}'"])[0].run_name == text
    assert [config.notes for config in preflight(["-m", *WORDS, f"notes={text},b"])] == [text, "b"]
    hub = ["data=fineweb", f"data.revision={text}", f"data.train_files=[{text}, 'a,{text}',b]"]
    (config,) = preflight([*WORDS, *hub])
    assert (config.data.revision, config.data.train_files) == (text, [text, f"a,{text}", "b"])
    mixed = ["data=mixture", "+data@data.sources.a=fineweb", "+data@data.sources.b=openwebtext"]
    (config,) = preflight(["trainer=cpu", *mixed, f"data.sources.a.revision={text}"])
    assert config.data.sources["a"].revision == text


def test_a_number_stays_one_where_a_number_is_meant():
    (config,) = preflight([*WORDS, "optim.lr=1e-4", "trainer.max_steps=1_000", "+tags.a=1e5", "notes=null"])
    assert (config.optim.lr, config.trainer.max_steps, config.tags["a"], config.notes) == (1e-4, 1000, 1e5, None)


@pytest.mark.whole
def test_the_words_of_the_log_name_the_folder_again(tmp_path):
    """As a shell takes them: of a run that has ended, and of one that goes on from there."""
    for name in ("2024_01_15", "größe, a=b#1 (it's)"):
        run = forked(*SMALL, "trainer.max_steps=3", typed.setting("run_name", name), cwd=tmp_path)
        assert run.returncode == 0, run.stderr
        said = [line.partition("next: ")[2] for line in run.stdout.splitlines() if "next: python" in line]
        on, exported, generated = (shlex.split(line)[3:] for line in said)
        assert forked(*on, cwd=tmp_path).returncode == 0
        assert summary(tmp_path / "outputs" / name)["steps"] == 6
        for program, words in (("export", exported), ("generate", [*generated, "tokens=2"])):
            done = forkserver.python("-m", f"gpt2_fp8.{program}", *words, cwd=tmp_path)
            assert done.returncode == 0, done.stderr
        shutil.rmtree(tmp_path / "exported")
    assert {path.name for path in (tmp_path / "outputs").iterdir()} == {"2024_01_15", "größe, a=b#1 (it's)"}
