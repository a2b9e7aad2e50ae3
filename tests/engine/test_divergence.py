"""What follows from a step: counts, events, ways back, ends."""

import json
import math
import random

import pytest

from gpt2_fp8.config.errors import Diverged
from gpt2_fp8.engine.divergence import WARM_UP, DivergencePolicy, RollBack
from gpt2_fp8.engine.step import Verdict

NAN = float("nan")
GOOD, BAD, BAD_GRADIENT = Verdict(3.0, False), Verdict(NAN, True), Verdict(3.0, True)


def made(limit=3, sigma=6.0, patience=4):
    lines = []
    it = DivergencePolicy(limit, sigma, patience, lines.append)
    it.lines = lines
    return it


def events(it):
    return [(event["step"], event["what"]) for event in it.events]


def run(it, *verdicts, start=1, first=None):
    for step, verdict in enumerate(verdicts, start):
        it.judge(step, verdict, first)


def noise(n, mean=3.0, std=0.05, seed=0):
    generator = random.Random(seed)
    return [Verdict(generator.gauss(mean, std), False) for _ in range(n)]


def test_a_good_run_says_nothing():
    it = made()
    run(it, *noise(1000))
    assert (it.report(), it.lines) == ({"events": [], "reruns": 0, "skipped": 0, "rollbacks": 0}, [])


def test_a_rerun_is_counted_and_breaks_the_row():
    it = made()
    run(it, GOOD, BAD, BAD)
    it.judge(4, GOOD, BAD_GRADIENT)
    run(it, BAD, BAD, start=5)
    assert events(it) == [(2, "skip"), (3, "skip"), (4, "rerun"), (5, "skip"), (6, "skip")]
    assert it.report() | {"events": []} == {"events": [], "reruns": 1, "skipped": 4, "rollbacks": 0}
    assert "gradient was not finite in FP8" in it.lines[2]


def test_so_many_in_a_row_lead_back_to_before_the_first():
    it = made(limit=3)
    with pytest.raises(RollBack, match="the last 3 steps") as back:
        run(it, GOOD, GOOD, BAD, BAD_GRADIENT, BAD)
    assert (back.value.step, back.value.before, back.value.weights_intact) == (5, 2, True)
    assert events(it)[-1] == (5, "rollback")


def test_the_second_time_ends_the_run_whichever_it_is():
    for second in ([BAD] * 3, [*noise(WARM_UP), *[Verdict(9.0, False)] * 4]):
        it = made(limit=3)
        with pytest.raises(RollBack):
            run(it, BAD, BAD, BAD)
        it.start_again()
        with pytest.raises(Diverged, match=r"precision=bf16 may help"):
            run(it, *second)
        assert it.rollbacks == 1


def test_a_loss_that_stays_high_leads_back_to_before_the_first():
    it = made(patience=4)
    run(it, *noise(200))
    high = [Verdict(4.0, False)] * 3
    run(it, *high, GOOD, *high, start=201)
    assert events(it) == [(201, "spike"), (205, "spike")]
    with pytest.raises(RollBack, match="since step 205") as back:
        run(it, Verdict(5.0, False), start=208)
    assert (back.value.step, back.value.before, back.value.weights_intact) == (208, 204, False)


def test_a_skipped_step_does_not_end_a_row_of_high_losses():
    it = made(patience=3)
    run(it, *noise(200))
    with pytest.raises(RollBack) as back:
        run(it, Verdict(9.0, False), BAD, Verdict(9.0, False), BAD, Verdict(9.0, False), start=201)
    assert back.value.before == 200


def test_a_loss_that_falls_is_no_divergence():
    it = made()
    losses = [9.0 * math.exp(-step / 300) + verdict.loss - 1 for step, verdict in enumerate(noise(2000))]
    run(it, *[Verdict(loss, False) for loss in losses])
    assert events(it) == []


def test_outliers_are_not_learned_from():
    it = made(patience=1000)
    run(it, *noise(300))
    before = it.state_dict()["statistics"]
    run(it, *[Verdict(30.0, False)] * 500, start=301)
    assert it.state_dict()["statistics"] == before


@pytest.mark.parametrize("at", [150, 206])
def test_a_resumed_run_decides_as_one_in_one_piece(at):
    steps = [*noise(200), BAD, GOOD, *[Verdict(9.0, False)] * 4]
    whole, part, rest = made(), made(), made()
    with pytest.raises(RollBack) as expected:
        run(whole, *steps)
    run(part, *steps[: at - 1])
    rest.load_state_dict(json.loads(json.dumps(part.state_dict())))
    with pytest.raises(RollBack) as back:
        run(rest, *steps[at - 1 :], start=at)
    assert rest.state_dict() == whole.state_dict()
    assert vars(back.value) == vars(expected.value)


def test_a_resumed_run_has_trained_what_came_before_it():
    part, rest = made(), made()
    run(part, GOOD)
    rest.load_state_dict(part.state_dict())
    run(rest, BAD, start=2)
    rest.end(2, weights_finite=True)


def test_after_a_rollback_what_happened_is_not_replaced_by_the_checkpoints():
    it, older = made(), made()
    run(older, *noise(150))
    it.load_state_dict(older.state_dict())
    with pytest.raises(RollBack):
        run(it, BAD, BAD, BAD, start=151)
    happened = it.report()
    it.start_again()
    it.load_state_dict(older.state_dict())
    assert (it.report(), it.state_dict()["statistics"]) == (happened, older.state_dict()["statistics"])
    run(it, BAD, BAD, start=151)  # the row has begun anew
