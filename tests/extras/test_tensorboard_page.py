"""TensorBoard on a finished run, as a person sees it: in a browser without a screen.

Needs Chromium (Debian's `chromium`). `TENSORBOARD_PICTURES=docs/pictures` keeps the pictures that README and docs show.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from tests.runs import train

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
OPTIONS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1400,900"),
    "--virtual-time-budget=30000",
]
KEPT = os.environ.get("TENSORBOARD_PICTURES")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason="no Chromium: apt-get install chromium")]


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """Of TensorBoard over a run and a sweep of two jobs."""
    outputs = tmp_path_factory.mktemp("page") / "outputs"
    long = ["trainer.max_steps=60", "callbacks.sample_tokens=20", "logger.histograms_every_n_steps=20"]
    for name, seed in (("first", 1), ("sweep/0", 2), ("sweep/1", 3)):
        train(outputs / name, *long, f"seed={seed}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(outputs), "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            yield wait(f"http://127.0.0.1:{port}/")
        finally:
            server.terminate()


def wait(address):
    """Until it has read all three runs."""
    for _ in range(120):
        try:
            with urllib.request.urlopen(f"{address}data/runs") as answer:
                if answer.read().count(b"tensorboard") >= 3:
                    return address
        except OSError:
            pass
        time.sleep(0.5)
    raise AssertionError("TensorBoard does not answer")


def page(address, name, tmp_path, picture=None):
    """The page's text, as drawn. `picture`: the name of the file that is kept of it."""
    start = [BROWSER, *OPTIONS, f"--user-data-dir={tmp_path}/browser"]
    shown = subprocess.run(
        [*start, "--dump-dom", f"{address}#{name}"], capture_output=True, text=True, timeout=180, check=True
    )
    if KEPT and picture:
        path = Path(KEPT).absolute() / picture
        subprocess.run(
            [*start, f"--screenshot={path}", f"{address}#{name}"], capture_output=True, timeout=180, check=True
        )
        shrink(path)
    without = re.sub(r"<(script|style|svg).*?</\1>", " ", shown.stdout, flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub("<[^>]+>", " ", without))


def shrink(path):
    """To 64 colours, so that a page of text is below 100 kB."""
    from PIL import Image

    Image.open(path).convert("RGB").resize((1120, 720)).quantize(64).save(path, optimize=True)
    assert path.stat().st_size < 100_000


def test_it_opens_on_the_loss(address, tmp_path):
    text = page(address, "timeseries", tmp_path, "tensorboard.png")
    groups = re.findall(r"\b(\w+) \d+ cards", text)
    assert groups[:2] == ["loss", "optim"], groups
    assert {"speed", "tensors_gradients", "tensors_norm", "tensors_weights"} <= set(groups)
    rows = set(re.findall(r"\S+/tensorboard\S*", text))
    assert rows == {"first/tensorboard", "sweep/0/tensorboard", "sweep/1/tensorboard"}
    page(address, "custom_scalars", tmp_path, "tensorboard_custom.png")


def asked(address, path, **body):
    """What the server tells the other pages, whose text lies where a page's source does not show it."""
    data = json.dumps(body).encode() if body else None
    request = urllib.request.Request(f"{address}data/plugin/{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.loads(answer.read())


def test_jobs_of_a_sweep_can_be_told_apart(address, tmp_path):
    page(address, "hparams", tmp_path, "tensorboard_hparams.png")
    experiment = asked(address, "hparams/experiment", experimentName="")
    results = [metric["name"] for metric in experiment["metricInfos"]]
    assert {"group": "", "tag": "loss/val"} in results
    columns = [{"metric": name, "order": "ORDER_UNSPECIFIED"} for name in results]
    statuses = ["STATUS_UNKNOWN", "STATUS_SUCCESS", "STATUS_FAILURE", "STATUS_RUNNING"]
    found = asked(
        address, "hparams/session_groups",
        experimentName="", allowedStatuses=statuses, colParams=columns, startIndex=0, sliceSize=100,
    )["sessionGroups"]  # fmt: skip
    assert {group["name"].rpartition("/")[2] for group in found} == {"first", "0", "1"}
    assert [column["name"] for column in experiment["hparamInfos"]][:2] == ["optim.lr", "seed"]
    seeds = {group["hparams"]["seed"] for group in found}
    losses = {
        value["value"] for group in found for value in group["metricValues"] if value["name"]["tag"] == "loss/val"
    }
    assert (seeds, len(losses)) == ({1, 2, 3}, 3)
