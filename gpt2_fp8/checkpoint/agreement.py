"""Whether the numbers in a run's state agree: with its step, and with each other.

Each number may be possible in some run, while no run can have all of them. Lightning's loops would then wait forever
for a step that does not come, or end before they begin.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def disagreements(state: dict[str, Any]) -> Iterator[str]:
    """Yield what in a state contradicts the step that it names. Its form must be a run's (`run_state.RUN`)."""
    step = state["global_step"]
    yield from _other_than(step, _equal_to_step(state))
    yield from _beyond(step, "the state's step", _at_most_step(state))
    yield from _loops(step, state["loops"]["fit_loop"])
    yield from _lanes(step, state["TokenDataModule"])


def _equal_to_step(state: dict[str, Any]) -> Iterator[tuple[str, int]]:
    yield "TokenDataModule.step", state["TokenDataModule"]["step"]
    yield "lr_schedulers.0.last_epoch", state["lr_schedulers"][0]["last_epoch"]
    loops = state["loops"]["fit_loop"]
    done = loops["epoch_loop.manual_optimization.optim_step_progress"]["total"]
    batches = loops["epoch_loop.batch_progress"]["total"]
    yield from ((f"optim_step_progress.total.{key}", done[key]) for key in ("ready", "completed"))
    yield from ((f"batch_progress.total.{key}", batches[key]) for key in ("ready", "started", "processed"))


def _at_most_step(state: dict[str, Any]) -> Iterator[tuple[str, int]]:
    yield "_batches_that_stepped", state["loops"]["fit_loop"]["epoch_loop.state_dict"]["_batches_that_stepped"]
    done = state["loops"]["fit_loop"]["epoch_loop.manual_optimization.optim_step_progress"]["current"]
    yield from ((f"optim_step_progress.current.{key}", count) for key, count in done.items())
    if checkpointing := state["callbacks"].get("Checkpointing"):
        yield "Checkpointing.validated_step", checkpointing["validated_step"] or 0
    if policy := state["callbacks"].get("DivergenceGuard"):
        yield "DivergenceGuard.statistics.count", policy["statistics"]["count"]
        yield from ((f"DivergenceGuard.in_a_row.{key}", count) for key, count in policy["in_a_row"].items())


def _loops(step: int, loops: dict[str, Any]) -> Iterator[str]:
    batches, validation = loops["epoch_loop.batch_progress"], loops["epoch_loop.val_loop.batch_progress"]
    if batches["total"]["completed"] not in (step - 1, step):  # the state may be saved at the end of the last one
        yield f"batch_progress.total.completed is {batches['total']['completed']}, and the state's step {step}"
    for name, counts in (("batch_progress", batches), ("val_loop.batch_progress", validation)):
        for part in ("total", "current"):
            found = [counts[part][key] for key in ("ready", "started", "processed", "completed")]
            if found != sorted(found, reverse=True):
                yield f"{name}.{part} has finished more than it has begun: {found}"
    current = {f"batch_progress.current.{key}": count for key, count in batches["current"].items()}
    yield from _beyond(step, "the state's step", current.items())
    # For Lightning an epoch is a run to `max_steps`, so a run that was extended has several.
    epochs = {f"epoch_progress.{part}.{key}": n for part in ("total", "current")
              for key, n in loops["epoch_progress"][part].items()}  # fmt: skip
    yield from _beyond(2 * step + 2, "twice the steps", epochs.items())


def _lanes(step: int, data: dict[str, Any]) -> Iterator[str]:
    """Check each lane's position: it cannot exceed the tokens of all steps, nor its offset the lane's share of them."""
    size, length = (data["fingerprint"].get(key) for key in ("global_batch_size", "n_positions"))
    if not (type(size) is type(length) is int):
        yield "TokenDataModule.fingerprint has no batch size and length of sequences"
        return
    for name, lane in data["lanes"].items():
        far = [(f"lanes.{name}.epoch", lane["epoch"])]
        yield from _beyond(step * size * length, "the tokens of its steps", far)
        mixed = "sources" in data["fingerprint"]  # whose lanes have unequal shares
        share = step * size if mixed else -(-step * size // len(data["lanes"]))  # sequences
        yield from _beyond(share, "the sequences of its steps", [(f"lanes.{name}.block", lane["block"])])
        yield from _beyond(share * length, "the tokens of its steps", [(f"lanes.{name}.offset", lane["offset"])])


def _other_than(step: int, numbers: Iterator[tuple[str, int]]) -> Iterator[str]:
    for name, number in numbers:
        if number != step:
            yield f"{name} is {number}, and the state's step {step}"


def _beyond(most: int, what: str, numbers: Any) -> Iterator[str]:
    for name, number in numbers:
        if number > most:
            yield f"{name} is {number}, beyond {what} ({most})"
