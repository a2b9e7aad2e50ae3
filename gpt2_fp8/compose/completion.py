"""Completion in bash and zsh, by Hydra's flag: `-sc install=bash` prints a script, which asks `-sc query=bash`.

Hydra's own script completes `python` for any program, and takes `=` out of the characters that end every command's
words. The shell itself completes paths, where nothing is suggested.
"""

from __future__ import annotations

import os
import re

from gpt2_fp8.compose.benchmark import BenchRunConfig
from gpt2_fp8.compose.commandline import CommandLine, read
from gpt2_fp8.compose.composition import open_catalog
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.config.keys import choices_of, key_paths
from gpt2_fp8.config.programs import EvaluateConfig, GenerateConfig
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.runtime import programs

_SCHEMAS: dict[str, tuple[type, ...]] = {  # of programs that take keys
    **dict.fromkeys(("run", "schedule", "prepare", "tokenizer"), (RunConfig,)), "bench": (BenchRunConfig,),
    "evaluate": (EvaluateConfig, RunConfig), "generate": (GenerateConfig,),
}  # fmt: skip
_COMMAND = re.compile(r"\S*gpt2-fp8\s+|\S+\s+-m\s+gpt2_fp8(?:\.(\w+))?\s+")
_SCRIPTS = {
    "bash": r"""
_gpt2_fp8() {
    local line=${COMP_LINE:0:COMP_POINT} ask=$1 IFS=$' \t\n'
    if [[ $1 == *python* ]]; then
        [[ $line == *" -m gpt2_fp8"* ]] || { ${_gpt2_fp8_before:-:} "$@"; return; }
        ask+=" -m gpt2_fp8"
    fi
    local word=${line##*[[:space:]]}
    COMPREPLY=($(COMP_LINE=$line $ask -sc query=bash 2>/dev/null))
    [[ ${COMPREPLY[0]} == *[.=] ]] && compopt -o nospace 2>/dev/null
    [[ $word == *=* && $COMP_WORDBREAKS == *=* ]] && COMPREPLY=("${COMPREPLY[@]#"${word%%=*}="}")
}
{ complete -p python || _comp_load python || _completion_loader python; } >/dev/null 2>&1
[[ $(complete -p python 2>/dev/null) =~ -F\ ([^ ]+) && ${BASH_REMATCH[1]} != _gpt2_fp8 ]] &&
    _gpt2_fp8_before=${BASH_REMATCH[1]}
complete -o bashdefault -o default -F _gpt2_fp8 gpt2-fp8 python python3
""",
    "zsh": r"""
_gpt2_fp8() {
    local -a ask=($words[1])
    if [[ $words[1] == *python* ]]; then
        [[ "$words[2,3]" == "-m gpt2_fp8"* ]] || { _python "$@"; return }
        ask+=(-m gpt2_fp8)
    fi
    local -a found=(${(f)"$(COMP_LINE="${words[1,CURRENT-1]} $PREFIX" $ask -sc query=zsh 2>/dev/null)"})
    if (( ! $#found )); then
        compset -P '*='
        _files
    elif [[ $found[1] == *[.=] ]]; then
        compadd -S '' -- $found
    else
        compadd -- $found
    fi
}
compdef _gpt2_fp8 gpt2-fp8 python python3
""",
}


def answer(line: CommandLine) -> str:
    """Return what a command line with `-sc` asks for. Raises UserError for a word that it does not know."""
    word = " ".join(str(override.input_line) for override in line.overrides)
    asked, _, shell = word.partition("=")
    if asked not in ("install", "query") or shell not in _SCRIPTS:
        raise UserError.of(f"-sc {word}: no shell that is known", 'eval "$(gpt2-fp8 -sc install=bash)", or install=zsh')
    return _SCRIPTS[shell] if asked == "install" else "\n".join(suggest(os.environ.get("COMP_LINE", "")))


def suggest(typed: str) -> list[str]:
    """Return what the last word of a command line that is being typed may become; nothing where it may be a path."""
    if not (command := _COMMAND.match(typed)):
        return []
    *words, word = typed[command.end() :].split(" ")
    names = programs.names() if not (command[1] or words) else []  # the first word of `gpt2-fp8` may be a program
    program = command[1] or (words.pop(0) if words and words[0] in programs.names() else "run")
    schemas = _SCHEMAS.get(program, ())
    key, chosen, _ = word.partition("=")
    with open_catalog() as catalog:
        if folder := read(words).config_dir:
            catalog.add_folders([folder])
        groups = catalog.groups if RunConfig in schemas or BenchRunConfig in schemas else []
        if chosen:
            choices = catalog.choices(key) if key in groups else [c for s in schemas for c in choices_of(s, key)]
            return sorted(found for choice in set(choices) if (found := f"{key}={choice}").startswith(word))
    keys = [*groups, *(key for schema in schemas for key in key_paths(schema))]
    nearest = {key[: key.find(".", len(word)) + 1] or f"{key}=" for key in keys if key.startswith(word)}
    return [*(name for name in names if name.startswith(word)), *sorted(nearest)]
