"""`FP8Precision` under LightningModules that are not ours."""

from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from gpt2_fp8 import FolderCheckpointIO, FP8Precision, GPT2Module, load_config
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.config.schema import FP8PrecisionConfig, StatelessRecipe
from gpt2_fp8.fp8.convert import Conversion

HYBRID = FP8PrecisionConfig(name="fp8_hybrid", keep_bf16=[], backend="auto", fast_accumulation=False, fallback="error")


class Language(pl.LightningModule):
    """A model of somebody else's: tied head, dropout, a product of odd width, an optimizer of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2)
        )
        self.odd = nn.Linear(32, 7)
        self.norm = nn.RMSNorm(32, eps=1e-6)
        self.lm_head = nn.Linear(32, 64, bias=False)
        self.lm_head.weight = self.embed.weight
        self.losses: list[Tensor] = []
        self.saw: list[str] = []

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.lm_head(self.norm(x + self.odd(x).mean()))

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, ids: Tensor, batch_idx: int) -> None:
        self.saw.append("validate")
        self.log("val", self(ids[:, :-1]).float().square().mean())

    def test_step(self, ids: Tensor, batch_idx: int) -> None:
        self.saw.append("test")
        self(ids)

    def predict_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        return self(ids)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def made() -> Language:
    torch.manual_seed(1)
    return Language()


def texts() -> DataLoader:
    return DataLoader(torch.randint(64, (12, 17), generator=torch.Generator().manual_seed(2)), batch_size=2)


def trainer(folder: Path, plugin: Any, epochs: int, **options: Any) -> pl.Trainer:
    defaults: dict[str, Any] = {
        "accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "limit_val_batches": 0, "accelerator": "cpu",
    }  # fmt: skip
    return pl.Trainer(
        default_root_dir=folder, plugins=plugin, devices=1, max_epochs=epochs, logger=False,
        enable_progress_bar=False, enable_model_summary=False, **defaults | options,
    )  # fmt: skip


def trained(folder: Path, plugin: Any, epochs: int = 2, **options: Any) -> Language:
    module = made()
    trainer(folder, plugin, epochs, enable_checkpointing=False, **options).fit(module, texts())
    return module


@pytest.mark.parametrize("recipe", ["current", "delayed", "block"])
def test_a_module_of_anyones_trains_in_fp8_and_continues_to_the_bit(tmp_path: Path, recipe: str) -> None:
    def plugin() -> FP8Precision:
        return FP8Precision(recipe=recipe, backend="emulated", keep_bf16=["lm_head"], device="cpu")

    whole = trained(tmp_path, plugin())
    in_bf16 = trained(tmp_path, pl.plugins.MixedPrecision("bf16-mixed", "cpu"))
    fp8, bf16 = torch.stack(whole.losses), torch.stack(in_bf16.losses)
    assert not torch.equal(fp8[0], bf16[0])
    assert torch.allclose(fp8, bf16, rtol=0.02)
    assert bf16[-1] < bf16[0]

    saves = ModelCheckpoint(tmp_path / recipe)
    trainer(tmp_path, plugin(), 1, callbacks=[saves]).fit(made(), texts())
    state = torch.load(saves.best_model_path, weights_only=False)
    assert state["state_dict"].keys() == made().state_dict().keys()
    assert ("FP8Precision" in state) == (recipe == "delayed")
    continued = made()
    trainer(tmp_path, plugin(), 2, enable_checkpointing=False).fit(
        continued, texts(), ckpt_path=saves.best_model_path, weights_only=False
    )
    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, continued.state_dict()[name]), name


def test_scales_are_plain_tensors_in_a_folder_too(tmp_path: Path) -> None:
    plugin = FP8Precision(recipe="delayed", backend="emulated", device="cpu")
    saves = ModelCheckpoint(tmp_path)
    run = trainer(tmp_path, [plugin, FolderCheckpointIO()], 1, callbacks=[saves])
    run.fit(made(), texts())
    saved = run.strategy.checkpoint_io.load_checkpoint(saves.best_model_path)["FP8Precision"]
    scales = saved["fp8_scales.scaling_fwd.scale"]
    assert len(scales) == 2 * len(plugin.converted)
    assert (scales > 1).all()
    assert load_config("recipe=delayed", "micro_batch_size=8").recipe == plugin._conversion.recipe, "as conf/ has it"
    assert saved["fp8_scales.scaling_bwd.amax_history"].shape == (16, len(plugin.converted))
    again = FP8Precision(recipe="delayed", backend="emulated", device="cpu")  # no step is left
    trainer(tmp_path, [again, FolderCheckpointIO()], 1).fit(made(), texts(), ckpt_path=saves.best_model_path)
    assert torch.equal(again.state_dict()["fp8_scales.scaling_fwd.scale"], scales)


def test_a_layer_with_two_names_is_one_and_a_subclass_stays() -> None:
    class Own(nn.LayerNorm):
        pass

    module = nn.Sequential(nn.Sequential(nn.Linear(16, 16), Own(16)))
    module.head = module[0][0]
    plugin = FP8Precision(backend="emulated", device="cpu")
    plugin.convert_module(module)
    assert module.head is module[0][0]
    assert not isinstance(module.head, nn.Linear)
    assert plugin.converted == ["0.0"]
    assert type(module[0][1]) is Own


@pytest.mark.parametrize("backend", ["emulated", "torchao"])
def test_hooks_stay_and_a_weight_that_one_computes_is_in_bf16(backend: Literal["emulated", "torchao"]) -> None:
    if backend == "torchao":
        pytest.importorskip("torchao")
    module, seen = nn.Sequential(nn.Linear(16, 32), nn.utils.weight_norm(nn.Linear(32, 16))), list[str]()
    handle = module[0].register_forward_hook(lambda *_: seen.append("forward"))
    module[0].register_full_backward_hook(lambda *_: seen.append("backward"))
    how = Conversion(backend, HYBRID, StatelessRecipe(name="current"), "cpu")
    assert how.apply(module) == ["0"]
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16), how.region(module):
            y = module(torch.ones(16, 16))
        y.sum().backward()
        handle.remove()
    assert seen == ["forward", "backward", "backward"]


def test_names_ties_and_every_kind_of_step(tmp_path: Path) -> None:
    plugin = FP8Precision(backend="emulated", keep_bf16=["blocks.0.*"], device="cpu")
    module = made()
    run = trainer(tmp_path, plugin, 1, limit_val_batches=1, enable_checkpointing=False, num_sanity_val_steps=1)
    run.fit(module, texts(), texts())
    assert plugin.converted == ["blocks.1.1", "blocks.1.3", "lm_head"]
    assert module.lm_head.weight is module.embed.weight
    run.test(module, texts(), verbose=False)
    (first, *_) = run.predict(module, texts())
    assert first.dtype == torch.bfloat16
    assert {"validate", "test"} <= set(module.saw)
    assert module(next(iter(texts()))).dtype == torch.float32, "outside of a Trainer"
    again = trainer(tmp_path, FP8Precision(backend="emulated", keep_bf16=["blocks.0.*"], device="cpu"), 1)
    assert torch.equal(again.predict(module, texts())[0], first)
    with pytest.raises(UserError, match="other settings"):
        trainer(tmp_path, FP8Precision(backend="emulated", device="cpu"), 1).predict(module, texts())


def test_torchaos_layers_hold_the_same_parameters() -> None:
    pytest.importorskip("torchao")
    module, how = made(), Conversion("torchao", HYBRID, StatelessRecipe(name="current"), "cpu")
    before = dict(module.named_parameters())
    assert how.apply(module) == ["blocks.0.1", "blocks.0.3", "blocks.1.1", "blocks.1.3", "lm_head"]
    assert {name: id(value) for name, value in module.named_parameters()} == {n: id(v) for n, v in before.items()}
    with torch.autocast("cpu", torch.bfloat16), how.region(module):
        loss = module.training_step(next(iter(texts())), 0)
    loss.backward()
    assert type(module.lm_head).__name__ == "Float8Linear"
    assert all(value.grad is not None for name, value in before.items())


def test_without_fp8_units_bf16_trains_or_an_error_says_why(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="the CPU has no FP8 matrix units"):
        plugin = FP8Precision(device="cpu")
    assert plugin.ran == "bf16"
    plain = trained(tmp_path, pl.plugins.MixedPrecision("bf16-mixed", "cpu"), epochs=1)
    assert torch.equal(torch.stack(trained(tmp_path, plugin, epochs=1).losses), torch.stack(plain.losses))
    with pytest.raises(UserError, match="the CPU has no FP8 matrix units"):
        FP8Precision(device="cpu", fallback="error")
    on_gpu = FP8Precision(backend="emulated", device="cuda")
    with pytest.raises(UserError, match="the Trainer computes on 'cpu', and FP8Precision was made for 'cuda'"):
        trained(tmp_path, on_gpu)


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"recipe": "dleayed"}, r"^error: recipe=dleayed: .*\n  fix: did you mean recipe=delayed\?"),
        ({"precision": "fp8_e5m2"}, "e5m2"),
        ({"precision": "bf16"}, "^error: precision=bf16: must be fp8_hybrid"),
        ({"backend": "fused"}, "backend=fused"),
        ({"backend": "torchao", "recipe": "delayed"}, "recipe=delayed"),
        ({"recipe": 3}, "recipe=3"),
        ({"device": "gpu"}, "device='gpu'"),
    ],
)
def test_what_is_not_known_is_refused(options: dict[str, Any], key: str) -> None:
    with pytest.raises(UserError, match=key):
        FP8Precision(**{"device": "cpu"} | options)


def test_what_a_module_lacks_is_refused(tmp_path: Path) -> None:
    plugin = FP8Precision(backend="emulated", keep_bf16=["head"], device="cpu")
    with pytest.raises(UserError, match="of the module: head"):
        plugin.convert_module(made())
    with pytest.raises(UserError, match="multiples of 16"):
        FP8Precision(backend="emulated", device="cpu").convert_module(nn.Linear(8, 8))
    config = load_config("model=tiny", "micro_batch_size=8", "trainer=cpu")
    with pytest.raises(UserError, match="from_config"):
        trainer(tmp_path, FP8Precision(backend="emulated", device="cpu"), 1).fit(GPT2Module(config), texts())
    with pytest.raises(UserError, match="is for a GPT2Module"):
        FP8Precision.from_config(config).convert_module(made())
