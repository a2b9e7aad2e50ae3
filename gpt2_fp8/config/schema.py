"""Every configuration key, its type, its range, and what it means. A key that is not here is refused.

`conf/` holds the values. `parsing.py` builds these classes from a composed dictionary. `checks.py` compares keys with
each other. If a group's choice decides which keys exist (precision, recipe, data, optimizer), each choice has a class,
distinguished by `name` or `kind`, and refuses the keys of the others. Those of `data` are in `data_schema.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from gpt2_fp8.config.data_schema import TextOfARun
from gpt2_fp8.config.keys import Amount, Count, Part, Positive, Range, Seed, Sequences, Share, Steps, Tokens

Recompute = Literal["none", "mlp", "full"]
AttentionKernel = Literal["auto", "sdpa", "math", "cudnn", "flash", "te"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The architecture, in GPT-2's own words. The defaults are GPT-2's block (docs/models.md)."""

    name: str
    n_layer: Count
    n_head: Count
    n_embd: Count
    n_positions: Count  # tokens of context; also the length of a training sequence
    vocab_size: Count | None  # null: the tokenizer's; the tables are padded up to a multiple of 64 either way
    dropout: Part  # after the embedding, in attention, and after both projections
    bias: bool  # biases on the linear layers (LayerNorm keeps its own)
    n_kv_head: Count | None = None  # heads of keys and values, each shared by several heads; null: n_head
    head_size: Count | None = None  # channels of a head; null: n_embd / n_head
    qk_norm: bool = False  # RMSNorm of queries and keys, head by head, before positions
    norm: Literal["layer_norm", "rms_norm"] = "layer_norm"
    norm_epsilon: Share = 1e-5  # of every normalisation
    mlp: Literal["gelu", "swiglu", "relu_squared"] = "gelu"
    mlp_width: Count | None = None  # channels of the hidden layer; null: 4 n_embd
    positions: Literal["learned", "rope"] = "learned"  # a table that is added to the embedding, or rotary positions
    rope_base: Positive | None = None  # only with positions=rope; null: 10000
    rope_scaling: Annotated[float, Range(1)] | None = None  # positions are divided by this; null: they are not
    rope_low_freq_factor: Positive | None = None  # Llama 3's scaling spares rotations that turn often (docs/models.md);
    rope_high_freq_factor: Positive | None = None  # null, all three: every rotation is scaled alike
    rope_original_positions: Count | None = None  # the context before it was lengthened
    tied_head: bool = True  # the head's weight is the embedding's
    depth_scaled_init: bool = True  # weights into the residual stream begin smaller, by sqrt(2 n_layer)


FREE_OF_WEIGHTS = ("name", "dropout", "depth_scaled_init")  # fields of ModelConfig; a resume may change them


@dataclass(frozen=True, kw_only=True)
class PlainPrecisionConfig:
    """fp32: everything in float32. bf16: float32 weights, bfloat16 autocast."""

    name: Literal["fp32", "bf16"]
    # which layers compute it; auto: in FP8 the first of fused, te and torchao that can, else reference, plain torch
    backend: Literal["auto", "fused", "te", "torchao", "reference", "emulated"]
    reduce: Literal["fp32", "bf16"] = "fp32"  # what several GPUs sum gradients in


@dataclass(frozen=True, kw_only=True)
class FP8PrecisionConfig:
    """float32 weights, bfloat16 activations, FP8 matrix products.

    `conf/` gives `evaluation` to a new run. The default here is what a checkpoint without that key was trained with.
    """

    name: Literal["fp8_hybrid", "fp8_e4m3", "fp8_e5m2"]  # hybrid: E4M3 forward, E5M2 gradients; e4m3: but the head's
    keep_bf16: list[str]  # layers whose products stay in bf16 (config/kept_layers.py has the names and patterns)
    backward: Literal["fp8", "bf16", "bf16_wgrad"] = "fp8"  # or both products of the backward in bf16, or one
    # our fused chain, Transformer Engine, torchao's float8, or FP8 emulated in plain torch on any device
    backend: Literal["auto", "fused", "te", "torchao", "reference", "emulated"]
    evaluation: Literal["fp8", "bf16"] = "fp8"  # what validation, samples and logits compute in; an export has no FP8
    bf16_last_steps: Steps = 0  # how many steps at the end of the run compute in bf16
    reduce: Literal["fp32", "bf16"] = "fp32"  # what several GPUs sum gradients in
    fast_accumulation: bool  # sum the blocks' input gradients in the tensor cores alone, to some 14 bits (fused layers)
    fallback: Literal["allow", "error"]  # when this machine cannot do FP8: train in bf16 (fp32 on a CPU), or exit 2


@dataclass(frozen=True, kw_only=True)
class DelayedRecipe:
    """Scales from the largest values of past steps: one read of each tensor, the fastest."""

    name: Literal["delayed"]
    margin: Annotated[int, Range(0, 100)]  # powers of two of headroom left in every scale
    amax_history_len: Annotated[int, Range(1, 10**6)]  # steps remembered
    amax_compute_algo: Literal["max", "most_recent"]


@dataclass(frozen=True, kw_only=True)
class StatelessRecipe:
    """current: a scale from the tensor itself. rowwise: one a row. block: one per 128 values. mxfp8: one per 32."""

    name: Literal["current", "rowwise", "block", "mxfp8"]


@dataclass(frozen=True, kw_only=True)
class RegisteredRecipe:
    """A recipe of Transformer Engine that a module of one's own has registered (`plugins`)."""

    name: Literal["registered"]
    factory: str  # the name that it was registered under


@dataclass(frozen=True, kw_only=True)
class AutoRecipe:
    """The backend's own."""

    name: Literal["auto"]
    delayed: DelayedRecipe  # what it is where it is delayed scaling


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Rates, decay and clipping; a linear warm-up and a schedule (engine/optim.py has the formulas)."""

    lr: Positive  # the peak
    embedding_lr: Positive | None = None  # the peak of the token and position embeddings; null: lr
    scalar_lr: Positive | None = None  # that of biases and normalisation weights; null: lr
    schedule: Literal["cosine", "linear", "constant", "warmup_stable_decay"] = "cosine"  # from the warm-up to the end
    min_lr_ratio: Annotated[float, Range(0, 1)]  # where the schedule ends, as a part of the peak; constant: 1
    warmup_steps: Steps
    decay_steps: Count | None = None  # the last steps, in which warmup_stable_decay falls; null for the others
    weight_decay: Amount  # on matrices alone; biases and normalisation are never decayed
    beta1: Part
    beta2: Part
    eps: Positive
    max_grad_norm: Positive  # gradients are clipped to this global L2 norm
    ema_decay: Part | None = None  # validations take an average of the weights with this decay a step; null: none
    ema_start_step: Steps = 0  # the average begins after this step


@dataclass(frozen=True, kw_only=True)
class AdamWOptimizer:
    """AdamW of `optim`, with its moments in float32 or in bfloat16 (docs/optimizers.md)."""

    name: Literal["adamw", "adamw_bf16"]


@dataclass(frozen=True, kw_only=True)
class MuonOptimizer:
    """Muon for the matrices of the blocks, and AdamW of `optim` for everything else (docs/optimizers.md)."""

    name: Literal["muon"]
    matrix_lr: Positive | None  # the peak for them; null: optim.lr, since their updates are scaled to AdamW's size
    momentum: Part
    ns_steps: Annotated[int, Range(1, 99)]  # Newton-Schulz iterations of an update


@dataclass(frozen=True, kw_only=True)
class RegisteredOptimizer:
    """An optimizer that a module of one's own has registered (`plugins`). It has the rates and decay of `optim`."""

    name: Literal["registered"]
    factory: str  # the name that it was registered under
    state_bytes: Annotated[int, Range(0, 10**3)]  # of state a parameter: for estimates

    @property
    def label(self) -> str:
        """The name that a checkpoint has for it."""
        return f"registered {self.factory}"


OptimizerConfig = AdamWOptimizer | MuonOptimizer | RegisteredOptimizer


@dataclass(frozen=True, kw_only=True)
class PenaltyConfig:
    """What is added to the loss in training, times these weights; validation has none of it (docs/penalties.md)."""

    z_loss: Amount = 0.0  # the square of the logarithm of the softmax's denominator
    logit_l2: Amount = 0.0  # the mean square of the logits; not in the fused layers
    activation_l1: Amount = 0.0  # the mean magnitude of the blocks' outputs; not in the fused layers

    @property
    def of_logits(self) -> bool:
        """Whether a penalty is on the logits."""
        return self.z_loss > 0 or self.logit_l2 > 0


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """Where and how long. Steps are optimizer steps, everywhere."""

    accelerator: Literal["auto", "cpu", "gpu"]
    devices: Annotated[int, Range(1, 4096)] | Literal["auto"]  # per node; auto: every GPU
    num_nodes: Annotated[int, Range(1, 10**6)]
    strategy: Literal["auto", "ddp", "fsdp"]
    # fsdp: among how many GPUs a copy of the model is divided; all: one copy, node: one a node, N: one for each N GPUs
    shard: Annotated[int, Range(2)] | Literal["all", "node"] | None = None
    reshard: bool | None = None  # fsdp: free a block's gathered weights between its forward and its backward
    gather: Literal["bfloat16", "float32"] | None = None  # fsdp: what weights are gathered in; they stay float32
    max_restarts: Annotated[int, Range(0, 10**3)] = 0  # how often a rank that fails or is killed starts all ranks again
    max_steps: Count | None  # the shortest limit holds, of those typed if any is; null: another one gives the steps
    max_tokens: Count | None = None  # the last step within it is the last
    max_epochs: Annotated[int, Range(1, 10**5)] | None = None  # passes over the training text, counted first
    max_time: str | None = None  # of training, over all resumes, as DD:HH:MM:SS; it stops, and changes no learning rate
    val_check_interval: Count  # steps between validations; there is always one at the end
    log_every_n_steps: Count
    deterministic: bool  # refuse kernels whose result depends on the order of execution
    fast_dev_run: bool  # one step, one validation batch, nothing written but the summary
    overfit_batches: Annotated[int, Range(0, 10**4)]  # repeat the first N steps' data for ever; 0: off
    # in the run's folder; pytorch: kernels and a trace of five steps; simple: times of Lightning's hooks
    profiler: Literal["simple", "pytorch"] | None


@dataclass(frozen=True, kw_only=True)
class CallbacksConfig:
    """What happens around the steps."""

    checkpoint_every_n_steps: Steps  # 0: not by steps
    checkpoint_every_minutes: Amount  # since the last one; 0: not by the clock. There is always one at the end
    async_checkpoints: bool  # a thread writes them while training goes on
    keep_checkpoints: Count  # the newest N stay; the best by validation loss always does
    keep_every_n_steps: Steps  # and so do those of every so many steps; 0: none
    keep_epochs: bool = False  # and the one at the end of every epoch of trainer.max_epochs
    nonfinite_limit: Count  # steps in a row without finite loss and gradient, also in bf16: back to a checkpoint
    divergence_sigma: Amount  # a loss this many standard deviations above the steps before is too high; 0: never
    divergence_steps: Count  # so many in a row: back to the last checkpoint, in bf16, once
    fp8_health: bool = True  # FP8's amaxes, scales and shares: summaries in every log, each tensor in fp8.csv
    fp8_health_every_n_steps: Count = 100  # between two samples of each tensor
    red_flags: bool = True  # a line in the log when FP8, the loss or the loader needs a look (docs/what-to-watch.md)
    early_stopping_patience: Count | None = None  # the run ends once so many validations had no lower loss; null: none
    early_stopping_min_delta: Amount = 0.0  # by how much a loss must be lower to count
    ranking: str | None = None  # a file of HellaSwag's form, whose endings are ranked after validations; null: none
    ranking_every_n_steps: Steps = 0  # a multiple of trainer.val_check_interval; 0: after each validation
    sample_tokens: Tokens  # length of the text written after each validation; 0: none
    sample_prompt: str
    progress_bar: bool
    extra: list[str] = field(default_factory=list)  # callbacks of one's own, by their registered names (`plugins`)


@dataclass(frozen=True, kw_only=True)
class WandbConfig:
    """Weights & Biases, chosen by `logger=wandb` (docs/logging.md)."""

    project: str
    entity: str | None = None  # the account or team; null: the account's own
    group: str | None = None  # runs that belong together; null: the jobs of a sweep do
    mode: Literal["online", "offline"] | None = None  # offline: `wandb sync` uploads later; null: WANDB_MODE, or online


@dataclass(frozen=True, kw_only=True)
class MLflowConfig:
    """MLflow, chosen by `logger=mlflow`."""

    experiment: str
    tracking_uri: str | None = None  # a server or sqlite:///FILE; null: MLFLOW_TRACKING_URI, or sqlite:///mlflow.db


@dataclass(frozen=True, kw_only=True)
class LoggerConfig:
    """Where a run logs: its own folder, and services."""

    tensorboard: bool
    csv: bool
    histograms_every_n_steps: Steps = 0  # of weights and gradients, and each matrix' gradient norm; 0: none
    wandb: WandbConfig | None = None
    mlflow: MLflowConfig | None = None
    extra: list[str] = field(default_factory=list)  # loggers of one's own, likewise


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A whole run."""

    plugins: list[str] = field(default_factory=list)  # modules to import, which register code; only typed, in no file
    notes: str | None = None  # what to remember of this run: for summary.json and the loggers
    tags: dict[str, int | float | bool | str] = field(default_factory=dict)  # likewise, by own keys: +tags.KEY=VALUE
    run_name: str  # the folder under outputs/; a name of your own makes it stable, which ckpt_path=last needs
    seed: Seed
    ckpt_path: str | None  # last, best, or a checkpoint's folder: continue that run
    init_from: str | None  # the folder of a checkpoint, or of Hugging Face's weights: start from these alone
    compile: bool | Literal["auto"]  # torch.compile of plain-torch layers (of FP8's last steps, too); auto: on a GPU
    compile_mode: Literal["default", "reduce-overhead"] = "default"  # the second records CUDA graphs (bf16 on a GPU)
    cuda_graphs: bool | Literal["auto"]  # a micro-batch as one launch (fused); auto: up to 65,536 tokens
    # sdpa: torch's, which chooses; math: the formula, unfused; cudnn, flash: torch's held to one;
    # te: Transformer Engine's; auto: the layers' own
    attention: AttentionKernel = "auto"
    document_mask: bool = False  # tokens attend within their document alone; not in the fused layers
    activation_checkpointing: Recompute  # what a backward computes again and does not keep: the MLP, or whole blocks
    global_batch_size: Sequences  # sequences per optimizer step, over all GPUs
    # sequences per GPU and forward pass, lowered to a divisor if not typed; auto: all that fit
    micro_batch_size: Sequences | Literal["auto"]
    model: ModelConfig
    precision: PlainPrecisionConfig | FP8PrecisionConfig
    recipe: DelayedRecipe | StatelessRecipe | RegisteredRecipe | AutoRecipe
    data: TextOfARun
    optim: OptimConfig
    optimizer: OptimizerConfig = field(default_factory=lambda: AdamWOptimizer(name="adamw"))
    penalty: PenaltyConfig = field(default_factory=PenaltyConfig)
    trainer: TrainerConfig
    callbacks: CallbacksConfig
    logger: LoggerConfig

    @property
    def micro_batch(self) -> int:
        """Return `micro_batch_size` as a number, once a run or the benchmark has decided what was `auto`."""
        assert self.micro_batch_size != "auto"
        return self.micro_batch_size
