"""The order of samples: nothing lost or repeated, and the same for every number of ranks, workers and resumes."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gpt2_fp8.config.errors import UserError
from gpt2_fp8.data import order
from gpt2_fp8.data.datamodule import TokenDataModule
from gpt2_fp8.data.order import lane_count, lanes_of, permutation
from tests.data.corpora import files_config, items, module, rank_batches, three, write_jsonl


def test_lane_count() -> None:
    assert (lane_count(480, 1000), lane_count(480, 200), lane_count(7, 1000), lane_count(8, 31)) == (16, 12, 7, 1)
    assert lane_count(13 * 17, 1000) == 13


def test_permutations_are_fixed() -> None:
    # Part of the format: a checkpoint's order is made again from its seed by later releases.
    assert permutation(8, 7, 0, 0).tolist() == [6, 3, 4, 0, 2, 7, 5, 1]
    assert sorted(permutation(1000, 1, 2, 3)) == list(range(1000))


def test_every_token_of_an_epoch_is_an_input_once(many_units: Path) -> None:
    made = module(files_config(many_units))
    assert made.text.streams[0].order.lanes == 4
    corpus = [made.text.pool.take(made.text.pool.ask(unit)).tokens for unit in made.text.corpus.train]
    for lane in range(4):
        batches = rank_batches(made, 0, 1)
        reader = batches.lanes[lane]
        owned = {epoch: made.text.streams[0].order.epoch(epoch)[lane::4] for epoch in range(3)}
        sizes = {epoch: sum(len(corpus[i]) for i in owned[epoch]) for epoch in owned}
        wanted, inputs = sizes[0] + sizes[1], []
        while sum(map(len, inputs)) < wanted:
            segment = reader._load()
            reader._place, reader._offset = segment.next
            assert sorted(segment.blocks) == list(range(len(segment.blocks)))
            inputs.append(segment.tokens[: 16 * len(segment.blocks)])
        stream = np.concatenate(inputs)
        start = 0
        for epoch in (0, 1):  # epochs follow each other without a gap
            documents = _documents(stream[start : start + sizes[epoch]])
            assert sorted(documents) == sorted(d for i in owned[epoch] for d in _documents(corpus[i]))
            start += sizes[epoch]


def _documents(tokens: np.ndarray) -> list[bytes]:
    assert tokens[-1] == 256, "an epoch ends with a document"
    return bytes(np.where(tokens == 256, 0, tokens).astype(np.uint8)).split(b"\0")[:-1]


def test_an_epoch_is_shuffled_and_epochs_differ(many_units: Path) -> None:
    made = module(files_config(many_units), max_steps=400)
    steps = items(made)
    first = np.concatenate(steps[:30])[:, 0]
    assert len({step.tobytes() for step in steps}) == len(steps)
    assert not np.array_equal(first, np.sort(first))
    assert made.state_dict()["lanes"]["0"]["epoch"] >= 2
    assert not np.array_equal(steps[0], items(module(files_config(many_units, seed=8)), 1)[0])


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("corpus", ["one source", "mixture"])
def test_ranks_share_the_same_global_batches(many_units: Path, tmp_path: Path, world: int, corpus: str) -> None:
    made = module(three(tmp_path) if corpus == "mixture" else files_config(many_units))
    whole = rank_batches(made, 0, 1)
    ranks = [rank_batches(made, rank, world) for rank in range(world)]
    for _ in range(60):
        batch, shares = whole.next(), [rank.next() for rank in ranks]
        for rank, share in enumerate(shares):
            assert np.array_equal(batch[rank::world], share)
    for rank in ranks:
        assert rank.state().items() <= whole.state().items()
    if world <= 4 and corpus == "one source":
        assert all(len(rank.lanes) == 4 // world for rank in ranks)  # no rank reads another's lanes


@pytest.mark.parametrize("corpus", ["many", "one"])
def test_resume_at_every_step_over_three_legs(many_units: Path, tmp_path: Path, corpus: str) -> None:
    text = many_units if corpus == "many" else write_jsonl(tmp_path / "one.jsonl", [f"{i} " * 20 for i in range(20)])
    config = files_config(text)
    whole = items(module(config))
    for first in range(1, 19):
        legs, state = [], None
        for steps in (first, 1, None):
            made = module(config)
            if state is not None:
                made.load_state_dict(json.loads(state))
            legs += items(made, steps)
            state = json.dumps(made.state_dict())
        assert len(legs) == len(whole)
        assert all(np.array_equal(a, b) for a, b in zip(legs, whole, strict=True)), f"after {first} steps"


def test_resume_on_another_number_of_ranks(many_units: Path) -> None:
    made = module(files_config(many_units))
    whole = items(made)
    ranks = [rank_batches(made, rank, 4) for rank in range(4)]
    for _ in range(7):
        [rank.next() for rank in ranks]
    lanes = {lane: state for rank in ranks for lane, state in rank.state().items()}
    ranks = [rank_batches(made, rank, 2, lanes) for rank in range(2)]
    for step in range(7, 20):
        batch = np.empty_like(whole[step])
        for rank in range(2):
            batch[rank::2] = ranks[rank].next()
        assert np.array_equal(batch, whole[step])


# Of ten steps of up to 16 lanes, and of 64.
HASHES = {
    "one source": ("882caf2faa38105e", "88a8faa9890833a5"),
    "mixture": ("c77b8fefc2c1da0a", "9db33068cb726222"),
}


@pytest.mark.parametrize("corpus", HASHES)
def test_a_run_keeps_the_lanes_of_the_ranks_that_began_it(
    many_units: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, corpus: str
) -> None:
    monkeypatch.setattr(order, "UNITS_A_LANE", 1)
    config = three(tmp_path) if corpus == "mixture" else files_config(many_units)

    def begun_by(world: int) -> TokenDataModule:
        with monkeypatch.context() as patch:
            patch.setattr("gpt2_fp8.data.token_stream.rank_and_world", lambda: (0, world))
            return module(config, global_batch_size=128)

    def global_batches(made: TokenDataModule, world: int, n: int, lanes: dict | None = None) -> tuple[list, dict]:
        ranks = [rank_batches(made, rank, world, lanes) for rank in range(world)]
        if corpus == "one source" and made.text.deal.lanes % world == 0:
            assert {len(rank.lanes) for rank in ranks} == {made.text.deal.lanes // world}
        batches = [np.stack([rank.next() for rank in ranks], axis=1).reshape(128, 17) for _ in range(n)]
        return batches, {lane: state for rank in ranks for lane, state in rank.state().items()}

    for first, expected in zip((16, 64), HASHES[corpus], strict=True):
        whole, _ = global_batches(begun_by(first), 1, 10)
        assert hashlib.sha256(np.concatenate(whole).tobytes()).hexdigest()[:16] == expected
        made = begun_by(first)
        before, lanes = global_batches(made, first, 5)
        state = json.loads(json.dumps(made.state_dict() | {"step": 5, "lanes": lanes}))
        for world in (64, 8, 1):
            later = begun_by(world)
            assert later.other_settings(state) == []
            later.load_state_dict(state)
            after, _ = global_batches(later, world, 5, later.text.progress.lanes)
            assert np.array_equal(before + after, whole)
            assert all(later.state_dict()[key] == state[key] for key in ("fingerprint", "step", "lanes"))
    assert global_batches(begun_by(1), 1, 1)[0][0].tobytes() == global_batches(begun_by(16), 1, 1)[0][0].tobytes()
    (told,) = module(replace(config, seed=8), global_batch_size=128).other_settings(state)
    assert "seed was 7" in told.cause


def test_only_what_was_trained_on_moves_the_state(many_units: Path) -> None:
    made = module(files_config(many_units))
    before = made.state_dict()
    first = items(made, 5, advance=False)
    assert made.state_dict() == before
    assert all(np.array_equal(a, b) for a, b in zip(items(made, 5), first, strict=True))
    assert made.state_dict()["step"] == 5


def test_changed_data_is_refused_with_each_difference(many_units: Path) -> None:
    state = module(files_config(many_units)).state_dict()
    (many_units.parent / "00.jsonl").write_text('{"text": "another"}\n')
    late = module(files_config(many_units, seed=8))
    with pytest.raises(UserError) as told:
        late.load_state_dict(state)
    changed = [p.cause.split(": ")[1].split(" was")[0] for p in told.value.problems]
    assert changed == ["the training text (its checksum)", "seed"]
    early = TokenDataModule(
        files_config(many_units), n_positions=16, global_batch_size=8, micro_batch_size=4, max_steps=20
    )
    early.load_state_dict(state)  # before setup: told there
    with pytest.raises(UserError, match="the training text"):
        early.setup()


def test_overfit_repeats_the_first_items(many_units: Path) -> None:
    plain = items(module(files_config(many_units)), 3)
    made = module(files_config(many_units), overfit_batches=3)
    repeated = items(made, 8)
    assert all(np.array_equal(repeated[i], plain[i % 3]) for i in range(8))
    again = module(files_config(many_units), overfit_batches=3)
    again.load_state_dict(made.state_dict())
    assert np.array_equal(items(again, 1)[0], plain[8 % 3])


def test_the_lanes_of_a_rank_are_those_of_all_its_sequences() -> None:
    for n_lanes, world, times in itertools.product(range(1, 17), range(1, 13), range(1, 9)):
        size = math.lcm(n_lanes, world) * times
        for rank in range(world):
            assert lanes_of(rank, world, n_lanes, size) == sorted({j % n_lanes for j in range(rank, size, world)})
    assert lanes_of(1, 2, 16, 10**15) == list(range(1, 16, 2))
