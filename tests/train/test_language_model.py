"""`gpt2_fp8.build`: the model in a loop of one's own."""

import io
from typing import Any

import pytest
import torch

import gpt2_fp8
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.engine.optim import build_optimizer, build_schedule
from gpt2_fp8.engine.training_step import TrainingStep
from gpt2_fp8.fp8.resolve import resolve

WORDS = [
    "model.n_layer=2", "model.n_embd=32", "model.n_head=2", "model.n_positions=16", "data.tokenizer=bytes",
    "trainer=cpu", "global_batch_size=4", "trainer.max_steps=6", "optim.warmup_steps=2",
]  # fmt: skip
EMULATED = ["precision=fp8_hybrid", "precision.backend=emulated"]
KINDS = {
    "fp32": ["precision=fp32"],
    "delayed": [*EMULATED, "recipe=delayed"],
    "current": [*EMULATED, "recipe=current"],
    "penalty": ["precision=bf16", "penalty.z_loss=0.01"],
}


def batches(steps: int = 6) -> torch.Tensor:
    return torch.randint(256, (steps, 4, 17), generator=torch.Generator().manual_seed(1))


def trained(model: gpt2_fp8.LanguageModel, ids: torch.Tensor, begun: int = 0, state: Any = None) -> tuple[Any, Any]:
    config = model.config
    optimizer = build_optimizer(model.model, config.optim, config.optimizer, config.seed)
    schedule = build_schedule(optimizer, config.optim, 6)
    if state:
        optimizer.load_state_dict(state[0])
        schedule.load_state_dict(state[1])
    losses = []
    for batch in ids[begun:]:
        loss = model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.max_grad_norm, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.detach())
    return torch.stack(losses), (optimizer.state_dict(), schedule.state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_a_plain_loop_has_the_losses_and_weights_of_a_run(kind: str) -> None:
    model = gpt2_fp8.build(*WORDS, *KINDS[kind], "micro_batch_size=4")
    step = TrainingStep(model.config, resolve(model.config, "cpu"), model.vocab_size)
    step.initialise()
    optimizer, _ = step.prepare_optimizer()
    of_run = []
    for ids in batches():
        step.on_settled[:] = [lambda result: of_run.append(result.read())]
        step(ids, optimizer.step, lambda: None)
    step.settle()
    losses, _ = trained(model, batches())
    if kind != "penalty":  # a run tells the cross-entropy alone
        assert losses.tolist() == [verdict.loss for verdict in of_run]
    for name, weight in step.model.state_dict().items():
        assert torch.equal(weight, model.model.state_dict()[name]), name


def test_a_state_dict_has_the_scales_and_a_loop_goes_on_to_the_bit() -> None:
    words = ["global_batch_size=64", *WORDS[:-3], *WORDS[-2:], *KINDS["delayed"]]  # a loop's batches are its own
    losses, _ = trained(gpt2_fp8.build(*words), batches())
    first = gpt2_fp8.build(*words)
    _, state = trained(first, batches()[:3])
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    again = gpt2_fp8.build(*words)
    again.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(trained(again, batches(), begun=3, state=state)[0], losses[3:])


def test_evaluation_leaves_the_scales_and_gives_logits() -> None:
    model = gpt2_fp8.build(*WORDS, *KINDS["delayed"], "precision.evaluation=fp8")
    ids = batches(1)[0]
    inputs, targets = ids[:, :-1], ids[:, 1:].clone()
    with pytest.raises(UserError, match="no scales yet"):
        model(inputs)
    model(inputs, targets).backward()
    before = {name: value.clone() for name, value in model.get_extra_state().items() if torch.is_tensor(value)}
    with torch.no_grad():
        loss = model.eval()(inputs, targets)
        logits = model(inputs)
    assert logits.shape == (4, 16, model.vocab_size)
    assert not loss.requires_grad
    losses = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
    assert loss.item() == pytest.approx(losses.item(), rel=1e-3)
    targets[:, 3:] = -100
    with torch.no_grad():
        part = model(inputs, targets)
    few = torch.nn.functional.cross_entropy(logits.float()[:, :3].flatten(0, 1), targets[:, :3].flatten())
    assert part.item() == pytest.approx(few.item(), rel=1e-3)
    after = model.get_extra_state()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int32])
def test_ids_may_be_integers_of_any_kind(dtype: torch.dtype) -> None:
    """-1, the target without a loss, is 255 in eight bits."""
    model, (ids,) = gpt2_fp8.build(*WORDS, *KINDS["delayed"]), batches(1)
    found = ids.to(dtype)
    assert model(found[:, :-1], found[:, 1:]).item() == model(ids[:, :-1], ids[:, 1:]).item()


def test_choices_are_words_and_mistakes_are_refused() -> None:
    model = gpt2_fp8.build("model.n_layer=1", model="tiny", precision="bf16", trainer="cpu")
    assert (model.plan.ran, len(model.model.blocks)) == ("bf16", 1)
    with pytest.raises(UserError, match="precison"):
        gpt2_fp8.build(precison="bf16")
    with pytest.raises(UserError, match=r"ids\[None\]"):
        model(torch.arange(8))
    with pytest.raises(UserError, match="256 positions"):
        model(torch.zeros(1, 300, dtype=torch.long))
    with pytest.warns(UserWarning, match="fp8_hybrid cannot run here, and fp32 trains instead: "):
        gpt2_fp8.build(model="tiny", precision="fp8_hybrid", trainer="cpu")


def test_a_loss_may_come_first_in_inference_mode() -> None:
    model, (ids,) = gpt2_fp8.build(*WORDS, *KINDS["delayed"], "precision.evaluation=fp8"), batches(1)
    with torch.inference_mode():
        found = ids.clone()
        loss = model(found[:, :-1], found[:, 1:])
    assert loss.isfinite()
    model(ids[:, :-1], ids[:, 1:]).backward()
