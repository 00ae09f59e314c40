"""Published training steps to compare predictions with: the files of published_data/, one a source.

A file has a head (where the figures are from, under which licence, what was guessed; `group`: sources that are held out
together; `planned_as`: the stack of megapipe/plan/stacks.py) and tables. A row's settings are those of the file, of its
model, of its table (`all`) and its own, later ones first. They are options of megapipe by name, or one of

    tp pp vpp cp ep etp seq batch micro    short names; vpp 1: no chunks
    precision   bf16, fp16, fp8 (also -tensorwise, -rowwise, -blockwise), mxfp8, nvfp4
    recompute   none, full, block (of so many layers), attention, norm+act, norm+moe, mla, mla+mlp
    sharding    ddp, zero1, zero1-late (no overlap), zero2, fsdp, hsdp (over a node); fsdp gathers a layer at a time
    config      a file of configs/ to start from
    gpu, gpus, and a field of the hardware's row to replace: memory_bytes_per_second, network_bytes_per_second
    attention   flash2, flash3 or triton, in place of the kernel that would run here; of written-out attention: torch
                (each pass a kernel) or xla (casts, mask and softmax fused), in place of what the stack does
    ring        unbalanced: the last rank of a ring sees all keys, twice as many as the mean
    graphs      CUDA graphs: partial (attention, router, what comes before experts), layers (whole ones: nothing waits
                for the host), or full (of a step, where biases of experts are fused, too)
    seconds     of a step; or tokens, per second and GPU; or tflops, per GPU, with flops: how they are counted
    sweep       name of the sweep that the row belongs to: layouts of one model and batch on the same GPUs
    outside     why the row is not predicted
    printed     TFLOP/s per GPU as printed with the figure, a check of the model's shape
    name, of, container    labels
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from megapipe.api.config import Config
from megapipe.config import config as sections
from megapipe.config.config import resolve_model
from megapipe.errors import ConfigError
from megapipe.plan.attention_rates import AttentionRate
from megapipe.plan.hardware import HARDWARE, TERA, Hardware, hardware_named
from megapipe.plan.layer_costs import step_flops
from megapipe.plan.resolve import resolve
from megapipe.plan.run_plan import RunPlan
from megapipe.plan.stacks import FUSED_SOFTMAX, STACKS, Stack, stack_named
from megapipe.plan.step_time import predict_step

DATA = Path(__file__).parent / "published_data"
CONFIGS = Path(__file__).resolve().parents[3] / "configs"

SHORT = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "num_virtual_stages_per_pipeline_rank",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "seq": "seq_length",
    "batch": "global_batch_size",
    "micro": "micro_batch_size",
}
LABELS = (
    "name",
    "model",
    "of",
    "container",
    "sweep",
    "outside",
    "gpu",
    "gpus",
    "config",
    "flops",
    "printed",
    "attention",
    "graphs",
    "ring",
)
PUBLISHED = ("seconds", "tokens", "tflops")
HARDWARE_FIELDS = ("memory_bytes_per_second", "network_bytes_per_second")
FP8: dict[str, Any] = {"bf16": True, "fp8_format": "hybrid"}
PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": True},
    "fp16": {"fp16": True},
    "fp8": FP8,
    "fp8-tensorwise": FP8 | {"fp8_recipe": "tensorwise"},
    "fp8-blockwise": FP8 | {"fp8_recipe": "blockwise"},
    "mxfp8": FP8 | {"fp8_recipe": "mxfp8"},
}
NONE: dict[str, Any] = {
    "recompute_granularity": None,
    "recompute_method": None,
    "recompute_num_layers": None,
    "recompute_modules": ["core_attn"],
}
EACH_LAYER = NONE | {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def _selective(*modules: str) -> dict[str, Any]:
    return NONE | {"recompute_granularity": "selective", "recompute_modules": list(modules)}


RECOMPUTES: dict[str, dict[str, Any]] = {
    "none": NONE,
    "full": EACH_LAYER,
    "block": NONE | {"recompute_granularity": "full", "recompute_method": "block"},
    "attention": _selective("core_attn"),
    "norm+act": _selective("layernorm", "moe_act"),
    "norm+moe": _selective("layernorm", "moe"),
    "mla": _selective("mla_up_proj"),
    "mla+mlp": _selective("mla_up_proj", "mlp"),
}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
WEIGHTS = OVERLAP | {"data_parallel_sharding_strategy": "optim_grads_params"}
SHARDINGS: dict[str, dict[str, Any]] = {
    "ddp": {"data_parallel_sharding_strategy": "no_shard"},
    "zero1": OVERLAP | {"data_parallel_sharding_strategy": "optim"},
    "zero1-late": {"data_parallel_sharding_strategy": "optim"},
    "zero2": OVERLAP | {"data_parallel_sharding_strategy": "optim_grads"},
    "fsdp": WEIGHTS,
    "hsdp": WEIGHTS,
}
ONE_RANK: dict[str, Any] = {"tp": 1, "pp": 1, "cp": 1, "ep": 1, "vpp": 1, "recompute": "none", "tp_comm_overlap": False}
SOFTMAX: dict[str, dict[str, Any]] = {"torch": {"softmax_shares": (1.0, 1.0)}, "xla": {"softmax_shares": FUSED_SOFTMAX}}
GRAPHS: dict[str | None, dict[str, Any]] = {
    None: {},
    "partial": {"launches": (3.0e-3, STACKS["megatron-core"].launches[1])},
    "layers": {"launches": (0.0, 0.0)},
    "full": {"launches": (0.0, 0.0), "bias_bytes": 0.0},
}
TRITON = 1.8  # flash2's speed over FlashAttention in Triton: between 1.3 and 2.5 (Dao 2023, section 4.1)
UNCOMPILED, ZERO1 = "pointwise kernels not fused", "optimizer sharded, not weights"
UNKNOWN_PRECISIONS = {"nvfp4": "nvfp4 is not planned", "fp8-rowwise": "fp8 with scales of rows is not planned"}


@dataclass(frozen=True)
class Source:
    """The head of a file of published_data/."""

    name: str
    group: str  # sources of one group are held out together
    where: str
    commit: str  # empty: a paper
    licence: str
    stack: str
    planned_as: Stack
    guessed: tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """A published step. settings: of all levels, merged, in the words of the file."""

    source: Source
    settings: Mapping[str, Any] = field(repr=False)
    columns: tuple[str, ...] = field(default=(), repr=False)  # those of its table that have a value

    @property
    def name(self) -> str:
        """The model, and what the row's own table says of it."""
        s = self.settings
        if "name" in s and "outside" not in s:
            return str(s["name"])
        model = s.get("name", s.get("model", s.get("config", f"{s.get('num_layers')} x {s.get('hidden_size')}")))
        told = {"gpus": s["gpus"], "gpu": s["gpu"], "precision": s["precision"]} | {key: s[key] for key in self.columns}
        others = {*PUBLISHED, "name", "model", "sweep", "num_layers", "hidden_size", "config", "printed"}
        return f"{model}: " + ", ".join(f"{key} {value}" for key, value in told.items() if key not in others)

    @property
    def num_gpus(self) -> int:
        return int(self.settings["gpus"])

    @property
    def is_mixture(self) -> bool:
        """Whether the model has experts; False for models that the planner does not know."""
        path = self.settings.get("config")
        return path is not None and _config((), path).model.num_experts is not None

    @property
    def sweep(self) -> str | None:
        return self.settings.get("sweep")

    @property
    def why_outside(self) -> str | None:
        """Why the row is not predicted: what the planner does not know."""
        known = self.settings["gpu"] in HARDWARE
        gpu = None if known else f"{self.settings['gpu']} is not in the table"
        return self.settings.get("outside") or gpu or UNKNOWN_PRECISIONS.get(self.settings["precision"])

    @property
    def hardware(self) -> Hardware:
        """The GPU of the row, with the fields that the row replaces."""
        row, s = hardware_named(self.settings["gpu"]), self.settings
        changes: dict[str, Any] = {key: float(s[key]) for key in HARDWARE_FIELDS if key in s}
        if rate := changes.pop("network_bytes_per_second", None):
            row = dataclasses.replace(row, network=dataclasses.replace(row.network, bytes_per_second=rate))
        own, graphs = str(s.get("attention", "")), s.get("graphs")
        kernel = row.attention_rates.get("flash2" if own == "triton" else own)
        times = (TRITON if own == "triton" else 1.0) * (2 - 1 / s.get("cp", 1) if "ring" in s else 1.0)
        rates = {name: _slower(kernel or rate, times) for name, rate in row.attention_rates.items()}
        stack = dataclasses.replace(self.source.planned_as, **SOFTMAX.get(own, {}), **GRAPHS[graphs])
        return dataclasses.replace(row, attention_rates=rates, stack=stack, **changes)

    @property
    def config(self) -> sections.Config:
        """The configuration of the row. Raises ConfigError."""
        options = tuple((key, _hashable(value)) for key, value in self.options.items())
        return _config(options, self.settings.get("config"))

    @property
    def options(self) -> dict[str, Any]:
        """The settings as options of megapipe, with what `approximated` says."""
        s = ONE_RANK | dict(self.settings)
        others = {*LABELS, *PUBLISHED, *HARDWARE_FIELDS, "precision", "recompute", "sharding"}
        options = PRECISIONS[s["precision"]] | SHARDINGS[self._sharding] | RECOMPUTES[s["recompute"]]
        options |= {"sequence_parallel": s["tp"] > 1}
        if "config" in s:
            options |= {"pipeline_model_parallel_layout": None, "pipeline_schedule": "auto"}
        given = {SHORT.get(key, key): value for key, value in s.items() if key not in others}
        if given.get("recompute_num_layers") is None:
            given.pop("recompute_num_layers", None)
        options |= given | {SHORT["vpp"]: None if s["vpp"] == 1 else s["vpp"]}
        if self._sharding in ("fsdp", "hsdp"):
            layers = options.get("num_layers") or _config((), s["config"]).model.num_layers
            options["data_parallel_sharding_units"] = -(-layers // (s["pp"] * s["vpp"]))
        if self._sharding == "hsdp":
            options["num_distributed_optimizer_instances"] = self.num_gpus // 8
        if self._divides_evenly(options):
            options.setdefault("pipeline_balance", "even")
        if self.is_mixture:
            options.setdefault(SHORT["etp"], 1)
        if UNCOMPILED in self.approximated:
            options["compile_pointwise"] = False
        return options

    @property
    def approximated(self) -> tuple[str, ...]:
        """What the planner does not combine, and is planned in another way."""
        s = self.settings
        is_sharded = s["sharding"] in ("fsdp", "hsdp")
        cases = {
            UNCOMPILED: s.get("compile_pointwise") and (self.is_mixture or s.get("cp", 1) > 1),
            ZERO1: is_sharded and (self.is_mixture or s.get("recompute") == "block" or s.get("vpp", 1) > 1),
        }
        return tuple(name for name, applies in cases.items() if applies)

    def _divides_evenly(self, options: Mapping[str, Any]) -> bool:
        """Whether all stages have as many layers, which is then what every source but this planner has."""
        s = self.settings
        layers = options.get("num_layers") or _config((), s["config"]).model.num_layers
        is_placed = options.get("pipeline_model_parallel_layout") or any("pipeline_split" in name for name in options)
        return not is_placed and layers % (s.get("pp", 1) * s.get("vpp", 1)) == 0

    @property
    def _sharding(self) -> str:
        return "zero1" if ZERO1 in self.approximated else str(self.settings["sharding"])

    @property
    def seconds(self) -> float:
        """Seconds of a step, as published or computed from what is."""
        s = self.settings
        if "seconds" in s:
            return float(s["seconds"])
        if "tokens" in s:
            return self.batch * self.config.model.seq_length / self.num_gpus / float(s["tokens"])
        return self.flops / self.num_gpus / (float(s["tflops"]) * TERA)

    @property
    def flops(self) -> float:
        """FLOPs of a step, as the source counts them."""
        model, how = self.config.model, self.settings["flops"]
        if how == "narayanan":
            return narayanan_flops(model, self.batch)
        return step_flops(resolve_model(model, self.settings.get("tp", 1)), self.batch, causal=how == "causal")

    @property
    def batch(self) -> int:
        """Sequences of a step."""
        batch = self.config.training.global_batch_size
        assert batch is not None
        return batch

    def plan(self) -> RunPlan:
        """Resolve the row's layout. Raises ConfigError for what cannot be run."""
        return _plan(self.config, self.num_gpus, self.hardware.on(self.num_gpus).ranks_per_node)

    def predicted_seconds(self, hardware: Hardware | None = None) -> float:
        """Predict the step time of the row's layout, on its GPU if `hardware` is None. Raises ConfigError."""
        hardware = hardware or self.hardware
        key = (self.config, self.num_gpus, repr(hardware))
        if key not in _PREDICTED:  # sources repeat layouts
            _PREDICTED[key] = predict_step(self.plan(), hardware).seconds
        return _PREDICTED[key]

    @property
    def ratio(self) -> float:
        """Predicted over published seconds. Raises ConfigError."""
        return self.predicted_seconds() / self.seconds

    @property
    def why_refused(self) -> str | None:
        """First line of the error if the layout cannot be resolved."""
        try:
            self.plan()
        except ConfigError as error:
            return str(error).splitlines()[0]
        return None


def _slower(rate: AttentionRate, times: float) -> AttentionRate:
    forward, backward = (curve._replace(highest=curve.highest / times) for curve in rate[:2])
    return AttentionRate(forward, backward, rate.small_heads)


def narayanan_flops(model: Any, batch: int) -> float:
    """Return the FLOPs of a step with full recompute by equation (3): 96 B s l h^2 (1 + s / 6h + V / 16lh)."""
    s, h, layers, vocabulary = model.seq_length, model.hidden_size, model.num_layers, model.vocab_size
    return 96.0 * batch * s * layers * h * h * (1.0 + s / (6.0 * h) + vocabulary / (16.0 * layers * h))


_PREDICTED: dict[tuple[sections.Config, int, str], float] = {}


@cache
def published_rows() -> tuple[Row, ...]:
    """Return the rows of all files, by file."""
    return tuple(row for path in sorted(DATA.glob("*.yaml")) for row in _rows(path))


def published_runs() -> tuple[Row, ...]:
    """Return the rows of three papers that test_published.py compares one by one, without context parallelism."""
    rows = published_rows()
    return tuple(
        row
        for name in ("narayanan", "korthikanti", "llama3")
        for row in rows
        if row.source.name == name and row.settings.get("cp", 1) == 1
    )


def sweeps() -> dict[str, list[Row]]:
    """Return the rows of each sweep, by the name of its source and its own."""
    found: dict[str, list[Row]] = {}
    for row in published_rows():
        if row.sweep:
            found.setdefault(f"{row.source.name}: {row.sweep}", []).append(row)
    return found


def _rows(path: Path) -> Iterator[Row]:
    read = yaml.load(path.read_text(), yaml.CSafeLoader)
    where = " ".join(read["where"].split())
    commit = read.get("commit", "")
    guessed, planned_as = tuple(read["guessed"]), stack_named(read["planned_as"])
    source = Source(read["source"], read["group"], where, commit, read["licence"], read["stack"], planned_as, guessed)
    models = {str(name): settings for name, settings in read.get("models", {}).items()}
    for table in read["tables"]:
        for values in table["rows"]:
            own = table.get("all", {}) | dict(zip(table["columns"], values, strict=True))
            own = {key: value for key, value in own.items() if value is not None or key not in LABELS}
            columns = tuple(key for key in table["columns"] if own.get(key) is not None)
            yield Row(source, read.get("settings", {}) | models.get(str(own.get("model")), {}) | own, columns)


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@cache
def _config(options: tuple[tuple[str, Any], ...], path: str | None) -> sections.Config:
    if path is None:
        return Config(**{key: value for key, value in options if value is not None}).values
    return Config.from_yaml(CONFIGS / f"{path}.yaml", **dict(options)).values


@cache
def _plan(config: sections.Config, num_gpus: int, ranks_per_node: int) -> RunPlan:
    return resolve(config, num_gpus, ranks_per_node)
