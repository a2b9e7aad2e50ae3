"""Checkpoints made by someone who wants something: none runs code, leaves its folder, or takes much memory or time.

`python -m tests.faults.test_hostile_checkpoints FOLDER` makes every artefact in FOLDER, reads each, and prints what
came of it: in a process of its own, whose memory is this reading's alone.
"""

import ast
import hashlib
import io
import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch

from gpt2_fp8 import compose
from gpt2_fp8.checkpoint import files
from gpt2_fp8.checkpoint.files import CheckpointError
from gpt2_fp8.checkpoint.manifest import sealed
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.runtime import host_memory
from tests.runs import command, train

PACKAGE = Path(__file__).resolve().parents[2] / "gpt2_fp8"
MODEL, SKELETON = "model.safetensors", "state.json"
CANARY = "canary"  # beside the checkpoints, in the folder that everything here happens in
ESCAPE = "\x1b]0;owned\x07\x1b[2J"


class Payload:
    """Unpickled, it writes into the canary, in the folder that it was made in."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.system, (f"echo sang >> {self.folder / CANARY}",)


def good(path):
    """A small whole checkpoint, which the artefacts are made from."""
    optimizer = {"state": {0: {"exp_avg": torch.ones(4)}}, "param_groups": []}
    whole = {"global_step": 3, "state_dict": {"w": torch.zeros(4)}, "optimizer_states": [optimizer]}
    files.write(path, whole)
    return path


def forge(path, name=None, data=b"", **changes):
    """Replace a file, and make sizes, digests and the manifest's own digest fit, as its author can."""
    manifest = json.loads((path / "manifest.json").read_text()) | changes
    if name:
        (path / name).unlink(missing_ok=True)
        (path / name).write_bytes(data)
        manifest["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (path / "manifest.json").write_text(json.dumps(sealed(manifest)))


def with_header(path, header, body=b"\0" * 16):
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    forge(path, MODEL, struct.pack("<Q", len(header)) + header + body)


def tensor(shape, start, stop, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def with_state(path, **values):
    """Add to the skeleton; an object with a key that starts with "$" is taken for what it claims to be."""
    forge(path, SKELETON, json.dumps(json.loads((path / SKELETON).read_text()) | values).encode())


def with_weight(path, name, key="w"):
    with_state(path, state_dict={key: {"$tensor": f"state_dict.{name}"}})


def nested(path, depth):
    state = (path / SKELETON).read_text().rstrip().removesuffix("}")
    forge(path, SKELETON, f'{state}, "x": {"[" * depth}{"]" * depth}}}'.encode())


def listing(path, name):
    manifest = json.loads((path / "manifest.json").read_text())
    forge(path, files=manifest["files"] | {name: {"size": 1, "sha256": "0" * 64}})


def linked(path, name, target):
    """`target`, of the same bytes where it is None, in place of a file."""
    if target is None:
        target = path.parent.parent / "elsewhere"
        shutil.copy(path / name, target)
    (path / name).unlink()
    (path / name).symlink_to(target)


def pipe(path):
    (path / SKELETON).unlink()
    os.mkfifo(path / SKELETON)


def sparse(path, name, size):
    """A file that claims `size` bytes and takes none."""
    manifest = json.loads((path / "manifest.json").read_text())
    os.truncate(path / name, size)
    forge(path, files=manifest["files"] | {name: {"size": size, "sha256": "0" * 64}})


def bomb():
    """100 MB in 100 kB."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * 10**8)
    return packed.getvalue()


def unlisted(path):
    """State names a tensor of a file that lies there, a link, and that the manifest does not speak of."""
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"].pop("optimizer.safetensors")
    (path / "manifest.json").write_text(json.dumps(sealed(manifest)))
    linked(path, "optimizer.safetensors", None)


def two(first, second):
    return {"w": tensor(*first), "v": tensor(*second)}


# How each is made, and what its refusal says; None: it is a legal checkpoint, and inert.
ARTEFACTS = {
    "a pickle as weights": (lambda p: forge(p, MODEL, pickle.dumps(Payload(p.parent.parent))), "is no safetensors"),
    "a pickle of torch as weights": (lambda p: (torch.save(Payload(p.parent.parent), p / "x"),
                                                forge(p, MODEL, (p / "x").read_bytes())), "do not fit together"),
    "a pickle as state": (lambda p: forge(p, SKELETON, pickle.dumps(Payload(p.parent.parent))), "state.json cannot"),
    "a pickle as manifest": (lambda p: (p / "manifest.json").write_bytes(pickle.dumps(Payload(p.parent.parent))),
                             "manifest.json cannot be read"),
    "a header of 2^60 bytes": (lambda p: forge(p, MODEL, struct.pack("<Q", 2**60) + b"{}"), "is no safetensors file"),
    "a header of 20 MB": (lambda p: with_header(p, b"{" + b" " * (20 << 20) + b"}"), "would have 20,971,522"),
    "a header nested 10^6 deep": (lambda p: with_header(p, b'{"w":' + b"[" * 10**6), "do not fit together"),
    "a shape of 2^62": (lambda p: with_header(p, {"w": tensor([2**62], 0, 2**64 - 1)}), "do not fit together"),
    "a shape that overflows": (lambda p: with_header(p, {"w": tensor([2**32, 2**32], 0, 0)}), "do not fit together"),
    "a shape larger than its bytes": (lambda p: with_header(p, {"w": tensor([2**40], 0, 16)}), "do not fit together"),
    "a shape of 10^6 dimensions": (lambda p: with_header(p, {"w": tensor([1] * 10**6, 0, 4)}), "do not fit together"),
    "offsets past the end": (lambda p: with_header(p, {"w": tensor([2**30], 0, 2**32)}), "do not fit together"),
    "negative offsets": (lambda p: with_header(p, {"w": tensor([4], -16, 0)}), "do not fit together"),
    "overlapping offsets": (lambda p: with_header(p, two(([4], 0, 16), ([2], 8, 16))), "do not fit together"),
    "an unknown dtype": (lambda p: with_header(p, {"w": tensor([4], 0, 16, ESCAPE)}), "do not fit together"),
    "a dtype that is not ours": (lambda p: with_header(p, {"w": tensor([32], 0, 16, "F4")}), "no checkpoint holds"),
    "a zip bomb as weights": (lambda p: forge(p, MODEL, bomb()), "do not fit together"),
    "a zip bomb as state": (lambda p: forge(p, SKELETON, bomb()), "state.json cannot be read"),
    "a manifest listing ../../x": (lambda p: listing(p, "../../x"), "lists '../../x'"),
    "a manifest listing /etc/passwd": (lambda p: listing(p, "/etc/passwd"), "lists '/etc/passwd'"),
    "a manifest listing escapes": (lambda p: listing(p, ESCAPE), r"lists '\x1b]0;owned\x07\x1b[2J'"),
    "a manifest by an escape": (lambda p: forge(p, version=4, written_by={"gpt2_fp8": ESCAPE}), r"use gpt2_fp8 \x1b]0"),
    "a tensor's name of escapes": (lambda p: with_weight(p, ESCAPE), r"\x1b]0;owned"),
    "a tensor's name of 10^6 letters": (lambda p: with_weight(p, "w" * 10**6), "do not fit together"),
    "a link to weights elsewhere": (lambda p: linked(p, MODEL, None), "model.safetensors: it is a link"),
    "a link to /dev/zero": (lambda p: linked(p, SKELETON, "/dev/zero"), "state.json: it is a link"),
    "a manifest that is a link": (lambda p: linked(p, "manifest.json", None), "manifest.json cannot be read (it is a"),
    "a pipe as state": (pipe, "state.json: it is no regular file"),
    "a file that is not listed": (unlisted, "which the manifest does not list"),
    "state nested 10^6 deep": (lambda p: forge(p, SKELETON, b"[" * 10**6 + b"]" * 10**6), "nested too deeply"),
    "state nested 5000 deep": (lambda p: nested(p, 5000), "cannot be read"),  # JSON's reader may let it pass, ours not
    "state of 1 GB": (lambda p: sparse(p, SKELETON, 2**30), "1,073,741,824 bytes"),
    "state of 1 GB in version 1": (lambda p: (sparse(p, SKELETON, 2**30), older(p)), "1,073,741,824 bytes"),
    "a manifest of 1 TB": (lambda p: os.truncate(p / "manifest.json", 2**40), "1,099,511,627,776 bytes"),
    "state of 10 million values": (lambda p: forge(p, SKELETON, b"[" + b"{}," * 10**7 + b"0]"), "at most 2,000,000"),
    "a number of 10^6 digits": (lambda p: forge(p, SKELETON, b"9" * 10**6), "state.json cannot be read"),
    "state that is a list": (lambda p: forge(p, SKELETON, b"[]"), "do not fit together"),
    "state of another step": (lambda p: with_state(p, global_step=4), "state.json is of another step"),
    "weights that are a list": (lambda p: with_state(p, state_dict=[]), "holds no weights"),
    "weights that are one tensor": (lambda p: with_state(p, state_dict={"$tensor": "state_dict.w"}), "no weights"),
    "a tag of its own": (lambda p: with_state(p, x={"$reduce": ["os.system", "id"]}), "$reduce is not known"),
    "keys that are lists": (lambda p: with_state(p, x={"$dict": [[[], 1]]}), "do not fit together"),
    "strings that others call": (lambda p: with_state(p, **CALLED), None),
    "an _extra_state that is a pickle": (lambda p: extra_state(p), None),
    "state of 30 MB in one string": (lambda p: with_state(p, x="\U0001f600" + "a" * (30 << 20)), None),
    "weights that are no numbers": (lambda p: with_header(p, {"w": tensor([4], 0, 16)}, b"\xff" * 16), None),
}  # fmt: skip

CALLED = {
    "_target_": "os.system",
    "_instantiator": "os.system",
    "__reduce__": ["os.system", ["id"]],
    "py/object": "subprocess.Popen",
    "hyper_parameters": {"_instantiator": "os.system", "_target_": "os.system", "path": "${oc.env:HOME}"},
    "hparams_name": "kwargs",
    "rng": "!!python/object/apply:os.system ['id']",
}


def older(path):
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"version": 1}))


def extra_state(path):
    """What Transformer Engine's modules once unpickled inside `load_state_dict`."""
    data = torch.frombuffer(bytearray(pickle.dumps(Payload(path.parent.parent))), dtype=torch.uint8)
    files.write(path, {"global_step": 3, "state_dict": {"w": torch.zeros(4), "_extra_state": data}})


def folder_of(folder, name):
    return folder / "artefacts" / name.replace(" ", "-").replace("/", "_")


def read_all(folder):
    """What this module does as a program: a line of JSON for each artefact."""
    for name, (make, _) in ARTEFACTS.items():
        make(good(folder_of(folder, name)))
    for name in ARTEFACTS:
        before, start = _resident(), time.process_time()  # the machine may have other things to do
        found = {}
        for read in (files.read, files.read_weights):
            try:
                read(folder_of(folder, name))
                found[read.__name__] = None
            except CheckpointError as error:
                found[read.__name__] = str(error)
        peak = round(host_memory.peak_gb() * 2**30)  # of this program, whatever its parent holds
        print(json.dumps({"name": name, "bytes": peak - before, "seconds": time.process_time() - start} | found))


def _resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """{artefact: what reading it gave}, and the folder that it happened in."""
    folder = tmp_path_factory.mktemp("hostile")
    (folder / CANARY).write_text("silent")
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.test_hostile_checkpoints", str(folder)],
        capture_output=True, text=True, cwd=PACKAGE.parent, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return {line["name"]: line for line in map(json.loads, done.stdout.splitlines())}, folder


@pytest.mark.parametrize("name", ARTEFACTS)
def test_a_hostile_checkpoint_does_nothing(outcomes, name):
    (found, folder), (_, refusal) = outcomes, ARTEFACTS[name]
    found = found[name]
    if refusal is None:
        assert found["read"] is found["read_weights"] is None
    else:
        assert refusal in found["read"]
        assert found["read"].startswith("error: ")
        assert len(found["read"].splitlines()) == 2
        assert found["read"].replace("\n", "").isprintable()
        assert len(found["read"]) < 2500
    assert found["bytes"] < 2**30
    assert found["seconds"] < 10
    assert (folder / CANARY).read_text() == "silent"


def test_the_payload_would_sing(tmp_path):
    """Or else its silence would prove nothing."""
    pickle.loads(pickle.dumps(Payload(tmp_path)))
    assert (tmp_path / CANARY).read_text() == "sang\n"


@pytest.mark.parametrize("key", ["ckpt_path", "init_from"])
def test_a_pickle_of_lightning_s_is_refused_by_its_path(tmp_path, key):
    path = tmp_path / "last.ckpt"
    torch.save({"state_dict": {}, "x": Payload(tmp_path)}, path)
    done = command("run_name=r", f"{key}={path}", cwd=tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 2
    assert "checkpoints here are folders" in done.stderr
    for read in (files.read, files.read_weights):
        with pytest.raises(CheckpointError, match="are never opened"):
            read(path)
    assert not (tmp_path / CANARY).exists()


@pytest.mark.parametrize("key", ["ckpt_path", "init_from"])
def test_a_run_refuses_a_pickle_renamed(tmp_path, key):
    path = good(tmp_path / "step-00000003")
    forge(path, MODEL, pickle.dumps(Payload(tmp_path)))
    with pytest.raises(UserError, match="is no safetensors file") as refused:
        train(tmp_path / "run", f"{key}={path}")
    assert refused.value.exit_code == 2
    assert not (tmp_path / CANARY).exists()


def test_a_run_refuses_weights_with_more_or_other_tensors_than_its_model(tmp_path):
    path = tmp_path / "step-00000003"
    extra_state(path)
    with pytest.raises(UserError, match="does not fit the model: _extra_state") as refused:
        train(tmp_path / "run", f"init_from={path}")
    assert refused.value.exit_code == 2
    assert not (tmp_path / CANARY).exists()


def test_escapes_in_a_path_are_shown(tmp_path):
    with pytest.raises(CheckpointError, match=r"\\x1b\]0;owned\\x07") as error:
        files.read(tmp_path / ESCAPE)
    assert "\x1b" not in str(error.value)
    with pytest.raises(UserError) as refused:
        compose.preflight(["run_name=r", f"init_from='{tmp_path}/x\x1b[2J'"])
    assert "\x1b" not in str(refused.value)


# ---- the source ------------------------------------------------------------------------------------------------------

# What can turn data into code, by the end of the dotted name of a call, or by a module's name.
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "jsonpickle", "code"}
CALLS = {
    *("torch.load", "torch.jit.load", "eval", "exec", "compile"),
    *("instantiate", "hydra.utils.call", "get_class", "get_method", "get_object", "yaml.load", "yaml.unsafe_load"),
    *("load_from_checkpoint", "import_module", "__import__"),
}
# Each with its reason. A new one is a decision.
ALLOWED = {
    ("compose/parallel.py", "joblib"): "counts the CPUs of this machine or container; nothing is read",
    ("data/worker_pool.py", "pickle"): "hands this process's own reader to the workers that it starts",
    ("data/worker_process.py", "pickle"): "takes it there, out of the pipe from that process; nothing from a file",
    ("__init__.py", "import_module"): "of a module of ours, by a public name",
    ("runtime/registry.py", "import_module"): "of a user's own module, named on the command line",
}


def dangers(source):
    """What of the two sets above a module's text uses."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            whole = [alias.name for alias in node.names]
            prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            names = {name.partition(".")[0] for name in (whole if not prefix else [prefix])}
            found |= (names & MODULES) | {n for n in whole if prefix and (n in CALLS or f"{prefix}{n}" in CALLS)}
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            safe = any("SafeLoader" in ast.unparse(a) for a in [*node.args, *(k.value for k in node.keywords)])
            found |= {call for call in CALLS if _is(call, name) and not (call == "yaml.load" and safe)}
            found |= {"allow_pickle" for k in node.keywords if k.arg == "allow_pickle"}
            found |= {"weights_only" for k in node.keywords if k.arg == "weights_only" and name.endswith("load")}
    return found


def _is(call, name):
    """Whether a call of `name` is one of `call`: builtins by their bare name, as `model.eval()` is something else."""
    return name == call or (call not in ("eval", "exec", "compile") and name.endswith(f".{call}"))


def test_nothing_in_the_source_turns_data_into_code():
    texts = {str(path.relative_to(PACKAGE)): path.read_text() for path in PACKAGE.rglob("*.py")}
    assert {(name, danger) for name, text in texts.items() for danger in dangers(text)} == set(ALLOWED)


@pytest.mark.parametrize(
    ("source", "danger"),
    [
        ("import pickle", "pickle"),
        ("from pickle import loads", "pickle"),
        ("import torch\ntorch.load('x', weights_only=True)", "torch.load"),
        ("from torch import load", "load"),
        ("from hydra.utils import instantiate", "instantiate"),
        ("import hydra\nhydra.utils.instantiate(cfg)", "instantiate"),
        ("eval('1')", "eval"),
        ("exec(text)", "exec"),
        ("import yaml\nyaml.load(text)", "yaml.load"),
        ("import yaml\nyaml.load(text, Loader=yaml.Loader)", "yaml.load"),
        ("import numpy\nnumpy.load('x', allow_pickle=True)", "allow_pickle"),
        ("import importlib\nimportlib.import_module(name)", "import_module"),
    ],
)
def test_the_search_of_the_source_finds(source, danger):
    assert danger in dangers(source)


@pytest.mark.parametrize(
    "source",
    ["model.eval()", "import yaml\nyaml.load(text, Loader=yaml.SafeLoader)", "json.load(f)", "re.compile('x')"],
)
def test_the_search_of_the_source_lets_pass(source):
    assert dangers(source) == set()


if __name__ == "__main__":
    read_all(Path(sys.argv[1]))
